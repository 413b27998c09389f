rule download:
    """Download the files of a remote corpus and verify their hashes. Needs a network: a local rule in every profile."""
    input:
        code=lambda w: code_of(
            "download", DOWNLOADS[settings.corpora[w.corpus].source.kind]
        ),
    output:
        "results/downloads/{corpus}/manifest.json",
    log:
        "results/logs/download/{corpus}.log",
    wildcard_constraints:
        corpus=one_of(
            n for n, c in settings.corpora.items() if c.source.kind in DOWNLOADS
        ),
    localrule: True
    params:
        settings=lambda w: canonical_json(to_dict(settings.corpora[w.corpus].download)),
    message:
        "download of {wildcards.corpus}"
    shell:
        "python -m tokenscale download --settings {params.settings:q} --output {output:q} > {log:q} 2>&1"


rule build_corpus:
    """Build raw Parquet with train and validation splits from a source's text. Declares only the manifest."""
    input:
        downloads=lambda w: downloads_of(w.corpus),
        code=lambda w: code_of(
            "corpus", SOURCES[settings.corpora[w.corpus].source.kind].module
        ),
    output:
        "results/corpus/{corpus}/manifest.json",
    log:
        "results/logs/corpus/{corpus}.log",
    benchmark:
        "results/logs/corpus/{corpus}.tsv"
    threads: 1
    resources:
        mem_mb=8000,
        runtime=240,
    params:
        settings=lambda w: canonical_json(to_dict(settings.corpora[w.corpus])),
        content=lambda w: content_of(w.corpus),
    message:
        "corpus {wildcards.corpus}"
    shell:
        "python -m tokenscale corpus --settings {params.settings:q} --downloads {input.downloads:q} --output {output:q}"
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
    threads: 1
    resources:
        mem_mb=4000,
        runtime=240,
    message:
        "records of the corpus {wildcards.corpus}"
    shell:
        "python -m tokenscale corpus --records --output {output:q} > {log:q} 2>&1"
