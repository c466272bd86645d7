-- How does the novelty of a NovelCraft frame, in each model's own score, follow its novel fraction?
-- `above_normal` is the mean share of normal frames that score lower; `found` the share of frames
-- that score above 95 % of the normal ones.
WITH frames AS (
    SELECT protocol, model, run_id, seed, split, novel, value,
        coalesce(novel_fraction, 0) AS fraction,
        quantile_cont(value, 0.95) FILTER (NOT novel) OVER run AS threshold,
        sum((NOT novel)::INT) OVER (run ORDER BY value) AS at_most,
        sum((NOT novel)::INT) OVER run AS normal
    FROM novelcraft.scores
    JOIN novelcraft.runs USING (run_id)
    JOIN novelcraft.targets ON sample_id = frame_id
    WHERE score = 'own'
    WINDOW run AS (PARTITION BY run_id, split)
)
SELECT protocol, model, run_id, seed, split,
    CASE
        WHEN NOT novel THEN '0 normal'
        WHEN fraction < 0.01 THEN '1 below 1 %'
        WHEN fraction < 0.05 THEN '2 1 to 5 %'
        WHEN fraction < 0.2 THEN '3 5 to 20 %'
        ELSE '4 20 % and more'
    END AS novel_pixels,
    count(*) AS frames, round(avg(fraction), 4) AS mean_fraction,
    round(avg(at_most / normal), 3) AS above_normal,
    round(avg((value > threshold)::INT), 3) AS found
FROM frames
WHERE normal > 0
GROUP BY ALL
ORDER BY ALL;
