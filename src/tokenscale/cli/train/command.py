"""Train a model on a file, a named corpus or random numbers, with ranks started here or by
torchrun.
"""

import argparse
import os

from tokenscale.base.errors import as_typed
from tokenscale.cli.train.inputs import prepare, print_summary, report_failure
from tokenscale.cli.train.request import parse_request
from tokenscale.runs.launch.start import start_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from tokenscale.settings import flags, source_studies

    usage = "%(prog)s [--dataset FILE|dummy|CORPUS] [options]\n"
    parser.usage = as_typed(
        usage + "       torchrun --nproc-per-node N -m tokenscale train [options]"
    )
    flags.add_flags(
        parser.add_argument_group("what to train, on what"), flags=source_studies.TRAIN_FLAGS
    )
    flags.add_flags(
        parser.add_argument_group("the settings of a run (docs/settings.md)"),
        flags=source_studies.RUN_FLAGS,
    )


def run(arguments: argparse.Namespace) -> int:
    """Prepare and train the run that the flags describe; return the exit code.

    A process that only starts ranks does not import torch.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from tokenscale.cli.train.torchrun import train_together

        return train_together(arguments)
    job = prepare(parse_request(arguments))
    exit_code = start_run(job.run, output=job.output, manifests=job.manifests)
    if exit_code == 0:
        print_summary(job.output.parent)
        exit_code = report_failure(job.output)
    return exit_code
