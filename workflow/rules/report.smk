report: "../report/workflow.rst"


rule draw_figure:
    """One figure from an experiment's tables, with its data and caption."""
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
            "results/figures/{experiment}/{figure}", ".pdf", ".png", ".csv", ".json"
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
    """The report as one self-contained HTML file."""
    input:
        tables=expand(
            "results/tables/{experiment}/{table}",
            experiment=EXPERIMENTS,
            table=TABLES,
        ),
        figures=figure_files(EXPERIMENTS),
        code=lambda w: code("tokenscale.report.page"),
    output:
        "results/report/index.html",
    log:
        "results/logs/report/page.log",
    localrule: True
    params:
        experiments=EXPERIMENTS,
    message:
        "report {output}"
    shell:
        "python -m tokenscale report page --experiments {params.experiments:q} --output {output:q} > {log:q} 2>&1"


rule build_pdf:
    """The same figures and verdicts on pages of a PDF."""
    input:
        tables=expand(
            "results/tables/{experiment}/{table}",
            experiment=EXPERIMENTS,
            table=TABLES,
        ),
        code=lambda w: code("tokenscale.report.pdf", *FIGURES.values()),
    output:
        "results/report/report.pdf",
    log:
        "results/logs/report/pdf.log",
    localrule: True
    params:
        experiments=EXPERIMENTS,
    message:
        "report {output}"
    shell:
        "python -m tokenscale report pdf --experiments {params.experiments:q} --output {output:q} > {log:q} 2>&1"


rule report:
    input:
        report_files(),


# Each experiment is a target by its name.
for name in settings.available:

    rule:
        name:
            name
        input:
            lambda w, name=name: figure_files([name]),
