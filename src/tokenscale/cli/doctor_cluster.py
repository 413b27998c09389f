"""The check of SLURM."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from tokenscale.cli.doctor_finding import Asked, Finding, noted
from tokenscale.cli.doctor_machine import output_of

#: the container of trainings on Alps
CONTAINER = Path("profiles/alps/train.toml")


def slurm(asked: Asked) -> Finding:
    """SLURM's programs, whether its controller and its accounting answer, and the account of the profile `alps`."""
    found = {name: shutil.which(name) is not None for name in ("sbatch", "srun", "sacct", "squeue", "sinfo")}
    job, account = os.environ.get("SLURM_JOB_ID"), os.environ.get("ALPS_ACCOUNT")
    values: dict[str, Any] = {"programs": found, "job": job, "account": account, "controller": None}
    inside = f"inside job {job}" if job else ""
    missing = [name for name in ("sbatch", "srun") if not found[name]]
    if missing:
        fact = f"{' and '.join(missing)} not found" + (f" {inside}" if inside else "")
        cure = "go to a cluster's login node; a dry run works without: snakemake --profile alps -n"
        return Finding("no", f"{fact}; needed only for --profile alps", cure, values)
    version = output_of(["sbatch", "--version"])[1]
    fact = ", ".join(filter(None, [version or "of unknown version", inside]))
    if found["sinfo"]:
        code, text = output_of(["sinfo", "--noheader", "--format=%P"])
        values["controller"] = code == 0
        if code != 0:
            first = text.splitlines()[0] if text else f"exit code {code}"
            fact += f"; its controller does not answer: {first}"
            return Finding("no", fact, "scontrol ping; then ask its administrators", values)
        fact += f", partitions {', '.join(dict.fromkeys(text.split()))}"
    notes = []
    if not account:
        notes.append(("ALPS_ACCOUNT is not set", "export ALPS_ACCOUNT=<project>"))
    elif image := missing_image():
        notes.append((f"the image of trainings is missing: {image}", "build it: profiles/alps/README.md, step 5"))
    if output_of(["sacct", "-X", "--noheader", "--format=JobIdRaw"])[0] != 0:
        notes.append(
            ("sacct gives no answer: Snakemake would wait for ever", "snakemake --slurm-status-command squeue")
        )
    if inside:
        notes.append(("Snakemake submits jobs of its own", "start it outside of a job"))
    return noted(fact, notes, values)


def missing_image() -> str | None:
    """The image that the container's file names, where it should be and is not: CSCS deletes what nobody touches."""
    stated = re.search(r'^image = "(.+)"$', CONTAINER.read_text(), re.M) if CONTAINER.is_file() else None
    path = os.path.expandvars(stated[1]) if stated else ""
    # a variable without a value: this is not Alps; `#`: an address
    return path if path and not set("$#") & set(path) and not Path(path).exists() else None
