"""Which commands of SLURM this machine lacks. `python -m tests.slurm.missing` says it and ends with
1 if any is.
"""

import os
import shutil
import sys

APT = "apt-get install -y --no-install-recommends slurmctld slurmd slurm-client"


def found(command: str) -> str | None:
    """Where a command lies. Daemons lie in a folder that an ordinary user's PATH may leave out."""
    return shutil.which(
        command, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    )


def message() -> str | None:
    """One line for who reads that the tests did not run; None when nothing is missing."""
    commands = ("slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
    missing = [command for command in commands if not found(command)]
    return f"SLURM is not installed ({', '.join(missing)}): {APT}" if missing else None


if __name__ == "__main__":
    sys.exit(message())
