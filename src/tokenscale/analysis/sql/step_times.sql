-- How step times of a run spread, after its warm-up ($warmup_steps steps an attempt), each step as long as its slowest
-- rank's: median, 95th and 99th percentile (interpolated), the slowest one, and the interquartile range over the median.
-- Steps are no repeats of each other, so this is no interval of anything: it says how steady one run was. `late_s` is the
-- time by which the slowest rank is behind the fastest, median over steps; null where there is one rank.
WITH ranks AS (
    SELECT s.run_id, s.step, max(s.step_s) - min(s.step_s) AS late_s
    FROM steps AS s
    WHERE s.world_size > 1 AND s.attempt_step >= $warmup_steps AND s.step_s IS NOT NULL
    GROUP BY s.run_id, s.step
    HAVING count(*) = any_value(s.world_size)
),
behind AS (
    SELECT run_id, median(late_s) AS late_s FROM ranks GROUP BY run_id
)
SELECT
    r.run_id, r.approach, r.series, r.world_size, r.repeat,
    count(*) AS steps, median(g.step_s) AS median_s, quantile_cont(g.step_s, 0.95) AS p95_s,
    quantile_cont(g.step_s, 0.99) AS p99_s, max(g.step_s) AS slowest_s,
    (quantile_cont(g.step_s, 0.75) - quantile_cont(g.step_s, 0.25)) / nullif(median(g.step_s), 0) AS iqr_share,
    any_value(b.late_s) AS late_s
FROM measured_steps($warmup_steps) AS g
JOIN runs AS r USING (run_id)
LEFT JOIN behind AS b USING (run_id)
GROUP BY r.run_id, r.approach, r.series, r.world_size, r.repeat
ORDER BY r.series, r.world_size, r.repeat, r.run_id;
