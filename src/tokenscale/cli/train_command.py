"""The verb `train`: ranks started here, or those that torchrun has started."""

import argparse
import importlib
import os

from tokenscale.analysis.live import summary_lines
from tokenscale.cli.train_inputs import prepare
from tokenscale.cli.train_request import request
from tokenscale.runs.launch.start import start


def run(arguments: argparse.Namespace) -> int:
    """Prepare and train the run that the flags ask for; returns the exit code. No torch is imported in a process that
    only starts ranks."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return importlib.import_module("tokenscale.cli.train_torchrun").train_together(arguments)
    job = prepare(request(arguments), lambda line: print(line, flush=True))
    exit_code = start(job.run, job.output, job.manifests)
    if exit_code == 0:
        print("\n".join(summary_lines(job.output.parent)))
    return exit_code
