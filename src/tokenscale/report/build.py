"""The whole report from the tables of experiments: figures, claims, pages, PDF and the folder that holds them.

The bytes are those of the commands that the rules of `workflow/rules/report.smk` and `claims.smk` call one by one.
`report rebuild` builds it where there is no Snakemake; `verify` builds it to compare.
"""

import json
import lzma
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tokenscale.analysis import claims as judging
from tokenscale.analysis.ingest import TableInputs
from tokenscale.analysis.replication import measure
from tokenscale.analysis.tables import read_experiment
from tokenscale.base.errors import UserError
from tokenscale.base.files import atomic, check_relative_path, read_json, report_malformed, write_json
from tokenscale.report import bundle, claims, page, pdf, save
from tokenscale.runs.records.provenance import read_sealed
from tokenscale.settings.registry import FIGURES

CLAIMS = "claims.json"


def write(
    experiments: Sequence[str],
    tables: Path,
    figures: Path,
    output: Path,
    *,
    ledger: Path | None = None,
    workflow: Path | None = None,
    citation: Path | None = None,
) -> list[Path]:
    """Write the report of `<tables>/<experiment>`; return the files for a reader.

    Figures go to `<figures>/<experiment>/`, everything else to `output`. Claims are judged if there is a `ledger`.
    Raises UserError for an experiment that is named twice or has no tables, before anything is written.
    """
    experiments = list(experiments)
    heads = {name: read_experiment(tables / name) for name in experiments}
    shown = {name: [f for f in head.get("figures") or FIGURES if f in FIGURES] for name, head in heads.items()}
    if len(shown) < len(experiments):
        raise UserError("an experiment is named twice.", experiments=", ".join(experiments), next="name each once")
    judged = judge(ledger, tables, experiments, output) if ledger is not None else None
    also = []
    for name in experiments:
        with save.Tables(tables / name) as opened:
            for figure in shown[name]:
                save.write(save.load_figure(figure, opened), figures / name / figure)
        if len(experiments) > 1:
            also.append(output / f"{name}.html")
            page.write_experiment(name, tables, figures, also[-1])
    also += [judged, judged.with_suffix(".tex")] if judged else []
    output.mkdir(parents=True, exist_ok=True)
    home, document = output / page.HOME, output / "report.pdf"
    page.write(experiments, tables, figures, home, claims=judged)
    pdf.write(experiments, tables, document, claims=judged, figures=figures)
    bundle.write(experiments, tables, figures, output, workflow=workflow, citation=citation, also=tuple(also))
    return [home, *also, document, output / bundle.SUMS]


def judge(ledger: Path, tables: Path, experiments: Sequence[str], output: Path) -> Path:
    """Judge the claims of the ledger; return the path of `claims.json` in `output`, with its LaTeX beside it.

    Raises UserError if there is no ledger.
    """
    from tokenscale.settings.claims import load_claims  # requires pydantic

    if not ledger.is_file():
        raise UserError("there is no ledger to judge the claims by.", file=ledger, next="--ledger FILE names it")
    known = load_claims(ledger)
    judged = judging.as_rows(known, judging.judge(known, tables, experiments))
    claims.write_claims(judged, output, measure(tables, experiments))
    return output / CLAIMS


#: in a folder that was made from an archive: the list of its experiments and their inputs
INDEX = "archive.json"
#: bytes that are no text, as in a damaged log, come back as they were
ENCODING = ("utf-8", "surrogateescape")
#: files of a run that tables are made of, and those that its seal covers
OF_RUN = ("run.json", "done.json", "dirty.diff", "**/attempt.json", "**/rank=*/*.jsonl")


