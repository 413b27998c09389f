"""What an experiment would run, and on what; or, with --output, its run table as a file."""

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment, and the configuration to read it from."""
    parser.add_argument("experiment", nargs="*", help="names of experiments; by default those of the report")
    parser.add_argument("--config", default="config/config.yaml", help="configuration file")
    parser.add_argument("--config-json", type=json.loads, help="configuration as JSON, instead of the file")
    parser.add_argument("--scale", help="overlay to use instead of the configured one")
    parser.add_argument("--gpus-per-node", type=int, help="count nodes of so many GPUs")
    parser.add_argument("--output", type=Path, help="write the run table of one experiment as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print or write."""
    from tokenscale.errors import UserError
    from tokenscale.files import write_json
    from tokenscale.settings import config as configuration

    stated = {"scale": arguments.scale, "gpus_per_node": arguments.gpus_per_node}
    overrides = {key: value for key, value in stated.items() if value is not None}
    if arguments.config_json is not None:
        config = configuration.Config({**arguments.config_json, **overrides})
    else:
        config = configuration.load(arguments.config, overrides=overrides)
    names = arguments.experiment or list(config.settings.experiments)
    if arguments.output:
        if len(names) != 1:
            raise UserError("--output takes one experiment.", found=", ".join(names))
        write_json(arguments.output, config.table(names[0]))
        return 0
    for line in _lines(config, names):
        print(line)
    return 0


def _lines(config, names):
    from tokenscale.settings.geometry import geometry

    yield f"scale {config.settings.scale}"
    for name in config.corpora_of(names):
        if config.corpora[name].source.downloaded is False:
            yield f"corpus {name}: not yet downloaded by anybody with this configuration; its hashes are not known here"
    for name in names:
        runs = config.runs(name)
        experiment = config.experiment(name)
        yield f"{name}: {len(runs)} runs ({experiment.repeats} repeats). {experiment.question}"
        sizes = sorted({run.settings.layout.world_size for run in runs})
        for size in sizes:
            of_size = [run.settings for run in runs if run.settings.layout.world_size == size]
            shape = geometry(size, config.settings.gpus_per_node)
            counted = [run for run in of_size if run.budget.kind == "steps"]
            steps = sum(run.budget.steps for run in counted)
            tokens = sum(run.budget.steps * run.global_batch * run.sequence_length for run in counted)
            others = f", and {len(of_size) - len(counted)} whose budget is no number of steps"
            yield (
                f"  world size {size:>2}: {len(of_size):>4} runs on {shape.nodes} x {shape.ranks_per_node} ranks"
                f", {steps:,} steps, {tokens:,} tokens{others if len(counted) < len(of_size) else ''}"
            )
    shared = sum(len(config.runs(n)) for n in names) - len(config.all_runs(names))
    if shared:
        yield f"{shared} run(s) are shared between experiments and run once"
