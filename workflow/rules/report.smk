import atexit


report: "../report/workflow.rst"


rule draw_figure:
    """Draw one figure from an experiment's tables, with its data and caption."""
    input:
        tables=expand("results/tables/{{experiment}}/{table}", table=TABLES),
        code=lambda w: code("tokenscale.report.save", FIGURES[w.figure]),
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


rule build_page:
    """Build the first page: verdicts and claims, and the whole experiment if there is only one."""
    input:
        tables=expand(
            "results/tables/{experiment}/{table}",
            experiment=EXPERIMENTS,
            table=TABLES,
        ),
        figures=figure_files(EXPERIMENTS) if len(EXPERIMENTS) == 1 else [],
        claims="results/report/claims.json",
        code=lambda w: code("tokenscale.report.page"),
    output:
        "results/report/index.html",
    log:
        "results/logs/report/page.log",
    localrule: True
    params:
        experiments=arguments(experiments=EXPERIMENTS),
    message:
        "report {output}"
    shell:
        "python -m tokenscale report page {params.experiments:q} --claims {input.claims:q}"
        " --output {output:q} > {log:q} 2>&1"


rule build_experiment_page:
    """Build the page of one of several experiments."""
    input:
        tables=expand("results/tables/{{experiment}}/{table}", table=TABLES),
        figures=lambda w: figure_files([w.experiment]),
        code=lambda w: code("tokenscale.report.page"),
    output:
        "results/report/{experiment}.html",
    log:
        "results/logs/report/{experiment}.log",
    localrule: True
    message:
        "report {output}"
    shell:
        "python -m tokenscale report experiment {wildcards.experiment:q} --output {output:q} > {log:q} 2>&1"


rule build_pdf:
    """Build the PDF with the same claims, figures and tables."""
    input:
        tables=expand(
            "results/tables/{experiment}/{table}",
            experiment=EXPERIMENTS,
            table=TABLES,
        ),
        claims="results/report/claims.json",
        # existing figures are reused if their data are unchanged
        figures=figure_files(EXPERIMENTS),
        code=lambda w: code("tokenscale.report.pdf", *FIGURES.values()),
    output:
        "results/report/report.pdf",
    log:
        "results/logs/report/pdf.log",
    localrule: True
    params:
        experiments=arguments(experiments=EXPERIMENTS),
    message:
        "report {output}"
    shell:
        "python -m tokenscale report pdf {params.experiments:q}"
        " --claims {input.claims:q} --output {output:q} > {log:q} 2>&1"


rule build_bundle:
    """The report's folder: figures, data, SQL, tables, provenance and checksums beside page and PDF.

    Of its files only these three are declared: the others are replaced one by one, and never missing in between.
    """
    input:
        pages=page_files(),
        pdf="results/report/report.pdf",
        claims=multiext("results/report/claims", ".json", ".tex"),
        tables=expand(
            "results/tables/{experiment}/{table}",
            experiment=EXPERIMENTS,
            table=TABLES,
        ),
        figures=figure_files(EXPERIMENTS),
        # copied into the folder; an edit of it is no reason to build the report again
        workflow=ancient(os.path.relpath(workflow.main_snakefile)),
        code=lambda w: code("tokenscale.report.bundle"),
    output:
        "results/report/SHA256SUMS",
        "results/report/provenance.json",
        "results/report/ro-crate-metadata.json",
    log:
        "results/logs/report/bundle.log",
    localrule: True
    params:
        experiments=arguments(experiments=EXPERIMENTS),
        directory=lambda w, output: os.path.dirname(output[0]),
        also=lambda w, input: arguments(also=[*input.pages[1:], *input.claims]),
    message:
        "report's folder {params.directory}"
    shell:
        "python -m tokenscale report bundle {params.experiments:q} --workflow {input.workflow:q}"
        " {params.also:q} --output {params.directory:q} > {log:q} 2>&1"


rule report:
    input:
        report_files(),


rule report_now:
    """Build the report of the sealed runs; see `NOW`."""
    input:
        report_files(),


rule all_experiments:
    input:
        report_files(),


# Each experiment is a target by its name.
for name in USABLE:

    rule:
        name:
            name
        input:
            lambda w, name=name: figure_files([name]),


if workflow.is_main_process:
    atexit.register(print_left_out)
