"""Files that the product reads, damaged one at a time: each is named or does no harm.

    python -m tests.faults.mutate --seed 1 --count 1000 [--results results]

A line a mutation that is silent, ends in a stack trace or hangs; the last line counts them. Without `--results` a small
project is built first.
"""

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from tests.harm import KINDS, OF_FILES, OF_TEXT, SPECIAL, harm
from tokenscale.analysis import tables
from tokenscale.base.errors import UserError
from tokenscale.base.manifests import read_sums, walk
from tokenscale.cli import verify
from tokenscale.report.packed_logs import restore
from tokenscale.report.save import read_figure

#: no result is read from these: texts for people, locks, and records of how something was built
BESIDE = {
    ".lock",
    "arguments.json",
    "build.json",
    "dirty.diff",
    "failed.txt",
    "README.md",
    "sources.json",
    "stacks.txt",
}
BESIDE |= {"status.json"}
HUNG_S = 60


class Kind(NamedTuple):
    """A folder whose files are read together. `check` yields what is wrong, or raises UserError."""

    pattern: str
    check: Callable[[Path], Iterable[object]]


def _check_figures(folder: Path) -> Iterable[str]:
    for path in sorted(folder.glob("*.svg")):  # as the page does, for the figures that an experiment has
        read_figure(path.with_suffix(".json"))
    return ()


def _check_report(folder: Path) -> Iterable[object]:
    yield from walk(folder, [{"name": n, "sha256": s} for n, s in read_sums(folder).items()], beside=("SHA256SUMS",))
    with tempfile.TemporaryDirectory() as output:
        restore(folder / "logs.json.xz", Path(output))


def _check_tables(folder: Path) -> Iterable[object]:
    tables.check(folder)
    return ()


#: those of `verify results`, whose folders are the parents of their records, and what the report reads
CHECKED = {name: Kind(f"{name}/{pattern}", check) for name, (pattern, check) in verify.KINDS.items()} | {
    "tables": Kind("tables/*/manifest.json", _check_tables),
    "figures": Kind("figures/*/*.svg", _check_figures),
    "report": Kind("report*/SHA256SUMS", _check_report),
}


def mutate(results: Path, work: Path, seed: str) -> tuple[str, str]:
    """Damage one file of a copy; returns (what was done, what came of it)."""
    draw = random.Random(seed)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    kinds = [name for name, kind in CHECKED.items() if any(results.glob(kind.pattern))]
    kind = CHECKED[draw.choice(kinds)]
    source = draw.choice(sorted({path.parent for path in results.glob(kind.pattern)}))
    folder = work / source.relative_to(results)
    shutil.copytree(source, folder, copy_function=os.link)
    entries = ((path, path.relative_to(folder).parts) for path in sorted(folder.rglob("*")) if path.is_file())
    files = [path for path, parts in entries if path.name not in BESIDE and "superseded" not in parts]
    place = draw.choice(sorted({path.parent for path in files}))
    path = draw.choice([file for file in files if file.parent == place])
    what = draw.choice(KINDS + OF_TEXT + OF_FILES + SPECIAL)
    other = draw.choice(files)
    before = [_content(p.read_bytes()) for p in (path, other)]
    harm(path, what, other, draw)
    done = f"{what} {path.relative_to(work)}"
    if path.is_file() and not path.is_symlink() and [_content(p.read_bytes()) for p in (path, other)] == before:
        return done, "equal"
    # a mark that is gone is written again, which is a note
    return done, _outcome(
        kind.check, folder, what == "remove", {path.name, path.stem, other.name, other.stem, path.parent.name}
    )


def _content(data: bytes) -> object:
    """JSON as its value, which no order of keys and no space changes."""
    try:
        return json.loads(data)
    except ValueError:
        return data


def _outcome(check: Callable[[Path], Iterable[object]], folder: Path, notes: bool, names: set[str]) -> str:
    """What a check says in a process of its own: named, silent, trace or hung."""
    reading, writing = os.pipe()
    if not (process := os.fork()):
        try:
            try:
                found = " ".join(str(f) for f in check(folder) if notes or not getattr(f, "note", False))
            except UserError as error:
                found = str(error)
            said = "silent" if not found else "named" if any(n in found for n in names) else f"not named: {found}"
        except BaseException:
            said = "trace: " + traceback.format_exc()
        os.write(writing, said.encode()[:4000])
        os._exit(0)
    os.close(writing)
    ready = select.select([reading], [], [], HUNG_S)[0]
    said = os.read(reading, 4000).decode() if ready else "hung"
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    os.close(reading)
    return said or "killed"


def campaign(results: Path, work: Path, seed: int, count: int) -> Counter[str]:
    """So many mutations; prints those that are not named and not without effect."""
    counts: Counter[str] = Counter()
    for number in range(count):
        done, outcome = mutate(results, work, f"{seed}-{number}")
        counts[outcome.split(":")[0]] += 1
        if outcome not in ("named", "equal"):
            print(f"{seed}-{number} {done}: {outcome}", flush=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--results", type=Path, help="results of a project, which stay as they are")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = arguments.results
        if results is None:
            from tests.workflow.conftest import build

            build(Path(folder))
            results = Path(folder, "project/results")
        counts = campaign(results, results.with_name("mutated"), arguments.seed, arguments.count)
    print(json.dumps(counts))
    return 0 if counts.keys() <= {"named", "equal"} else 1


if __name__ == "__main__":
    sys.exit(main())
