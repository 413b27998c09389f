"""Files that the product reads, damaged one at a time: each is named or does no harm.

    python -m tests.faults.mutate --seed 1 --count 1000 [--results results] [--kinds runs,figures]
    [--flips 600]

A line a mutation that is silent, ends in a stack trace or hangs; the last line counts them by kind.
`named`: refused or reported by name; `refused`: by the name of another file, which the damaged one
lists. `equal`: read as it was. `other`: read as another text, in a file whose content nothing
proves. `--flips`: instead, so many single bits of every record of a file of each kind. Without
`--results` a small project is built first.
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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.faults.samples import SAMPLES, read_logs
from tests.harm import KINDS, OF_FILES, OF_TEXT, SPECIAL, harm
from tests.logs import tabulate
from tokenscale.analysis import tables
from tokenscale.analysis.rows import benchmark_rows
from tokenscale.base.errors import UserError
from tokenscale.base.manifests import read_sums, walk
from tokenscale.cli import verify
from tokenscale.report.save import read_figure

#: no result is read from these: texts for people, locks, and records of how something was built
BESIDE = [
    ".lock",
    "arguments.json",
    "build.json",
    "dirty.diff",
    "failed.txt",
    "README.md",
    "sources.json",
    "stacks.txt",
    "status.json",
]
HARMLESS = ("named", "equal", "other", "refused")
#: seconds without an answer; a busy machine needs many for an import
HUNG_S = 200
Counts = dict[str, Counter[str]]


class Kind(NamedTuple):
    """Folders whose files are read together, the parents of `pattern`.

    `check` yields what is wrong; or `read` returns what the files say. Both raise UserError.
    """

    pattern: str
    check: Callable[[Path], Iterable[object]] | None = None
    read: Callable[[Path], object] = Path
    proven: bool = True


def _check_figures(folder: Path) -> Iterable[str]:
    # as the page does, for an experiment's figures
    for name in sorted({path.stem for path in folder.glob("*.*")}):
        read_figure(folder / f"{name}.json")
    return ()


def _check_report(folder: Path) -> Iterable[object]:
    yield from walk(
        folder,
        [{"name": n, "sha256": s} for n, s in read_sums(folder).items()],
        beside=("SHA256SUMS",),
    )
    read_logs(folder)


def _check_tables(folder: Path) -> Iterable[object]:
    tables.check(folder)
    return ()


def _ingest(folder: Path) -> list[object]:
    with tempfile.TemporaryDirectory() as output:
        return [
            tabulate(path, folder / "runs", Path(output)) for path in sorted(folder.glob("*.json"))
        ]


#: those of `verify results`, whose folders are the parents of their records, what the report reads,
#: and samples
CHECKED = {
    name: Kind(f"{name}/{pattern}", check) for name, (pattern, check) in verify.KINDS.items()
} | {
    "tables": Kind("tables/*/manifest.json", _check_tables),
    "figures": Kind("figures/*/*.svg", _check_figures),
    "report": Kind("report*/SHA256SUMS", _check_report),
    "run tables": Kind("experiments/*/*.json", read=_ingest),
    "benchmarks": Kind(
        "benchmarks/*/*.json", read=lambda folder: benchmark_rows(sorted(folder.glob("*.json")))
    ),
    **{name: Kind("", read=s.read, proven=s.proven) for name, s in SAMPLES.items()},
}


def available(results: Path) -> list[str]:
    """The kinds of which there are files."""
    return [
        name for name, kind in CHECKED.items() if name in SAMPLES or any(results.glob(kind.pattern))
    ]


def copied(
    results: Path, work: Path, name: str, draw: random.Random
) -> tuple[Path, Path, list[Path]]:
    """(a folder of this kind, its copy of links, the files in the copy that are read)."""
    shutil.rmtree(work, ignore_errors=True)
    if name in SAMPLES and not (source := work.with_name("samples") / name).exists():
        source.mkdir(parents=True)
        made = _outcome(lambda: f"made: {SAMPLES[name].make(source)}")
        assert made.startswith("made"), f"{name}: {made}"
    elif name not in SAMPLES:
        source = draw.choice(sorted({path.parent for path in results.glob(CHECKED[name].pattern)}))
    folder = work / source.relative_to(source.parents[1] if name in SAMPLES else results)
    shutil.copytree(source, folder, copy_function=os.link)
    entries = (
        (path, path.relative_to(folder).parts)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    )
    beside = () if name in SAMPLES else BESIDE
    return (
        source,
        folder,
        [path for path, parts in entries if path.name not in beside and "superseded" not in parts],
    )


def mutate(results: Path, work: Path, seed: str, kinds: list[str]) -> tuple[str, str, str]:
    """Damage one file of a copy; returns (kind, what was done, what came of it)."""
    draw = random.Random(seed)
    kind = CHECKED[name := draw.choice(kinds)]
    source, folder, files = copied(results, work, name, draw)
    place = draw.choice(sorted({path.parent for path in files}))
    path = draw.choice([file for file in files if file.parent == place])
    what = draw.choice(KINDS + OF_TEXT + OF_FILES + SPECIAL)
    # whoever lists such records misses one
    if what == "remove" and kind.pattern.endswith("*.json"):
        what = "flip"
    other = draw.choice(files)
    before = [_content(p.read_bytes()) for p in (path, other)]
    harm(path, what, other, draw)
    done = f"{what} {path.relative_to(work)}"
    if (
        path.is_file()
        and not path.is_symlink()
        and [_content(p.read_bytes()) for p in (path, other)] == before
    ):
        return name, done, "equal"
    # a mark that is gone is written again, which is a note
    return name, done, _outcome(lambda: said(kind, source, folder, what == "remove", (path, other)))


def said(kind: Kind, source: Path, folder: Path, notes: bool, damaged: Iterable[Path]) -> str:
    """What comes of reading a damaged folder: named, silent, equal, other, or refused."""
    try:
        if kind.check is None:
            if kind.read(folder) == kind.read(source):
                return "equal"
            return "silent" if kind.proven else "other"
        found = " ".join(
            str(f) for f in kind.check(folder) if notes or not getattr(f, "note", False)
        )
    except UserError as error:
        found = str(error)
    if not found:
        return "silent"
    names = {name for path in damaged for name in (path.name, path.stem, path.parent.name)}
    return "named" if any(name in found for name in names) else "refused"


def _content(data: bytes) -> object:
    """JSON as its value, which no order of keys and no space changes."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data