def pack(experiments: Sequence[TableInputs], results: Path, output: Path) -> tuple[int, list[str]]:
    """Write the archive; return the number of runs in it, and the ids of those left out because they have not ended.

    Raises UserError for an input that is missing, and for a file that names the project's or the user's folder.
    """
    names: set[str] = set()
    runs: set[str] = set()
    left_out: set[str] = set()
    for inputs in experiments:
        names |= {*inputs.names()}
        builds = (str(Path(store).with_name("build.json")) for store in inputs.stores)
        names |= {name for name in builds if (results / name).is_file()}
        path = results / inputs.table
        table = read_json(path, "experiment's run table", next=f"snakemake {path} --cores 2")
        with report_malformed(path, "experiment's run table", next=f"snakemake -f {path} --cores 2"):
            listed = [run["run_id"] for run in table["runs"]]
        for run_id in listed:
            sealed = read_sealed(results / "runs" / run_id / "run.json") is not None
            (runs if sealed else left_out).add(run_id)
    if not runs:
        raise UserError("no run of these experiments has ended.", folder=results / "runs", next="snakemake runs")
    for run_id in runs:
        folder = results / "runs" / run_id
        names |= {path.relative_to(results).as_posix() for pattern in OF_RUN for path in folder.glob(pattern)}
    if outside := [name for name in sorted(names) if ".." in Path(name).parts]:
        what, next = "an input of the tables lies outside of the folder of results.", "move it there, and ingest again"
        raise UserError(what, path=results / outside[0], next=next)
    files = {name: _read(results / name).decode(*ENCODING) for name in names}
    content = {"schema": 1, "experiments": [asdict(inputs) for inputs in experiments], "files": files}
    packed = lzma.compress(json.dumps(content, sort_keys=True).encode(), preset=9 | lzma.PRESET_EXTREME)
    with atomic(output) as temporary:
        temporary.write_bytes(packed)
    return len(runs), sorted(left_out)


def _read(path: Path) -> bytes:
    """The bytes of a file of the archive, which says nothing of the folders of this machine."""
    if not path.is_file():
        raise UserError("a file that the tables are made of is missing.", path=path, next=f"snakemake {path} --cores 2")
    content = path.read_bytes()
    for folder in {Path.cwd(), Path.home()} - {Path("/")}:
        if f"{folder}/".encode() in content:
            next = "name the corpus and other inputs by paths relative to the project, and run the experiment again"
            what = "a file for the archive names a folder of this machine."
            raise UserError(what, path=path, found=f"{folder}/", next=next)
    return content


def rebuild(archive: Path, output: Path, ledger: Path, workflow: Path, citation: Path) -> list[Path]:
    """Make tables, claims and report of an archive below `output`; return the files for a reader.

    Raises UserError where `restore` does.
    """
    experiments = restore(archive, output)
    folders = (output / name for name in ("tables", "figures", "report"))
    return write(experiments, *folders, ledger=ledger, workflow=workflow, citation=citation)


def restore(archive: Path, output: Path) -> list[str]:
    """Unpack the logs of an archive below `output` and ingest them; return the names of the experiments, in order.

    `output` is laid out like `results/`. A folder that an earlier call made is replaced. Raises UserError for a damaged
    archive, and for a folder that holds anything else.
    """
    ours = (output / INDEX).is_file() or (output.is_dir() and not any(output.iterdir()))
    if output.exists() and not ours:
        next = "name a new folder with --output"
        raise UserError("the folder for the evidence holds other files.", folder=output, next=next)
    experiments, files = _unpacked(archive)
    shutil.rmtree(output, ignore_errors=True)
    for name, content in files.items():
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    write_json(output / INDEX, [asdict(inputs) for inputs in experiments])
    for inputs in experiments:
        inputs.ingest(output, output / "tables" / inputs.experiment)
    return [inputs.experiment for inputs in experiments]


def _unpacked(archive: Path) -> tuple[list[TableInputs], dict[str, bytes]]:
    """Experiments, and file → content, of an archive. Raises UserError for a missing or damaged archive."""
    next = "take the archive from the repository again"
    try:
        content = json.loads(lzma.decompress(archive.read_bytes()))
    except FileNotFoundError:
        raise UserError("there is no such archive.", path=archive, next="correct the path") from None
    except (lzma.LZMAError, EOFError, OSError, ValueError, RecursionError) as error:
        raise UserError("the archive of logs cannot be read.", path=archive, reason=error, next=next) from None
    with report_malformed(archive, "archive of logs", next=next):
        experiments = [TableInputs(**inputs) for inputs in content["experiments"]]
        files = {check_relative_path(name): text.encode(*ENCODING) for name, text in content["files"].items()}
    return experiments, files
