-- Runs of an experiment against each other: first the facts that runs are compared by, then a table for each check, with
-- (run_id, sentence) for each run that it names. A row without a run says why nothing was compared.
-- `runs` has what each run is by itself (`validity`, `reasons`). Macros without parameters, such as `loss_spreads()`, are
-- the limits of `siblings.py`.

CREATE MACRO spread(found) AS                          -- `measure_spread`
    sqrt(pi() / 2) * list_avg(list_transform(found, lambda x: abs(x - list_median(found))));

-- Runs that count. A family shares its batches: an approach and its twin, and the storage of one without a twin.
CREATE TEMP TABLE counted AS
    SELECT r.*, row_number() OVER () AS place, contains(r.reasons, first_loss_differs()) AS contradicts_itself,
        coalesce(t.online, r.approach) AS batches,
        CASE WHEN t.online IS NULL THEN concat(r.approach, ' ', r.storage) ELSE concat(t.online, ' ') END AS family
    FROM runs AS r LEFT JOIN twins AS t ON t.offline = r.approach
    WHERE r.validity IN ('valid', 'suspect');
CREATE VIEW ours AS FROM counted WHERE NOT external;
CREATE TEMP TABLE gathered AS
    SELECT run_id, step, order_digest, useful_tokens, total_tokens, loss_sum, grad_norm, memory_peak_bytes,
        step_s - coalesce(data_wait_s, 0) AS computing_s
    FROM steps_global;
CREATE TEMP TABLE noted AS
    SELECT row_number() OVER () AS line, run_id, event, attempt, rank, coalesce(step, 0) AS step, boot, t_unix_s, t_mono_s,
        loss_sum, useful_tokens, activations_bytes, cpu_s
    FROM events;

-- Steps whose counts are compared: all of the first ones, then some.
CREATE TEMP TABLE counts AS
    SELECT run_id, place, step, order_digest, useful_tokens, loss_sum, grad_norm
    FROM gathered JOIN counted USING (run_id)
    WHERE order_digest IS NOT NULL AND useful_tokens IS NOT NULL AND (step < first_steps() OR step % stride() = 0);

-- Losses: of the last third of the steps, of validations, and of the training near each of these.
CREATE TEMP TABLE trained AS
    SELECT run_id, sum(loss_sum) / sum(useful_tokens) AS loss
    FROM (SELECT *, max(step) OVER (PARTITION BY run_id) AS last FROM gathered)
    WHERE step >= 2 * (last + 1) // 3
    GROUP BY run_id
    HAVING sum(loss_sum) > 0 AND sum(useful_tokens) > 0 AND count(loss_sum) = count(*);
CREATE TEMP TABLE validated AS
    SELECT run_id, step, arg_max(loss_sum / useful_tokens, line) AS loss
    FROM noted
    WHERE event = 'validation' AND loss_sum <> 0 AND useful_tokens <> 0
    GROUP BY run_id, step;
CREATE TEMP TABLE nearby AS
    SELECT v.run_id, v.step, sum(g.loss_sum) / sum(g.useful_tokens) AS loss
    FROM validated AS v
    JOIN gathered AS g ON g.run_id = v.run_id AND g.step >= v.step - nearby_steps() AND g.step < v.step + nearby_steps()
    WHERE v.step > 0
    GROUP BY v.run_id, v.step
    HAVING sum(g.loss_sum) > 0 AND sum(g.useful_tokens) > 0;

-- Quantities that runs of equal shapes share.
CREATE TEMP TABLE of_a_shape AS
    SELECT 'memory_peak_bytes' AS quantity, run_id, arg_max(memory_peak_bytes, step)::DOUBLE AS value
    FROM gathered
    GROUP BY run_id
    UNION ALL
    SELECT 'seconds of computing a token', run_id, median(computing_s / greatest(total_tokens, 1))
    FROM (FROM gathered QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY step) > warmup_steps())
    GROUP BY run_id
    HAVING count(computing_s) = count(*)
    UNION ALL
    SELECT 'activations_bytes', run_id, sum(bytes)
    FROM (                                             -- each attempt measures anew
        SELECT run_id, arg_max(activations_bytes, (attempt, line)) AS bytes
        FROM noted
        WHERE activations_bytes > 0
        GROUP BY run_id, rank
    )
    GROUP BY run_id
    UNION ALL
    SELECT 'processor time a second', run_id, sum(cpu_s) / sum(took_s)
    FROM (                                             -- of the newest attempt
        SELECT s.run_id, s.cpu_s, s.t_mono_s - max(b.t_mono_s) AS took_s
        FROM noted AS s JOIN noted AS b USING (run_id, attempt, rank)
        WHERE s.event = 'run_stop' AND s.cpu_s <> 0 AND b.event = 'init_done'
        GROUP BY s.run_id, s.attempt, s.line, s.cpu_s, s.t_mono_s
        QUALIFY s.attempt = max(s.attempt) OVER (PARTITION BY s.run_id)
    )
    GROUP BY run_id;
