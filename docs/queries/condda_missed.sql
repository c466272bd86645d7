-- Which novel instances of CONDDA/OND tests do agents take for a known class, and which one?
SELECT r.model AS agent, r.protocol, p.step AS round, s.position AS test_row, p.class,
    p.predicted, p.probability, p.p_unknown, p.sample_id
FROM condda.predictions p
JOIN condda.runs r USING (run_id)
JOIN condda.splits t ON t.protocol = r.protocol AND t.sample_id = p.sample_id AND t.step = p.step
JOIN condda.samples s ON s.sample_id = p.sample_id
WHERE t.role = 'novel' AND NOT p.predicted LIKE 'unknown%'
ORDER BY p.p_unknown, agent, r.protocol, test_row;
