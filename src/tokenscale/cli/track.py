"""Export a run's events to TensorBoard, MLflow or Weights & Biases (offline), after the run or
while it runs.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN_DIRECTORY", help="results/runs/RUN_ID"
    )
    parser.add_argument(
        "--to", required=True, metavar="TRACKER", help="tensorboard, mlflow or wandb"
    )
    text = "output folder; an earlier export is replaced"
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--follow", action="store_true", help="continue until every run is sealed")


def run(arguments: argparse.Namespace) -> None:
    """Export the runs and report the result."""
    from tokenscale.analysis.trackers import track

    def log(line: str) -> None:
        print(line, flush=True)

    track(
        arguments.runs,
        to=arguments.to,
        output=arguments.output,
        follow=arguments.follow,
        log=log,
    )