DELETE FROM of_a_shape WHERE NOT coalesce(value > 0, false);

-- When each attempt of a run was on which boot, by its monotonic clock.
CREATE TEMP TABLE stays AS
    WITH boots AS (
        SELECT run_id, attempt, rank, arg_max(boot, line) AS boot FROM noted WHERE event = 'run_start' GROUP BY ALL
    ),
    times AS (
        SELECT run_id, attempt, rank, t_mono_s, line FROM noted
        UNION ALL
        SELECT run_id, attempt, rank, max(t_mono_s), NULL FROM steps GROUP BY ALL
    )
    SELECT run_id, boot, min(t_mono_s) AS begun, max(t_mono_s) AS ended, min(line) AS line
    FROM times JOIN boots USING (run_id, attempt, rank)
    WHERE boot <> '' AND t_mono_s IS NOT NULL
    GROUP BY run_id, attempt, boot;

-- Pairs of runs with equal values in their logs (`copies`). Runs of one seed whose batches are equal may have equal losses:
-- by approach, or by order digest and useful tokens of each step, as of an own approach that reads what another one does.
-- Equal timings no two runs have, but those that another trainer printed with few digits.
CREATE TEMP TABLE copied AS
    WITH samples AS (
        SELECT run_id, list((step, order_digest, useful_tokens) ORDER BY step) AS samples
        FROM counts SEMI JOIN (SELECT run_id FROM copies UNION SELECT other FROM copies) USING (run_id)
        GROUP BY run_id
    )
    SELECT c.compared, c.run_id, c.other, c.words, a.seed <> b.seed AS other_seed,
        NOT (a.external OR b.external) AS are_ours,
        other_seed OR a.batches <> b.batches AND coalesce(x.samples <> y.samples, true) AS other_samples,
        (a.run_id IS NULL OR a.started_unix_s IS NOT NULL) AND (b.run_id IS NULL OR b.started_unix_s IS NOT NULL) AS have_clocks
    FROM copies AS c
    LEFT JOIN counted AS a ON a.run_id = c.run_id
    LEFT JOIN counted AS b ON b.run_id = c.other
    LEFT JOIN samples AS x ON x.run_id = c.run_id
    LEFT JOIN samples AS y ON y.run_id = c.other;
INSERT INTO copied BY NAME SELECT * REPLACE (other AS run_id, run_id AS other) FROM copied;
CREATE TEMP TABLE copied_runs AS
    SELECT run_id, format('{} of run {}: {}',
        if(compared = 'validations', 'its validations are a copy of those', 'a copy'), other, words) AS sentence
    FROM copied
    WHERE CASE compared
        WHEN 'validations' THEN are_ours AND other_seed
        WHEN 'order_digest' THEN false
        ELSE are_ours AND other_samples OR compared IN ('step_s', 'own_s') AND have_clocks
    END;

-- Runs with another value than most that are alike have at a step: the first such step, and the first run with another
-- value. Where as many have another one, nobody knows which is wrong.
CREATE MACRO outvoted(compared) AS TABLE
    WITH votes AS (
        SELECT *, count(*) OVER (PARTITION BY alike, step, value) AS votes
        FROM query_table(compared)
        QUALIFY votes < count(*) OVER (PARTITION BY alike, step)
    )
    SELECT a.run_id, a.step, a.value, arg_min(b.run_id, b.place) AS other, arg_min(b.value, b.place) AS other_value
    FROM votes AS a JOIN votes AS b USING (alike, step)
    WHERE a.value <> b.value AND a.votes <= b.votes
    GROUP BY a.run_id, a.step, a.value
    QUALIFY row_number() OVER (PARTITION BY a.run_id ORDER BY a.step) = 1;

