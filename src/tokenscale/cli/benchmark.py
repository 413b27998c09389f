"""Run side-by-side measurements, each in isolation."""

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.settings.benchmark import DataBenchmarkSettings, StorageBenchmarkSettings
from tokenscale.settings.inference import InferenceBenchmarkSettings
from tokenscale.settings.options import from_json

#: benchmarks of this project's own speed, which are scripts of the repository
SCRIPTS = {
    "analysis": "benchmarks/analysis.py",
    "pretokenize": "benchmarks/pretokenize.py",
    "text": "benchmarks/prose.py",
    "workflow": "benchmarks/workflow.py",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one set of options for each benchmark."""
    kinds = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (help_text, add, _) in BENCHMARKS.items():
        add(kinds.add_parser(name, help=help_text))
    for name in SCRIPTS:
        moved: Any = kinds.add_parser(name)
        # accept any options: `run` reports the new location
        moved.parse_known_args = lambda _, namespace=None: (namespace or argparse.Namespace(), [])


def run(arguments: argparse.Namespace) -> int | None:
    """Run a benchmark and print its table. Return the exit code of a process that was started elsewhere, if any."""
    if (script := SCRIPTS.get(arguments.benchmark)) is not None:
        raise UserError(
            f"the benchmark {arguments.benchmark} is now a script of the repository.",
            next=f"python {script} --help",
        )
    # imported by name: a rule lists the module of its own benchmark as its code
    measure = BENCHMARKS[arguments.benchmark][2]
    return measure(importlib.import_module(f"tokenscale.benchmark.{arguments.benchmark}"), arguments)


def _add_corpus_and_tokenizer(parser: argparse.ArgumentParser) -> None:
    required: dict[str, Any] = {"required": True, "type": Path, "metavar": "FILE"}
    parser.add_argument("--corpus", **required, help="results/corpus/NAME/manifest.json")
    parser.add_argument("--tokenizer", **required, help="results/tokenizers/NAME/manifest.json")


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settings", default="{}", metavar="JSON", help="sequence_length, rows, batches, rounds")
    _add_corpus_and_tokenizer(parser)
    parser.add_argument("--stores", type=Path, metavar="DIR", help="results/tokens/CORPUS/TOKENIZER")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="the JSON to write")
    parser.add_argument(
        "--size",
        type=_parse_positive,
        metavar="GB",
        help="instead of --stores: compare the corpus with one of GB gigabytes of text, made by repeating it",
    )
    parser.add_argument("--cold", action="store_true", help="with --size: also read what is not in the page cache")
    parser.add_argument("--peers", metavar="PYTHON", help="a Python with datasets, mosaicml-streaming or litdata")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the table: .svg, .png or .pdf")


def _measure_data(module: ModuleType, arguments: argparse.Namespace) -> None:
    settings = from_json(DataBenchmarkSettings, arguments.settings)
    if (arguments.size is None) == (arguments.stores is None):
        raise UserError("one of --stores and --size is needed.", next="python -m tokenscale benchmark data --help")
    if arguments.size is not None:
        sizes = importlib.import_module("tokenscale.benchmark.sizes")
        given = arguments.corpus.parent, arguments.tokenizer.parent
        found = sizes.measure(settings, *given, int(arguments.size * 1e9), arguments.output, cold=arguments.cold)
        print(sizes.format_table(found))
        return
    folders = arguments.corpus.parent, arguments.tokenizer.parent, arguments.stores
    result = module.measure(settings, *folders, arguments.output, peers=arguments.peers)
    if arguments.figure:
        module.draw(result, arguments.figure)
    print(module.format_table(result))


def _add_storage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settings", default="{}", metavar="JSON", help="formats, dtypes, codecs, row_group_rows, …")
    _add_corpus_and_tokenizer(parser)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="the JSON to write")


def _measure_storage(module: ModuleType, arguments: argparse.Namespace) -> None:
    settings = from_json(StorageBenchmarkSettings, arguments.settings)
    print(
        module.format_table(
            module.measure(settings, arguments.corpus.parent, arguments.tokenizer.parent, arguments.output)
        )
    )


def _add_inference(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settings", default="{}", metavar="JSON", help="prompts, sampling, prompt_tokens, …")
    parser.add_argument("--run", nargs="+", required=True, type=Path, metavar="DIR", help="results/runs/RUN_ID, …")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="the JSON to write")
    parser.add_argument("--site", nargs="?", metavar="FILE", help="the machine's file; with srun there, run on a GPU")


def _measure_inference(module: ModuleType, arguments: argparse.Namespace) -> int | None:
    if arguments.site:
        machine = importlib.import_module("tokenscale.settings.machine").load_machine(arguments.site)
        if machine.starter == "srun":
            words = ["benchmark", "inference", "--settings", arguments.settings, "--output", str(arguments.output)]
            single_rank = importlib.import_module("tokenscale.runs.launch.single_rank")
            return single_rank.run_single_rank(machine, [*words, "--run", *map(str, arguments.run)])
    settings = from_json(InferenceBenchmarkSettings, arguments.settings)
    print(module.format_table(module.measure(settings, arguments.run, arguments.output)))
    return None


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=["llama-tiny", "llama-small", "gpt2-tiny"], metavar="PRESET")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps in each round (default 10)")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="every arm is timed once in each (default 5)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="the JSON to write")


def _measure_training(module: ModuleType, arguments: argparse.Namespace) -> None:
    options = {"models": tuple(arguments.models), "steps": arguments.steps, "rounds": arguments.rounds}
    print(module.format_table(module.measure(arguments.output, **options)))


def _add_collectives(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world-size", type=int, default=2, metavar="N", help="ranks (default 2; torchrun's own)")
    parser.add_argument("--sizes", nargs="+", type=int, metavar="BYTES", help="default 4 KiB to 64 MiB, by fours")
    parser.add_argument("--collectives", nargs="+", metavar="NAME", help="all_reduce, all_gather, reduce_scatter")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="everything is timed once in each round")
    parser.add_argument(
        "--device", choices=("auto", "cpu"), default="auto", help="cpu: gloo, even where there is a GPU"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="the JSON to write, which `predict` reads")


def _measure_collectives(module: ModuleType, arguments: argparse.Namespace) -> None:
    names = ("world_size", "sizes", "collectives", "rounds", "device")
    options = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if (result := module.measure(arguments.output, **options)) is not None:
        print(module.format_table(result))


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="DIR", help="one JSON a case; finished ones stay")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the cases, their memory and expected minutes; needs no GPU"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases, by the beginnings of their names")
    parser.add_argument(
        "--seconds",
        type=_parse_positive,
        default=1e9,
        metavar="S",
        help="begin no case that may not end within S seconds",
    )
    parser.add_argument("--again", action="store_true", help="repeat cases that have a file already")
    parser.add_argument("--case", metavar="NAME", help="run this one case in this process")


def _measure_gpu(module: ModuleType, arguments: argparse.Namespace) -> None:
    if arguments.dry_run:
        print(module.format_plan())
        return
    if arguments.output is None:
        raise UserError("benchmark gpu needs a folder for its results.", next="--output gpu-results, or --dry-run")
    if arguments.case:
        print(module.format_case(module.run_case(arguments.case, arguments.output)))
    else:
        options = {"names": arguments.only, "again": arguments.again, "budget_s": arguments.seconds}
        module.measure(arguments.output, **options)


def _parse_positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


#: benchmark → (its purpose, adds its options, calls its module `tokenscale.benchmark.NAME`)
BENCHMARKS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[..., int | None]]] = {
    "data": ("tokenize and read batches, all data-loading strategies side by side", _add_data, _measure_data),
    "storage": ("write and read the same token ids in every format", _add_storage, _measure_storage),
    "inference": ("generate text with and without a key-value cache", _add_inference, _measure_inference),
    "training": (
        "a training step against a plain loop over transformers and its Trainer",
        _add_training,
        _measure_training,
    ),
    "collectives": (
        "time collectives between ranks: latency and bandwidth of the link",
        _add_collectives,
        _measure_collectives,
    ),
    "gpu": ("tokens/s and MFU on one GPU, case by case; toy sizes on a CPU", _add_gpu, _measure_gpu),
}
