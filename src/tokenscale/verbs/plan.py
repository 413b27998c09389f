"""What an experiment would run, on what, and the memory it needs; or, with --output, its run table as a file."""

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The experiment, and the configuration to read it from."""
    parser.add_argument("experiment", nargs="*", help="names of experiments; by default those of the report")
    parser.add_argument("--config", default="config/config.yaml", help="configuration file")
    parser.add_argument("--config-json", type=json.loads, help="configuration as JSON, instead of the file")
    parser.add_argument("--scale", help="overlay to use instead of the configured one")
    parser.add_argument("--machine", help="file of the machine to count nodes of, such as profiles/alps/machine.toml")
    parser.add_argument("--output", type=Path, help="write the run table of one experiment as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print or write."""
    from tokenscale.errors import UserError
    from tokenscale.files import write_json
    from tokenscale.settings import config as configuration

    stated = {"scale": arguments.scale, "machine": arguments.machine}
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
            shape = geometry(size, config.machine.gpus_per_node)
            counted = [run for run in of_size if run.budget.kind == "steps"]
            steps = sum(run.budget.steps for run in counted)
            tokens = sum(run.budget.steps * run.global_batch * run.sequence_length for run in counted)
            others = f", and {len(of_size) - len(counted)} whose budget is no number of steps"
            yield (
                f"  world size {size:>2}: {len(of_size):>4} runs on {shape.nodes} x {shape.ranks_per_node} ranks"
                f", {steps:,} steps, {tokens:,} tokens{others if len(counted) < len(of_size) else ''}"
            )
        yield from _memory([run.settings for run in runs])
    shared = sum(len(config.runs(n)) for n in names) - len(config.all_runs(names))
    if shared:
        yield f"{shared} run(s) are shared between experiments and run once"


def _memory(runs):
    """A line for each model, rows of a pass and precision; layouts that need the same stand together."""
    found, unknown = {}, {}
    for run in sorted(runs, key=_place):
        held, reason = _held(run)
        if reason:
            unknown[f"    {run.model.name}: {reason}"] = None
            continue
        what = (run.model.name, f"{run.micro_batch} x {run.sequence_length}", run.precision, _options(run), *held)
        found.setdefault(what, {})[_layout(run.layout)] = None
    kernels = "a CPU's" if all(run.device == "cpu" for run in runs) else "a GPU's"
    yield f"  memory of the rank with the most, predicted for {kernels} kernels:"
    lines = [(model, ", ".join(layouts), *rest) for (model, *rest), layouts in found.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for *said, total, parts in lines:
        *wide, room, _ = widths
        columns = [text.ljust(width) for text, width in zip(said, wide, strict=True) if width]
        yield f"    {'  '.join(columns)}  {total.rjust(room)} = {parts}"
    yield from unknown


def _place(run):
    """Small layouts first, those of one kind together."""
    layout = run.layout
    return run.model.name, layout.world_size, layout.method, run.micro_batch, run.precision, _options(run)


def _layout(layout):
    """Degrees above 1 in words."""
    names = {"shard": layout.sharding, "pipeline": layout.schedule}
    degrees = ((degree, getattr(layout, degree)) for degree in ("data", "shard", "tensor", "pipeline"))
    return " ".join(f"{names.get(degree, degree)} {size}" for degree, size in degrees if size > 1) or "one rank"


def _options(run):
    """What else a run's memory depends on."""
    again = run.activation_checkpointing
    named = {
        f"{again} checkpointing": again != "none",
        f"loss_chunk {run.loss_chunk}": run.loss_chunk,
        "document_mask": run.document_mask,
        "compile": run.compile,
        "float8": run.float8,
    }
    return ", ".join(name for name, said in named.items() if said)


def _held(run):
    """((sum, parts), None), or (None, why they are not known)."""
    from dataclasses import asdict, replace

    from tokenscale.costs.memory import largest
    from tokenscale.errors import UserError

    vocabulary = run.model.vocabulary_size or run.tokenizer.vocabulary_size
    if vocabulary is None:
        return None, f"not known before the tokenizer {run.tokenizer.name} is built, which decides the vocabulary"
    kernels = "cpu" if run.device == "cpu" else "cuda"
    try:
        held = largest(replace(run, model=run.model.with_vocabulary(vocabulary)), kernels)
    except (ImportError, UserError):
        return None, f"not known without the library transformers, which builds {run.model.transformers}"
    unit, name = (1 << 30, "GiB") if held.total >= 1 << 30 else (1 << 20, "MiB")
    parts = [
        f"{part}, which are not predicted" if size is None else f"{size / unit:.2f} {part}"
        for part, size in asdict(held).items()
    ]
    return (f"{held.total / unit:.2f} {name}", " + ".join(parts)), None
