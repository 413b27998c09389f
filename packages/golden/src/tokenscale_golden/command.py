"""Compare golden losses: is a change rounding or real, and of what kind? docs/other-trainers.md explains
the kinds.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenscale_golden.reading import Curve, GoldenError, is_run, read
from tokenscale_golden.verdict import (
    DATA,
    IDENTICAL,
    KINDS,
    ROUNDING,
    UNKNOWN,
    Verdict,
    judge,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for both curves, the floor, declared changes and the output."""
    kinds = "; ".join(KINDS[:-2])
    repeated = "OLD repeated with other threads, kernels or layout: measures rounding"
    parser.add_argument(
        "old",
        metavar="OLD",
        help="file or run of old losses, or a folder of them; FILE::RUN chooses",
    )
    parser.add_argument(
        "new", metavar="NEW", help="the new ones; in folders, curves of the same name are compared"
    )
    parser.add_argument("--floor", nargs="+", default=[], metavar="RUN", help=repeated)
    parser.add_argument(
        "--fp32", action="store_true", help="both were trained without bf16, fp16 or TF32"
    )
    parser.add_argument(
        "--expect", action="append", default=[], metavar="KIND", help=f"an intended change: {kinds}"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the table of a pull request's comment"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the verdicts, worst first. Return the exit code."""
    try:
        expected = {kind.partition(" from step")[0].strip() for kind in arguments.expect}
        if unknown := expected - {*KINDS}:
            raise GoldenError(
                f"--expect {unknown.pop()!r} is no kind of change; choose from: {'; '.join(KINDS)}."
            )
        verdicts = sorted(
            _compare(arguments), key=lambda pair: (KINDS.index(pair[1].kind), -pair[1].largest)
        )
    except GoldenError as error:
        print(
            f"tokenscale: {error}\n  next  tokenscale golden --help; docs/other-trainers.md",
            file=sys.stderr,
        )
        return 2
    if table := arguments.markdown or len(verdicts) > 1:
        print(
            "| curve | change | first step | size there | largest | why | time of a step |\n"
            + "|---" * 7
            + "|"
        )
    print(*(_row(name, verdict=v) if table else _lines(v) for name, v in verdicts), sep="\n")
    return int(any(verdict.kind not in {IDENTICAL, ROUNDING, *expected} for _, verdict in verdicts))


def main() -> int:
    parser = argparse.ArgumentParser("tokenscale-golden", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


def _compare(arguments: argparse.Namespace) -> Iterator[tuple[str, Verdict]]:
    old = Path(arguments.old)
    new = Path(arguments.new)
    floors = [Path(place) for place in arguments.floor]
    places = [old, new, *floors]
    runs = [str(place) for place in places if is_run(place)]
    if runs and len(runs) < len(places):
        raise GoldenError(f"Compare curves or folders, not both. Curves: {runs}.")
    if runs:
        yield old.name, judge(read(old), read(new), [read(path) for path in floors], arguments.fp32)
        return
    yield from _compare_folders(old, new, floors, fp32=arguments.fp32)


def _compare_folders(
    old: Path, new: Path, floors: list[Path], fp32: bool
) -> Iterator[tuple[str, Verdict]]:
    """Compare the curves of the same name. A file without losses in both folders is left out."""
    names = sorted({*_list_curves(old), *_list_curves(new)})
    curves = {name: [_try_read(folder / name) for folder in (old, new, *floors)] for name in names}
    if not any(a and b for a, b, *_ in curves.values()):
        raise GoldenError(f"{old} and {new} have no losses in files or runs of the same name.")
    for name, (a, b, *repeated) in curves.items():
        if a and b:
            yield name, judge(a, b, [curve for curve in repeated if curve], fp32)
        elif a or b:
            missing = "NEW" if a else "OLD"
            yield name, Verdict(UNKNOWN, reason=f"{missing} has no readable losses of this name")


def _try_read(path: Path) -> Curve | None:
    with contextlib.suppress(GoldenError):
        return read(path)
    return None


def _list_curves(folder: Path, front: str = "") -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        if is_run(path) and path.name[0] != ".":
            yield front + path.name
        elif path.is_dir():
            yield from _list_curves(path, front=f"{front}{path.name}/")


def _row(name: str, verdict: Verdict) -> str:
    sizes = [f"{size:.1e}" if size else "" for size in (verdict.first, verdict.largest)]
    cells = (
        verdict.title,
        "" if verdict.step is None else verdict.step,
        *sizes,
        verdict.reason,
        verdict.speed or "",
    )
    return (
        "| "
        + " | ".join(" ".join(str(cell).replace("|", "\\|").split()) for cell in (name, *cells))
        + " |"
    )


def _lines(verdict: Verdict) -> str:
    first = (
        "" if verdict.step is None or verdict.kind == DATA else f" (first at step {verdict.step})"
    )
    facts = [
        ("why", verdict.reason),
        ("floor", verdict.floor),
        ("sure", verdict.sure),
        ("step time", verdict.speed),
    ]
    facts += [("note", note) for note in verdict.notes]
    return "\n".join(
        [verdict.title + first, *(f"  {key:<9}  {text}" for key, text in facts if text)]
    )
