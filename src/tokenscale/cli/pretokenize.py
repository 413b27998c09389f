"""Write one token store from raw Parquet, as the workflow's rules do, or Parquet files of tokens
from a text file.
"""

import argparse
import os
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.base.progress import Progress
from tokenscale.data.corpus.raw_text import read_corpus_manifest
from tokenscale.data.stores.writing import describe_store, merge_store, write_store
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
    rule.add_argument("--part", type=int, metavar="K", help="write part K (from 0) of the N parts")
    rule.add_argument(
        "--output", type=Path, metavar="FILE", help="results/tokens/…/[parts/NNNNN/]manifest.json"
    )


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
    """Write the store of a corpus, one part of it, or the manifest of all its parts."""
    store = StoreSettings.parse(arguments.store)
    tokenizer = arguments.tokenizer or Path("results/tokenizers/tekken/manifest.json")
    part = arguments.part
    parts = arguments.parts
    if parts < 1 or (part is not None and not 0 <= part < parts):
        what = "--part must be from 0 to --parts - 1."
        found = f"--part {part} --parts {parts}"
        raise UserError(what, found=found, next="--parts 8 --part 0, for example")
    documents = read_corpus_manifest(arguments.corpus.parent)["splits"][store.split]["rows"]
    name = f"store {store.directory}" + (f", part {part}" if part is not None else "")
    progress = Progress(name, total=documents if part is None else None)
    corpus = arguments.corpus.parent
    directory = arguments.output.parent
    with hold_run_folder(directory, what=f"the {name}", wait=wait):
        if part is None and parts > 1:
            manifest = merge_store(
                store,
                corpus_directory=corpus,
                directory=directory,
                parts=parts,
            )
        else:
            options = {"engine": arguments.engine, "part": None if part is None else (part, parts)}
            manifest = write_store(
                store,
                corpus_directory=corpus,
                tokenizer_directory=tokenizer.parent,
                directory=directory,
                report=progress,
                **options,
            )
    progress.close()
    if manifest["documents"] == 0:
        print(f"{progress.line()}; no documents fall into this part")
    else:
        print(f"{progress.line()}; {describe_store(manifest)}")
