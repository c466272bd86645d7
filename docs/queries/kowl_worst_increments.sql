-- At which increments does the accuracy of a KOWL predictor fall most?
-- Accuracy of each increment alone, after its feedback, against that of the increment before.
WITH accuracy AS (
    SELECT run_id, split, step, value, n
    FROM kowl.measures
    WHERE metric = 'accuracy' AND scope = 'increment' AND phase = 'after' AND view = 'plain'
        AND known_set = 'none' AND reduction = 'raw' AND grouping = 'all' AND value IS NOT NULL
), steps AS (
    SELECT *, lag(step) OVER run AS before_increment, lag(value) OVER run AS before_value
    FROM accuracy
    WINDOW run AS (PARTITION BY run_id, split ORDER BY step)
)
SELECT run_id, model AS predictor, network AS extractor, settings ->> '$.feedback' AS feedback,
    seed, split, step AS increment, before_increment, n AS samples,
    round(before_value, 4) AS before, round(value, 4) AS after,
    round(value - before_value, 4) AS change
FROM steps JOIN kowl.runs USING (run_id)
WHERE before_value IS NOT NULL
ORDER BY value - before_value, run_id, split, step
LIMIT 20;
