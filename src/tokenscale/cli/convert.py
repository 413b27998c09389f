"""Token stores from and to the formats of others: Megatron-LM's pair, nanoGPT's .bin, Hugging Face data on disk."""

import argparse
import importlib
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import read_json
from tokenscale.cli.convert_source import FLAGS, HELP, IDS, ConvertSettings, Say, of_foreign, of_store
from tokenscale.cli.convert_target import Target, make_way, manifest_of
from tokenscale.cli.convert_writing import write_foreign, write_store
from tokenscale.data.stores.manifest import SingleFile
from tokenscale.settings import flags
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.registry import FOREIGN, FORMATS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to convert, into what, and what a file cannot say."""

    parser.usage = "%(prog)s SOURCE TARGET --to FORMAT [--tokenizer FOLDER] [options]"
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a store, a pair's prefix, a .bin, a folder")
    parser.add_argument(
        "target",
        type=Path,
        metavar="TARGET",
        help="the same, to write; padded, token-list: also FILE.parquet",
    )
    flags.add(parser, FLAGS)


def run(arguments: argparse.Namespace) -> None:
    """Convert, and say what came of it."""

    settings = ConvertSettings(**flags.stated(arguments, FLAGS))
    words = shlex.join(["python", "-m", "tokenscale", *sys.argv[1:]])
    convert(settings, arguments.source, arguments.target, print, words)


def convert(settings: ConvertSettings, source: Path, target: Path, say: Say = print, command: str = "") -> None:
    """Write TARGET from SOURCE; `say` hears a line for each thing found and done, `command` goes into build records.

    Raises UserError for a source that is none of the known formats, does not hold together or contradicts what is
    stated of it; for flags that mean nothing here; and for anything in the way at TARGET.
    """
    goal = _target(settings, target, command)
    kind = settings.from_format or _kind_of(source)
    _check_flags(settings, kind, goal)
    make_way(goal, source, kind, settings.force)
    if kind == "store":
        found = of_store(settings, source, goal, say)
    else:
        found = of_foreign(settings, source, kind, goal, say)
    if not len(found.documents):
        raise UserError("the source holds no documents.", source=source, next="name another")
    if goal.foreign:
        write_foreign(settings, found, goal, say)
    else:
        write_store(found, replace(goal, store=replace(goal.store, eos=found.facts["eos"])), say)


def _target(settings: ConvertSettings, path: Path, command: str) -> Target:
    names = [*FOREIGN, *FORMATS]
    if not settings.to:
        raise UserError("--to is missing.", allowed=", ".join(names), next=HELP)
    if settings.to in FOREIGN:
        return Target(path, foreign=settings.to)
    command = command if settings.force or not command else f"{command} --force"  # what is broken is in the way
    if not any(settings.to == name or settings.to.startswith(f"{name}-") for name in FORMATS):
        raise unknown("format", settings.to, names, flag="--to")
    store = StoreSettings.parse(settings.to)
    if settings.sequence_length is not None:
        if "sequence_length" not in store.options():
            raise UserError(
                f"the format {store.format} has no rows of one length.", flag="--sequence-length", next="leave it out"
            )
        store = replace(store, sequence_length=settings.sequence_length)
    single = None
    if path.suffix == ".parquet":
        if store.format not in ("padded", "token-list"):
            raise UserError(
                f"the format {store.format} is a folder of files, not one.", target=path, next="name a folder"
            )
        single = SingleFile(path.stem, command)
    return Target(path, store=store, single=single, command=command)


def _kind_of(path: Path) -> str:
    """The format of a source, where it shows."""
    manifest = manifest_of(path)
    if manifest.is_file() and "format" in read_json(manifest, "manifest"):  # corpora and tokenizers have none
        return "store"
    for kind, module in FOREIGN.items():
        if importlib.import_module(module).recognises(path):
            return kind
    if path.exists() or any(path.with_name(path.name + ending).exists() for ending in (".bin", ".idx")):
        raise UserError(
            "the source shows no format that is known.",
            source=path,
            expected="a store's folder, PREFIX of .bin and .idx, a .bin, or a folder of Dataset.save_to_disk",
            next=f"--from {{store,{','.join(FOREIGN)}}} tries one of them and says what is missing\n"
            "python -m tokenscale pretokenize --help, where it is text",
        )
    raise UserError("the source is missing.", source=path, next="mend the path")


def _check_flags(settings: ConvertSettings, kind: str, goal: Target) -> None:
    """UserError for a flag that means nothing for this conversion."""
    of_foreign = ("tokenizer", "tokenizer_name", *IDS)
    means = dict.fromkeys(of_foreign, kind != "store")
    means |= {
        "eos": goal.store is not None,
        "sequence_length": goal.store is not None,
        "bos": goal.foreign is not None,
        "document_end": goal.foreign is not None or kind != "store",
        "dtype": kind == "nanogpt",
        "column": kind == "hf-datasets",
    }
    for name, used in means.items():
        if not used and getattr(settings, name) is not None:
            flag = next(flag.name for flag in FLAGS if flag.key == name)
            what = f"from {kind} to {goal.foreign or goal.store.format}"
            known = "the store's manifest says it" if kind == "store" and name in of_foreign else None
            raise UserError(f"{flag} means nothing {what}.", reason=known, next="leave it out")
