"""Train a model on a file, a named corpus or random numbers, with ranks started here or by
torchrun.
"""

import argparse
import os
import sys
from pathlib import Path

from tokenscale.base.errors import UserError, as_typed
from tokenscale.base.files import read_json
from tokenscale.cli.train.inputs import prepare, print_summary
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
    exit_code = start_run(job.run, job.output, job.manifests)
    if exit_code == 0:
        print_summary(job.output.parent)
        exit_code = report_failure(job.output)
    return exit_code


def report_failure(output: Path) -> int:
    """Return 0 for a run that is complete. Of any other, say how it ended and return 1: what
    follows in a script finds no model.
    """
    status = read_json(output, what="record of the run's end")["status"]
    if status == "complete":
        return 0
    error = UserError(
        f"the run has ended, but it is not complete: {status}.",
        run=output.parent,
        next="lower the learning rate, warm up for longer, or clip gradients, if its loss was no number",
    )
    print(error.render(), file=sys.stderr)
    return 1
