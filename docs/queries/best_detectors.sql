-- Which detector has the highest AUROC in each protocol, on average over the seeds?
SET VARIABLE metrics = (
    SELECT string_agg(format('SELECT * FROM {0}.metrics', schema_name), ' UNION ALL ')
    FROM duckdb_columns()
    WHERE table_name = 'metrics' AND column_name = 'convention'
);
SELECT benchmark, protocol, split, convention, detector, backbone,
    count(DISTINCT seed) AS seeds, round(avg(value), 4) AS auroc
FROM query(getvariable('metrics'))
WHERE metric = 'auroc' AND value IS NOT NULL
GROUP BY benchmark, protocol, split, convention, detector, backbone
QUALIFY row_number() OVER (
    PARTITION BY benchmark, protocol, split, convention ORDER BY auroc DESC, detector, backbone
) = 1
ORDER BY ALL;
