report: "../report/workflow.rst"


rule draw_figure:
    """Draw one figure from an experiment's tables, with its data and caption."""
    input:
        tables=expand("results/tables/{{experiment}}/{table}", table=TABLES),
        code=lambda w: code("tokenscale.report.save", figure_module(w.figure)),
    output:
        report(
            "results/figures/{experiment}/{figure}.svg",
            category="{experiment}",
            labels={"figure": "{figure}"},
            caption="../report/figure.rst",
        ),
        multiext(
            "results/figures/{experiment}/{figure}",
            ".pdf",
            ".png",
            ".csv",
            ".parquet",
            ".json",
        ),
    log:
        "results/logs/figures/{experiment}-{figure}.log",
    localrule: True
    params:
        tables=lambda w, input: os.path.dirname(input.tables[0]),
        output=lambda w, output: os.path.splitext(output[0])[0],
    message:
        "figure {wildcards.figure} of {wildcards.experiment}"
    shell:
        "python -m tokenscale report figure {wildcards.figure:q} --tables {params.tables:q} --output {params.output:q}"
        " > {log:q} 2>&1"


rule describe_experiment:
    """Describe an experiment once, for pages, PDF and folder: its texts and tables."""
    input:
        tables=expand("results/tables/{{experiment}}/{table}", table=TABLES),
        code=lambda w: code("tokenscale.report.summary"),
    output:
        "results/figures/{experiment}/description.json",
    log:
        "results/logs/figures/{experiment}-description.log",
    localrule: True
    params:
        tables=lambda w, input: os.path.dirname(input.tables[0]),
    message:
        "description of {wildcards.experiment}"
    shell:
        "python -m tokenscale report description --tables {params.tables:q} --output {output:q} > {log:q} 2>&1"


rule build_page:
    """Build the first page: verdicts and claims, and the whole experiment if there is only one."""
    input:
        descriptions=lambda w: targets.description_files(w.report),
        figures=lambda w: targets.page_figures(w.report),
        claims="results/{report}/claims.json",
        code=lambda w: code("tokenscale.report.page"),
    output:
        "results/{report}/index.html",
    log:
        "results/logs/{report}/page.log",
    localrule: True
    params:
        experiments=lambda w: targets.arguments(
            experiments=targets.experiments_of(w.report)
        ),
    message:
        "report {output}"
    shell:
        "python -m tokenscale report page {params.experiments:q} --claims {input.claims:q}"
        " --output {output:q} > {log:q} 2>&1"


rule build_experiment_page:
    """Build the page of one of several experiments."""
    input:
        "results/figures/{experiment}/description.json",
        figures=lambda w: targets.figure_files([w.experiment]),
        code=lambda w: code("tokenscale.report.page"),
    output:
        "results/{report}/{experiment}.html",
    log:
        "results/logs/{report}/{experiment}.log",
    localrule: True
    message:
        "report {output}"
    shell:
        "python -m tokenscale report page --of-several --experiments {wildcards.experiment:q} --output {output:q} > {log:q} 2>&1"


rule build_pdf:
    """Build the PDF with the same claims, figures and tables."""
    input:
        descriptions=lambda w: targets.description_files(w.report),
        claims="results/{report}/claims.json",
        figures=lambda w: targets.figure_files(targets.experiments_of(w.report)),
        code=lambda w: code("tokenscale.report.pdf"),
    output:
        "results/{report}/report.pdf",
    log:
        "results/logs/{report}/pdf.log",
    localrule: True
    params:
        experiments=lambda w: targets.arguments(
            experiments=targets.experiments_of(w.report)
        ),
    message:
        "report {output}"
    shell:
        "python -m tokenscale report pdf {params.experiments:q}"
        " --claims {input.claims:q} --output {output:q} > {log:q} 2>&1"


rule build_bundle:
    """The report's folder: figures, data, SQL, tables, provenance and checksums beside page and PDF.

    Of its files only these two are declared: the others are replaced one by one, and never missing in between.
    """
    input:
        pages=lambda w: targets.page_files(w.report),
        pdf="results/{report}/report.pdf",
        claims=multiext("results/{report}/claims", ".json", ".tex"),
        descriptions=lambda w: targets.description_files(w.report),
        tables=lambda w: targets.report_tables(w.report),
        figures=lambda w: targets.figure_files(targets.experiments_of(w.report)),
        # copied into the folder; an edit of it is no reason to build the report again
        workflow=ancient(os.path.relpath(internals.get_snakefile(workflow))),
        ledger=lambda w: ancient(str(targets.ledger_of(w.report))),
        code=lambda w: code("tokenscale.report.bundle"),
    output:
        "results/{report}/SHA256SUMS",
        "results/{report}/provenance.json",
    log:
        "results/logs/{report}/bundle.log",
    localrule: True
    params:
        experiments=lambda w: targets.arguments(
            experiments=targets.experiments_of(w.report)
        ),
        directory=lambda w, output: os.path.dirname(output[0]),
        also=lambda w, input: targets.arguments(also=[*input.pages[1:], *input.claims]),
        logs="" if settings.settings.report_logs else "--no-logs",
    message:
        "report's folder {params.directory}"
    shell:
        "python -m tokenscale report bundle {params.experiments:q} --workflow {input.workflow:q}"
        " --ledger {input.ledger:q} {params.logs} {params.also:q} --output {params.directory:q} > {log:q} 2>&1"


rule figures:
    input:
        lambda w: targets.figure_files(targets.chosen),


rule report:
    input:
        lambda w: targets.report_files(targets.report),


rule replication:
    """Run the experiments that the source studies' claims need, and build their report."""
    input:
        lambda w: targets.report_files(targets.replication),


# see `REPORT_ONLY`
rule report_now:
    input:
        lambda w: targets.report_files(targets.report),


# Each experiment by its name, and all of them.
for requested in [*targets.experiments, ALL]:

    rule:
        name:
            requested
        input:
            partial(files_of_experiment, name=requested),
