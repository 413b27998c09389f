"""Train a model: on a file, a corpus by name, or random numbers; ranks started here or by torchrun."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags in the studies' words, and one for each setting of a run."""
    from tokenscale.settings import flags, study

    parser.usage = (
        "%(prog)s [--dataset FILE|dummy|CORPUS] [--training-steps N] [--world-size N] [options]\n"
        "       torchrun --nproc-per-node N -m tokenscale train [options]"
    )
    flags.add(parser.add_argument_group("what to train, on what"), study.TRAIN_FLAGS)
    flags.add(parser.add_argument_group("the settings of a run (config/README.md)"), study.RUN_FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Hand over to `commands.train`."""
    from tokenscale.cli import train_command as command

    return command.run(arguments)
