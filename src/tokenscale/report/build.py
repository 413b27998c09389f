"""The whole report from the tables of experiments: figures, claims, pages, PDF and the folder that
holds them.

The bytes are those of the commands that the rules of `workflow/rules/report.smk` and `claims.smk`
call one by one. `report rebuild` builds it where there is no Snakemake; `verify` builds it to
compare.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenscale.analysis.tables import read_experiment
from tokenscale.base.errors import UserError
from tokenscale.referee import claims as judging
from tokenscale.referee.replication import measure_figures
from tokenscale.report import bundle, claims, page, pdf, save, summary
from tokenscale.report.packed_logs import check_replaceable, put_in_place, restore

CLAIMS = "claims.json"


def write(
    experiments: Sequence[str],
    tables: Path,
    figures: Path,
    output: Path,
    *,
    ledger: Path | None = None,
    **options: Any,
) -> list[Path]:
    """Write the report of `<tables>/<experiment>`; return the files for a reader.

    Figures go to `<figures>/<experiment>/`, everything else to `output`. Claims are judged if there
    is a `ledger`; further `options` are those of `bundle.write`. Raises UserError for an experiment
    that is named twice or has no tables, before anything is written.
    """
    experiments = list(experiments)
    for name in experiments:
        read_experiment(tables / name)  # raises before anything is written
    if len({*experiments}) < len(experiments):
        raise UserError(
            "an experiment is named twice.",
            experiments=", ".join(experiments),
            next="name each once",
        )
    judged = (
        judge(
            ledger,
            tables,
            experiments=experiments,
            output=output,
        )
        if ledger is not None
        else None
    )
    also = []
    parts = []
    for name in experiments:
        description = figures / name / summary.FILE
        summary.write(name, tables, path=description)
        parts.append(summary.read(description))
        with save.Tables(tables / name) as opened:
            for figure in parts[-1]["figures"]:
                save.write(save.load_figure(figure, tables=opened), output=figures / name / figure)
        if len(experiments) > 1:
            also.append(output / f"{name}.html")
            page.write_experiment(parts[-1], figures, output=also[-1])
    also += [judged, judged.with_suffix(".tex")] if judged else []
    output.mkdir(parents=True, exist_ok=True)
    home = output / page.HOME
    document = output / "report.pdf"
    page.write(parts, figures, output=home, claims=judged)
    pdf.write(parts, figures, output=document, claims=judged)
    bundle.write(
        parts,
        tables,
        figures=figures,
        output=output,
        ledger=ledger,
        also=tuple(also),
        **options,
    )
    return [home, *also, document, output / bundle.SUMS]


def judge(ledger: Path, tables: Path, experiments: Sequence[str], output: Path) -> Path:
    """Judge the claims of a ledger; return `claims.json` in `output`. Raises UserError if there is
    no ledger.
    """
    from tokenscale.settings.claims import load_claims  # requires pydantic

    if not ledger.is_file():
        raise UserError(
            "there is no ledger to judge the claims by.", file=ledger, next="--ledger FILE names it"
        )
    known = load_claims(ledger)
    judged = judging.list_verdicts(known, judged=judging.judge_claims(known, tables, experiments))
    claims.write_claims(judged, output, measured=measure_figures(known, tables, experiments))
    return output / CLAIMS


def rebuild(
    archive: Path, output: Path, ledger: Path, workflow: Path, citation: Path
) -> list[Path]:
    """Make tables, claims and report of an archive below `output`; return the files for a reader.

    All is made elsewhere first. Raises UserError for a folder with files that no earlier call made.
    """
    check_replaceable(output)
    with TemporaryDirectory() as temporary:
        made = Path(temporary)
        experiments = restore(archive, made)
        folders = (made / name for name in ("tables", "figures", "report"))
        written = write(experiments, *folders, ledger=ledger, workflow=workflow, citation=citation)
        put_in_place(made, output)
    return [output / path.relative_to(made) for path in written]
