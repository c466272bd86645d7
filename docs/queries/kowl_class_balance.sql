-- How many KOWL clips and labels, known and new, does each increment release in each split?
SELECT increment, split,
    count(*) AS clips, count(DISTINCT label) AS labels,
    count_if(role = 'novel') AS new_clips,
    count(DISTINCT label) FILTER (role = 'novel') AS new_labels,
    round(count(*) / count(DISTINCT label), 2) AS clips_a_label
FROM kowl.increments
GROUP BY increment, split
ORDER BY increment, split;
