"""Tamperings of a mailed report, each carried through with the commands that ship.

    python -m tests.tampering REPORT [NAME …]

A tampering changes the folder of a report or the logs packed in it, and renews all checksums and
seals. What lies beside the change still follows from what was there before: `verify` must name it.
Of changed logs a whole report is made as well, with `report rebuild`: nothing contradicts it, so
that `verify` agrees, and its page says what the logs say of themselves.
"""

import argparse
import contextlib
import io
import json
import lzma
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import logs
from tokenscale.base.files import canonical_json, read_json, sha256_file, write_json, write_sealed
from tokenscale.base.manifests import SUMS
from tokenscale.cli.main import main
from tokenscale.report import bundle
from tokenscale.report.packed_logs import JUDGED, LOGS
from tokenscale.runs.records import provenance
from tokenscale.runs.records.provenance import log_hashes


@dataclass
class Logs:
    """The unpacked logs of a report: `root` is laid out like `results/`."""

    root: Path
    content: dict[str, Any]

    @property
    def table(self) -> Path:
        return self.root / self.content["experiments"][0]["table"]

    @property
    def judged(self) -> dict[str, dict[str, str]]:
        return next(iter(self.content["judged"].values()))

    def runs(self, **cell: object) -> list[Path]:
        """Return the folders of the runs with these levels, by repeat."""
        entries = [e for e in read_json(self.table)["runs"] if cell.items() <= e["cell"].items()]
        entries.sort(key=lambda entry: entry["repeat"])
        return [self.root / "runs" / entry["run_id"] for entry in entries]


def seal(run: Path, **fields: Any) -> None:
    """Seal a run's record with the hashes of its logs, as a training does at its end."""
    record = read_json(run / "run.json") | fields
    provenance.seal_record(run, record, record["outcome"] | {"logs": log_hashes(run)})
    write_json(
        run / "done.json",
        read_json(run / "done.json") | {"seal": read_json(run / "run.json")["seal"]},
    )


def change_table(found: Logs, change: Callable[[dict[str, Any]], None]) -> None:
    table = logs.unsealed(found.table)
    change(table)
    write_sealed(found.table, record=table)


def renew_sums(report: Path) -> None:
    """Renew the checksums of all files that the report lists."""
    names = [line[66:] for line in (report / SUMS).read_text().splitlines()]
    sums = [f"{sha256_file(report / n)}  {n}\n" for n in names if (report / n).is_file()]
    (report / SUMS).write_text("".join(sums))


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    changed = re.sub(old, new, text, count=1)
    assert changed != text, (path, old)
    path.write_text(changed)


# -- files that follow from the logs


def edit_page(report: Path) -> None:
    replace_text(report / "index.html", "Every number is computed", "No number is computed")


def edit_releases(report: Path) -> None:
    record = read_json(report / "provenance.json")
    record["packages"]["matplotlib"] = record["installed"]["matplotlib"] = "0.1"
    (report / "provenance.json").write_text(canonical_json(record) + "\n")


def edit_page_and_releases(report: Path) -> None:
    edit_page(report)
    edit_releases(report)


def edit_page_releases_and_readme(report: Path) -> None:
    edit_page(report)
    edit_releases_and_readme(report)


def edit_releases_and_readme(report: Path) -> None:
    edit_releases(report)
    text = bundle.render_readme(read_json(report / "provenance.json"), cited=True)
    (report / "README.md").write_text(text)


def edit_number(report: Path) -> None:
    path = min((report / "data").glob("*/cells.csv"))
    replace_text(path, r",(\d+\.\d+)\b", r",9\1")


