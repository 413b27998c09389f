"""The whole report from the tables of experiments: figures, claims, pages, PDF and the folder that holds them.

The same bytes as those of the verbs that the rules of `workflow/rules/report.smk` and `claims.smk` call one by one, for
who has tables and no Snakemake. Queries are asked once; all that draws is forked from a process that has their rows.
"""

import functools
import importlib
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, Self

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json
from tokenscale.report import bundle, cells, page, pdf, registry, save, style, summary
from tokenscale.settings.registry import FIGURES

#: queries that hold the steps of all runs beside those of their references: never two of them at once, of 200 logs x
#: 10,000 steps one takes 0.4 GB
_HOLDING = ("parallelism", "order", "loss_difference", "pipeline")
#: what matplotlib imports when it first writes a file of a kind, or letters into it
_LATE = ("fontTools.subset", *(f"matplotlib.backends.backend_{kind}" for kind in ("agg", "pdf", "svg")))


def write(
    experiments: Sequence[str],
    tables: Path,
    figures: Path,
    output: Path,
    *,
    ledger: Path | None = None,
    threads: int = 2,
    workflow: Path | None = None,
    citation: Path | None = None,
) -> list[Path]:
    """Make all of the report of `<tables>/<experiment>`, with so many processes; returns the files for a reader.

    Figures go to `<figures>/<experiment>/`, everything else to `output`; claims are judged where there is a `ledger`.
    Raises UserError for a number of threads below 1, an experiment that is named twice or has no tables, and for what
    the single verbs refuse, with the part of the report that it is about.
    """
    experiments = list(experiments)
    shown = {name: _figures_of(tables / name) for name in experiments}
    if threads < 1:
        raise UserError("no process, no report.", threads=threads, expected="1 or more", next="--threads 1")
    if len(shown) < len(experiments):
        raise UserError(
            "an experiment is named twice.", experiments=", ".join(experiments), next="name each experiment once"
        )
    for module in FIGURES.values():
        importlib.import_module(module)  # once, before processes are forked
    claims = [output / f"claims.{kind}" for kind in ("json", "tex") if ledger is not None]
    judged = claims[0] if claims else None
    _prepare()
    rows = _query_all(shown, tables, threads, (ledger, tables, experiments, output) if ledger else None)
    home, own, document = output / page.HOME, {}, output / "report.pdf"
    with save.known(rows):
        pages, summaries = _drawn(shown, tables, figures, threads)
        with pdf.known(pages), summary.known(summaries), _Processes(threads) as processes:
            made = [processes.begin(document.name, pdf.write, experiments, tables, document, claims=judged)]
            made.append(processes.begin(home.name, page.write, experiments, tables, figures, home, claims=judged))
            if len(experiments) > 1:
                own = {name: output / f"{name}.html" for name in experiments}
            for name, path in own.items():
                made.append(processes.begin(path.name, page.write_experiment, name, tables, figures, path))
            processes.finish(made)
        also = (*own.values(), *claims)
        with summary.known(summaries):
            bundle.write(experiments, tables, figures, output, workflow=workflow, citation=citation, also=also)
    return [home, *also, document, output / bundle.SUMS]


def _prepare() -> None:
    """Load once what every process would load when it first draws."""
    for module in _LATE:
        importlib.import_module(module)
    style.register()


def _drawn(
    shown: dict[str, list[str]], tables: Path, figures: Path, threads: int
) -> tuple[dict[tuple[Path, str], bytes], dict[Path, dict[str, Any]]]:
    """Draw all figures; returns the page of each by the folder of its tables and its name, with the pages around them,
    and what is said of each experiment by its folder."""
    with _Processes(threads) as processes:
        around = {tables / name: processes.begin(f"tables of {name}", _around, name, tables) for name in shown}
        begun = {
            (tables / name, figure): processes.begin(
                f"figure {figure} of {name}", pdf.save_figure, figure, tables / name, figures / name / figure
            )
            for name, found in shown.items()
            for figure in found
        }
        processes.finish([*around.values(), *begun.values()])
        pages = {key: future.result() for key, future in begun.items()}
        for folder, future in around.items():
            pages |= {(folder, key): document for key, document in future.result()[1].items()}
        return pages, {folder: future.result()[0] for folder, future in around.items()}


def _around(name: str, tables: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    part = summary.experiment(name, tables)
    return part, pdf.pages_around(part)


def _figures_of(folder: Path) -> list[str]:
    """Names of the figures that an experiment shows."""
    head = read_json(folder / "experiment.json", "experiment's description", next="python -m tokenscale ingest …")
    return [figure for figure in head.get("figures") or FIGURES if figure in FIGURES]


def _query_all(
    shown: dict[str, list[str]], tables: Path, threads: int, judging: tuple | None
) -> dict[Path, dict[str, save.Rows]]:
    """Folder → query → its rows, of all that figures, pages and cells are made of; claims are judged beside."""
    wanted = [
        (tables / name, query)
        for name, figures in shown.items()
        for query in dict.fromkeys(
            (*(q for figure in figures for q in registry.module(figure).QUERIES), *summary.QUERIES, *cells.QUERIES)
        )
    ]
    parts = [[one] for one in wanted if one[1] not in _HOLDING]
    if held := [one for one in wanted if one[1] in _HOLDING]:
        parts.insert(0, held)
    with _Processes(threads) as processes:
        claims = [processes.begin("claims", _judge, *judging)] if judging else []
        begun = [processes.begin(f"query {', '.join(q for _, q in part)}", _rows, part) for part in parts]
        processes.finish([*claims, *begun])
    rows: dict[Path, dict[str, save.Rows]] = {folder: {} for folder, _ in wanted}
    for part, future in zip(parts, begun, strict=True):
        for (folder, query), found in zip(part, future.result(), strict=True):
            rows[folder][query] = found
    return rows


def _rows(part: list[tuple[Path, str]]) -> list[save.Rows]:
    return [_opened(folder).rows_of(query) for folder, query in part]


@functools.cache
def _opened(folder: Path) -> save.Tables:
    """Tables of a process, closed as it ends: to open them takes as long as to answer a short query."""
    return save.Tables(folder)


def _judge(ledger: Path, tables: Path, experiments: list[str], output: Path) -> None:
    """Judge the claims as the command `claims` does; only this reads settings, which takes pydantic."""
    from tokenscale.report.judge_claims import judge_and_print

    judge_and_print(ledger, tables, experiments, output, strict=False)


class _Processes:
    """Processes forked from this one: what it has imported and read is there, and nothing is connected to DuckDB."""

    def __init__(self, count: int):
        self._pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("fork"))

    def begin(self, part: str, work: Callable[..., Any], *arguments: Any, **options: Any) -> Future:
        """Have a process do the work as soon as one is free; of what is begun first, first."""
        return self._pool.submit(_done, part, work, arguments, options)

    def finish(self, begun: Iterable[Future]) -> None:
        """Wait for all of it. Raises what the first that fails has raised; then nothing further is begun."""
        for future in wait(begun, return_when=FIRST_EXCEPTION).done:
            try:
                future.result()
            except _Refused as refused:
                what, facts = refused.args
                raise UserError(what, **facts) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


class _Refused(Exception):
    """What a UserError says, which itself does not survive the way between processes."""


def _done(part: str, work: Callable[..., Any], arguments: tuple, options: dict) -> Any:
    """What the work returns; what it raises names the part."""
    try:
        return work(*arguments, **options)
    except UserError as error:
        raise _Refused(error.what, {"part": part} | error.facts) from None
    except Exception as error:
        error.add_note(f"while making {part}")
        raise
