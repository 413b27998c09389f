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
        corpus=one_of(set(settings.corpora) - set(IN_PARTS)),
    priority: DATA_PRIORITY
    threads: 1
    resources:
        mem_mb=8000,
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


rule corpus_part:
    """Build one part of a corpus with several `parts`, from its group of source files."""
    input:
        downloads=lambda w: targets.corpus_inputs(w.corpus),
        code=lambda w: code_of(
            "corpus", SOURCES[settings.corpora[w.corpus].source.kind].module
        ),
    output:
        "results/corpus/{corpus}/parts/{part}/manifest.json",
    log:
        "results/logs/corpus/{corpus}-part-{part}.log",
    benchmark:
        "results/logs/corpus/{corpus}-part-{part}.tsv"
    wildcard_constraints:
        corpus=one_of(IN_PARTS),
    priority: DATA_PRIORITY
    group:
        "corpus_parts"
    threads: 1
    resources:
        mem_mb=3000,
        runtime=60,
    params:
        settings=lambda w: targets.settings(settings.corpora[w.corpus]),
        number=lambda w: int(w.part),
        content=lambda w: targets.content_of(w.corpus, int(w.part)),
    message:
        "corpus {wildcards.corpus}, part {wildcards.part}"
    shell:
        "python -m tokenscale corpus {params.settings:q} --downloads {input.downloads:q}"
        " --part {params.number:q} --content {params.content:q} --output {output:q} > {log:q} 2>&1"


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
        mem_mb=lambda w, threads: 4000 + 600 * threads,
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
        mem_mb=lambda w, threads: 1000 + 500 * threads,
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
