-- How did AUROC move over the last builds?
-- A run that is in several builds has one row for each; `gc` decides how far back they go.
SELECT benchmark, number, made, count(DISTINCT run_id) AS runs, count(*) AS numbers,
    round(avg(value), 4) AS mean_auroc, round(max(value), 4) AS best_auroc
FROM lake.metrics_by_build
WHERE metric = 'auroc' AND split = 'test' AND view = 'plain' AND subset = 'all'
GROUP BY ALL
ORDER BY benchmark, number;
