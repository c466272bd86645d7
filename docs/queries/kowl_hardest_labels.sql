-- Which KOWL labels does a predictor miss most, and what does it take them for?
WITH top AS (
    SELECT extractor, predictor, feedback, seed, split, target, predicted, sum(count) AS clips
    FROM kowl.confusion
    WHERE rank = 1 AND phase = 'post_feedback' AND grouping = 'all'
    GROUP BY ALL
)
SELECT extractor, predictor, feedback, seed, split, target AS label, sum(clips) AS clips,
    round(coalesce(sum(clips) FILTER (predicted = target), 0) / sum(clips), 3) AS recall,
    max_by(predicted, (clips, predicted)) FILTER (predicted <> target) AS taken_for,
    max(clips) FILTER (predicted <> target) AS times
FROM top
GROUP BY ALL
ORDER BY recall, sum(clips) DESC, extractor, predictor, feedback, seed, split, label
LIMIT 30;
