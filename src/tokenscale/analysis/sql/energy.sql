-- Energy of a run in joules, as the devices' own counters have it (NVML's total of a board), summed over ranks; of the
-- attempts that said it, steps that a later attempt did again included. Null where nothing counts it, as on a CPU, or
-- where a rank of such an attempt did not say it: then it was not measured, and nothing is guessed. Host, network and
-- cooling are not in it. `j_per_useful_token` is over the useful tokens of those attempts' steps that count.
WITH counted AS (
    SELECT run_id, attempt, sum(energy_j) AS energy_j, count(energy_j) AS ranks
    FROM events
    WHERE event = 'run_stop'
    GROUP BY run_id, attempt
    HAVING count(energy_j) > 0
),
tokens AS (
    SELECT run_id, attempt, sum(useful_tokens) AS useful_tokens
    FROM steps
    GROUP BY run_id, attempt
)
SELECT
    r.run_id, r.approach, r.series, r.world_size, r.repeat,
    CASE WHEN bool_and(c.ranks = r.world_size) THEN sum(c.energy_j) END AS energy_j,
    CASE WHEN bool_and(c.ranks = r.world_size) THEN sum(c.energy_j) / nullif(sum(t.useful_tokens), 0) END AS j_per_useful_token
FROM runs AS r
LEFT JOIN counted AS c USING (run_id)
LEFT JOIN tokens AS t ON t.run_id = c.run_id AND t.attempt = c.attempt
WHERE r.validity IN ('valid', 'suspect')
GROUP BY r.run_id, r.approach, r.series, r.world_size, r.repeat
ORDER BY r.series, r.world_size, r.repeat, r.run_id;
