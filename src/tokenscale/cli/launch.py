"""Start a run's processes here or in a SLURM job, wait for them, and write done.json from the
sealed record.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.cli import main
from tokenscale.data.batches.repetitions import check_repetitions
from tokenscale.runs.launch.start import Launch, find_job, start_run
from tokenscale.settings.extensions import verify_extensions
from tokenscale.settings.machine import Machine, load_machine
from tokenscale.settings.run import RunSettings

if TYPE_CHECKING:
    from tokenscale.settings.config import Config

ROLES = ("corpus", "tokenizer", "store", "validation_store", "arm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that give a run by its id, as `plan` lists it, or by its settings, as the
    rule does.
    """
    parser.usage = (
        "%(prog)s RUN_ID [--profile alps] [--print]\n       %(prog)s --run JSON --output FILE "
        "[options]"
    )
    parser.add_argument("run_id", nargs="*", metavar="RUN_ID", help="a run of an experiment")
    main.add_configuration_arguments(parser)
    parser.add_argument(
        "--print", action="store_true", help="print the command of its processes, and start nothing"
    )
    parser.add_argument("--run", help="the run's settings as canonical JSON, instead of its id")
    parser.add_argument("--output", type=Path, help="results/runs/<run id>/done.json")
    for role in ROLES:
        option = f"--{role.replace('_', '-')}"
        text = f"manifest of the {role.replace('_', ' ')}"
        parser.add_argument(option, type=Path, nargs="?", help=text)
    of_site = "file of the machine (docs/settings.md); by default this one as it is"
    parser.add_argument("--site", nargs="?", help=of_site)
    parser.add_argument(
        "--share", type=int, default=1, help="most runs that have this run's nodes at the same time"
    )


def run(arguments: argparse.Namespace) -> int:
    """Start the run, or print its command."""
    if arguments.run is None:
        run, output, manifests, machine = find_run(
            arguments.run_id, settings=main.load_configuration(arguments)
        )
    elif arguments.output is None:
        raise UserError("--run needs --output.", next="--output results/runs/<run id>/done.json")
    else:
        run = RunSettings.from_json(arguments.run)
        output = arguments.output
        machine = load_machine(arguments.site)
        manifests = {role: path for role in ROLES if (path := getattr(arguments, role)) is not None}
    if arguments.print:
        print(
            Launch(
                run=run,
                machine=machine,
                directory=output.parent,
                share=arguments.share,
                job=find_job(machine),
            ).printed(manifests)
        )
        return 0
    verify_extensions(run.extensions)  # before anything is written
    # if another attempt holds the run's folder, wait for it
    options = {"machine": machine, "share": arguments.share, "check": check_repetitions}
    return start_run(
        run,
        output,
        manifests=manifests,
        wait=True,
        **options,
    )


def find_run(
    run_ids: list[str], settings: "Config"
) -> tuple[RunSettings, Path, dict[str, Path], Machine]:
    """Return a run of the configuration, its output, inputs and machine. Raises UserError unless
    one run is named.
    """
    from tokenscale.settings.manifests import done_file, list_manifests

    if not run_ids:
        raise UserError(
            "the run id is missing.",
            next="tokenscale launch RUN_ID; `snakemake -n -p runs` lists ids",
        )
    runs = settings.all_runs(settings.usable(()))
    for run_id in run_ids:
        if run_id not in runs:
            near = find_nearest(run_id, words=runs)
            lists = "`snakemake -n -p runs` lists ids; --profile chooses another scale"
            following = f"did you mean {near}?" if near else lists
            raise UserError(
                f"no experiment has a run {run_id}.", scale=settings.settings.scale, next=following
            )
    if len(run_ids) > 1:
        files = " ".join(map(done_file, run_ids))
        raise UserError(
            "one run is launched at a time.", found=len(run_ids), next=f"snakemake {files}"
        )
    run = runs[run_ids[0]].settings
    manifests = {role: Path(path) for role, path in list_manifests(run).items()}
    return run, Path(done_file(run_ids[0])), manifests, settings.machine
