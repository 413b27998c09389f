-- Tables of one run, from its logs. Of steps that several attempts logged, the last attempt's count, as in `ingest`; a step that
-- is not finite is in `latest_steps` alone.
CREATE TABLE logged_attempts AS
    SELECT attempt, min(step) AS first_step, coalesce(max(world_size), count(DISTINCT rank)) AS world_size,
        max(world_size) IS NOT NULL AS stated
    FROM logged_steps LEFT JOIN (
        SELECT attempt, max(world_size) AS world_size FROM logged_events GROUP BY attempt
    ) USING (attempt)
    GROUP BY attempt;
CREATE TABLE latest_steps AS
    SELECT 'run' AS run_id, s.*, s.step - a.first_step AS attempt_step, a.world_size
    FROM logged_steps AS s JOIN logged_attempts AS a USING (attempt)
    WHERE s.step IS NOT NULL
    QUALIFY s.attempt = max(s.attempt) OVER (PARTITION BY s.step)
        AND row_number() OVER (PARTITION BY s.step, s.attempt, s.rank ORDER BY s.line) = 1
    ORDER BY s.attempt, s.rank, s.line;
CREATE VIEW steps AS FROM latest_steps WHERE nonfinite IS DISTINCT FROM true;
CREATE VIEW events AS SELECT 'run' AS run_id, * FROM logged_events;
INSERT INTO runs BY NAME
    SELECT 'run' AS run_id, coalesce(max_by(world_size, attempt), 1) AS world_size, 'valid' AS validity
    FROM logged_attempts;
