-- Which raw records were quarantined, by which rule and why?
SELECT benchmark, stage, table_name, rule, count(*) AS records,
    min_by(record, (record, number)) AS first_record,
    min_by(message, (record, number)) AS its_message
FROM lake.quarantine
GROUP BY ALL
ORDER BY records DESC, benchmark, stage, table_name, rule;
