-- Which known samples are false alarms of all detectors, or of most of them?
-- An alarm: a score above 90 % of the known samples of the same run. The first ten of a benchmark.
SET VARIABLE scores = (
    SELECT string_agg(format('SELECT ''{0}'' AS benchmark, * FROM {0}.scores', schema_name), ' UNION ALL ')
    FROM duckdb_views() WHERE view_name = 'scores'
);
WITH known AS (
    SELECT *, score > quantile_cont(score, 0.9) OVER (
        PARTITION BY benchmark, protocol, detector, backbone, seed, split
    ) AS alarm
    FROM query(getvariable('scores'))
    WHERE NOT novel
)
SELECT benchmark, protocol, split, sample_id, class,
    count_if(alarm) AS alarms, count(*) AS runs, bool_and(alarm) AS of_all,
    string_agg(DISTINCT detector, ', ' ORDER BY detector) FILTER (alarm) AS detectors
FROM known
GROUP BY benchmark, protocol, split, sample_id, class
HAVING count(*) > 1 AND count_if(alarm) > 0
QUALIFY row_number() OVER (
    PARTITION BY benchmark
    ORDER BY bool_and(alarm) DESC, count_if(alarm) / count(*) DESC, protocol, split, sample_id
) <= 10
ORDER BY benchmark, of_all DESC, alarms / runs DESC, protocol, split, sample_id;
