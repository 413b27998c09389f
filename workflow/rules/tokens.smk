rule build_tokenizer:
    """Build a tokenizer's files and manifest: from its package, from a folder or hub, or learned from a corpus."""
    input:
        unpack(lambda w: targets.tokenizer_inputs(w.tokenizer)),
        code=lambda w: code_of("tokenizer", tokenizer_module(w.tokenizer)),
    output:
        "results/tokenizers/{tokenizer}/manifest.json",
    log:
        "results/logs/tokenizer/{tokenizer}.log",
    wildcard_constraints:
        tokenizer=one_of(n for n, t in settings.tokenizers.items() if not t.from_hub),
    priority: DATA_PRIORITY
    threads: 2
    resources:
        mem_mb=memory_mb(4000),
    params:
        settings=lambda w: targets.settings(settings.tokenizers[w.tokenizer]),
    message:
        "tokenizer {wildcards.tokenizer}"
    shell:
        "python -m tokenscale tokenizer {params.settings:q} --corpus {input.corpus:q}"
        " --output {output:q} > {log:q} 2>&1"


# A tokenizer from the hub needs a network: a local rule in every profile.
use rule build_tokenizer as fetch_tokenizer with:
    wildcard_constraints:
        tokenizer=one_of(n for n, t in settings.tokenizers.items() if t.from_hub),
    localrule: True


rule pretokenize:
    """Write one token store from raw Parquet. Declares only the manifest: every reader checks shards against it."""
    input:
        corpus="results/corpus/{corpus}/manifest.json",
        tokenizer="results/tokenizers/{tokenizer}/manifest.json",
        code=lambda w: code_of(
            "pretokenize",
            FORMATS[StoreSettings.parse(w.store).format].writer,
            tokenizer_module(w.tokenizer),
        ),
    output:
        "results/tokens/{corpus}/{tokenizer}/{store}/manifest.json",
    log:
        "results/logs/pretokenize/{corpus}-{tokenizer}-{store}.log",
    benchmark:
        "results/logs/pretokenize/{corpus}-{tokenizer}-{store}.tsv"
    wildcard_constraints:
        corpus=one_of(set(settings.corpora) - IN_PARTS),
        store=stores_of(ALL_FORMATS),
    priority: DATA_PRIORITY
    threads: 8
    resources:
        mem_mb=lambda w, threads: memory_mb(1000 + 1100 * threads),  # 500 in all, but for words that never repeat
    params:
        engine=settings.settings.engine,
    message:
        "tokens {wildcards.corpus} / {wildcards.tokenizer} / {wildcards.store}"
    shell:
        "python -m tokenscale pretokenize --store {wildcards.store:q} --corpus {input.corpus:q}"
        " --tokenizer {input.tokenizer:q} --engine {params.engine} --threads {threads} --output {output:q}"
        " > {log:q} 2>&1"


# Formats that cannot be written in parts, of corpora that are built in parts.
use rule pretokenize as pretokenize_whole with:
    wildcard_constraints:
        corpus=one_of(IN_PARTS),
        store=stores_of(WRITTEN_WHOLE),


for parts, corpora in PART_RANGES.items():

    rule:
        """Write a range of the parts of a token store, each from a range of the documents; finished parts are kept."""
        name:
            f"token_parts_{parts[0]:05d}_{parts[-1]:05d}"
        input:
            corpus="results/corpus/{corpus}/manifest.json",
            tokenizer="results/tokenizers/{tokenizer}/manifest.json",
            code=lambda w: code_of(
                "pretokenize",
                FORMATS[StoreSettings.parse(w.store).format].writer,
                tokenizer_module(w.tokenizer),
            ),
        output:
            [
                part_manifest("results/tokens/{corpus}/{tokenizer}/{store}", number)
                for number in parts
            ],
        log:
            f"results/logs/pretokenize/{{corpus}}-{{tokenizer}}-{{store}}-parts-{parts[0]:05d}.log",
        benchmark:
            f"results/logs/pretokenize/{{corpus}}-{{tokenizer}}-{{store}}-parts-{parts[0]:05d}.tsv"
        wildcard_constraints:
            corpus=one_of(corpora),
            store=stores_of(WRITTEN_IN_PARTS),
        priority: DATA_PRIORITY
        threads: parts_at_a_time(parts)
        resources:
            mem_mb=lambda w, threads: memory_mb(PART_MB * threads),
            runtime=lambda w, threads, parts=parts: part_minutes(parts, threads),
        params:
            engine=settings.settings.engine,
            numbers=list(parts),
            parts=lambda w: settings.corpora[w.corpus].parts,
            manifest=lambda w: store_manifest(w.corpus, w.tokenizer, w.store),
        message:
            f"tokens {{wildcards.corpus}} / {{wildcards.tokenizer}} / {{wildcards.store}}, parts {parts[0]} to {parts[-1]}"
        shell:
            "python -m tokenscale pretokenize --store {wildcards.store:q} --corpus {input.corpus:q}"
            " --tokenizer {input.tokenizer:q} --engine {params.engine} --threads 1 --processes {threads}"
            " --part {params.numbers:q} --parts {params.parts:q} --inputs {input:q} --output {params.manifest:q}"
            " > {log:q} 2>&1"


rule merge_store:
    """Merge the parts of a token store into one manifest."""
    input:
        corpus="results/corpus/{corpus}/manifest.json",
        parts=lambda w: targets.part_manifests(
            f"results/tokens/{w.corpus}/{w.tokenizer}/{w.store}", w.corpus
        ),
        code=lambda w: code("tokenscale.data.stores.writing"),
    output:
        "results/tokens/{corpus}/{tokenizer}/{store}/manifest.json",
    log:
        "results/logs/pretokenize/{corpus}-{tokenizer}-{store}.log",
    wildcard_constraints:
        corpus=one_of(IN_PARTS),
        store=stores_of(WRITTEN_IN_PARTS),
    priority: DATA_PRIORITY
    threads: 1
    resources:
        mem_mb=memory_mb(2000),
        runtime=60,
    params:
        parts=lambda w: settings.corpora[w.corpus].parts,
    message:
        "tokens {wildcards.corpus} / {wildcards.tokenizer} / {wildcards.store}, merged from its parts"
    shell:
        "python -m tokenscale pretokenize --store {wildcards.store:q} --corpus {input.corpus:q}"
        " --parts {params.parts:q} --output {output:q} > {log:q} 2>&1"


rule mix_stores:
    """List the token stores of a mixture, one of each of its corpora."""
    input:
        sources=lambda w: [
            store_manifest(name, w.tokenizer, w.store)
            for name in targets.mixed_corpora(w.mixture, w.store)
        ],
        code=lambda w: code_of("mixture"),
    output:
        "results/mixtures/{mixture}/{tokenizer}/{store}/manifest.json",
    log:
        "results/logs/mixture/{mixture}-{tokenizer}-{store}.log",
    wildcard_constraints:
        store=stores_of(ALL_FORMATS),
    priority: DATA_PRIORITY
    localrule: True
    params:
        sources=lambda w, input: targets.arguments(
            names=targets.mixed_corpora(w.mixture, w.store),
            sources=list(input.sources),
        ),
    message:
        "mixture {wildcards.mixture} / {wildcards.tokenizer} / {wildcards.store}"
    shell:
        "python -m tokenscale mixture {params.sources:q} --output {output:q}"
        " > {log:q} 2>&1"
