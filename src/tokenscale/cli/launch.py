"""Start a run's processes here or in a SLURM job, wait for them, and write done.json from the sealed record."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.base.files import write_text
from tokenscale.cli import configuration
from tokenscale.runs.launch.command import Launch, find_job
from tokenscale.runs.launch.start import start_run as start_run
from tokenscale.settings import machine as machines
from tokenscale.settings.machine import Machine
from tokenscale.settings.run import RunSettings

ROLES = ("corpus", "tokenizer", "store", "validation_store", "arm")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that give runs by id, as `plan` lists them, or one run by its settings, as the rule does."""
    parser.usage = (
        "%(prog)s RUN_ID … [--profile alps] [--print | --sbatch FILE]\n"
        "       %(prog)s --run JSON --output FILE [--site FILE] [--store FILE …] [--print]"
    )
    parser.add_argument(
        "run_id",
        nargs="*",
        metavar="RUN_ID",
        help="a run of an experiment; with --sbatch several of one rank: one node",
    )
    configuration.add_arguments(parser)
    parser.add_argument("--print", action="store_true", help="print the command of its processes, and start nothing")
    parser.add_argument("--sbatch", type=Path, metavar="FILE", help="write a job script for sbatch, and start nothing")
    parser.add_argument("--run", help="the run's settings as canonical JSON, instead of its id")
    parser.add_argument("--output", type=Path, help="results/runs/<run id>/done.json")
    for role in ROLES:
        option, text = f"--{role.replace('_', '-')}", f"manifest of the {role.replace('_', ' ')}"
        parser.add_argument(option, type=Path, nargs="?", help=text)
    parser.add_argument(
        "--site", nargs="?", help="file of the machine (docs/settings.md); by default this one as it is"
    )
    parser.add_argument("--share", type=int, default=1, help="runs that have this run's nodes at the same time")


def run(arguments: argparse.Namespace) -> int:
    """Start the run, print its command, or write its job script."""
    from tokenscale.base.errors import UserError

    if arguments.run is None:
        from tokenscale.cli.plan_prices import RunPrices

        settings = configuration.load_configuration(arguments)
        requests = requests_by_id(arguments.run_id, arguments.profile, settings, RunPrices(settings).time_limit_minutes)
    else:
        manifests = {role: path for role in ROLES if (path := getattr(arguments, role)) is not None}
        requests = [request_from_json(arguments.run, arguments.output, arguments.site, manifests)]
    if arguments.sbatch is not None:
        print(write_job_script(requests, arguments.sbatch))
        return 0
    if len(requests) > 1:
        raise UserError("one run is launched at a time.", found=len(requests), next="--sbatch FILE for one shared node")
    if arguments.print:
        print(render_command(requests[0], arguments.share))
        return 0
    return start(requests[0], arguments.share)


if TYPE_CHECKING:
    from tokenscale.settings.config import Config
    from tokenscale.settings.experiments import Run


@dataclass(frozen=True)
class Request:
    """A run, its inputs and outputs, and its machine. `site` and `profile` are the files that describe the machine.

    `minutes` is the time limit of its job.
    """

    run: RunSettings
    output: Path
    manifests: dict[str, Path]
    machine: Machine
    site: str | None = None
    profile: dict[str, Any] | None = None
    profile_name: str | None = None
    minutes: int | None = None


def request_from_json(run: str, output: Path | None, site: str | None, manifests: dict[str, Path]) -> Request:
    """Build a request from settings as JSON and paths, as the rule passes them."""
    if output is None:
        raise UserError("--run needs --output.", next="--output results/runs/<run id>/done.json")
    return Request(RunSettings.from_json(run), output, manifests, machines.load_machine(site), site)


def requests_by_id(
    run_ids: list[str], profile: str | None, settings: "Config", minutes: Callable[["Run"], int]
) -> list[Request]:
    """Build requests for runs of any experiment of the configuration from their ids.

    `profile` is for the resources of jobs, `minutes` returns the time limit of a run's job.
    """
    from tokenscale.settings import profile as profiles
    from tokenscale.settings.manifests import done_file, list_manifests

    if not run_ids:
        raise UserError(
            "the run id is missing.", next="python -m tokenscale launch RUN_ID; `snakemake -n runs` lists ids"
        )
    runs = settings.all_runs(settings.usable(()))
    for run_id in run_ids:
        if run_id not in runs:
            near = find_nearest(run_id, runs)
            lists = "`snakemake -n runs` lists ids; --profile chooses another scale"
            raise UserError(
                f"no experiment has a run {run_id}.",
                scale=settings.settings.scale,
                next=f"did you mean {near}?" if near else lists,
            )
    profile_values = profiles.load_profile(profile)[1] if profile else {}
    return [
        Request(
            runs[run_id].settings,
            Path(done_file(run_id)),
            {role: Path(path) for role, path in list_manifests(runs[run_id].settings).items()},
            settings.machine,
            settings.settings.machine,
            profile_values,
            profile,
            minutes(runs[run_id]),
        )
        for run_id in run_ids
    ]


def render_command(request: Request, share: int) -> str:
    """Return the command that would start the run's processes, with the variables it adds, for a shell."""
    launch = Launch(request.run, request.machine, request.output.parent, share, job=find_job(request.machine))
    return launch.printed(request.manifests)


def write_job_script(requests: list[Request], file: Path) -> str:
    """Write a job script for the runs, which share a node if there are several. Return the commands that submit it."""
    from tokenscale.runs.launch import submission

    request, launches = requests[0], []
    for each in requests:
        words = ["launch", "--run", each.run.to_json(), "--site", each.site or "", "--share", str(len(requests))]
        words += ["--output", str(each.output)]
        for role, path in each.manifests.items():
            words += [f"--{role.replace('_', '-')}", str(path)]
        launches.append(words)
    manifests = list(dict.fromkeys(str(path) for each in requests for path in each.manifests.values()))
    runs = [each.run for each in requests]
    minutes = max(each.minutes or request.machine.minutes for each in requests)
    write_text(
        file, submission.render_script(runs, request.machine, request.profile or {}, launches, manifests, minutes)
    )
    Path(submission.LOGS).mkdir(parents=True, exist_ok=True)  # sbatch makes no folders, and says nothing of it
    missing = [manifest for manifest in manifests if not Path(manifest).is_file()]
    profile = f"--profile {request.profile_name} " if request.profile_name else ""
    first = f"snakemake {profile}{' '.join(missing)}\n" if missing else ""
    return f"{first}sbatch {file}"


def start(request: Request, share: int) -> int:
    """Start the run here. If another attempt holds the run's folder, wait for it."""
    return start_run(request.run, request.output, request.manifests, machine=request.machine, share=share, wait=True)