-- Equal order digests are equal samples, which have equal numbers of useful tokens.
CREATE VIEW useful_tokens_of_samples AS
    SELECT c.run_id, c.place, c.step, c.useful_tokens AS value, {'runs': o.alike, 'digest': c.order_digest} AS alike
    FROM counts AS c
    JOIN (SELECT run_id, dense_rank() OVER (ORDER BY factors, science, repeat, family) AS alike FROM ours) AS o USING (run_id);
CREATE TEMP TABLE other_counts AS
    SELECT run_id, format('{} useful tokens at step {}, where {} has {} in the same samples (equal order digest)',
        value, step, other, other_value) AS sentence
    FROM outvoted('useful_tokens_of_samples');

-- The samples of a step follow from text and seed alone, whatever the layout.
CREATE VIEW order_digests AS
    SELECT c.run_id, c.place, c.step, c.order_digest AS value, o.alike
    FROM counts AS c
    JOIN (SELECT run_id, dense_rank() OVER (ORDER BY science, repeat, arm, family) AS alike FROM ours) AS o USING (run_id);
CREATE TEMP TABLE other_orders AS
    SELECT run_id, format('its order digest at step {} is {}, that of {} {}', step, value, other, other_value) AS sentence
    FROM outvoted('order_digests');

-- Labels of held-out rows follow from store and settings alone.
CREATE VIEW held_out_tokens AS
    SELECT run_id, place, 0 AS step, validation_tokens AS value,
        dense_rank() OVER (ORDER BY science, repeat, arm, validation_store_sha256) AS alike
    FROM ours
    WHERE validation_tokens IS NOT NULL;
CREATE TEMP TABLE other_validation_tokens AS
    SELECT run_id, format('it validated on {} useful tokens, {} on {} of the same rows', value, other, other_value) AS sentence
    FROM outvoted('held_out_tokens');

-- Equal weights and samples have equal losses and gradients in every layout, within the rounding of each. Which of two is
-- wrong, their own validation may know. Where gradients or gathered weights are rounded, weights differ after the first
-- step, and norms by more than losses.
CREATE TEMP TABLE other_losses_of_samples AS
    WITH alike AS (
        SELECT run_id, dense_rank() OVER (ORDER BY factors, science, repeat, arm, resumed_from, family) AS alike,
            coalesce(compression = 'bf16' OR contains(layout, 'gather=bf16'), false) AS rounded,
            if(rounded, 'bf16', precision) AS rounding,
            NOT (rounded OR contradicts_itself) AS trusted
        FROM ours
    ),
    known AS (
        SELECT c.*, a.*, loss_tolerance(rounding, step) AS tolerance FROM counts AS c JOIN alike AS a USING (run_id)
    ),
    measured AS (
        SELECT *, 'loss' AS quantity, loss_sum AS value, tolerance / 2 AS least FROM known
        UNION ALL
        SELECT *, 'gradient norm', grad_norm, greatest(least_norm(), norm_times() * tolerance) / 2
        FROM known
        WHERE NOT (rounded AND step > 0)
    ),
    middles AS (
        SELECT alike, step, order_digest, quantity, coalesce(median(value) FILTER (trusted), median(value)) AS middle
        FROM measured
        WHERE value > 0
        GROUP BY ALL
        HAVING min(value) < max(value)
    )
    SELECT run_id, format('its {} at step {} is {:.6g}, beside {:.6g} of the same samples', quantity, step, value, middle)
        AS sentence
    FROM measured JOIN middles USING (alike, step, order_digest, quantity)
    WHERE value > 0 AND abs(value / middle - 1) > least
    QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY step, quantity DESC) = 1;

