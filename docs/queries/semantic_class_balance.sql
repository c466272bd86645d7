-- How many normal and anomalous images has each hold-out trial in each split?
SELECT subset, trial, split,
    count_if(role = 'normal') AS normal,
    count_if(role = 'anomaly') AS anomalous,
    round(count_if(role = 'anomaly') / count(*), 3) AS anomalous_share,
    count(DISTINCT class) AS classes
FROM semantic.trials
GROUP BY subset, trial, split
ORDER BY subset, trial, split;
