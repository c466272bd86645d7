-- How many known and novel images has each hold-out trial in each split?
SELECT json_extract_string(definition, '$.subset') AS subset,
    json_extract_string(definition, '$.held_out') AS held_out,
    split,
    count_if(role = 'known') AS known,
    count_if(role = 'novel') AS novel,
    round(count_if(role = 'novel') / count(*), 3) AS novel_share,
    count(DISTINCT class) AS classes
FROM semantic.splits JOIN semantic.protocols USING (protocol)
GROUP BY ALL
ORDER BY subset, held_out, split;