-- Approaches with rows of one length compute and hold the same. Each approach has one voice, however many repeats it has; of
-- two, nobody knows which is wrong.
CREATE TEMP TABLE other_shapes AS
    WITH alike AS (
        SELECT run_id, series, approach = 'length-bucketed' AS bucketed,
            dense_rank() OVER (
                ORDER BY arm, science_per_rank, global_batch, micro_batch, device, world_size, layout, data
            ) AS alike
        FROM ours
    ),
    measured AS (
        SELECT s.quantity, s.run_id, ln(s.value) AS value, a.alike, a.series
        FROM of_a_shape AS s JOIN alike AS a USING (run_id)
        WHERE NOT bucketed
    ),
    approaches AS (SELECT quantity, alike, series, median(value) AS middle FROM measured GROUP BY ALL),
    beside AS (
        SELECT a.quantity, a.run_id, 'repeats' AS others, list_median(list(b.value)) AS middle,
            greatest(ln(l.of_repeats), shape_spreads() * spread(list(b.value))) AS least
        FROM measured AS a
        JOIN measured AS b USING (quantity, alike, series)
        JOIN shape_limits AS l USING (quantity)
        WHERE a.run_id <> b.run_id
        GROUP BY a.quantity, a.run_id, l.of_repeats
        HAVING count(*) > 1
        UNION ALL
        SELECT m.quantity, m.run_id, 'approaches', median(a.middle), ln(l.of_approaches)
        FROM measured AS m
        JOIN approaches AS a USING (quantity, alike)
        JOIN shape_limits AS l USING (quantity)
        GROUP BY m.quantity, m.run_id, l.of_approaches
        HAVING count(*) > 1
    )
    SELECT run_id, quantity, format('its {} is {:.3g} × that of other {}', quantity, exp(value - middle), others) AS sentence
    FROM measured JOIN beside USING (quantity, run_id)
    WHERE abs(value - middle) > least
    QUALIFY row_number() OVER (PARTITION BY quantity, run_id ORDER BY others DESC) = 1;

-- A digest is made from the step and the samples of its slots: no two steps of a run have the same.
CREATE TEMP TABLE repeated_orders AS
    SELECT run_id, format('{} of {} steps have the samples of another step (equal order digest)',
        count(*) - count(DISTINCT order_digest), count(*)) AS sentence
    FROM counts
    GROUP BY run_id
    HAVING count(*) > count(DISTINCT order_digest)
    UNION ALL
    SELECT run_id, format('it trained on the samples of run {}, which has another seed: {}', other, words)
    FROM copied
    WHERE compared = 'order_digest' AND other_seed
    UNION ALL
    SELECT NULL, 'no log holds order digests' WHERE NOT EXISTS (FROM counts);

-- Equal weights have equal losses on equal text. Which of two is right, nobody knows.
CREATE TEMP TABLE other_first_validations AS
    WITH alike AS (
        SELECT v.run_id, v.loss, if(o.precision = 'fp32', same_loss(), same_loss_16()) AS tolerance,
            dense_rank() OVER (
                ORDER BY science, arm, precision, validation_store_sha256, validation_attention, validation_tokens
            ) AS alike
        FROM validated AS v JOIN ours AS o USING (run_id)
        WHERE v.step = 0
    ),
    far AS (
        SELECT *, median(loss) OVER (PARTITION BY alike) AS middle
        FROM alike
        QUALIFY abs(loss / middle - 1) > tolerance / 2
    )
    SELECT f.run_id, format('its validation before step 0 gave {:.6g}, that of {} {:.6g}', f.loss,
        arg_min(a.run_id, abs(a.loss - f.middle)), arg_min(a.loss, abs(a.loss - f.middle))) AS sentence
    FROM far AS f JOIN alike AS a USING (alike)
    WHERE f.run_id <> a.run_id
    GROUP BY f.run_id, f.loss;

