-- Which samples do two detectors rank most differently?
-- A rank is the share of the run's samples with a lower score, so that scores of any scale compare.
SET VARIABLE scores = (
    SELECT string_agg(format('SELECT ''{0}'' AS benchmark, * FROM {0}.scores', schema_name), ' UNION ALL ')
    FROM duckdb_views() WHERE view_name = 'scores'
);
WITH ranked AS (
    SELECT benchmark, protocol, split, sample_id, class, novel,
        concat_ws(' ', detector, backbone, seed) AS run,
        percent_rank() OVER (
            PARTITION BY benchmark, protocol, split, detector, backbone, seed ORDER BY score
        ) AS place
    FROM query(getvariable('scores'))
)
SELECT benchmark, protocol, split, a.sample_id, a.class, a.novel,
    a.run AS first_run, round(a.place, 3) AS first_rank,
    b.run AS second_run, round(b.place, 3) AS second_rank,
    round(abs(a.place - b.place), 3) AS apart
FROM ranked a JOIN ranked b USING (benchmark, protocol, split, sample_id)
WHERE a.run < b.run
ORDER BY abs(a.place - b.place) DESC, benchmark, protocol, split, sample_id, first_run, second_run
LIMIT 20;
