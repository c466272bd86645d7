-- What is in each CONDDA/OND session: tests, rounds, results posted, feedback asked for?
WITH latest AS (
    SELECT session_id, test_id, max(attempt) + 1 AS attempts, count(DISTINCT round) AS rounds,
        sum(served) AS served
    FROM condda.rounds GROUP BY ALL
), posted AS (
    SELECT session_id, test_id, count(*) AS result_lines,
        string_agg(DISTINCT type, ', ' ORDER BY type) AS types
    FROM condda.results GROUP BY ALL
), asked AS (
    SELECT session_id, test_id, count(*) AS requests, sum(ids) AS ids
    FROM condda.feedback GROUP BY ALL
)
SELECT session_id, s.agent, s.protocol, s.domain, s.red_light, s.state,
    format('{} of {}', sum(s.completed::INT) OVER (PARTITION BY session_id), s.tests)
        AS tests_finished,
    test_id, latest.attempts, latest.rounds, latest.served, posted.result_lines, posted.types,
    coalesce(asked.requests, 0) AS feedback_requests, coalesce(asked.ids, 0) AS feedback_ids,
    s.run_id
FROM condda.sessions s
LEFT JOIN latest USING (session_id, test_id)
LEFT JOIN posted USING (session_id, test_id)
LEFT JOIN asked USING (session_id, test_id)
ORDER BY session_id, test_id;