-- A loss in other units, below what any repeat reached, or diverged. Two runs do not say which is wrong. Runs whose first loss
-- contradicts their own validation are no measure of others. Honest losses have spikes: what training and validation say
-- alike happened in the run. A validation is named where it leaves the training near it, too.
CREATE TEMP TABLE outlying_losses AS
    WITH alike AS (
        SELECT run_id, contradicts_itself, dense_rank() OVER (
            ORDER BY factors, approach, storage, science_per_rank, global_batch, steps_asked
        ) AS alike
        FROM ours
    ),
    compared AS (
        SELECT t.run_id, -1 AS step, t.loss, t.loss / v.loss AS beside
        FROM trained AS t
        LEFT JOIN validated AS v ON v.run_id = t.run_id AND v.step = (SELECT max(step) FROM validated)
        UNION ALL
        SELECT v.run_id, v.step, v.loss, v.loss / n.loss
        FROM validated AS v LEFT JOIN nearby AS n USING (run_id, step)
        WHERE v.step > 0
    ),
    measured AS (SELECT c.*, a.* EXCLUDE (run_id) FROM compared AS c JOIN alike AS a USING (run_id)),
    repeats AS (
        SELECT a.run_id, a.step, ln(a.loss) - median(ln(b.loss)) AS apart, list(ln(b.loss)) AS others,
            ln(a.beside) - median(ln(b.beside)) AS alone
        FROM measured AS a JOIN measured AS b USING (alike, step)
        WHERE a.run_id <> b.run_id AND NOT b.contradicts_itself
        GROUP BY a.run_id, a.step, a.loss, a.beside
        HAVING count(*) > 1
    )
    SELECT run_id, format('its loss is {}: {:.3g} × theirs in the {}{}',
        if(apart < 0, 'below what any of its repeats reached', 'above that of its repeats (diverged?)'), exp(apart),
        if(step < 0, 'last third of the steps', 'validation at step ' || step),
        (SELECT coalesce(', as in ' || min(unit), '') FROM loss_units WHERE abs(exp(apart) / factor - 1) < 0.03)) AS sentence
    FROM repeats
    WHERE abs(apart) > greatest(loss_spreads() * spread(others), ln(if(len(others) < many(), loss_ratio(), loss_ratio_of_many())))
        AND (step < 0 AND abs(apart) > ln(loss_ratio())
            OR coalesce(alone / apart > told_alone(), true))
    ORDER BY step;

-- A run counts in a sample of its documents, which is the same in each run of this text.
CREATE TEMP TABLE other_cuts AS
    WITH texts AS (
        SELECT *, coalesce(text_cut, 'None') AS text, mode(text) OVER (
            PARTITION BY corpus, tokenizer, sequence_length, approach, code_digest
        ) AS most
        FROM ours
    ),
    stored AS (
        SELECT corpus, tokenizer, sequence_length, cut_tokens / (document_tokens - documents) AS share
        FROM stores
        WHERE format = 'padded' AND split = 'train' AND document_tokens > 0
    ),
    shares AS (
        SELECT run_id, tokenizer, sequence_length, unnest(map_entries(text_cut::JSON::MAP(VARCHAR, DOUBLE)), recursive := true)
        FROM ours
    )
    SELECT run_id, format('it counted {} of its text as cut, other runs {}', text, most) AS sentence
    FROM texts
    WHERE text <> most
    UNION ALL
    SELECT r.run_id, format('it counted {:.4g} of {} as cut, its padded store {:.4g}', r.value, r.key, s.share)
    FROM shares AS r
    JOIN stored AS s ON s.corpus = r.key AND s.tokenizer = r.tokenizer AND s.sequence_length = r.sequence_length
    WHERE abs(r.value - s.share) > cut_of_store() + cut_of_store_share() * s.share;

-- Rows are drawn from their store. The share of a row that is useful lies between 0 and 1, so that Hoeffding's bound (1963)
-- holds whatever the rows are, and without replacement, too.
CREATE MACRO divergence(p, q) AS if(p > 0, p * ln(p / q), 0);
CREATE TEMP TABLE other_shares AS
    WITH drawn AS (
        SELECT run_id, count(*) * r.global_batch AS rows, sum(c.useful_tokens) / (rows * r.sequence_length) AS share,
            s.useful_tokens / s.total_tokens AS of_store
        FROM counts AS c
        JOIN counted AS r USING (run_id)
        JOIN stores AS s ON s.manifest_sha256 = r.store_sha256
        WHERE r.objective = 'causal' AND r.labels = 'all' AND s.format IN ('padded', 'packed')
            AND (r.approach = 'packed' OR r.approach IN (SELECT offline FROM twins))
        GROUP BY run_id, r.global_batch, r.sequence_length, of_store
    )
    SELECT run_id, format('{:.3g} % of its positions have a useful token, of its store {:.3g} %', 100 * share, 100 * of_store)
        AS sentence
    FROM drawn
    WHERE rows * (divergence(share, of_store) + divergence(1 - share, 1 - of_store)) > -ln(chance());

-- The rows validated on are those of a store of another split than the training's.
CREATE TEMP TABLE training_splits AS
    SELECT run_id, 'it validated on text of the training split' AS sentence
    FROM counted
    WHERE validation_store_sha256 = store_sha256
        OR validation_store_sha256 IN (SELECT manifest_sha256 FROM stores WHERE split = 'train');

