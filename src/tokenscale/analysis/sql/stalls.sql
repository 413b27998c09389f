-- Data-stall share of a run: time that a step waited for its batch over the time of the step, each the longest of any
-- rank, sum over sum after warm-up ($warmup_steps steps an attempt). `largest_gain` is the bound that follows (Amdahl):
-- no data format and no loader can speed this run up by more than 1 / (1 - share). The host waits: where it runs ahead of
-- a GPU, a part of that is hidden behind computing, so that the share is at most this and the bound holds all the more.
SELECT
    r.run_id, r.approach, r.series, r.world_size, r.repeat,
    sum(g.data_wait_s) AS data_wait_s, sum(g.step_s) AS seconds,
    sum(g.data_wait_s) / sum(g.step_s) AS data_stall_share,
    CASE WHEN sum(g.data_wait_s) >= sum(g.step_s) THEN 'inf'::DOUBLE
         ELSE 1 / (1 - sum(g.data_wait_s) / sum(g.step_s)) END AS largest_gain
FROM measured_steps($warmup_steps) AS g JOIN runs AS r USING (run_id)
WHERE g.data_wait_s IS NOT NULL
GROUP BY r.run_id, r.approach, r.series, r.world_size, r.repeat
HAVING sum(g.step_s) > 0
ORDER BY r.series, r.world_size, r.repeat, r.run_id;
