-- Exposed communication of a run: time that ranks waited for gradients to be exchanged, after their backward passes, over
-- the time of the steps; sums over all ranks and steps after warm-up ($warmup_steps steps an attempt).
-- `least_exposed_share` counts in each step only the rank that waited least: what the others waited longer was for late
-- ranks, not for the network. `largest_gain`: no network can speed the run up by more than 1 / (1 - exposed share)
-- (Amdahl). Runs whose ranks exchange no gradients, or do not say how long that took, are not listed.
WITH waited AS (
    SELECT
        s.run_id,
        s.step,
        sum(s.exposed_communication_s) AS exposed_s,
        sum(s.step_s) AS seconds,
        min(s.exposed_communication_s) AS least_s,
        max(s.step_s) AS longest_s
    FROM steps AS s
    JOIN runs AS r USING (run_id)
    WHERE r.validity IN ('valid', 'suspect') AND s.attempt_step >= $warmup_steps
        AND s.exposed_communication_s IS NOT NULL AND s.step_s IS NOT NULL
    GROUP BY s.run_id, s.step
    HAVING count(*) = any_value(s.world_size)
)
SELECT
    r.run_id,
    r.approach,
    r.series,
    r.method,
    r.world_size,
    r.repeat,
    count(*) AS steps,
    sum(w.exposed_s) AS exposed_s,
    sum(w.seconds) AS seconds,
    sum(w.exposed_s) / sum(w.seconds) AS exposed_share,
    sum(w.least_s) / sum(w.longest_s) AS least_exposed_share,
    CASE WHEN sum(w.exposed_s) >= sum(w.seconds) THEN 'inf'::DOUBLE
         ELSE 1 / (1 - sum(w.exposed_s) / sum(w.seconds)) END AS largest_gain
FROM waited AS w
JOIN runs AS r USING (run_id)
GROUP BY r.run_id, r.approach, r.series, r.method, r.world_size, r.repeat
HAVING sum(w.seconds) > 0
ORDER BY r.series, r.world_size, r.repeat, r.run_id;
