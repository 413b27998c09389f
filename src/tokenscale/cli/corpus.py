"""Build raw Parquet with train and validation splits from raw text, whole or in parts; or write its
records files.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.processes import map_processes
from tokenscale.base.progress import Progress
from tokenscale.base.wording import format_bytes
from tokenscale.data.corpus.build import build
from tokenscale.data.corpus.parts import build_part, list_part_files, merge_parts
from tokenscale.data.corpus.raw_text import write_text_records
from tokenscale.data.parts import PartRecord, complete_part, digest_inputs, part_folder
from tokenscale.runs.launch.lock import hold_run_folder
from tokenscale.settings.data import CorpusSettings, state_cleaning
from tokenscale.settings.options import from_json, to_dict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--settings", metavar="JSON", help="build the corpus of these settings")
    text = "write records files, for random access to single documents"
    what.add_argument("--records", action="store_true", help=text)
    text = "build these parts (from 0) of a corpus with several `parts` in its settings"
    parser.add_argument("--part", type=int, nargs="+", metavar="N", help=text)
    text = "files that finished parts were built from: with other content they are built again"
    parser.add_argument("--inputs", type=Path, nargs="+", default=[], metavar="FILE", help=text)
    text = "fingerprint of the source files, to record; of each part"
    parser.add_argument("--content", nargs="*", default=[], help=text)
    text = "processes that build parts, merge parts, or write records files"
    parser.add_argument("--processes", type=int, default=1, metavar="N", help=text)
    text = "kinds url, hub: results/downloads/NAME/manifest.json"
    parser.add_argument("--downloads", nargs="?", type=Path, metavar="FILE", help=text)
    text = "results/corpus/NAME/[records/]manifest.json; parts are built in its folder"
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=text)


def run(arguments: argparse.Namespace, wait: bool = True) -> None:
    """Build the corpus or some parts, merge its parts, or write its records files, and report the
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
            files = write_text_records(directory, processes=arguments.processes)["files"]
        documents = sum(file["records"] for file in files)
        size = sum(file["bytes"] for file in files)
        print(f"records of {directory}: {documents:,} documents, {format_bytes(size)}")
        return
    settings = from_json(CorpusSettings, text=arguments.settings)
    for field, text in settings.problems():
        what = "the settings of the corpus do not fit together."
        raise UserError(what, key=field, reason=text, next="change this key")
    downloads = arguments.downloads.parent if arguments.downloads else None
    directory = arguments.output.parent
    if arguments.part is not None:
        _build_parts(settings, arguments, downloads=downloads, wait=wait)
        return
    progress = Progress(f"corpus {settings.name}")
    with hold_run_folder(directory, what=f"the corpus {settings.name}", wait=wait):
        if settings.parts > 1:
            manifest = merge_parts(settings, directory, processes=arguments.processes)
            for split in manifest["splits"].values():
                progress(split["rows"], split["utf8_bytes"])
        else:
            manifest = build(
                settings,
                directory,
                report=progress,
                downloads=downloads,
                content="".join(arguments.content),
            )
    progress.close()
    dropped = manifest["cleaning"]["documents"]["duplicates"]
    line = f"{progress.line()}; {_format_rows(manifest)}"
    print(line + (f"; {dropped:,} duplicates dropped" if dropped else ""))
    for note in state_cleaning(manifest):
        print(note)


def _format_rows(manifest: dict[str, Any]) -> str:
    return ", ".join(f"{name} {split['rows']:,}" for name, split in manifest["splits"].items())


def _build_parts(
    settings: CorpusSettings, arguments: argparse.Namespace, downloads: Path | None, wait: bool
) -> None:
    """Build the parts that an earlier job has not finished, several at a time."""
    numbers = arguments.part
    contents = arguments.content
    if not contents:
        contents = [""] * len(numbers)
    if len(contents) != len(numbers):
        what = "--content must have one fingerprint for each part."
        found = f"{len(contents)} for {len(numbers)} parts"
        raise UserError(what, found=found, next="snakemake, which passes them")
    for number in numbers:
        if not 0 <= number < settings.parts:
            raise UserError(
                "the corpus has no such part.",
                flag="--part",
                found=number,
                expected=f"0 to {settings.parts - 1}",
                next="name one of its parts, or change `parts` in its settings",
            )
    jobs = []
    for number, content in zip(numbers, contents, strict=True):
        built_from = digest_inputs(
            arguments.inputs,
            settings=to_dict(settings),
            part=number,
            content=content,
        )
        record = PartRecord(part_folder(arguments.output.parent, number), built_from)
        build = partial(
            build_part,
            settings,
            number=number,
            downloads=downloads,
            content=content,
        )
        jobs.append((record, f"corpus {settings.name}, part {number}", build))
    complete = partial(
        complete_part,
        list_files=list_part_files,
        describe=_format_rows,
        hold=partial(hold_run_folder, wait=wait),
    )
    for _ in map_processes(complete, jobs, processes=arguments.processes):
        pass
