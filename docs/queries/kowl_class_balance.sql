-- How many KOWL clips and labels, known and new, does each increment release in each split?
SELECT protocol, step AS increment, split,
    count(*) AS clips, count(DISTINCT class) AS labels,
    count_if(role = 'novel') AS new_clips,
    count(DISTINCT class) FILTER (role = 'novel') AS new_labels,
    round(count(*) / count(DISTINCT class), 2) AS clips_a_label
FROM kowl.splits
GROUP BY protocol, step, split
ORDER BY protocol, step, split;
