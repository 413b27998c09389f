"""Resources of a training job on SLURM: for Snakemake's plugin, and as a job script for manual submission.

The options come from the plugin's own function, so that both request the same. Host only.
"""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.runs.launch.submission_checks import unset_variable_error
from tokenscale.settings.layout import Geometry, geometry
from tokenscale.settings.machine import Machine
from tokenscale.settings.run import RunSettings

#: rule that trains; a profile changes its resources by this name
RULE = "train"
#: folder of SLURM's output for manually submitted jobs
LOGS = "results/logs/slurm/by-hand"


class Resources(dict):
    """Resources of a job with access by key and by attribute, as the plugin expects."""

    __getattr__ = dict.__getitem__


class SubmittedJob:
    """The part of a Snakemake job that the plugin's functions use."""

    def __init__(self, resources: dict[str, Any], threads: int = 1):
        self.resources, self.threads = Resources(resources), threads


def merge_resources(
    shape: Geometry, machine: Machine, profile: dict[str, Any], minutes: int | None = None
) -> dict[str, Any]:
    """Merge the rule's resources with a profile's `default-resources` (below) and `set-resources` (above).

    `minutes` is the job's time limit, by default the machine's.
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
            "a job script needs a profile whose resources are mappings.",
            next="write name: value instead of name=value",
        )
    stated = {**maps[0], **requested, **maps[1].get(RULE, {})}
    if not str(stated["runtime"]).isdigit():
        raise UserError(
            "a job script needs a time limit in minutes.",
            runtime=stated["runtime"],
            next="set runtime, such as runtime: 120",
        )
    return {name: os.path.expandvars(value) if isinstance(value, str) else value for name, value in stated.items()}


def sbatch_options(resources: dict[str, Any], *, name: str, comment: str, log: str, directory: str = "") -> list[str]:
    """Return the options of `sbatch` for these resources, with account and partition, by the plugin's functions."""
    from snakemake_executor_plugin_slurm.submit_string import get_submit_command
    from snakemake_executor_plugin_slurm.utils import set_gres_string

    job = SubmittedJob(resources)
    if error := unset_variable_error([resources]):
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


def render_script(
    runs: list[RunSettings],
    machine: Machine,
    profile: dict[str, Any],
    launches: list[list[str]],
    manifests: list[str],
    minutes: int | None = None,
) -> str:
    """Return a job script. `launches` are the launch commands of the runs, `manifests` their required files.

    Several single-rank runs share one node. Raises UserError for runs that cannot share a job.
    """
    if machine.starter != "srun":
        raise UserError(
            "this machine does not use SLURM.",
            machine=machine.name,
            next="use a cluster's profile, such as --profile alps",
        )
    sizes = [run.layout.world_size for run in runs]
    if len(runs) > 1 and (max(sizes) > 1 or len(runs) > machine.gpus_per_node):
        raise UserError(
            "these runs cannot share a node.",
            found=f"{len(runs)} runs of {', '.join(map(str, sizes))} ranks",
            expected=f"at most {machine.gpus_per_node} runs of one rank",
            next="write one script per run",
        )
    if len({run.identity for run in runs}) < len(runs):
        raise UserError("a run is listed twice.", next="list each run once")
    here, name = Path.cwd(), "+".join(run.identity for run in runs)
    # together they request what one run with as many ranks requests
    shape = geometry(sum(sizes), machine.gpus_per_node)
    words = sbatch_options(
        merge_resources(shape, machine, profile, minutes),
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
        *(f"#SBATCH {option}" for option in _pair_options(words) if option != "--parsable"),
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


def _pair_options(words: list[str]) -> list[str]:
    """Join options with their values: `-A g1`, `--nodes=2`."""
    found: list[str] = []
    for word in words:
        if word.startswith("-") or not found:
            found.append(word)
        else:
            found[-1] += f" {shlex.quote(word)}"
    return found
