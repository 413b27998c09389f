"""Build raw Parquet with train and validation splits from raw text, whole or in parts; or write its
records files.
"""

import argparse
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.base.progress import Progress
from tokenscale.base.wording import format_bytes
from tokenscale.data.corpus.build import build
from tokenscale.data.corpus.parts import build_part, merge_parts
from tokenscale.data.corpus.raw_text import write_text_records
from tokenscale.runs.launch.lock import hold_run_folder
from tokenscale.settings.data import CorpusSettings, state_held_out
from tokenscale.settings.options import from_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--settings", metavar="JSON", help="build the corpus of these settings")
    text = "write records files, for random access to single documents"
    what.add_argument("--records", action="store_true", help=text)
    text = "build part N (from 0) of a corpus with several `parts` in its settings"
    parser.add_argument("--part", type=int, metavar="N", help=text)
    parser.add_argument(
        "--content",
        nargs="?",
        default="",
        const="",
        help="fingerprint of the source files, to record",
    )
    text = "processes that merge parts, or write records files"
    parser.add_argument("--processes", type=int, default=1, metavar="N", help=text)
    text = "kinds url, hub: results/downloads/NAME/manifest.json"
    parser.add_argument("--downloads", nargs="?", type=Path, metavar="FILE", help=text)
    text = "results/corpus/NAME/[parts/NNNNN/ | records/]manifest.json"
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=text)


def run(arguments: argparse.Namespace, wait: bool = True) -> None:
    """Build the corpus or one part, merge its parts, or write its records files, and report the
    size.
    """
    if arguments.processes < 1:
        raise UserError(
            "--processes must be at least 1.",
            found=arguments.processes,
            next="--processes 8, for example",
        )
    if arguments.records:
        directory = arguments.output.parent.parent
        with hold_run_folder(directory, what="the corpus records", wait=wait):
            files = write_text_records(directory, arguments.processes)["files"]
        documents = sum(file["records"] for file in files)
        size = sum(file["bytes"] for file in files)
        print(f"records of {directory}: {documents:,} documents, {format_bytes(size)}")
        return
    settings = from_json(CorpusSettings, text=arguments.settings)
    for field, text in settings.problems():
        what = "the settings of the corpus do not fit together."
        raise UserError(what, key=field, reason=text, next="change this key")
    part = arguments.part
    if part is not None and not 0 <= part < settings.parts:
        expected = f"0 to {settings.parts - 1}"
        next_step = "name one of its parts, or change `parts` in its settings"
        raise UserError(
            "the corpus has no such part.",
            flag="--part",
            found=part,
            expected=expected,
            next=next_step,
        )
    name = f"corpus {settings.name}" + (f", part {part}" if part is not None else "")
    progress = Progress(name)
    downloads = arguments.downloads.parent if arguments.downloads else None
    directory = arguments.output.parent
    with hold_run_folder(directory, what=f"the {name}", wait=wait):
        if part is not None:
            manifest = build_part(
                settings,
                number=part,
                directory=directory,
                report=progress,
                downloads=downloads,
                content=arguments.content,
            )
        elif settings.parts > 1:
            manifest = merge_parts(settings, directory, arguments.processes)
            for split in manifest["splits"].values():
                progress(split["rows"], split["utf8_bytes"])
        else:
            manifest = build(
                settings,
                directory,
                report=progress,
                downloads=downloads,
                content=arguments.content,
            )
    progress.close()
    rows = ", ".join(f"{name} {split['rows']:,}" for name, split in manifest["splits"].items())
    # found among all parts
    dropped = 0 if part is not None else manifest["cleaning"]["documents"]["duplicates"]
    print(f"{progress.line()}; {rows}" + (f"; {dropped:,} duplicates dropped" if dropped else ""))
    if part is None and (overlap := state_held_out(manifest)):
        print(overlap)
