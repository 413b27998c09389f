-- Speed of pretokenization, for each token store: documents, useful tokens and megabytes (10^6 bytes of UTF-8 text) over
-- the seconds of the whole build: reading, tokenizing, writing and hashing. Null where the record of the build is lost.
SELECT
    corpus,
    tokenizer,
    store,
    format,
    split,
    engine,
    documents,
    text_bytes,
    stored_bytes,
    useful_tokens,
    seconds,
    documents / nullif(seconds, 0) AS documents_per_s,
    1e-6 * text_bytes / nullif(seconds, 0) AS text_mb_per_s,
    useful_tokens / nullif(seconds, 0) AS useful_tokens_per_s,
    stored_bytes / nullif(documents, 0) AS stored_bytes_per_document,
    padding_tokens / nullif(total_tokens, 0) AS padding_share
FROM stores
ORDER BY corpus, tokenizer, store, manifest_sha256;
