rule run_table:
    """Write an experiment's run table: which runs belong to which cell. The hash of its content is a parameter."""
    output:
        "results/experiments/{experiment}/runs.json",
    log:
        "results/logs/experiments/{experiment}.log",
    localrule: True
    params:
        config=lambda w: targets.arguments(
            config_json=canonical_json(settings.relevant_values(w.experiment))
        ),
        table=lambda w: sha256_text(canonical_json(settings.table(w.experiment))),
    message:
        "run table of {wildcards.experiment}"
    shell:
        "python -m tokenscale plan {wildcards.experiment:q} {params.config:q} --output {output:q}"
        " > {log:q} 2>&1"


rule ingest:
    """Convert the logs of an experiment's runs to typed tables."""
    input:
        unpack(lambda w: targets.table_inputs(w.experiment)),
        table="results/experiments/{experiment}/runs.json",
        code=lambda w: code_of("ingest"),
    output:
        expand(
            "results/tables/{{experiment}}/{table}",
            table=RECORDED,
        ),
    log:
        "results/logs/ingest/{experiment}.log",
    localrule: True
    threads: 2
    params:
        directory=lambda w, output: os.path.dirname(output[0]),
        inputs=lambda w, input: targets.arguments(
            benchmark=list(input.benchmarks),
            store=list(input.stores),
            corpus=list(input.corpora),
            certificate=list(input.certificates),
        ),
    message:
        "tables of {wildcards.experiment}"
    shell:
        "python -m tokenscale ingest --experiment {input.table:q} --runs results/runs {params.inputs:q}"
        " --kept results/run-tables/{wildcards.experiment:q} --output {params.directory:q}"
        " --threads {threads} > {log:q} 2>&1"


rule validate:
    """Judge an experiment's runs from its tables alone: validity, reasons and cautions."""
    input:
        unpack(lambda w: targets.design_inputs(w.experiment)),
        tables=expand("results/tables/{{experiment}}/{table}", table=RECORDED),
        table="results/experiments/{experiment}/runs.json",
        code=lambda w: code_of("validate"),
    output:
        expand("results/tables/{{experiment}}/{table}", table=JUDGED),
    log:
        "results/logs/validate/{experiment}.log",
    localrule: True
    params:
        directory=lambda w, output: os.path.dirname(output[0]),
        inputs=lambda w, input: targets.arguments(
            store=list(input.stores), corpus=list(input.corpora)
        ),
    message:
        "validity of the runs of {wildcards.experiment}"
    shell:
        "python -m tokenscale validate --experiment {input.table:q} --tables {params.directory:q} --runs results/runs"
        " {params.inputs:q} --kept results/run-tables/{wildcards.experiment:q} > {log:q} 2>&1"


rule tables:
    input:
        lambda w: targets.table_files(targets.chosen),