def edit_pixels(report: Path) -> None:
    path = min((report / "figures").rglob("*.png"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def hide_cautions(report: Path) -> None:
    replace_text(report / "index.html", "</style>", "li { display: none }</style>")


def remove_drawing(report: Path) -> None:
    replace_text(report / "index.html", r"(?s)<svg\b.*?</svg>", "")


def edit_definition(report: Path) -> None:
    replace_text(report / "sql/throughput.sql", r"\bsum\(", "max(")


def edit_record(report: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the record says of each run."""
    record = read_json(report / "provenance.json")
    for part in record["experiments"].values():
        for facts in part["runs"].values():
            change(facts)
    (report / "provenance.json").write_text(canonical_json(record) + "\n")


def name_other_processor(report: Path) -> None:
    edit_record(report, lambda facts: facts.update(cpu="Another CPU"))


def call_runs_unfinished(report: Path) -> None:
    """Say that runs had not ended, which leaves differences unchecked."""
    edit_page(report)
    edit_record(report, lambda facts: facts.pop("seal"))


def add_drawing(report: Path) -> None:
    edit_releases_and_readme(report)
    drawing = min((report / "figures").glob("*/*.svg"))
    shutil.copy(drawing, drawing.with_name("better.svg"))
    with open(report / SUMS, "a") as sums:
        sums.write(f"{'0' * 64}  {drawing.with_name('better.svg').relative_to(report)}\n")


# -- logs, and what is packed beside them


def hide_missing_step(found: Logs) -> None:
    """Delete the last step of a run, and say beside it that the run is valid."""
    run = found.runs(approach="packed")[0]
    edit_lines(run, lambda lines: lines[:-1])
    seal(run)
    claim_checked(found, run)


def edit_lines(run: Path, change: Callable[[list[str]], list[str]]) -> None:
    path = run / "attempt=00/rank=00000/steps.jsonl"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def claim_checked(found: Logs, run: Path) -> None:
    """Say beside the logs that the run was checked with its stores, without a finding."""
    found.judged[run.name] = dict.fromkeys(JUDGED, "") | {"validity": "valid"}


def forge_tokens(found: Logs) -> None:
    """Scale useful tokens of an approach, and say nothing of it."""

    def change(line: dict[str, Any]) -> dict[str, Any]:
        useful = round(0.9 * line["useful_tokens"])
        ratio = useful / line["useful_tokens"]
        return line | {"useful_tokens": useful, "loss_sum": ratio * line["loss_sum"]}

    for run in found.runs(**{"approach": "packed", "layout.data": 1}):
        logs.edit(run, change)
        seal(run)
        found.judged.pop(run.name, None)


def forge_tokens_as_checked(found: Logs) -> None:
    """The same, and say that they were counted again."""
    forge_tokens(found)
    for run in found.runs(**{"approach": "packed", "layout.data": 1}):
        claim_checked(found, run)


def drop_repeats(found: Logs) -> None:
    """Leave out the last repeats of all approaches."""
    dropped = {run.name for run in (found.root / "runs").iterdir()}

    def change(table: dict[str, Any]) -> None:
        last = max(entry["repeat"] for entry in table["runs"])
        table["runs"] = [entry for entry in table["runs"] if entry["repeat"] < last - 1]
        dropped.difference_update(entry["run_id"] for entry in table["runs"])
        for cell, count in table["cell_repeats"].items():
            table["cell_repeats"][cell] = min(count, last - 1)

    change_table(found, change)
    for name in dropped:
        shutil.rmtree(found.root / "runs" / name)
        found.judged.pop(name, None)


def change_primary(found: Logs) -> None:
    """State another primary comparison, and another question."""

    def change(table: dict[str, Any]) -> None:
        table["question"] = "Which approach ends at the lower loss?"
        for primary in table["primary"]:
            primary["quantity"] = "validation_loss"

    change_table(found, change)


def swap_runs(found: Logs) -> None:
    """Exchange the logs of a run of each of two approaches."""
    one, two = (
        found.runs(**{"approach": name, "layout.data": 1})[0] for name in ("packed", "padded")
    )
    between = found.root / "between"
    one_log, two_log = one / "attempt=00", two / "attempt=00"
    shutil.move(one_log, between)
    shutil.move(two_log, one_log)
    shutil.move(between, two_log)
    for run in (one, two):
        seal(run)


def forge_clocks(found: Logs) -> None:
    """Make all seconds of an approach half as long."""

    def change(line: dict[str, Any]) -> dict[str, Any]:
        return line | {
            name: 0.5 * line[name] for name in line if name.endswith("_s") and line[name]
        }

    for run in found.runs(approach="packed"):
        for kind in ("steps", "events", "spans"):
            logs.edit(run, change, kind)
        record = read_json(run / "run.json")
        seal(run, **halve(record), outcome=record["outcome"] | halve(record["outcome"]))


def halve(record: dict[str, Any]) -> dict[str, float]:
    """Return the times of day of a record, halved as those of its logs are."""
    return {name: 0.5 * record[name] for name in record if name.endswith("_unix_s")}


def change_commit(found: Logs) -> None:
    """Name another commit and processor."""
    for run in found.runs():
        record = read_json(run / "run.json")
        git = record["git"] | {"commit": "f" * 40}
        seal(run, git=git, hardware=record["hardware"] | {"cpu": "Another CPU"})


def change_processor(found: Logs) -> None:
    """Name another processor in the runs of one approach."""
    for run in found.runs(approach="packed"):
        hardware = read_json(run / "run.json")["hardware"]
        seal(run, hardware=hardware | {"cpu": "Another CPU"})


def copy_repeat(found: Logs) -> None:
    """Replace a repeat by another one, with noise in its times."""
    one, two = found.runs(**{"approach": "packed", "layout.data": 1})[:2]
    shutil.copytree(one / "attempt=00", two / "attempt=00", dirs_exist_ok=True)
    logs.edit(two, lambda line: line | {"step_s": line["step_s"] * (1 + 1e-7)})
    seal(two)


def halve_processor_time(found: Logs) -> None:
    """Halve the processor time of one run."""
    run = found.runs(**{"approach": "packed", "layout.data": 1})[0]

    def change(line: dict[str, Any]) -> dict[str, Any]:
        return line | {"cpu_s": 0.5 * line["cpu_s"]} if line.get("cpu_s") else line

    logs.edit(run, change, "events")
    seal(run)


def lower_losses(found: Logs) -> None:
    """Scale the training losses of an approach."""
    for run in found.runs(approach="packed"):
        logs.edit(run, lambda line: line | {"loss_sum": 0.9 * line["loss_sum"]})
        seal(run)


def move_bound(report: Path) -> None:
    replace_text(report / "claims.yaml", r'(bound"?: )[-0-9.e]+', r"\g<1>0.0001")


@dataclass(frozen=True)
class Tampering:
    """`report` or `logs` is changed. `says` stands on the page of the whole forgery."""

    report: Callable[[Path], None] | None = None
    logs: Callable[[Logs], None] | None = None
    says: str | None = None


TAMPERINGS = {
    "page": Tampering(edit_page),
    "page, and a release in the record": Tampering(edit_page_and_releases),
    "page, release and README": Tampering(edit_page_releases_and_readme),
    "number of a table": Tampering(edit_number),
    "pixel": Tampering(edit_pixels),
    "an invalid run is called valid": Tampering(logs=hide_missing_step, says="1 invalid of"),
    "tokens, as if checked": Tampering(logs=forge_tokens_as_checked, says="in the same samples"),
    "tokens": Tampering(logs=forge_tokens, says="in the same samples"),
    "repeats left out": Tampering(logs=drop_repeats, says="was changed after"),
    "another primary comparison": Tampering(logs=change_primary, says="was changed after"),
    "logs exchanged": Tampering(logs=swap_runs, says="invalid of"),
    "bound of a claim": Tampering(move_bound, says=""),
    "clocks": Tampering(logs=forge_clocks, says=""),
    "commit and processor": Tampering(logs=change_commit, says="fffffff"),
}
#: further ones
SIBLINGS = {
    "a stylesheet that hides cautions": Tampering(hide_cautions),
    "a drawing taken out of the page": Tampering(remove_drawing),
    "a definition": Tampering(edit_definition),
    "processor in the record": Tampering(name_other_processor),
    "page, of runs that had not ended": Tampering(call_runs_unfinished),
    "a drawing that is added, and releases": Tampering(add_drawing),
    "processor of an approach": Tampering(logs=change_processor, says="not compared"),
    "copy of a repeat": Tampering(logs=copy_repeat, says="a copy of"),
    "processor time": Tampering(logs=halve_processor_time, says=""),
    "losses of an approach": Tampering(logs=lower_losses, says="suspect of"),
}
ALL = TAMPERINGS | SIBLINGS


def change_logs(report: Path, change: Callable[[Logs], None]) -> None:
    """Unpack the logs of a report, change them, and pack them again."""
    archive = report / LOGS
    content = json.loads(lzma.decompress(archive.read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, text in content["files"].items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        change(Logs(root, content))
        content["files"] = {
            name: (root / name).read_text() for name in content["files"] if (root / name).is_file()
        }
    archive.write_bytes(lzma.compress(json.dumps(content).encode()))


def command(*arguments: str | Path) -> tuple[int, str]:
    """Return exit code and output of a command."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main([*map(str, arguments)])
    return code, out.getvalue()


def rebuild(report: Path, output: Path) -> Path:
    """Make a whole report of the logs and copied files of a folder."""
    copied = {"ledger": "claims.yaml", "workflow": "workflow/Snakefile", "citation": "CITATION.cff"}
    given = [word for name, file in copied.items() for word in (f"--{name}", report / file)]
    code, text = command("report", "rebuild", report / LOGS, "--output", output, *given)
    assert code == 0, text
    return output / "report"


def tamper(report: Path, tampering: Tampering, folder: Path) -> Path:
    """Return a tampered copy of a report, with checksums that fit."""
    mailed = Path(shutil.copytree(report, folder / "mailed"))
    if tampering.report:
        tampering.report(mailed)
    if tampering.logs:
        change_logs(mailed, tampering.logs)
    renew_sums(mailed)
    return mailed


def print_results() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("names", nargs="*", default=[*ALL])
    arguments = parser.parse_args()
    for name in arguments.names:
        with tempfile.TemporaryDirectory() as folder:
            mailed = tamper(arguments.report, ALL[name], Path(folder))
            code, text = command("verify", mailed)
            print(f"{name}: {code}\n{text.replace(folder, '')}", flush=True)
            if ALL[name].says is None:
                continue
            whole = rebuild(mailed, Path(folder, "whole"))
            code, text = command("verify", whole)
            print(f"{name}, all made again: {code}\n{text.replace(folder, '')}", flush=True)


if __name__ == "__main__":
    print_results()
