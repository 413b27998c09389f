-- Memory of a run in bytes, as measured in the first step of its latest attempt by the rank that held the most, beside
-- what its settings predict for the rank with the most: parameters, gradients (the most after any backward pass),
-- optimizer state, and what backward needs of the forward passes in flight (activations). A sum is null where a part was not measured or is not predicted.
-- `peak_bytes` is the most that any rank allocated in any step (on a CPU: its resident set, the program included).
WITH peaks AS (
    SELECT run_id, max(memory_peak_bytes)::BIGINT AS peak_bytes
    FROM steps_global
    GROUP BY run_id
),
predicted AS (
    SELECT
        *,
        predicted_parameters_bytes + predicted_gradients_bytes + predicted_optimizer_bytes
            + predicted_activations_bytes AS predicted_bytes
    FROM runs
    WHERE validity IN ('valid', 'suspect')
)
SELECT
    p.run_id, p.approach, p.series, p.model, p.method, p.world_size, p.repeat, p.micro_batch, p.sequence_length,
    p.precision, p.device_kind, m.rank,
    m.parameters_bytes, p.predicted_parameters_bytes, m.gradients_bytes, p.predicted_gradients_bytes,
    m.optimizer_bytes, p.predicted_optimizer_bytes, m.activations_bytes, p.predicted_activations_bytes,
    m.bytes, p.predicted_bytes, p.predicted_bytes / nullif(m.bytes, 0) AS predicted_per_measured, k.peak_bytes
FROM predicted AS p
JOIN fullest_ranks AS m USING (run_id)
LEFT JOIN peaks AS k USING (run_id)
ORDER BY p.series, p.world_size, p.repeat, p.run_id;
