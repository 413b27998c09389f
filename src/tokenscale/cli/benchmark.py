"""Side-by-side measurements, each apart from everything else."""

import argparse
import importlib
from pathlib import Path

from tokenscale.settings.benchmark import DataBenchmarkSettings, StorageBenchmarkSettings
from tokenscale.settings.inference import InferenceBenchmarkSettings
from tokenscale.settings.options import from_json

#: benchmark → the module that measures it, imported only when asked for
BENCHMARKS = {
    "data": "tokenscale.benchmark.data",
    "storage": "tokenscale.benchmark.storage",
    "inference": "tokenscale.benchmark.inference",
    "text": "tokenscale.benchmark.prose",
    "pretokenize": "tokenscale.benchmark.pretokenize",
    "training": "tokenscale.benchmark.training",
    "collectives": "tokenscale.benchmark.collectives",
    "analysis": "tokenscale.benchmark.analysis",
    "gpu": "tokenscale.benchmark.gpu",
    "workflow": "tokenscale.benchmark.workflow",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options: one set for each benchmark."""
    kinds = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    data = kinds.add_parser("data", help="tokenizing and reading, the five approaches side by side")
    data.add_argument("--settings", default="{}", metavar="JSON", help="sequence_length, rows, batches, rounds")
    data.add_argument("--corpus", required=True, type=Path, metavar="FILE", help="results/corpus/NAME/manifest.json")
    data.add_argument(
        "--tokenizer", required=True, type=Path, metavar="FILE", help="results/tokenizers/NAME/manifest.json"
    )
    data.add_argument("--stores", required=True, type=Path, metavar="DIR", help="results/tokens/CORPUS/TOKENIZER")
    data.add_argument("--output", required=True, type=Path, metavar="FILE", help="the JSON to write")
    data.add_argument("--peers", metavar="PYTHON", help="a Python with datasets, mosaicml-streaming or litdata")
    data.add_argument("--figure", type=Path, metavar="FILE", help="draw the table: .svg, .png or .pdf")
    storage = kinds.add_parser("storage", help="tokens at rest: the same ids in many ways, written and read in turns")
    storage.add_argument("--settings", default="{}", metavar="JSON", help="formats, dtypes, codecs, row_group_rows, …")
    storage.add_argument("--corpus", required=True, type=Path, metavar="FILE", help="results/corpus/NAME/manifest.json")
    storage.add_argument(
        "--tokenizer", required=True, type=Path, metavar="FILE", help="results/tokenizers/NAME/manifest.json"
    )
    storage.add_argument("--output", required=True, type=Path, metavar="FILE", help="the JSON to write")
    inference = kinds.add_parser("inference", help="what trained models write, with a cache of keys and values or none")
    inference.add_argument("--settings", default="{}", metavar="JSON", help="prompts, sampling, prompt_tokens, …")
    inference.add_argument("--run", nargs="+", required=True, type=Path, metavar="DIR", help="results/runs/RUN_ID, …")
    inference.add_argument("--output", required=True, type=Path, metavar="FILE", help="the JSON to write")
    inference.add_argument("--site", nargs="?", metavar="FILE", help="the machine's file; where it says srun, on a GPU")
    text = kinds.add_parser("text", help="real English text without repeats, to measure tokenizers with")
    text.add_argument("--megabytes", type=_positive, default=100.0, metavar="X", help="how much (default 100)")
    text.add_argument("--output", required=True, type=Path, metavar="FILE", help="the Parquet file to write")
    text.add_argument("--seed", type=int, default=0, metavar="N", help="of the order and of the lengths (default 0)")
    text.add_argument("--at-most", action="store_true", help="where the machine holds less, take what is there")
    job = kinds.add_parser("pretokenize", help="a corpus to a token store, against a plain script of transformers")
    job.add_argument("--corpus", required=True, type=Path, metavar="FILE", help="results/corpus/NAME/manifest.json")
    job.add_argument(
        "--tokenizer", required=True, type=Path, metavar="FILE", help="results/tokenizers/NAME/manifest.json"
    )
    job.add_argument("--stores", nargs="+", default=["packed-sequence_length=2048", "token-list"], metavar="NAME")
    job.add_argument("--rounds", type=int, default=3, metavar="N", help="everything is timed once in each")
    job.add_argument("--cores", type=int, default=1, metavar="N", help="that each side may use")
    job.add_argument(
        "--memory", nargs="*", type=int, default=[], metavar="MB", help="peak memory on so much made-up text"
    )
    job.add_argument("--output", required=True, type=Path, metavar="FILE", help="the JSON to write")
    training = kinds.add_parser("training", help="a step here, in a loop over transformers, and in its Trainer")
    training.add_argument("--models", nargs="+", default=["llama-tiny", "llama-small", "gpt2-tiny"], metavar="PRESET")
    training.add_argument("--steps", type=int, default=10, metavar="N", help="timed in each round (default 10)")
    training.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="each arm has its turn in each (default 5)"
    )
    training.add_argument("--output", type=Path, metavar="FILE", help="the JSON to write")
    collectives = kinds.add_parser(
        "collectives", help="what an exchange between ranks takes: alpha and beta of the link"
    )
    collectives.add_argument("--world-size", type=int, default=2, metavar="N", help="ranks (default 2; torchrun's own)")
    collectives.add_argument("--sizes", nargs="+", type=int, metavar="BYTES", help="default 4 KiB to 64 MiB, by fours")
    collectives.add_argument("--collectives", nargs="+", metavar="NAME", help="all_reduce, all_gather, reduce_scatter")
    collectives.add_argument("--rounds", type=int, default=5, metavar="N", help="everything is timed once in each")
    collectives.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu: gloo, GPUs or not")
    collectives.add_argument("--output", type=Path, metavar="FILE", help="the JSON to write, which `predict` reads")
    analysis = kinds.add_parser("analysis", help="from logs to numbers: ingest and two questions, beside pandas")
    analysis.add_argument("--logs", type=int, default=200, metavar="N", help="of one rank each (default 200)")
    analysis.add_argument("--steps", type=int, default=10_000, metavar="N", help="lines of a log (default 10000)")
    analysis.add_argument("--rounds", type=int, default=3, metavar="N", help="each arm has its turn in each")
    analysis.add_argument("--threads", type=int, default=2, metavar="N", help="that ingest may use (default 2)")
    analysis.add_argument("--output", type=Path, metavar="FILE", help="the JSON to write")
    gpu = kinds.add_parser("gpu", help="tokens/s and MFU on one GPU, case by case; at toy size without one")
    gpu.add_argument("--output", required=True, type=Path, metavar="DIR", help="one JSON a case; those there are kept")
    gpu.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases, by the beginnings of their names")
    gpu.add_argument(
        "--seconds", type=_positive, default=1e9, metavar="S", help="begin no case that may not end in them"
    )
    gpu.add_argument("--again", action="store_true", help="measure cases whose file is there, too")
    gpu.add_argument("--case", metavar="NAME", help="this one, in this process")
    workflow = kinds.add_parser("workflow", help="planning: how long `snakemake --dry-run` takes for many runs")
    workflow.add_argument("--runs", nargs="+", type=int, default=[500, 2000], metavar="N", help="how many, each timed")
    workflow.add_argument("--rounds", type=int, default=3, metavar="N", help="everything is timed once in each")
    states = ["cold", "complete", "checkout"]
    workflow.add_argument("--states", nargs="+", choices=states, default=states, help="nothing built, all built, …")
    workflow.add_argument("--profiles", nargs="+", default=["none"], metavar="P", help="as Snakemake's; each is timed")


def run(arguments: argparse.Namespace) -> int | None:
    """Measure and print the table. Returns the exit code of a process that was started for it elsewhere."""
    if arguments.benchmark == "inference" and arguments.site:
        machine = importlib.import_module("tokenscale.settings.machine").load(arguments.site)
        if machine.starter == "srun":
            words = ["benchmark", "inference", "--settings", arguments.settings, "--output", str(arguments.output)]
            alone = importlib.import_module("tokenscale.runs.launch.single_rank")
            return alone.run(machine, [*words, "--run", *map(str, arguments.run)])
    module = importlib.import_module(BENCHMARKS[arguments.benchmark])
    if arguments.benchmark == "workflow":
        print(module.table(module.measure(arguments.runs, arguments.rounds, arguments.states, arguments.profiles)))
        return
    if arguments.benchmark == "training":
        options = {"models": tuple(arguments.models), "steps": arguments.steps, "rounds": arguments.rounds}
        print(module.table(module.measure(arguments.output, **options)))
        return
    if arguments.benchmark == "analysis":
        options = {name: getattr(arguments, name) for name in ("logs", "steps", "rounds", "threads")}
        print(module.table(module.measure(arguments.output, **options)))
        return
    if arguments.benchmark == "collectives":
        options = {
            name: getattr(arguments, name) for name in ("world_size", "sizes", "collectives", "rounds", "device")
        }
        result = module.measure(arguments.output, **{k: v for k, v in options.items() if v is not None})
        if result is not None:
            print(module.table(result))
        return
    if arguments.benchmark == "gpu":
        if arguments.case:
            print(module.line(module.run_case(arguments.case, arguments.output)))
            return
        options = {"names": arguments.only, "again": arguments.again, "budget_s": arguments.seconds}
        module.measure(arguments.output, **options)
        return
    if arguments.benchmark == "text":
        facts = module.build(arguments.output, arguments.megabytes, seed=arguments.seed, at_most=arguments.at_most)
        print(module.table(facts))
        return
    if arguments.benchmark == "pretokenize":
        folders = arguments.corpus.parent, arguments.tokenizer.parent
        options = {name: getattr(arguments, name) for name in ("stores", "rounds", "cores", "memory")}
        print(module.table(module.measure(*folders, arguments.output, **options)))
        return
    if arguments.benchmark == "storage":
        settings = from_json(StorageBenchmarkSettings, arguments.settings)
        folders = arguments.corpus.parent, arguments.tokenizer.parent
        result = module.measure(settings, *folders, arguments.output)
        print(importlib.import_module("tokenscale.benchmark.storage").table(result))
        return
    if arguments.benchmark == "inference":
        settings = from_json(InferenceBenchmarkSettings, arguments.settings)
        result = module.measure(settings, arguments.run, arguments.output)
        print(importlib.import_module("tokenscale.benchmark.inference").table(result))
        return
    settings = from_json(DataBenchmarkSettings, arguments.settings)
    folders = arguments.corpus.parent, arguments.tokenizer.parent, arguments.stores
    result = module.measure(settings, *folders, arguments.output, peers=arguments.peers)
    shown = importlib.import_module("tokenscale.benchmark.data_table")
    if arguments.figure:
        shown.draw(result, arguments.figure)
    print(shown.table(result))


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number
