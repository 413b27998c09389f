"""One rank of an arm, as a launcher starts it."""

import argparse
import os
from pathlib import Path

from tokenscale.cli.rank import SRUN
from tokenscale.cli.rank import add_arguments as add_rank_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a rank, and the record of the arm's environment."""
    add_rank_arguments(parser)
    parser.add_argument("--arm", type=Path, help="results/arms/NAME/environment.json")


def run(arguments: argparse.Namespace) -> int:
    """Train one rank."""
    from tokenscale.arms.train import train
    from tokenscale.settings.run import RunSettings

    if arguments.srun:
        os.environ.update({ours: os.environ[theirs] for theirs, ours in SRUN.items()})
    place = int(os.environ.get("LOCAL_RANK", 0))
    os.environ.update({name: values[place] for name, values in arguments.by_local_rank.items()})
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    settings = RunSettings.from_json(arguments.settings)
    ranks = {"attempt": arguments.attempt, "rank": rank, "world_size": world_size}
    train(settings, arguments.store, arguments.arm, arguments.directory, **ranks, hang_s=arguments.hang_s)
    return 0
