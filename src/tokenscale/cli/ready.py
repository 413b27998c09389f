"""Say whether the chosen experiments can start: one line, then what is missing and how to mend it.

Exit code 0 if nothing is missing, else 2; warnings do not count. Details: `check` (designs),
`doctor` (this machine), `plan` (cost).
"""

import argparse
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenscale.base.errors import UserError, as_typed
from tokenscale.base.wording import count, format_bytes
from tokenscale.cli import check, doctor, main
from tokenscale.cli.doctor import Finding
from tokenscale.cli.library_weights import count_library_weights
from tokenscale.cli.plan_prices import RunPrices
from tokenscale.costs.prices import sum_prices
from tokenscale.runs.launch import cluster, submission
from tokenscale.runs.launch.start import check_memory
from tokenscale.settings.config import Config
from tokenscale.settings.profile import load_profile

#: checks of `doctor` that runs need: where they run on this machine, and where SLURM starts them
HERE = (
    "python",
    "host packages",
    "trainer packages",
    "report packages",
    "results folder",
    "gpu",
    "nccl",
    "gloo",
)
SUBMITTED = ("python", "host packages", "report packages", "results folder", "slurm")


class Lack(NamedTuple):
    """Something that is missing, and the command or edit that mends it. `refuses`: the experiments
    cannot start.
    """

    what: str
    next: str
    refuses: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "experiment", nargs="*", help="names of experiments; by default those of the report"
    )
    main.add_configuration_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict with the size of the work, and what is missing."""
    config = main.load_configuration(arguments)
    names = config.select_experiments(arguments.experiment)
    prices = RunPrices(config)
    findings = doctor.examine(
        Path("results"), only=SUBMITTED if config.machine.starter == "srun" else HERE
    )
    lacks = list(
        judge_machine(
            config,
            names,
            findings=findings,
            profile=arguments.profile,
        )
    )
    lacks += find_problems(
        config,
        names,
        prices=prices,
        profile=arguments.profile,
    )
    for text in render(
        config,
        names,
        prices=prices,
        lacks=lacks,
        colour=sys.stdout.isatty(),
    ):
        print(text)
    return 2 if any(lack.refuses for lack in lacks) else 0


def render(
    config: Config,
    names: Sequence[str],
    prices: RunPrices,
    lacks: Sequence[Lack],
    *,
    colour: bool = False,
) -> Iterator[str]:
    """Yield the verdict with the runs that are left and their cost, then each lack with its next
    step.
    """
    runs = config.all_runs(list(names))
    missing = sum(lack.refuses for lack in lacks)
    left = [run for run_id, run in runs.items() if not prices.is_done(run_id)]
    total = sum_prices(map(prices.price, left))
    warnings = len(lacks) - missing
    parts = ([f"{missing} missing"] if missing else []) + (
        [count(warnings, noun="warning")] if warnings else []
    )
    parts += [
        f"{', '.join(names)} at scale {config.settings.scale}",
        f"{len(left)} of {len(runs)} runs to do",
    ]
    if left and total.timed and config.machine.gpus_per_node is not None:
        parts.append(f"{submission.format_hours({'': total})} node-hours")
    if left:
        parts += [format_bytes(total.bytes)]
    verdict = "not ready" if missing else "ready"
    if colour:
        shown = f"\x1b[{31 if missing else 32}m{verdict}\x1b[0m"
    else:
        shown = verdict
    yield f"{shown}: {', '.join(parts)}"
    for lack in sorted(lacks, key=lambda lack: not lack.refuses):
        yield f"  {'' if lack.refuses else 'warning  '}{textwrap.shorten(lack.what, 240)}"
        for number, text in enumerate(as_typed(lack.next).splitlines()):
            yield f"    {'' if number else 'next':<4}  {text}"


def judge_machine(
    config: Config,
    names: Sequence[str],
    findings: Mapping[str, Finding],
    profile: str | None = None,
) -> Iterator[Lack]:
    """Yield what this machine or cluster lacks for the experiments. A GPU is missed only where
    there are too few.
    """
    runs = [run.settings for run in config.all_runs(list(names)).values()]
    on_gpus = max((run.layout.world_size for run in runs if run.device != "cpu"), default=0)
    devices = len(findings["gpu"].values.get("devices", [])) if "gpu" in findings else 0
    unneeded = {"gpu"}
    if not devices or on_gpus < 2:
        unneeded.add("nccl")
    if all(run.layout.world_size == 1 for run in runs):
        unneeded.add("gloo")
    yield from _judge_checks(findings, unneeded)
    if 0 < devices < on_gpus:
        what = f"runs of {on_gpus} ranks with a GPU each, but torch sees {devices}"
        yield Lack(what, next="CUDA_VISIBLE_DEVICES= make run")
    if profile:
        found = findings["slurm"].values.get("partitions", {}) if "slurm" in findings else {}
        partitions = {name: cluster.Partition(**values) for name, values in found.items()}
        file, values = load_profile(profile)
        errors = cluster.partition_errors(
            values, read_resources(profile), config.machine, partitions=partitions, file=str(file)
        )
        yield from map(_describe, errors)
    if config.machine.starter == "srun":
        yield from map(_describe, cluster.quota_errors([Path.home(), *list_result_folders()]))


def _judge_checks(findings: Mapping[str, Finding], unneeded: set[str]) -> Iterator[Lack]:
    """Yield the checks of `doctor` that failed, without those that the experiments do not need."""
    for name, finding in findings.items():
        if finding.verdict == "no" and name not in unneeded:
            yield Lack(f"{name}: {finding.fact}", finding.next)
        elif finding.verdict == "note" and name == "slurm":
            yield Lack(what=f"{name}: {finding.fact}", next=finding.next, refuses=False)


def _describe(error: UserError) -> Lack:
    """Return an error as what is missing, with the facts that a reader needs to mend it."""
    facts = ", ".join(
        f"{key} {text}" for key, text in error.facts.items() if key in ("needed", "found", "budget")
    )
    return Lack(f"{error.what} {facts}".strip(), next=str(error.facts.get("next", "")))


def list_result_folders(results: Path = Path("results")) -> list[Path]:
    """Return the folder of results and those in it that may be links."""
    return [results, *(folder for folder in results.glob("*") if folder.is_symlink())]


def find_problems(
    config: Config, names: Sequence[str], prices: RunPrices, profile: str | None = None
) -> Iterator[Lack]:
    """Yield what keeps the experiments from starting, by their settings, the profile, and the files
    in `results`.

    Needs a fraction of a second and no torch: a dry run calls it, too.
    """
    for name, problems in check.find_problems(
        config, names, here=config.machine.starter != "srun"
    ).items():
        for problem in problems:
            if problem.level != "note":
                what = check.describe(config, name, problem)
                yield Lack(
                    what=f"{name}: {what}" if name else what,
                    next=problem.next,
                    refuses=problem.level == "refuse",
                )
    runs = config.all_runs(list(names))
    left = [run_id for run_id in runs if not prices.is_done(run_id)]
    resources = read_resources(profile) if profile else {}
    errors = [
        submission.unset_variable_error([resources]),
        cluster.account_error(resources.get("slurm_account"), config.machine),
        find_purge_error(config, prices, left=left, profile=profile),
        prices.find_cpu_error(left),
    ]
    if config.machine.gpus_per_node is not None:
        errors.append(
            submission.budget_error(
                prices.sum_by_experiment(left), config.settings.budget.node_hours
            )
        )
    large: list[tuple[str, UserError]] = []
    for run_id in left:
        run = runs[run_id].settings
        try:
            entries = prices.read_vocabulary(run)
            counted = count_library_weights(run, vocabulary_size=entries)
            check_memory(counted, config.machine, vocabulary=entries)
        except UserError as error:
            large.append((run_id, error))
    for run_id, lack in large[:1]:
        errors.append(UserError(f"{len(large)} runs, such as {run_id}: {lack.what}", **lack.facts))
    yield from map(_describe, filter(None, errors))
    stores = prices.count_stores(list(names)).predicted_bytes if left else 0
    needed = sum_prices(prices.price(runs[run_id]) for run_id in left).bytes + stores
    if needed > (free := shutil.disk_usage(".").free):
        what = f"results take about {format_bytes(needed)}, {format_bytes(free)} are free"
        yield Lack(what, next="free space (`df -h .`)")


def find_purge_error(
    config: Config, prices: RunPrices, left: Sequence[str], profile: str | None
) -> UserError | None:
    """Return the error for results that are purged before the runs that are left have ended.

    The time is that of the runs whose time is known, as many at once as the profile allows jobs.
    """
    runs = config.all_runs(config.usable(()))
    prices_left = [prices.price(runs[run_id]) for run_id in left if run_id in runs]
    hours = sum((price.seconds or 0.0) / 3600 for price in prices_left if price.bound is None)
    jobs = str((load_profile(profile)[1] if profile else {}).get("jobs", 1))
    at_once = int(jobs) if jobs.isdecimal() and int(jobs) else 1
    return cluster.purge_error(config.machine, list_result_folders(), hours=hours / at_once)


def read_resources(profile: str) -> dict[str, Any]:
    """Return the default resources of a profile, with the environment's values of variables."""
    given = load_profile(profile)[1].get("default-resources") or {}
    pairs = (
        given.items()
        if isinstance(given, Mapping)
        else (str(entry).partition("=")[::2] for entry in given)
    )
    return {name: os.path.expandvars(str(value)) for name, value in pairs}
