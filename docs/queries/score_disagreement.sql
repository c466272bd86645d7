-- Which samples do two scores rank most differently?
-- A rank is the share of the same score's samples with a lower value, so that any scales compare.
WITH ranked AS (
    SELECT benchmark, protocol, split, "view", phase, step, sample_id, class, novel,
        concat_ws(' ', model, nullif(network, 'none'), score, seed) AS run, run_id, score_id,
        percent_rank() OVER (
            PARTITION BY benchmark, run_id, score_id, split, "view", phase ORDER BY value
        ) AS place
    FROM lake.scores JOIN lake.runs USING (benchmark, run_id)
)
SELECT benchmark, protocol, split, a.sample_id, a.class, a.novel,
    a.run AS first_run, round(a.place, 3) AS first_rank,
    b.run AS second_run, round(b.place, 3) AS second_rank,
    round(abs(a.place - b.place), 3) AS apart
FROM ranked a JOIN ranked b USING (benchmark, protocol, split, "view", phase, step, sample_id)
WHERE (a.run, a.run_id, a.score_id) < (b.run, b.run_id, b.score_id)
ORDER BY abs(a.place - b.place) DESC, benchmark, protocol, split, sample_id, first_run, second_run
LIMIT 20;
