"""One rank of a run, as torchrun, srun or our own launcher starts it. What this imports is a training's code."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Paths are those of manifests; what lies beside them is read."""
    parser.add_argument("--run", required=True, help="the run's settings as canonical JSON")
    parser.add_argument("--directory", required=True, type=Path, help="results/runs/<run id>")
    parser.add_argument("--attempt", type=int, default=0, help="number of this attempt")
    parser.add_argument(
        "--corpus", type=Path, help="manifest of the raw corpus (approaches that tokenize while training)"
    )
    parser.add_argument("--tokenizer", type=Path, help="manifest of the tokenizer (the same approaches)")
    parser.add_argument("--store", type=Path, help="manifest of the token store (the other approaches)")
    parser.add_argument("--validation-store", type=Path, help="manifest of the packed validation store")


def run(arguments: argparse.Namespace) -> int:
    """Join the other ranks, train, part."""
    from tokenscale.parallel.world import heard_last, join, part
    from tokenscale.settings.run import RunSettings
    from tokenscale.training.loop import Inputs, train

    def folder(manifest: Path | None) -> Path | None:
        return manifest.parent if manifest else None

    settings = RunSettings.from_json(arguments.run)
    inputs = Inputs(
        corpus=folder(arguments.corpus),
        tokenizer=folder(arguments.tokenizer),
        store=arguments.store,  # the manifest: a store may be one file among others of its folder
        validation_store=arguments.validation_store,
    )
    world = join(settings.layout.world_size, settings.device)
    with heard_last(world):
        train(settings, inputs, arguments.directory, world, arguments.attempt)
    part(world)
    return 0
