rule judge_claims:
    """Test the claims against the tables: numbers, verdicts, LaTeX macros. Never fails because of a verdict."""
    input:
        ledger=lambda w: ancient(str(targets.ledger_of(w.report))),
        tables=lambda w: targets.report_tables(w.report),
        code=lambda w: code_of("claims"),
    output:
        "results/{report}/claims.json",
        "results/{report}/claims.tex",
    log:
        "results/logs/{report}/claims.log",
    localrule: True
    params:
        experiments=lambda w: targets.arguments(
            experiments=targets.experiments_of(w.report)
        ),
        folder=lambda w, output: os.path.dirname(output[0]),
        # the claims' content, without comments and modification time
        content=lambda w: targets.claims_digest(w.report),
    message:
        "claims of {input.ledger}"
    shell:
        "python -m tokenscale claims --ledger {input.ledger:q} {params.experiments:q}"
        " --output {params.folder:q} > {log:q} 2>&1"


rule claims:
    """Print the claims. With `strict_claims`, fail if a required claim no longer holds."""
    input:
        judged=f"results/{targets.report}/claims.json",
        ledger=settings.settings.claims,
    log:
        "results/logs/claims-printed.log",
    localrule: True
    params:
        experiments=targets.arguments(experiments=targets.chosen),
        strict="--strict" if settings.settings.strict_claims else "",
    shell:
        "python -m tokenscale claims --ledger {input.ledger:q} {params.experiments:q} {params.strict}"
        " 2>&1 | tee {log:q}"
