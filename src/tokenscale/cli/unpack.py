"""An archive → a packed store, byte for byte the one that comes from the text; needs neither text nor tokenizer."""

import argparse
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.base.progress import Progress
from tokenscale.data.stores.manifest import read_store_manifest, resolve_store
from tokenscale.data.stores.unpack import unpack, unpack_once
from tokenscale.runs.launch.lock import hold_run_folder
from tokenscale.settings.data import StoreSettings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where from, what, where to."""
    parser.add_argument("--archive", required=True, type=Path, metavar="PATH", help="the archive: folder or manifest")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--sequence-length", type=int, default=1024, metavar="N", help="positions a row (default 1024)")
    what.add_argument("--store", metavar="NAME", help="the packed store by its whole name, as rules say it")
    to = parser.add_mutually_exclusive_group(required=True)
    to.add_argument("--output", type=Path, metavar="FILE", help="the store's manifest.json; the rest lies beside")
    to.add_argument(
        "--local-disk",
        type=Path,
        metavar="DIR",
        help="the disk of a node: makes DIR/packed…/manifest.json, unless it is there, and prints its path",
    )


def run(arguments: argparse.Namespace) -> None:
    """Write, and say what came of it."""
    if arguments.sequence_length < 1:
        raise UserError(f"{arguments.sequence_length} is no sequence length.", next="--sequence-length 2048, say")
    if arguments.output is not None and arguments.output.name != "manifest.json":
        raise UserError(
            "a store's manifest is called manifest.json.", output=arguments.output, next="FOLDER/manifest.json"
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
        print(path if made else f"{path} (was there)")
        return
    with hold_run_folder(arguments.output.parent, f"the store {store.directory}", wait=True):
        manifest = unpack(arguments.archive, store, arguments.output.parent, progress)
    progress.close()
    print(
        f"{progress.line()}; {manifest['rows']:,} rows, {manifest['tokens_useful']:,} useful of "
        f"{manifest['tokens_total']:,} tokens (fill {manifest['fill']:.2%})"
    )