-- The wall clock of one boot goes ahead of the monotonic one (while the machine sleeps), never back.
CREATE TEMP TABLE clocks_ahead AS
    WITH starts AS (
        SELECT run_id, t_unix_s - t_mono_s AS ahead, min(ahead) OVER (
            PARTITION BY boot ORDER BY t_mono_s DESC, run_id DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ) AS least
        FROM noted
        WHERE event = 'run_start' AND boot <> '' AND t_mono_s IS NOT NULL AND t_unix_s IS NOT NULL
    )
    SELECT run_id, format('its wall clock is {:.4g} s ahead of later runs'' on this machine', ahead - least) AS sentence
    FROM starts
    WHERE ahead > least + clock_s();

-- Runs of one boot by its monotonic clock; of nodes that state no boot by the wall clock. Runs that the launcher lets share a
-- node are no surprise, and what runs of other experiments did at the time is not known here.
CREATE TEMP TABLE overlapping_runs AS
    WITH busy AS (
        SELECT {'boot': boot} AS machine, run_id, begun, ended, coalesce(share, 1) > 1 AS shared
        FROM stays JOIN counted USING (run_id)
        UNION ALL
        SELECT {'boot': 'node ' || unnest(string_split(node_names, ', '))}, run_id, started_unix_s, stopped_unix_s - wall_s(),
            coalesce(share, 1) > 1
        FROM counted
        WHERE run_id NOT IN (SELECT run_id FROM stays) AND node_names <> '' AND stopped_unix_s IS NOT NULL
    ),
    late AS (
        FROM busy
        QUALIFY begun < max(ended) OVER (
            PARTITION BY machine ORDER BY begun, ended, run_id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        )
    ),
    pairs AS (
        SELECT a.run_id, b.run_id AS other, least(a.ended, b.ended) - a.begun AS seconds
        FROM late AS a JOIN busy AS b USING (machine)
        WHERE (b.begun, b.ended, b.run_id) < (a.begun, a.ended, a.run_id) AND b.ended > a.begun AND a.run_id <> b.run_id
            AND NOT (a.shared AND b.shared)
    ),
    both_ways AS (FROM pairs UNION ALL SELECT other, run_id, seconds FROM pairs)
    SELECT run_id, format('overlaps run {} by {:.3g} s on one machine: its times are not those of a run alone',
        arg_max(other, (seconds, other)), max(seconds)) AS sentence
    FROM both_ways
    GROUP BY run_id
    UNION ALL
    SELECT NULL, 'no log states the boot or the node that it was written on' WHERE NOT EXISTS (FROM busy);

-- Times of two machines of one type, or of one machine before and after a restart, may differ.
CREATE TEMP TABLE other_machines AS
    WITH boots AS (SELECT run_id, place, arg_min(boot, line) AS boot FROM stays JOIN counted USING (run_id) GROUP BY ALL),
    most_boots AS (
        SELECT boot, arg_min(run_id, place) AS run_id FROM boots GROUP BY boot ORDER BY count(*) DESC, min(place) LIMIT 1
    ),
    memory AS (SELECT run_id, place, machine_memory_bytes AS bytes FROM counted WHERE machine_memory_bytes > 0),
    most_memory AS (
        SELECT bytes, arg_min(run_id, place) AS run_id FROM memory GROUP BY bytes ORDER BY count(*) DESC, min(place) LIMIT 1
    )
    SELECT b.run_id, format('it ran on another machine than {}, or after a restart (other boot)', m.run_id) AS sentence
    FROM boots AS b JOIN most_boots AS m ON b.boot <> m.boot
    UNION ALL
    SELECT a.run_id, format('its machine has {:.5g} GB of memory, that of {} {:.5g} GB', a.bytes / 1e9, m.run_id, m.bytes / 1e9)
    FROM memory AS a JOIN most_memory AS m ON abs(a.bytes / m.bytes - 1) > other_memory();

-- Runs that somebody removed from the table may be those with unwelcome results.
CREATE TEMP TABLE lacking_runs AS
    SELECT run_id, 'the run table ' || string_agg(gap, ', ') AS sentence FROM counted, gaps GROUP BY run_id;
