-- At which increments does the accuracy of a KOWL predictor fall most?
-- Accuracy of each increment alone, after its feedback, against that of the increment before.
WITH accuracy AS (
    SELECT extractor, predictor, feedback, seed, split, increment, value, n
    FROM kowl.measures
    WHERE metric = 'accuracy' AND scope = 'increment' AND phase = 'post_feedback'
        AND known_set = 'none' AND reduction = 'raw' AND grouping = 'all' AND value IS NOT NULL
), steps AS (
    SELECT *, lag(increment) OVER run AS before_increment, lag(value) OVER run AS before_value
    FROM accuracy
    WINDOW run AS (PARTITION BY extractor, predictor, feedback, seed, split ORDER BY increment)
)
SELECT extractor, predictor, feedback, seed, split, increment, before_increment, n AS samples,
    round(before_value, 4) AS before, round(value, 4) AS after,
    round(value - before_value, 4) AS change
FROM steps
WHERE before_value IS NOT NULL
ORDER BY value - before_value, extractor, predictor, feedback, seed, split, increment
LIMIT 20;
