-- Which novel classes are hardest for which detector, in every benchmark with scores?
-- AUROC of one novel class against all known samples of the run; 0.5 is chance. The three lowest.
SET VARIABLE scores = (
    SELECT string_agg(format('SELECT ''{0}'' AS benchmark, * FROM {0}.scores', schema_name), ' UNION ALL ')
    FROM duckdb_views() WHERE view_name = 'scores'
);
WITH counted AS (
    SELECT *,
        sum((NOT novel)::INT) OVER (run ORDER BY score) AS at_most,
        sum((NOT novel)::INT) OVER (run ORDER BY score GROUPS BETWEEN CURRENT ROW AND CURRENT ROW) AS equal,
        sum((NOT novel)::INT) OVER run AS known
    FROM query(getvariable('scores'))
    WINDOW run AS (PARTITION BY benchmark, protocol, detector, backbone, seed, split)
)
SELECT benchmark, protocol, split, detector, backbone, seed, class, count(*) AS samples,
    round(avg((at_most - equal / 2) / known), 4) AS auroc
FROM counted
WHERE novel AND known > 0
GROUP BY benchmark, protocol, split, detector, backbone, seed, class
QUALIFY row_number() OVER (
    PARTITION BY benchmark, protocol, split, detector, backbone, seed ORDER BY auroc, class
) <= 3
ORDER BY benchmark, protocol, split, detector, backbone, seed, auroc, class;
