-- All runs of the experiment, the missing and the invalid ones included; nothing is taken out of this list.
SELECT *
FROM runs
ORDER BY series, world_size, repeat, run_id;
