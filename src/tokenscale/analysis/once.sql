-- What was reported once: numbers of all other events, over the ranks of their latest attempt. The names in braces are
-- fields of the logs (analysis/measures.py).
WITH latest AS (
    FROM events
    WHERE event NOT IN ('run_start', 'validation', 'source_validation')
        AND coalesce({events}) IS NOT NULL
    QUALIFY row_number() OVER (PARTITION BY event, rank ORDER BY attempt DESC, line DESC) = 1
),
over_ranks AS (
    SELECT event, {summed_events}
    FROM (FROM latest QUALIFY attempt = max(attempt) OVER (PARTITION BY event))
    GROUP BY event
)
SELECT event || '/' || name, value
FROM (UNPIVOT over_ranks ON COLUMNS(* EXCLUDE (event)) INTO NAME name VALUE value)
