-- What does each table cost: rows, bytes, files, bytes a row?
-- Read from the manifests beside the tables, so no table is opened.
SET VARIABLE lake = (
    SELECT regexp_replace(path, '[^/]*$', '') FROM duckdb_databases() WHERE database_name = current_database()
);
SELECT benchmark, "table" AS table_name, rows, bytes, len(parts) AS files, quarantined,
    round(bytes / nullif(rows, 0), 1) AS bytes_a_row,
    round(bytes / sum(bytes) OVER (), 4) AS share
FROM read_json(
    getvariable('lake') || '*/*/current/_manifest.json',
    columns = {
        benchmark: 'VARCHAR', "table": 'VARCHAR', rows: 'BIGINT', bytes: 'BIGINT',
        quarantined: 'BIGINT', parts: 'JSON[]'
    }
)
ORDER BY bytes DESC, benchmark, table_name;
