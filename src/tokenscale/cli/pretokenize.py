"""Write one token store from raw Parquet, as the workflow's rules do, or Parquet files of tokens
from a text file.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.processes import map_processes
from tokenscale.base.progress import Progress
from tokenscale.data.corpus.raw_text import read_corpus_manifest
from tokenscale.data.parts import PartRecord, complete_part, digest_inputs, part_folder
from tokenscale.data.stores.writing import describe_store, list_files, merge_store, write_store
from tokenscale.runs.launch.lock import hold_run_folder
from tokenscale.settings.data import StoreSettings

RULE = ("store", "corpus", "tokenizer", "output")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from tokenscale.cli import pretokenize_file

    parser.usage = "%(prog)s --input-path FILE --output-dir DIR …\n"
    parser.usage += "       %(prog)s --store NAME --corpus FILE --output FILE"
    pretokenize_file.add_arguments(parser)
    rule = parser.add_argument_group("write one store of a corpus, as the workflow's rules do")
    rule.add_argument("--store", metavar="NAME", help="for example padded-sequence_length=2048")
    rule.add_argument(
        "--corpus", type=Path, metavar="FILE", help="results/corpus/NAME/manifest.json"
    )
    text = "results/tokenizers/NAME/manifest.json; Tekken's by default"
    rule.add_argument("--tokenizer", type=Path, metavar="FILE", help=text)
    rule.add_argument("--threads", type=int, help="threads of the engine (default: one per core)")
    rule.add_argument(
        "--engine", default="auto", help="tokenization engine; auto: the fastest exact one"
    )
    text = "merge the N parts of the store in the output's folder"
    rule.add_argument("--parts", type=int, default=1, metavar="N", help=text)
    text = "write these parts (from 0) of the N parts, each with one process"
    rule.add_argument("--part", type=int, nargs="+", metavar="K", help=text)
    text = "processes that write parts"
    rule.add_argument("--processes", type=int, default=1, metavar="N", help=text)
    text = "results/tokens/…/manifest.json; parts are written in its folder"
    rule.add_argument("--output", type=Path, metavar="FILE", help=text)
    text = "files that finished parts were built from: with other content they are written again"
    rule.add_argument("--inputs", type=Path, nargs="+", default=[], metavar="FILE", help=text)


def run(arguments: argparse.Namespace, wait: bool = True) -> None:
    """Write the tokens and report the result."""
    from tokenscale.cli import pretokenize_file

    of_file = [
        flag.name for flag in pretokenize_file.FLAGS if getattr(arguments, flag.key) is not None
    ]
    of_rule = [f"--{name}" for name in RULE if getattr(arguments, name)]
    if of_file and of_rule:
        what = "the flags belong to two modes of this command."
        next_step = "use one mode: tokenscale pretokenize --help"
        raise UserError(what, file=" ".join(of_file), corpus=" ".join(of_rule), next=next_step)
    if not of_rule:
        return pretokenize_file.run(arguments)
    _check_flags(arguments)
    if arguments.threads:
        os.environ["RAYON_NUM_THREADS"] = str(arguments.threads)
    return _write(arguments, wait)


def _check_flags(arguments: argparse.Namespace) -> None:
    for name in RULE:
        if name != "tokenizer" and getattr(arguments, name) is None:
            raise UserError(f"--{name} is missing.", next="tokenscale pretokenize --help")


def _write(arguments: argparse.Namespace, wait: bool) -> None:
    """Write the store of a corpus, some parts of it, or the manifest of all its parts."""
    store = StoreSettings.parse(arguments.store)
    tokenizer = arguments.tokenizer or Path("results/tokenizers/tekken/manifest.json")
    numbers = arguments.part
    parts = arguments.parts
    if parts < 1 or not all(0 <= number < parts for number in numbers or ()):
        what = "--part must be from 0 to --parts - 1."
        found = f"--part {' '.join(map(str, numbers or ()))} --parts {parts}"
        raise UserError(what, found=found, next="--parts 8 --part 0, for example")
    corpus = arguments.corpus.parent
    documents = read_corpus_manifest(corpus)["splits"][store.split]["rows"]
    directory = arguments.output.parent
    if numbers is not None:
        _write_parts(store, arguments, tokenizer=tokenizer.parent, wait=wait)
        return
    name = f"store {store.directory}"
    progress = Progress(name, total=documents)
    with hold_run_folder(directory, what=f"the {name}", wait=wait):
        if parts > 1:
            manifest = merge_store(
                store,
                corpus_directory=corpus,
                directory=directory,
                parts=parts,
            )
        else:
            manifest = write_store(
                store,
                corpus_directory=corpus,
                tokenizer_directory=tokenizer.parent,
                directory=directory,
                report=progress,
                engine=arguments.engine,
            )
    progress.close()
    print(f"{progress.line()}; {describe_store(manifest)}")


def _write_parts(
    store: StoreSettings, arguments: argparse.Namespace, tokenizer: Path, wait: bool
) -> None:
    """Write the parts that an earlier job has not finished, several at a time."""
    jobs = []
    for number in arguments.part:
        built_from = digest_inputs(
            arguments.inputs,
            store=store.directory,
            engine=arguments.engine,
            part=number,
            parts=arguments.parts,
        )
        record = PartRecord(part_folder(arguments.output.parent, number), built_from)
        write = partial(
            write_store,
            store,
            corpus_directory=arguments.corpus.parent,
            tokenizer_directory=tokenizer,
            engine=arguments.engine,
            part=(number, arguments.parts),
        )
        jobs.append((record, f"store {store.directory}, part {number}", write))
    complete = partial(
        complete_part,
        list_files=list_files,
        describe=_describe_part,
        hold=partial(hold_run_folder, wait=wait),
    )
    for _ in map_processes(complete, jobs, processes=arguments.processes):
        pass


def _describe_part(manifest: dict[str, Any]) -> str:
    if not manifest["documents"]:
        return "no documents fall into this part"
    return describe_store(manifest)
