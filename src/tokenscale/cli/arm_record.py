"""Record the first steps of a run for its parity certificate: of this project's trainer, or of an
arm.
"""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run", required=True, metavar="JSON", help="the run's settings as canonical JSON"
    )
    parser.add_argument("--store", required=True, type=Path, help="manifest of the token store")
    parser.add_argument(
        "--arm", type=Path, nargs="?", help="results/arms/NAME/environment.json of another trainer"
    )
    parser.add_argument(
        "--output", required=True, type=Path, help="results/parity/<run id>/outcome.json"
    )
    parser.add_argument(
        "--site",
        nargs="?",
        metavar="FILE",
        help="the machine's file; with srun there, record on a GPU",
    )


def run(arguments: argparse.Namespace) -> int:
    """Record, or start the recording by srun and return its exit code. A failure is written into
    the output: the certificate then gives it as its reason.
    """
    if arguments.site:
        from tokenscale.runs.launch.start import run_on_site

        words = ["arm_record", "--run", arguments.run, "--store", str(arguments.store)]
        words += ["--output", str(arguments.output)]
        if arguments.arm is not None:
            words += ["--arm", str(arguments.arm)]
        # the recording empties its own folder
        folder = arguments.output.parent
        file = folder.with_name(f"{folder.name}.arguments.json")
        exit_code = run_on_site(arguments.site, words, arguments_file=file)
        if exit_code is not None:
            return exit_code
    from tokenscale.arms.record import record
    from tokenscale.runs.launch.lock import hold_run_folder
    from tokenscale.settings.run import RunSettings

    settings = RunSettings.from_json(arguments.run)
    folder = arguments.output.parent
    with hold_run_folder(folder, what=f"the recording of {settings.identity}", wait=True) as held:
        reason = record(
            settings,
            store=arguments.store,
            environment=arguments.arm,
            folder=folder,
            keep=(held,),
        )
    if reason:
        print(
            f"tokenscale: {settings.identity} has no recording.\n  reason  {reason}",
            file=sys.stderr,
        )
    return 0
