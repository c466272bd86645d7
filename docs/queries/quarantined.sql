-- Which raw records were quarantined, by which rule and why?
SET VARIABLE refused = (
    SELECT string_agg(format('SELECT ''{0}'' AS benchmark, * FROM {0}.quarantine', schema_name), ' UNION ALL ')
    FROM duckdb_views() WHERE view_name = 'quarantine'
);
SELECT benchmark, stage, table_name, rule, count(*) AS records,
    min_by(record, (record, number)) AS first_record,
    min_by(message, (record, number)) AS its_message
FROM query(getvariable('refused'))
GROUP BY ALL
ORDER BY records DESC, benchmark, stage, table_name, rule;
