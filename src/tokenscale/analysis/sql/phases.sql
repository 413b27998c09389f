-- Where the time of a step goes, in seconds a step and rank: sums over all ranks and steps after warm-up ($warmup_steps steps
-- an attempt), over their number, so that parts add up to the step. `rest_s` is what no part names: the host's own
-- bookkeeping, logging, and where ranks of a GPU run, gaps. It is negative where parts overlap, as the waiting of a host
-- that runs ahead of its device does. A part that is not measured, or that a run does not have, counts as nothing.
WITH measured AS (
    SELECT
        s.run_id,
        count(*) AS rank_steps, avg(s.step_s) AS step_s,
        coalesce(sum(s.data_wait_s), 0) / count(*) AS data_wait_s,
        coalesce(sum(s.h2d_s), 0) / count(*) AS h2d_s,
        coalesce(sum(s.forward_s), 0) / count(*) AS forward_s,
        coalesce(sum(s.backward_s), 0) / count(*) AS backward_s,
        coalesce(sum(s.exposed_communication_s), 0) / count(*) AS exposed_communication_s,
        coalesce(sum(s.bubble_s), 0) / count(*) AS bubble_s,
        coalesce(sum(s.optimizer_s), 0) / count(*) AS optimizer_s
    FROM steps AS s JOIN runs AS r USING (run_id)
    WHERE r.validity IN ('valid', 'suspect') AND s.attempt_step >= $warmup_steps AND s.step_s IS NOT NULL
    GROUP BY s.run_id
)
SELECT
    r.run_id, r.approach, r.series, r.method, r.world_size, r.repeat, m.rank_steps, m.step_s, m.data_wait_s,
    m.h2d_s, m.forward_s, m.backward_s, m.exposed_communication_s, m.bubble_s, m.optimizer_s,
    m.step_s - m.data_wait_s - m.h2d_s - m.forward_s - m.backward_s - m.exposed_communication_s - m.bubble_s
        - m.optimizer_s AS rest_s
FROM measured AS m JOIN runs AS r USING (run_id)
ORDER BY r.series, r.world_size, r.repeat, r.run_id;