def _outcome(tried: Callable[[], str]) -> str:
    """What a call in a process of its own returns, or trace, or hung."""
    reading, writing = os.pipe()
    if not (process := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            found = tried()
        except BaseException:
            found = "trace: " + traceback.format_exc()
        os.write(writing, found.encode(errors="replace")[:4000])
        os._exit(0)
    os.close(writing)
    ready = select.select([reading], [], [], HUNG_S)[0]
    found = os.read(reading, 4000).decode(errors="replace") if ready else "hung"
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    os.close(reading)
    return found or "killed"


def campaign(
    results: Path, work: Path, seed: int, count: int, chosen: list[str] | None = None
) -> Counts:
    """So many mutations, or those until an interruption; prints what is not named and not without
    effect.
    """
    counts: Counts = defaultdict(Counter)
    kinds = [name for name in available(results) if not chosen or name in chosen]
    with suppress(KeyboardInterrupt):
        for number in range(count):
            name, done, outcome = mutate(results, work, f"{seed}-{number}", kinds)
            counts[name][outcome.split(":")[0]] += 1
            if outcome not in HARMLESS:
                print(f"{seed}-{number} {done}: {outcome}", flush=True)
    return counts


def flips(
    results: Path, work: Path, seed: int, count: int, chosen: list[str] | None = None
) -> Counts:
    """So many single bits of each record of one folder of each kind whose content is proven."""
    counts: Counts = defaultdict(Counter)
    for name in available(results):
        if not CHECKED[name].proven or (chosen and name not in chosen):
            continue
        kind = CHECKED[name]
        draw = random.Random(f"{seed}-{name}")
        source, folder, files = copied(results, work, name, draw)
        for path in (
            p
            for p in files
            if p.suffix in (".json", ".xz") or p.name in ("SHA256SUMS", "steps.jsonl")
        ):
            content = path.read_bytes()
            for _ in range(count):
                harm(path, "flip", path, draw)
                same = _content(path.read_bytes()) == _content(content)
                outcome = "equal" if same else said(kind, source, folder, False, (path,))
                counts[name][outcome.split(":")[0]] += 1
                if outcome not in HARMLESS:
                    print(f"{name} {path.relative_to(folder)}: {outcome}", flush=True)
                path.write_bytes(content)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--flips", type=int, help="single bits of each record")
    parser.add_argument("--kinds", type=lambda text: text.split(","), help=", ".join(CHECKED))
    parser.add_argument("--results", type=Path, help="results of a project, which stay as they are")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = arguments.results
        if results is None:
            from tests.workflow.conftest import build

            build(Path(folder))
            results = Path(folder, "project/results")
        tried, number = (
            (campaign, arguments.count) if arguments.flips is None else (flips, arguments.flips)
        )
        counts = tried(
            results, results.with_name("mutated"), arguments.seed, number, arguments.kinds
        )
    print(json.dumps(counts | {"all": sum(counts.values(), Counter())}))
    return 0 if sum(counts.values(), Counter()).keys() <= {*HARMLESS} else 1


if __name__ == "__main__":
    sys.exit(main())
