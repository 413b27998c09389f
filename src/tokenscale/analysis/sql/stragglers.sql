-- Ranks that were slower than their peers for a stretch of a run. Peers are the ranks of one pipeline stage, which compute
-- the same. A rank's time is its waiting for data, its copies, forward and backward; the exchange of gradients, in which the
-- others wait for it, is left out. Under FSDP and tensor parallelism peers also wait for each other in forward and backward:
-- there only what comes before the first collective shows. A rank is late in a step if it takes longer than the median rank
-- (of two, the other one) by more than $excess of the step, and slow in a window of $window steps of an attempt if it is
-- late in nine of ten. Adjacent windows are one stretch. Left out are warm-up and ranks that share cores.
WITH busy AS (
    SELECT
        s.run_id, s.attempt, s.step, s.rank,
        s.rank // greatest(r.world_size // coalesce(r.pipeline, 1), 1) AS stage,
        s.t_unix_s, s.step_s,
        coalesce(s.data_wait_s, 0) AS data_wait_s, coalesce(s.h2d_s, 0) AS h2d_s,
        coalesce(s.forward_s, 0) AS forward_s, coalesce(s.backward_s, 0) AS backward_s,
        coalesce(s.data_wait_s, 0) + coalesce(s.h2d_s, 0) + s.forward_s + coalesce(s.backward_s, 0) AS busy_s
    FROM steps AS s JOIN runs AS r USING (run_id)
    WHERE r.validity IN ('valid', 'suspect') AND r.world_size > 1 AND NOT coalesce(r.oversubscribed, false)
        AND s.attempt_step >= $warmup_steps AND s.forward_s IS NOT NULL AND s.step_s > 0
),
typical AS (
    SELECT
        run_id, attempt, step, stage,
        CASE WHEN count(*) = 2 THEN min(busy_s) ELSE median(busy_s) END AS busy_s,
        median(data_wait_s) AS data_wait_s, median(h2d_s) AS h2d_s, median(forward_s) AS forward_s,
        median(backward_s) AS backward_s
    FROM busy
    GROUP BY run_id, attempt, step, stage
    HAVING count(*) > 1
),
windows AS (
    SELECT
        b.run_id, b.attempt, b.rank,
        b.step // $window AS piece, min(b.step) AS first_step, max(b.step) AS last_step,
        min(b.t_unix_s - b.step_s) AS started_unix_s, max(b.t_unix_s) AS stopped_unix_s, sum(b.busy_s) AS busy_s,
        sum(t.busy_s) AS typical_s,
        sum(b.data_wait_s - t.data_wait_s) AS data_wait_s,
        sum(b.h2d_s - t.h2d_s) AS h2d_s, sum(b.forward_s - t.forward_s) AS forward_s,
        sum(b.backward_s - t.backward_s) AS backward_s
    FROM busy AS b JOIN typical AS t USING (run_id, attempt, step, stage)
    GROUP BY b.run_id, b.attempt, b.rank, piece
    HAVING count(*) = $window AND avg((b.busy_s - t.busy_s > $excess * b.step_s)::INTEGER) >= 0.9
),
numbered AS (
    SELECT *, piece - row_number() OVER (PARTITION BY run_id, attempt, rank ORDER BY piece) AS stretch FROM windows
),
stretches AS (
    SELECT
        run_id, attempt, rank,
        min(first_step) AS first_step, max(last_step) AS last_step, min(started_unix_s) AS started_unix_s,
        max(stopped_unix_s) AS stopped_unix_s,
        sum(busy_s) / nullif(sum(typical_s), 0) AS slowdown,
        sum(busy_s) - sum(typical_s) AS lost_s, sum(data_wait_s) AS data_wait_s, sum(h2d_s) AS h2d_s,
        sum(forward_s) AS forward_s, sum(backward_s) AS backward_s
    FROM numbered
    GROUP BY run_id, attempt, rank, stretch
)
SELECT
    s.run_id, r.series, r.world_size, s.attempt, s.rank,
    -- nodes have equal numbers of ranks, in their order
    string_split(r.node_names, ', ')[1 + s.rank * len(string_split(r.node_names, ', ')) // r.world_size] AS node,
    s.first_step, s.last_step, s.started_unix_s, s.stopped_unix_s, s.slowdown, s.lost_s,
    CASE greatest(s.data_wait_s, s.h2d_s, s.forward_s, s.backward_s)
        WHEN s.data_wait_s THEN 'the wait for data'
        WHEN s.h2d_s THEN 'copies to the device'
        WHEN s.forward_s THEN 'the forward pass'
        ELSE 'the backward pass'
    END AS part
FROM stretches AS s JOIN runs AS r USING (run_id)
ORDER BY s.lost_s DESC, s.run_id, s.attempt, s.rank, s.first_step;
