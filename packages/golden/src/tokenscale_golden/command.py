"""Compare golden losses: is a change rounding or real, and of what kind? docs/other-trainers.md explains
the kinds.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenscale_golden.history import list_versions
from tokenscale_golden.platforms import Platform
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
        "--history",
        action="store_true",
        help="measure rounding by the earlier versions of OLD in git, where --floor gives no run",
    )
    parser.add_argument(
        "--second",
        nargs=2,
        metavar=("OLD", "NEW"),
        help="the same change on another platform: a real one moves both alike",
    )
    parser.add_argument(
        "--fp32", action="store_true", help="both were trained without bf16, fp16 or TF32"
    )
    parser.add_argument(
        "--expect", action="append", default=[], metavar="KIND", help=f"an intended change: {kinds}"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the table of a pull request's comment"
    )


def _find_next_step(error: GoldenError) -> str:
    if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
        return (
            "look at the disk and the limits (dmesg, df -h ., ulimit -a), then repeat the command"
        )
    return "tokenscale golden --help; docs/other-trainers.md"


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
            f"tokenscale: {error}\n  next  {_find_next_step(error)}",
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
    places = [Path(place) for place in (arguments.old, arguments.new)]
    places += map(Path, arguments.second or ())
    floors = [Path(place) for place in arguments.floor]
    runs = [str(place) for place in (*places, *floors) if is_run(place)]
    if runs and len(runs) < len(places) + len(floors):
        raise GoldenError(f"Compare curves or folders, not both. Curves: {runs}.")
    if runs:
        curves = [read(place) for place in places]
        yield places[0].name, _judge(arguments, places[0], curves, [read(path) for path in floors])
        return
    yield from _compare_folders(arguments, places, floors)


def _judge(
    arguments: argparse.Namespace, old: Path, curves: list[Curve], floors: list[Curve]
) -> Verdict:
    """Judge OLD and NEW, which may be followed by those of a second platform."""
    before, after, *others = curves
    return judge(
        before,
        after,
        floors,
        fp32=arguments.fp32,
        versions=list_versions(old) if arguments.history and not floors else [],
        second=Platform(*others) if others else None,
    )


def _compare_folders(
    arguments: argparse.Namespace, places: list[Path], floors: list[Path]
) -> Iterator[tuple[str, Verdict]]:
    """Compare the curves of the same name. A file without losses in both folders is left out."""
    old, new = places[:2]
    names = sorted({*_list_curves(old), *_list_curves(new)})
    curves = {name: [_try_read(place / name) for place in places] for name in names}
    if not any(a and b for a, b, *_ in curves.values()):
        raise GoldenError(f"{old} and {new} have no losses in files or runs of the same name.")
    for name, found in curves.items():
        known = [curve for curve in found if curve]
        repeated = [curve for place in floors if (curve := _try_read(place / name))]
        if found[0] and found[1]:
            both = known if len(known) == len(places) else known[:2]
            yield name, _judge(arguments, old / name, both, repeated)
        elif found[0] or found[1]:
            missing = "NEW" if found[0] else "OLD"
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
