-- Tokens at rest, each way to store the same documents in each round: bytes a token (padding not counted as one) beside
-- the order-0 entropy of an id, and seconds over useful tokens. Written: from ids in memory to a sealed store. Read in
-- order and shuffled: opening and one pass over all rows through the store's reader, its cache as trainings have it; by
-- single rows: row groups are decoded anew for each, as where a store is far larger than the cache. Cold: the files were
-- dropped from the page cache. Break-even: epochs after which tokenizing all text once and writing the store have taken
-- less than tokenizing some documents at a time in every epoch, by the engine that auto takes and by `tokenizers`, in the
-- same round: (bulk_s + write_s) / (on_the_fly_s - shuffled_s); +inf where nothing is saved. A
-- useful token of a text is one of whole documents: what a store has cut away it need not read. The engines have seen no
-- text before; in later epochs those that remember words are faster.
WITH fly AS (
    SELECT
        benchmark, round,
        max(CASE WHEN auto THEN sequential_s END) AS auto_s,
        max(CASE WHEN engine = 'tokenizers' THEN sequential_s END) AS tokenizers_s,
        max(CASE WHEN auto THEN bulk_s END) AS bulk_s
    FROM storage_benchmarks
    WHERE format = 'text'
    GROUP BY benchmark, round
),
timed AS (
    SELECT
        s.*,
        coalesce(s.shuffled_s, s.sequential_s) AS epoch_s,
        f.bulk_s + s.write_s AS preprocessing_s,
        f.auto_s AS auto_s, f.tokenizers_s AS tokenizers_s
    FROM storage_benchmarks AS s
    LEFT JOIN fly AS f ON f.benchmark = s.benchmark AND f.round = s.round AND s.format <> 'text'
)
SELECT
    benchmark, store, format, dtype, codec, row_group_rows, round, engine, documents, documents_cut, ids,
    useful_tokens, stored_bytes,
    stored_bytes / nullif(ids, 0) AS bytes_per_id,
    stored_bytes / nullif(useful_tokens, 0) AS bytes_per_useful_token,
    entropy_bits / 8 AS entropy_bytes,
    stored_bytes / nullif(CASE WHEN documents_cut = 0 THEN text_bytes END, 0) AS share_of_text,
    text_bytes,
    1e6 * write_s / nullif(useful_tokens, 0) AS write_us_per_token,
    1e6 * sequential_s / nullif(useful_tokens, 0) AS sequential_us_per_token,
    1e6 * shuffled_s / nullif(useful_tokens, 0) AS shuffled_us_per_token,
    1e6 * cold_s / nullif(useful_tokens, 0) AS cold_us_per_token,
    1e3 * single_rows_s / nullif(single_rows, 0) AS single_row_ms,
    preprocessing_s,
    CASE WHEN auto_s > epoch_s THEN preprocessing_s / (auto_s - epoch_s)
         WHEN auto_s IS NOT NULL THEN 'inf'::DOUBLE END AS break_even_epochs,
    CASE WHEN tokenizers_s > epoch_s THEN preprocessing_s / (tokenizers_s - epoch_s)
         WHEN tokenizers_s IS NOT NULL THEN 'inf'::DOUBLE END AS break_even_epochs_tokenizers,
    left_out, tokenizer, corpus, sequence_length, cpu, cores
FROM timed
ORDER BY benchmark, format, store, round;
