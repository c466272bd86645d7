-- How much do the 3DOS metrics vary with the seed of training?
SELECT m.protocol, m.model, r.network, r.changed, m.score, m.split, m.view, m.subset,
    m.convention, m.metric,
    count(*) AS seeds, round(avg(m.value), 4) AS mean,
    round(stddev_samp(m.value), 4) AS deviation,
    round(min(m.value), 4) AS lowest, round(max(m.value), 4) AS highest
FROM threedos.metrics m JOIN threedos.runs r USING (run_id)
WHERE m.value IS NOT NULL
GROUP BY m.protocol, m.model, r.network, r.changed, m.score, m.split, m.view, m.subset,
    m.convention, m.metric, m.score_id, r.config_id
ORDER BY deviation DESC NULLS LAST, m.protocol, m.model, r.network, r.changed, m.score, m.split,
    m.view, m.subset, m.convention, m.metric, m.score_id, r.config_id;
