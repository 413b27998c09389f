"""Unpack an archive into a packed store, identical to the one from the text, without text or tokenizer."""

import argparse
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.base.progress import Progress
from tokenscale.data.stores.manifest import read_store_manifest, resolve_store
from tokenscale.data.stores.unpack import unpack, unpack_once
from tokenscale.runs.launch.lock import hold_run_folder
from tokenscale.settings.data import StoreSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the archive, the store and the output."""
    parser.add_argument("--archive", required=True, type=Path, metavar="PATH", help="the archive: folder or manifest")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--sequence-length", type=int, default=1024, metavar="N", help="positions a row (default 1024)")
    what.add_argument("--store", metavar="NAME", help="full name of the packed store, as in the rules")
    to = parser.add_mutually_exclusive_group(required=True)
    to.add_argument(
        "--output", type=Path, metavar="FILE", help="the store's manifest.json; its other files are beside it"
    )
    to.add_argument(
        "--local-disk",
        type=Path,
        metavar="DIR",
        help="local disk of a node: write DIR/packed…/manifest.json unless it exists, and print its path",
    )


def run(arguments: argparse.Namespace) -> None:
    """Write the store and report the result."""
    if arguments.sequence_length < 1:
        raise UserError(
            "--sequence-length must be at least 1.",
            found=arguments.sequence_length,
            next="--sequence-length 2048, for example",
        )
    if arguments.output is not None and arguments.output.name != "manifest.json":
        raise UserError(
            "a store's manifest must be named manifest.json.", output=arguments.output, next="FOLDER/manifest.json"
        )
    found = read_store_manifest(arguments.archive)
    options = {name: found["options"][name] for name in ("split", "eos")}
    store = StoreSettings("packed", sequence_length=arguments.sequence_length, **options)
    if arguments.store is not None:
        store = StoreSettings.parse(arguments.store)
    progress = Progress(f"unpack {resolve_store(arguments.archive)[0]}", total=found["documents"])
    if arguments.local_disk is not None:
        path, made = unpack_once(arguments.archive, store, arguments.local_disk, progress)
        progress.close()
        print(path if made else f"{path} (already exists)")
        return
    with hold_run_folder(arguments.output.parent, f"the store {store.directory}", wait=True):
        manifest = unpack(arguments.archive, store, arguments.output.parent, progress)
    progress.close()
    print(
        f"{progress.line()}; {manifest['rows']:,} rows, {manifest['tokens_useful']:,} useful of "
        f"{manifest['tokens_total']:,} tokens (fill {manifest['fill']:.2%})"
    )
