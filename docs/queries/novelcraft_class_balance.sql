-- How many NovelCraft frames and episodes of each class are in each split, after the filter?
SELECT class, any_value(role) AS role,
    count_if(kept AND split = 'train') AS train,
    count_if(kept AND split = 'valid') AS valid,
    count_if(kept AND split = 'test') AS test,
    count_if(NOT kept) AS filtered_out,
    count_if(kept AND split IS NULL) AS in_no_split,
    count(DISTINCT episode_id) AS episodes
FROM novelcraft.frame_roles
GROUP BY class
ORDER BY role, class;
