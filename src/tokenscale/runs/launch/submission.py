"""What a training's job asks SLURM for: as Snakemake's plugin spells it, and as a script for those who submit by hand.

The options come from the plugin's own function, so that both ways ask for the same. Host only.
"""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.runs.launch.submission_checks import without_a_value
from tokenscale.settings.layout import Geometry, geometry
from tokenscale.settings.machine import Machine
from tokenscale.settings.run import RunSettings

#: the rule that trains, by whose name a profile may change its resources
RULE = "train"
#: where SLURM's own output of a job that was submitted by hand goes
LOGS = "results/logs/slurm/by-hand"


class Resources(dict):
    """Resources of a job, as the plugin reads them: by key, and as attributes."""

    __getattr__ = dict.__getitem__


class SubmittedJob:
    """As much of a Snakemake job as the plugin's functions look at."""

    def __init__(self, resources: dict[str, Any], threads: int = 1):
        self.resources, self.threads = Resources(resources), threads


def resources_of(
    shape: Geometry, machine: Machine, profile: dict[str, Any], minutes: int | None = None
) -> dict[str, Any]:
    """What the rule asks for, with a profile's `default-resources` under it and its `set-resources` over it.

    `minutes` is the job's time limit; without it, the machine's.
    """
    requested = {
        "mpi": "srun",
        "nodes": shape.nodes,
        "tasks_per_node": shape.tasks_per_node,
        "cpus_per_task": shape.cores_per_task(machine.cores_per_rank),
        "ranks": shape.world_size,
        "mem_mb": machine.memory_mb,
        "runtime": minutes or machine.minutes,
        "gres": f"gpu:{shape.ranks_per_node}",
        "slurm_extra": machine.slurm_options,
    }
    maps = [profile.get(name) or {} for name in ("default-resources", "set-resources")]
    if not all(isinstance(stated, dict) for stated in maps):
        raise UserError(
            "a job script is written from profiles whose resources are mappings.",
            next="name: value in place of name=value",
        )
    stated = {**maps[0], **requested, **maps[1].get(RULE, {})}
    if not str(stated["runtime"]).isdigit():
        raise UserError("a job script needs a time limit in minutes.", runtime=stated["runtime"], next="runtime: 120")
    return {name: os.path.expandvars(value) if isinstance(value, str) else value for name, value in stated.items()}


def options(resources: dict[str, Any], *, name: str, comment: str, log: str, directory: str = "") -> list[str]:
    """The words that follow `sbatch`: of the plugin's functions for these resources, with account and partition."""
    from snakemake_executor_plugin_slurm.submit_string import get_submit_command
    from snakemake_executor_plugin_slurm.utils import set_gres_string

    job = SubmittedJob(resources)
    if error := without_a_value([resources]):
        raise error
    account, partition = resources.get("slurm_account"), resources.get("slurm_partition")
    parameters = {
        "run_uuid": name,
        "slurm_logfile": log,
        "comment_str": comment,
        "account": f"-A {shlex.quote(str(account))}" if account else "",
        "partition": f"-p {shlex.quote(str(partition))}" if partition else "",
        "workdir": directory,
    }
    return shlex.split(get_submit_command(job, parameters) + set_gres_string(job))[1:]


def script(
    runs: list[RunSettings],
    machine: Machine,
    profile: dict[str, Any],
    launches: list[list[str]],
    manifests: list[str],
    minutes: int | None = None,
) -> str:
    """A whole job script: `launches` are the words of each run's launcher, `manifests` what must be there before.

    Several runs of one rank are in one job of one node, side by side. Raises UserError for runs that cannot be.
    """
    if machine.starter != "srun":
        raise UserError(
            "this machine has no SLURM to submit to.", machine=machine.name, next="--profile alps, or another cluster's"
        )
    sizes = [run.layout.world_size for run in runs]
    if len(runs) > 1 and (max(sizes) > 1 or len(runs) > machine.gpus_per_node):
        raise UserError(
            "these runs cannot share a node.",
            found=f"{len(runs)} runs of {', '.join(map(str, sizes))} ranks",
            expected=f"runs of one rank, {machine.gpus_per_node} at most",
            next="a script for each",
        )
    if len({run.identity for run in runs}) < len(runs):
        raise UserError("a run is named twice.", next="name each once")
    here, name = Path.cwd(), "+".join(run.identity for run in runs)
    # side by side they ask for what a run of as many ranks asks for
    shape = geometry(sum(sizes), machine.gpus_per_node)
    words = options(
        resources_of(shape, machine, profile, minutes),
        name=f"tokenscale_{runs[0].identity}",
        comment=f"rule_{RULE}_wildcards_{name}",
        log=str(here / LOGS / "%j.log"),
        directory=str(here),
    )
    commands = [shlex.join([sys.executable, "-m", "tokenscale", *launch]) for launch in launches]
    if len(runs) > 1:
        commands = [f"{command} &\npids+=($!)" for command in commands]
        commands = ["pids=()", *commands, "code=0", 'for pid in "${pids[@]}"; do wait "$pid" || code=$?; done']
        commands += ["exit $code"]
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {option}" for option in _pairs(words) if option != "--parsable"),
        "#SBATCH --no-requeue",
        *(f"# {run.identity}" for run in runs),
        f"# {shape.nodes} x {shape.ranks_per_node} ranks on {machine.name}. A run that its time limit stops goes on",
        "# where it was when this is submitted again. Must be there before:",
        *(f"#   {manifest}" for manifest in manifests),
        "set -euo pipefail",
        f"cd {shlex.quote(str(here))}",
        *commands,
    ]
    return "\n".join(lines) + "\n"


def _pairs(words: list[str]) -> list[str]:
    """Options with their values, one a line: `-A g1`, `--nodes=2`."""
    found: list[str] = []
    for word in words:
        if word.startswith("-") or not found:
            found.append(word)
        else:
            found[-1] += f" {shlex.quote(word)}"
    return found
