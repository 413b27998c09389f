-- Tables between logs and report. Their order, and that of their columns, is the order in the Parquet files.
-- `steps`, `spans` and `events` have the fields of their log lines (runs/records/events.py) behind these columns.

CREATE TABLE runs (
    experiment VARCHAR, run_id VARCHAR,
    external BOOLEAN,  -- another program's run, which states its settings itself
    cell VARCHAR,  -- the factors and their levels, as text
    repeat INTEGER, position INTEGER,
    arm VARCHAR,  -- the trainer: tokenscale, or the name of an arm
    approach VARCHAR,
    engine VARCHAR,  -- asked to tokenize in training; null where tokens come from a store
    cold BOOLEAN,  -- of a run that only reads: its files were dropped from the page cache; so the next, null for others
    workers INTEGER,  -- of torch's DataLoader; null where none is between
    series VARCHAR,  -- the approach and the three below: what figures show as one line
    factors VARCHAR,
    storage VARCHAR,  -- those of the Parquet store, where the approach reads one
    layout VARCHAR,  -- those of the layout, but the data-parallel degree
    model VARCHAR, world_size INTEGER, method VARCHAR,
    pipeline INTEGER,  -- the degrees, whose product is the world size
    data INTEGER, shard INTEGER, tensor INTEGER,
    sharding VARCHAR,  -- where shard is above 1: zero1, zero2, zero3
    copies VARCHAR,  -- what keeps copies alike, where data is above 1 and shard is not: ddp
    compression VARCHAR,  -- bf16: gradients are rounded before they are reduced; else none
    schedule VARCHAR, stages_per_rank INTEGER, sequence_length INTEGER, global_batch INTEGER, micro_batch INTEGER,
    tokenizer VARCHAR, corpus VARCHAR,
    mixture VARCHAR,  -- JSON: corpus → its share of the sequences; null without a mixture, or if not known
    precision VARCHAR, seed BIGINT, objective VARCHAR, labels VARCHAR, eos BOOLEAN,
    science VARCHAR,  -- digest of all settings but approach, storage, layout, micro-batch and resume_from
    science_per_rank VARCHAR,  -- the same without global batch, budget and repeat, for weak scaling
    steps_asked BIGINT,
    resumed_from VARCHAR,  -- id of the run (or path of the state) that it goes on from; null: of none
    resumed_at BIGINT, tokens_before BIGINT,
    status VARCHAR,  -- of run.json; missing: listed, never started
    design_sha256 VARCHAR,  -- digest of the experiment's design when the run began; null where not recorded
    sealed BOOLEAN, attempts INTEGER,
    steps_seen BIGINT,  -- steps with a row of every rank
    overlap_rows BIGINT,  -- rows of earlier attempts that a later one repeats
    quarantined BIGINT, quarantined_benign BIGINT, device VARCHAR, device_kind VARCHAR, cpu VARCHAR, cores INTEGER,
    machine_memory_bytes BIGINT, threads_per_rank INTEGER,
    oversubscribed BOOLEAN,  -- on a CPU: ranks × threads exceed the cores
    blocks INTEGER,  -- of all ranks, if the run asks for compile; null: it does not, or not recorded
    eager_blocks INTEGER,  -- of the blocks: ran outside of any graph
    graph_breaks INTEGER,  -- in all graphs of all ranks
    load_average DOUBLE,  -- of the machine of rank 0 when the run began, over a minute; null where not recorded
    text_lost DOUBLE,  -- largest share of a corpus' bytes that the tokenizer loses; null where not recorded
    text_unknown DOUBLE,  -- the same of its ids that are unknown
    text_cut VARCHAR,  -- JSON: corpus → share of its tokens behind the end of rows, as the run counted; or null
    document_mask BOOLEAN,  -- whether attention stays inside the documents of a row in training; null for other trainers
    validation_attention VARCHAR,  -- of held-out rows: inside documents, or over whole rows
    unknown_facts VARCHAR,  -- JSON: (name, why) of the facts that its record could not have; null without one
    machine VARCHAR,  -- the name in its file; so the next, of the newest attempt
    share INTEGER,  -- runs that had its nodes at the same time
    node_names VARCHAR,
    job_ids VARCHAR,  -- of SLURM, of all attempts, parted by ", "; so their logs
    slurm_logs VARCHAR,  -- below the project's folder
    queue_s DOUBLE, parameters BIGINT,
    predicted_parameters_bytes BIGINT,  -- of the rank with the most (costs/memory.py); so the three below
    predicted_gradients_bytes BIGINT, predicted_optimizer_bytes BIGINT, predicted_activations_bytes BIGINT,
    predicted_sent_bytes BIGINT,  -- by a rank in a step; null where it is not predicted
    -- model FLOPs of a position's forward and backward pass (costs/flops.py): attention in full, or without what the
    -- causal mask leaves out; with what backward computes again; and the first of them as the record states it
    flops_per_token DOUBLE, flops_per_token_causal DOUBLE, flops_per_token_hardware DOUBLE,
    mfu_stated DOUBLE,  -- as another program's run says it itself, a share of 1
    flops_per_token_stated DOUBLE,
    number_format VARCHAR,  -- of matrix products: bf16, fp16, fp32, fp8
    peak_flops DOUBLE,  -- FLOP/s of one device in that format; null on a CPU and where nobody knows it
    peak_source VARCHAR,
    corpus_sha256 VARCHAR,  -- of the manifests that it read; null where it read none of the kind
    tokenizer_sha256 VARCHAR, store_sha256 VARCHAR, validation_store_sha256 VARCHAR,
    validation_tokens BIGINT,  -- useful tokens of the held-out slice; null without validation
    code_digest VARCHAR,
    code VARCHAR,  -- canonical JSON: source file below the package → first 12 digits of its SHA-256
    git_commit VARCHAR, git_dirty BOOLEAN, versions VARCHAR,
    environment VARCHAR,  -- canonical JSON: variable → value, of those that may change times or numbers
    started_unix_s DOUBLE, stopped_unix_s DOUBLE, seal VARCHAR,
    -- of translations at the end (analysis/ingest.py); null without any
    bleu DOUBLE, bleu_low DOUBLE, bleu_high DOUBLE, bleu_sentences INTEGER, bleu_signature VARCHAR
);
CREATE TABLE bleu (  -- a row for each step after which a run translated
    run_id VARCHAR, step BIGINT, bleu DOUBLE, bleu_low DOUBLE, bleu_high DOUBLE, bleu_sentences INTEGER,
    bleu_signature VARCHAR
);
CREATE TABLE attempts (  -- superseded ones too, wherever they lie
    run_id VARCHAR, folder VARCHAR, attempt INTEGER,
    superseded BOOLEAN,  -- made by other code or inputs than the run's record: never merged
    digest VARCHAR, ranks INTEGER, first_step BIGINT, last_step BIGINT, step_rows BIGINT,
    merged_rows BIGINT,  -- of these, those that no later attempt repeats
    started_unix_s DOUBLE, stopped_unix_s DOUBLE
);
CREATE TABLE steps (
    run_id VARCHAR, attempt INTEGER, rank INTEGER, world_size INTEGER, attempt_step BIGINT
);
CREATE TABLE logged (  -- all rows of the runs whose logs have a step twice or out of order, in the order of the files
    run_id VARCHAR, attempt INTEGER, rank INTEGER, world_size INTEGER, attempt_step BIGINT
);
CREATE TABLE spans (
    run_id VARCHAR, attempt INTEGER, rank INTEGER
);
CREATE TABLE events (
    run_id VARCHAR, attempt INTEGER, rank INTEGER
);
CREATE TABLE quarantine (
    run_id VARCHAR,
    file VARCHAR,  -- relative to the folder of runs
    line BIGINT, reason VARCHAR, text VARCHAR,
    benign BOOLEAN  -- a partial last line, as a killed process leaves it
);
CREATE TABLE benchmarks (
    benchmark VARCHAR, arm VARCHAR, round INTEGER, open_s DOUBLE,
    seconds DOUBLE,  -- for all batches
    batches BIGINT, useful_tokens BIGINT, total_tokens BIGINT, sequence_length INTEGER, rows INTEGER,
    tokenizer VARCHAR, corpus VARCHAR,
    cache VARCHAR,  -- warm, or cold: the files that the arm reads were dropped from the page cache before
    engine VARCHAR,  -- what tokenizes; null where tokens come from a store
    workers INTEGER,  -- of torch's DataLoader; null where none is between
    left_out VARCHAR,  -- why the arm did not run; null where it did
    cpu VARCHAR, cores INTEGER
);
-- a row a way to store and round; an engine that tokenizes the text instead has them, too
CREATE TABLE storage_benchmarks (
    benchmark VARCHAR,
    store VARCHAR,  -- as its folder would be called; or "text" and the engine
    format VARCHAR, dtype VARCHAR, codec VARCHAR, row_group_rows INTEGER, round INTEGER, engine VARCHAR,
    auto BOOLEAN, documents BIGINT, documents_cut BIGINT, text_bytes BIGINT,
    ids BIGINT,  -- that are held, padding left out
    useful_tokens BIGINT, vocabulary_size INTEGER,
    entropy_bits DOUBLE,  -- of an id, by how often it occurs
    stored_bytes BIGINT, rows BIGINT,
    write_s DOUBLE,  -- from ids in memory, hashes and manifest included
    sequential_s DOUBLE,  -- opening, and all rows in order; of a text: tokenizing some documents at a time
    shuffled_s DOUBLE,  -- the same in random order, with the cache that trainings have
    cold_s DOUBLE,  -- in order, files dropped from the page cache; null where the machine keeps them
    single_rows BIGINT,
    single_rows_s DOUBLE,  -- so many of them in random order, where no decoded row group is kept
    bulk_s DOUBLE,  -- of a text: tokenizing all documents at once
    left_out VARCHAR,  -- why the engine did not run, or why nothing is cold
    tokenizer VARCHAR, corpus VARCHAR, sequence_length INTEGER, cpu VARCHAR, cores INTEGER
);
CREATE TABLE inference_benchmarks (  -- a row a stretch of positions: the prompt's, then those of new tokens
    benchmark VARCHAR,
    of_run VARCHAR,  -- id of the run whose weights wrote; these rows are of a benchmark, not of that run's logs
    model VARCHAR, model_step BIGINT, dtype VARCHAR, batch INTEGER, prompt_tokens INTEGER, new_tokens INTEGER,
    cached BOOLEAN, round INTEGER,
    part VARCHAR,  -- prompt: until the first new token is known; decode: those behind it
    position INTEGER,
    tokens BIGINT,  -- of each row: read for the prompt, written behind it
    seconds DOUBLE,
    rows_equal INTEGER,  -- rows whose new tokens are those that the cache gave when nothing was timed
    first_difference INTEGER,  -- position of the first token that is another, of all rows; null where none is
    cache_bytes BIGINT,  -- of the cache's tensors; 0 without one
    layers INTEGER, key_value_heads INTEGER, head_dimension INTEGER, number_bytes INTEGER,
    peak_bytes BIGINT,  -- most that was allocated beside the weights; null where the device does not count
    left_out VARCHAR,  -- why there is no such cell; null where there is one
    device VARCHAR, cpu VARCHAR, cores INTEGER, threads INTEGER
);
CREATE TABLE generations (  -- a row an answer to a prompt
    benchmark VARCHAR, of_run VARCHAR, model VARCHAR, model_step BIGINT, number INTEGER, prompt VARCHAR,
    prompt_tokens INTEGER, temperature DOUBLE, top_k INTEGER, top_p DOUBLE, seed BIGINT, text VARCHAR,
    tokens INTEGER,
    same_uncached BOOLEAN  -- without the cache it is the same, token by token
);
CREATE TABLE certificates (  -- parity of two trainers on the same weights and batches, a row a compared pair of runs
    run_id VARCHAR, over VARCHAR,
    verdict VARCHAR,  -- equal, equal to rounding, different; none: there is no certificate
    reason VARCHAR, steps INTEGER, first_difference VARCHAR,
    cause VARCHAR,  -- null where no tested hypothesis explains the difference
    loss_difference DOUBLE,  -- the largest of all steps, relative; so the floor
    loss_floor DOUBLE, certificate_sha256 VARCHAR
);
CREATE TABLE stores (  -- token stores that the runs read, or that hold what others of them tokenize while training
    corpus VARCHAR, tokenizer VARCHAR, store VARCHAR, format VARCHAR, split VARCHAR,
    sequence_length INTEGER,  -- null where the format has none
    eos BOOLEAN, documents BIGINT, documents_cut BIGINT,
    useful_tokens BIGINT,  -- labels that count, in one epoch; so the next two
    total_tokens BIGINT,
    padding_tokens BIGINT,  -- the rest that is not useful: labels that are a BOS
    ids BIGINT,  -- that it holds, padding left out
    document_tokens BIGINT,  -- ids of its documents before any is cut; null where not recorded; so the next
    cut_tokens BIGINT,  -- ids behind the end of rows, which it does not hold
    vocabulary_size INTEGER,
    entropy_bits DOUBLE,  -- of an id of its documents, by how often it occurs
    stored_bytes BIGINT,
    text_bytes BIGINT,  -- UTF-8, of the documents; null where the corpus is not at hand
    -- distinct held-out texts that the corpus' training text also holds; null where the corpus is not at hand
    held_out_in_training BIGINT,
    held_out_dropped BOOLEAN,  -- whether they were dropped from the held-out text
    dropped VARCHAR,  -- JSON: what the cleaning of the corpus dropped → documents; null where it is not at hand
    median_tokens DOUBLE,  -- of a document; so the next two; null for other stores than those of lengths
    tokens_95 DOUBLE, largest_tokens DOUBLE,
    manifest_sha256 VARCHAR, corpus_sha256 VARCHAR, engine VARCHAR,
    seconds DOUBLE  -- of the whole build; null where the record is lost or tells of a part
);
-- what the referee takes of a run beside typed columns, as JSON
CREATE TABLE records (
    run_id VARCHAR,
    entry VARCHAR,  -- of the run table
    record VARCHAR,  -- run.json, facts that could not be had as null; null where it is missing or not readable
    trouble VARCHAR,  -- why it is not readable, in words
    hashes VARCHAR,  -- log → SHA-256
    changed VARCHAR  -- logs that differ from their sealed hashes
);
CREATE TABLE recounts (  -- tokens of global batches, counted again by the inputs at hand
    run_id VARCHAR, step BIGINT, useful_tokens BIGINT, total_tokens BIGINT,
    order_digest BIGINT,  -- modulo 2**52
    -- JSON, in a row without a step, the first of each run: sizes and held-out tokens, or why nothing was counted again
    recount VARCHAR
);
CREATE TABLE validity (  -- what the referee says of each run, by all other tables
    run_id VARCHAR,
    validity VARCHAR,  -- valid, suspect or invalid; missing: never started
    reasons VARCHAR,  -- in words, separated by "; "; so the next two
    cautions VARCHAR,
    unchecked VARCHAR  -- values that nothing at hand could be compared with
);
