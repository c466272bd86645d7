-- Which novel classes are hardest for which run and score, in every benchmark?
-- AUROC of one novel class against all known samples; 0.5 is chance. The three lowest.
WITH counted AS (
    SELECT *,
        sum((NOT novel)::INT) OVER (same ORDER BY value) AS at_most,
        sum((NOT novel)::INT) OVER (same ORDER BY value GROUPS BETWEEN CURRENT ROW AND CURRENT ROW) AS equal,
        sum((NOT novel)::INT) OVER same AS known
    FROM lake.scores
    WINDOW same AS (PARTITION BY benchmark, run_id, score_id, split, "view", phase)
)
SELECT benchmark, protocol, split, model, network, seed, score, "view", phase, run_id, class,
    count(*) AS samples, round(avg((at_most - equal / 2) / known), 4) AS auroc
FROM counted JOIN lake.runs USING (benchmark, run_id)
WHERE novel AND known > 0
GROUP BY benchmark, run_id, protocol, split, model, network, seed, score_id, score, "view", phase, class
QUALIFY row_number() OVER (
    PARTITION BY benchmark, run_id, score_id, split, "view", phase ORDER BY auroc, class
) <= 3
ORDER BY benchmark, protocol, split, model, network, seed, score, "view", phase, run_id, auroc, class;
