-- Text that a run never trains on because its rows end before the document does: `dropped_share` of the useful tokens
-- of the training text, a row a run and corpus. Streams and packed rows keep every document whole: 0. Where rows are
-- padded, it is that of an epoch, by the manifest of the store `padded` of that text with the run's sequence length;
-- where no such store is at hand, what the run counted when it began, in documents from all over the corpus
-- (`counted_by_run`). Null where neither is known. Runs of other programs are left out: theirs is not recorded.
WITH texts AS (
    SELECT
        r.*, s.corpus_sha256 AS text_sha256,
        unnest(coalesce(
            list_filter(json_keys(r.mixture), lambda name: (r.mixture ->> ('$."' || name || '"'))::DOUBLE > 0),
            [coalesce(r.corpus, '')]
        )) AS source
    FROM runs AS r LEFT JOIN (
        SELECT manifest_sha256, any_value(corpus_sha256) AS corpus_sha256 FROM stores GROUP BY manifest_sha256
    ) AS s ON s.manifest_sha256 = r.store_sha256
    WHERE r.validity IN ('valid', 'suspect') AND r.external IS NOT TRUE AND NOT only_reads(r.arm)
),
counted AS (
    SELECT
        t.run_id, t.source,
        CASE WHEN t.approach IN ('packed', 'token-list', 'padding-free') THEN 0.0
             ELSE any_value(s.cut_tokens / nullif(s.document_tokens - s.documents, 0)) END AS dropped_share
    FROM texts AS t
    LEFT JOIN stores AS s
        ON (s.manifest_sha256 = t.store_sha256 AND t.approach <> 'length-bucketed') OR (
            t.approach IN ('padded', 'pretokenized-padded', 'length-bucketed')
            AND s.format = 'padded' AND s.split = 'train' AND s.corpus = t.source AND s.tokenizer = t.tokenizer
            AND s.eos = t.eos AND s.sequence_length = t.sequence_length
            AND (t.mixture IS NOT NULL OR s.corpus_sha256 = coalesce(t.corpus_sha256, t.text_sha256))
        )
    GROUP BY t.run_id, t.source, t.approach
)
SELECT
    t.run_id, t.approach, t.series, t.world_size, t.repeat, t.source AS corpus,
    coalesce(c.dropped_share, TRY_CAST(t.text_cut ->> ('$."' || t.source || '"') AS DOUBLE)) AS dropped_share,
    c.dropped_share IS NULL AND t.text_cut IS NOT NULL AS counted_by_run
FROM texts AS t JOIN counted AS c USING (run_id, source)
ORDER BY t.series, t.world_size, t.repeat, t.run_id, t.source;
