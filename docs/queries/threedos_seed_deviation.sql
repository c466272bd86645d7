-- How much do the 3DOS metrics vary with the seed of training?
SELECT protocol, backbone, detector, split, convention, metric,
    count(*) AS seeds, round(avg(value), 4) AS mean, round(stddev_samp(value), 4) AS deviation,
    round(min(value), 4) AS lowest, round(max(value), 4) AS highest
FROM threedos.metrics
WHERE value IS NOT NULL
GROUP BY ALL
ORDER BY deviation DESC NULLS LAST, protocol, backbone, detector, split, convention, metric;
