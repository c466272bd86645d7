-- Which run has the highest AUROC in each protocol, on average over its seeds?
-- The best of several is chosen after looking; the interval is that of a single seed.
WITH whole AS (
    SELECT m.*, network, changed, config_id
    FROM lake.metrics m JOIN lake.runs USING (benchmark, run_id)
    WHERE metric = 'auroc' AND value IS NOT NULL
        AND "view" = 'plain' AND subset = 'all' AND phase <> 'after' AND step <= 0
    QUALIFY step = min(step) OVER (PARTITION BY benchmark, m.protocol)
)
SELECT benchmark, protocol, split, convention, model, network, score, any_value(changed) AS changed,
    count(*) AS seeds, round(avg(value), 4) AS auroc,
    CASE count(*) WHEN 1 THEN round(min(low), 4) END AS low,
    CASE count(*) WHEN 1 THEN round(max(high), 4) END AS high,
    max(n) AS samples
FROM whole
GROUP BY benchmark, protocol, split, convention, config_id, score_id, model, network, score
QUALIFY row_number() OVER (
    PARTITION BY benchmark, protocol, split, convention ORDER BY auroc DESC, model, network, score, config_id
) = 1
ORDER BY ALL;
