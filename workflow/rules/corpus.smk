rule build_corpus:
    """Text of a source → raw Parquet with train and validation splits. Declares only the manifest."""
    input:
        code=lambda w: code_of(
            "corpus", SOURCES[settings.corpora[w.corpus].source.kind]
        ),
    output:
        "results/corpus/{corpus}/manifest.json",
    log:
        "results/logs/corpus/{corpus}.log",
    benchmark:
        "results/logs/corpus/{corpus}.tsv"
    localrule: True
    params:
        settings=lambda w: canonical_json(to_dict(settings.corpora[w.corpus])),
    message:
        "corpus {wildcards.corpus}"
    shell:
        "python -m tokenscale corpus --settings {params.settings:q} --output {output:q} > {log:q} 2>&1"
