-- Which KOWL labels does a predictor miss most, and what does it take them for?
-- First guesses at clips as they are, after the feedback of their increment.
WITH top AS (
    SELECT run_id, split, class, predicted, count(*) AS clips
    FROM kowl.predictions
    WHERE rank = 1 AND phase = 'after' AND view = 'plain'
    GROUP BY ALL
)
SELECT run_id, any_value(model) AS predictor, any_value(network) AS extractor,
    any_value(settings ->> '$.feedback') AS feedback, any_value(seed) AS seed,
    split, class AS label, sum(clips) AS clips,
    round(coalesce(sum(clips) FILTER (predicted = class), 0) / sum(clips), 3) AS recall,
    max_by(predicted, (clips, predicted)) FILTER (predicted <> class) AS taken_for,
    max(clips) FILTER (predicted <> class) AS times
FROM top JOIN kowl.runs USING (run_id)
GROUP BY run_id, split, class
ORDER BY recall, sum(clips) DESC, run_id, split, label
LIMIT 30;
