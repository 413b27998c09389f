rule download:
    """Download the files of a remote corpus and verify their hashes. Needs a network: a local rule in every profile."""
    input:
        code=lambda w: code_of("download"),
    output:
        "results/downloads/{corpus}/manifest.json",
    log:
        "results/logs/download/{corpus}.log",
    wildcard_constraints:
        corpus=one_of(
            n for n, c in settings.corpora.items() if SOURCES[c.source.kind].downloaded
        ),
    priority: DATA_PRIORITY
    localrule: True
    params:
        settings=lambda w: targets.settings(settings.corpora[w.corpus].download),
    message:
        "download of {wildcards.corpus}"
    shell:
        "python -m tokenscale download {params.settings:q} --output {output:q} > {log:q} 2>&1"


rule build_corpus:
    """Build raw Parquet with train and validation splits from a source's text. Declares only the manifest."""
    input:
        downloads=lambda w: targets.corpus_inputs(w.corpus),
        code=lambda w: code_of(
            "corpus", SOURCES[settings.corpora[w.corpus].source.kind].module
        ),
    output:
        "results/corpus/{corpus}/manifest.json",
    log:
        "results/logs/corpus/{corpus}.log",
    benchmark:
        "results/logs/corpus/{corpus}.tsv"
    wildcard_constraints:
        corpus=one_of(set(settings.corpora) - IN_PARTS),
    priority: DATA_PRIORITY
    threads: 1
    resources:
        mem_mb=memory_mb(8000),
        runtime=240,
    params:
        settings=lambda w: targets.settings(settings.corpora[w.corpus]),
        content=lambda w: targets.content_of(w.corpus),
    message:
        "corpus {wildcards.corpus}"
    shell:
        "python -m tokenscale corpus {params.settings:q} --downloads {input.downloads:q}"
        " --content {params.content:q} --output {output:q}"
        " > {log:q} 2>&1"


for parts, corpora in PART_RANGES.items():

    rule:
        """Build a range of the parts of a corpus, each from its group of source files; finished parts are kept."""
        name:
            f"corpus_parts_{parts[0]:05d}_{parts[-1]:05d}"
        input:
            downloads=lambda w: targets.corpus_inputs(w.corpus),
            code=lambda w: code_of(
                "corpus", SOURCES[settings.corpora[w.corpus].source.kind].module
            ),
        output:
            [part_manifest("results/corpus/{corpus}", number) for number in parts],
        log:
            f"results/logs/corpus/{{corpus}}-parts-{parts[0]:05d}.log",
        benchmark:
            f"results/logs/corpus/{{corpus}}-parts-{parts[0]:05d}.tsv"
        wildcard_constraints:
            corpus=one_of(corpora),
        priority: DATA_PRIORITY
        threads: parts_at_a_time(parts)
        resources:
            mem_mb=lambda w, threads: memory_mb(PART_MB * threads),
            runtime=lambda w, threads, parts=parts: part_minutes(parts, threads),
        params:
            settings=lambda w: targets.settings(settings.corpora[w.corpus]),
            parts=lambda w, parts=parts: targets.part_arguments(w.corpus, parts),
            manifest=lambda w: corpus_manifest(w.corpus),
        message:
            f"corpus {{wildcards.corpus}}, parts {parts[0]} to {parts[-1]}"
        shell:
            "python -m tokenscale corpus {params.settings:q} --downloads {input.downloads:q} {params.parts:q}"
            " --inputs {input:q} --processes {threads} --output {params.manifest:q} > {log:q} 2>&1"


rule merge_corpus:
    """Merge the parts of a corpus: find duplicates between them, and write the manifest of all."""
    input:
        parts=lambda w: targets.part_manifests(f"results/corpus/{w.corpus}", w.corpus),
        code=lambda w: code("tokenscale.data.corpus.parts"),
    output:
        "results/corpus/{corpus}/manifest.json",
    log:
        "results/logs/corpus/{corpus}.log",
    benchmark:
        "results/logs/corpus/{corpus}.tsv"
    wildcard_constraints:
        corpus=one_of(IN_PARTS),
    priority: DATA_PRIORITY
    threads: 8
    resources:
        mem_mb=lambda w, threads: memory_mb(4000 + 600 * threads),
        runtime=240,
    params:
        settings=lambda w: targets.settings(settings.corpora[w.corpus]),
    message:
        "corpus {wildcards.corpus}, merged from its parts"
    shell:
        "python -m tokenscale corpus {params.settings:q} --processes {threads} --output {output:q}"
        " > {log:q} 2>&1"


rule corpus_records:
    """Write a corpus's training documents to records files, for approaches that tokenize while training."""
    input:
        corpus="results/corpus/{corpus}/manifest.json",
        code=lambda w: code("tokenscale.data.corpus.raw_text"),
    output:
        "results/corpus/{corpus}/records/manifest.json",
    log:
        "results/logs/corpus/{corpus}-records.log",
    benchmark:
        "results/logs/corpus/{corpus}-records.tsv"
    priority: DATA_PRIORITY
    threads: 8
    resources:
        mem_mb=lambda w, threads: memory_mb(1000 + 500 * threads),
        runtime=240,
    message:
        "records of the corpus {wildcards.corpus}"
    shell:
        "python -m tokenscale corpus --records --processes {threads} --output {output:q} > {log:q} 2>&1"


rule mix_corpora:
    """List the corpora of a mixture, for approaches that tokenize while training."""
    input:
        sources=lambda w: [
            corpus_manifest(name) for name in targets.mixed_corpora(w.mixture)
        ],
        code=lambda w: code_of("mixture"),
    output:
        "results/mixtures/{mixture}/manifest.json",
    log:
        "results/logs/mixture/{mixture}.log",
    priority: DATA_PRIORITY
    localrule: True
    params:
        sources=lambda w, input: targets.arguments(
            names=targets.mixed_corpora(w.mixture), sources=list(input.sources)
        ),
    message:
        "mixture {wildcards.mixture}"
    shell:
        "python -m tokenscale mixture {params.sources:q} --output {output:q}"
        " > {log:q} 2>&1"
