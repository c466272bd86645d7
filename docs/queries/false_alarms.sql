-- Which known samples are false alarms of all scores of all runs, or of most of them?
-- An alarm: a value above 90 % of the known samples of the same score. The first ten of a benchmark.
WITH known AS (
    SELECT benchmark, protocol, split, sample_id, class, model || ' ' || score AS named,
        value > quantile_cont(value, 0.9) OVER (
            PARTITION BY benchmark, run_id, score_id, split, "view", phase
        ) AS alarm
    FROM lake.scores JOIN lake.runs USING (benchmark, run_id)
    WHERE NOT novel
)
SELECT benchmark, protocol, split, sample_id, class,
    count_if(alarm) AS alarms, count(*) AS of_scores, bool_and(alarm) AS of_all,
    string_agg(DISTINCT named, ', ' ORDER BY named) FILTER (alarm) AS scores
FROM known
GROUP BY benchmark, protocol, split, sample_id, class
HAVING count(*) > 1 AND count_if(alarm) > 0
QUALIFY row_number() OVER (
    PARTITION BY benchmark ORDER BY alarms / of_scores DESC, protocol, split, sample_id
) <= 10
ORDER BY benchmark, alarms / of_scores DESC, protocol, split, sample_id;
