"""Say whether the chosen experiments can start: one line, then what is missing and how to mend it.

Exit code 0 if nothing is missing, else 2. Details: `check` (designs), `doctor` (this machine), `plan` (cost).
"""

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.cli import check, doctor, main
from tokenscale.cli.doctor_checks import Finding
from tokenscale.cli.plan import format_bytes
from tokenscale.cli.plan_prices import RunPrices
from tokenscale.costs.prices import sum_prices
from tokenscale.runs.launch import submission
from tokenscale.runs.launch.start import check_memory
from tokenscale.settings.config import Config
from tokenscale.settings.profile import load_profile
from tokenscale.settings.run import RunSettings

#: checks of `doctor` that runs need: where they run on this machine, and where SLURM starts them
HERE = ("python", "host packages", "trainer packages", "report packages", "results folder", "gpu", "nccl", "gloo")
SUBMITTED = ("python", "host packages", "report packages", "results folder", "slurm")

#: what is missing, and the command or edit that mends it
Problem = tuple[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the experiments and the configuration."""
    parser.add_argument("experiment", nargs="*", help="names of experiments; by default those of the report")
    main.add_configuration_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict, the size of the work, and what is missing."""
    config, results = main.load_configuration(arguments), Path("results")
    names, prices = config.select_experiments(arguments.experiment), RunPrices(config)
    submits = config.machine.starter == "srun"
    findings = doctor.examine(results, only=SUBMITTED if submits else HERE)
    problems = [*judge_machine(config, names, findings), *find_problems(config, names, prices, arguments.profile)]
    for line in render(config, names, prices, problems, colour=sys.stdout.isatty()):
        print(line)
    return 2 if problems else 0


def judge_machine(config: Config, names: Sequence[str], findings: Mapping[str, Finding]) -> Iterator[Problem]:
    """Yield what this machine lacks for the experiments; GPUs are only missing where there are some, but too few."""
    runs = [run.settings for run in config.all_runs(list(names)).values()]
    ranks = max((run.layout.world_size for run in runs), default=1)
    on_gpus = max((run.layout.world_size for run in runs if run.device == "auto"), default=0)
    devices = len(findings["gpu"].values.get("devices", [])) if "gpu" in findings else 0
    unneeded = {"gpu", *["nccl"] * (not devices or on_gpus < 2), *["gloo"] * (ranks < 2)}
    for name, finding in findings.items():
        if finding.verdict == "no" and name not in unneeded:
            yield f"{name}: {finding.fact}", finding.next
    if 0 < devices < on_gpus:
        yield f"runs of {on_gpus} ranks with a GPU each, but torch sees {devices}", "CUDA_VISIBLE_DEVICES= make run"


def find_problems(config: Config, names: Sequence[str], prices: RunPrices, profile: str | None) -> Iterator[Problem]:
    """Yield what keeps the experiments from starting, by their settings, the profile, and the files in `results`."""
    for line, refuses in check.check(config, list(names), here=config.machine.starter != "srun"):
        if refuses:
            what, _, following = line.strip().removeprefix("refuse").strip().partition(" Next: ")
            yield what, following
    runs = config.all_runs(list(names))
    left = [run_id for run_id in runs if not prices.is_done(run_id)]
    errors = [submission.unset_variable_error([_read_resources(profile)] if profile else [])]
    if config.machine.gpus_per_node is not None:
        errors.append(submission.budget_error(prices.sum_by_experiment(left), config.settings.budget.node_hours))
    too_large = {
        run_id: error for run_id in left if (error := _find_lack_of_memory(config, runs[run_id].settings, prices))
    }
    for run_id, error in list(too_large.items())[:1]:
        errors.append(UserError(f"{len(too_large)} runs, such as {run_id}: {error.what}", **error.facts))
    for found in filter(None, errors):
        facts = ", ".join(f"{key} {text}" for key, text in found.facts.items() if key in ("needed", "found", "budget"))
        yield f"{found.what} {facts}".strip(), str(found.facts.get("next", ""))
    needed, free = sum_prices(prices.price(runs[run_id]) for run_id in left).bytes, shutil.disk_usage(".").free
    if needed > free:
        yield f"results take about {format_bytes(needed)}, {format_bytes(free)} are free", "free space (`df -h .`)"


def _find_lack_of_memory(config: Config, run: RunSettings, prices: RunPrices) -> UserError | None:
    try:
        check_memory(run, config.machine, vocabulary=prices.read_vocabulary(run))
    except UserError as error:
        return error
    return None


def _read_resources(profile: str) -> dict[str, Any]:
    """Return the default resources of a profile, with the environment's values of variables."""
    given = load_profile(profile)[1].get("default-resources") or {}
    pairs = given.items() if isinstance(given, Mapping) else (str(entry).partition("=")[::2] for entry in given)
    return {name: os.path.expandvars(str(value)) for name, value in pairs}


def render(
    config: Config, names: Sequence[str], prices: RunPrices, problems: Sequence[Problem], *, colour: bool = False
) -> Iterator[str]:
    """Yield the verdict with the runs that are left and their cost, then each problem with its next step."""
    runs = config.all_runs(list(names))
    left = [run for run_id, run in runs.items() if not prices.is_done(run_id)]
    total = sum_prices(map(prices.price, left))
    work = f"{', '.join(names)} at scale {config.settings.scale}: {len(left)} of {len(runs)} runs to do"
    if total.timed and config.machine.gpus_per_node is not None:
        work += f", {submission.format_hours({'': total})} node-hours"
    work += f", {format_bytes(total.bytes)}" if left else ""
    verdict = f"not ready, {len(problems)} missing" if problems else "ready"
    yield (f"\x1b[{31 if problems else 32}m{verdict}\x1b[0m" if colour else verdict) + f": {work}"
    for what, following in problems:
        yield f"  {textwrap.shorten(what, 240)}"
        yield from (
            f"    {'next' if number == 0 else '    '}  {line}" for number, line in enumerate(following.splitlines())
        )
