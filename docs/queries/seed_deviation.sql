-- How much do the metrics vary with the seed, where a configuration was run with several?
SELECT m.benchmark, m.protocol, m.model, network, score, changed, config_id, score_id, split,
    "view", phase, step, subset, convention, metric,
    count(*) AS seeds, round(avg(value), 4) AS mean, round(stddev_samp(value), 4) AS deviation,
    round(min(value), 4) AS lowest, round(max(value), 4) AS highest
FROM lake.metrics m JOIN lake.runs USING (benchmark, run_id)
WHERE value IS NOT NULL
GROUP BY ALL
HAVING count(*) > 1
ORDER BY deviation DESC, m.benchmark, m.protocol, m.model, network, score, config_id, score_id, split,
    "view", phase, step, subset, convention, metric;
