"""Find out what a data loader reads: anyone's, at several world sizes, over epochs and after a resume.

The loader is a function in a module of the working folder: make_loader(rank, world_size, epoch, seed, step,
batch_size). It is given those arguments that it has, and returns an iterable of batches of ids.
"""

import argparse
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import write_sealed
from tokenscale.data.audit import FAILED, HELD, TITLES, AuditSettings, audit, read_samples

if TYPE_CHECKING:
    from tokenscale.data.audit import Audit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = AuditSettings()
    parser.add_argument("loader", metavar="MODULE:FUNCTION", help="the function that makes it")
    text = "function that returns the ids of each sample, of which a pass reads each once"
    parser.add_argument("--samples", metavar="MODULE:FUNCTION", help=text)
    parser.add_argument("--vocabulary-size", type=int, metavar="N", help="ids lie below it")
    text = "id of padding, for batches without an attention mask"
    parser.add_argument("--pad-id", type=int, metavar="N", help=text)
    text = "world sizes to compare (default: 1 2 3 8)"
    parser.add_argument(
        "--worlds", type=int, nargs="+", default=default.worlds, metavar="N", help=text
    )
    text = "rows of all ranks together, for a loader that takes batch_size (default: 24)"
    parser.add_argument(
        "--global-batch", type=int, default=default.global_batch, metavar="N", help=text
    )
    text = "most batches of a pass; a loader with more has no end (default: 10000)"
    parser.add_argument("--batches", type=int, default=default.most_batches, metavar="N", help=text)
    text = "seconds to wait for one batch (default: 120)"
    parser.add_argument("--timeout", type=int, default=default.timeout_s, metavar="S", help=text)
    text = (
        f"properties that must hold for exit code 0 (default: none may fail): {', '.join(TITLES)}"
    )
    parser.add_argument("--ask", nargs="+", default=[], metavar="PROPERTY", help=text)
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write them (JSON)")


def run(arguments: argparse.Namespace) -> int:
    """Print the verdicts. With `--ask`, return 1 unless each named property holds; else return 1 if any
    property fails.
    """
    for name in arguments.ask:
        if name not in TITLES:
            raise unknown("property", word=name, words=TITLES)
    for flag in ("global_batch", "batches", "timeout"):
        _check_positive(flag, getattr(arguments, flag))
    for world in arguments.worlds:
        _check_positive("worlds", world)
    settings = AuditSettings(
        worlds=tuple(arguments.worlds),
        global_batch=arguments.global_batch,
        vocabulary_size=arguments.vocabulary_size,
        pad_id=arguments.pad_id,
        most_batches=arguments.batches,
        timeout_s=arguments.timeout,
    )
    make = _load_function(arguments.loader)
    samples = read_samples(_load_function(arguments.samples)) if arguments.samples else None
    found = audit(make, settings, samples)
    print("\n".join(_describe(arguments.loader, found, asked=arguments.ask or [*TITLES])))
    if arguments.output is not None:
        record = {"loader": arguments.loader, "settings": dataclasses.asdict(settings)}
        write_sealed(arguments.output, record=record | dataclasses.asdict(found))
    if arguments.ask:
        answers = {verdict.name: verdict.answer for verdict in found.verdicts}
        return int(any(answers[name] != HELD for name in arguments.ask))
    return int(any(verdict.answer == FAILED for verdict in found.verdicts))


def _check_positive(flag: str, value: int) -> None:
    if value < 1:
        raise UserError(
            f"--{flag.replace('_', '-')} is {value}.", expected="1 or more", next="give another one"
        )


def _load_function(name: str) -> Callable[..., Any]:
    """Return a function by MODULE:FUNCTION; the module may lie in the working folder."""
    module_name, _, function = name.partition(":")
    if not module_name or not function:
        raise UserError(
            f"{name} names no function.",
            expected="MODULE:FUNCTION, such as my_data:make_loader",
            next="name the function behind a colon",
        )
    if module_name.endswith(".py"):
        raise UserError(
            f"{module_name} names a file.",
            expected="a module, such as my_data:make_loader",
            next=f"leave out .py: {module_name.removesuffix('.py').replace('/', '.')}:{function}",
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"the module {module_name} cannot be imported.",
            folder=Path.cwd(),
            reason=f"{type(error).__name__}: {error}".splitlines()[0],
            next=f"python -c 'import {module_name}'",
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        raise unknown(
            "function",
            word=function,
            words=[
                key
                for key, value in vars(module).items()
                if inspect.isfunction(value) and not key.startswith("_")
            ],
            module=module_name,
        )
    return found


def _describe(name: str, found: "Audit", asked: Sequence[str]) -> Iterator[str]:
    """Yield what one rank reads, and the verdicts that were asked for, with the words of `--ask`."""
    facts = found.facts
    yield f"{name}: {facts['batches']:,} batches of one rank"
    labels = "none" if facts["labels"] is None else f"{facts['labels']:,}"
    yield (
        f"  {facts['positions']:,} positions, {facts['padding']:.1%} padding, labels that count: "
        f"{labels}"
    )
    if facts["documents_in_a_row"] is not None:
        yield f"  at most {facts['documents_in_a_row']:,} documents in a row"
    yield (
        f"  {facts['tokens_per_s']:,} tokens/s; a copy of the same ids {facts['copy_tokens_per_s']:,}"
    )
    for verdict in found.verdicts:
        if verdict.name in asked:
            reason = f": {verdict.reason}" if verdict.reason else ""
            yield f"{verdict.answer:<12} {verdict.name:<11} {TITLES[verdict.name]}{reason}"
