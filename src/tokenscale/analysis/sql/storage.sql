-- What a token takes at rest: bytes of a store over the ids that it holds, padding not counted, so that padding
-- costs and a token that a store cut away saves nothing. Beside it what an id takes in three other ways:
-- `entropy_bytes`, its order-0 entropy (how often ids of the documents occur, whatever stands before them), below
-- which no code of single ids gets; `fixed_bytes`, the whole bits that number the vocabulary; and `text_bytes`, the
-- UTF-8 text that it stands for, where no document is cut. A store below the entropy uses which ids stand beside
-- each other. Validation splits are left out.
SELECT
    corpus, tokenizer, store, format, ids, vocabulary_size, stored_bytes,
    stored_bytes / nullif(ids, 0) AS bytes_per_id, entropy_bits / 8 AS entropy_bytes,
    ceil(log2(vocabulary_size)) / 8 AS fixed_bytes,
    CASE WHEN documents_cut = 0 THEN text_bytes / nullif(ids, 0) END AS text_bytes,
    documents_cut
FROM stores
WHERE split = 'train' AND ids > 0                      -- those of lengths alone hold none
ORDER BY corpus, tokenizer, store, manifest_sha256;
