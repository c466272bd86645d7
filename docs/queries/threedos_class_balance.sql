-- How many 3DOS shapes of each class are in each split of each track, and how many were read?
SELECT s.protocol, s.role, s.class,
    count_if(s.split = 'train') AS train,
    count_if(s.split = 'valid') AS valid,
    count_if(s.split = 'test') AS test,
    count(shapes.sample_id) AS of_them_read
FROM threedos.splits s LEFT JOIN threedos.shapes USING (sample_id)
GROUP BY ALL
ORDER BY ALL;
