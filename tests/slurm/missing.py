"""What a test cluster needs and this machine lacks. `python -m tests.slurm.missing` says it and
ends with 1 if anything is missing.
"""

import os
import shutil
import sys
from pathlib import Path

APT = (
    "apt-get install -y --no-install-recommends "
    "slurmctld slurmd slurm-client slurmdbd mariadb-server-core"
)
COMMANDS = (
    *("slurmctld", "slurmd", "slurmdbd", "mariadbd"),
    *("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun"),
)


def find_database_tables() -> Path | None:
    """The statements that make MariaDB's own tables; older releases name them after MySQL."""
    return next(Path("/usr/share").glob("m*/m*_system_tables.sql"), None)


def found(command: str) -> str | None:
    """Where a command lies. Daemons lie in a folder that an ordinary user's PATH may leave out."""
    return shutil.which(
        command, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
    )


def message() -> str | None:
    """One line for who reads that the tests did not run; None when nothing is missing."""
    missing = [command for command in COMMANDS if not found(command)]
    if not find_database_tables():
        missing.append("MariaDB's system tables")
    return f"SLURM is not installed ({', '.join(missing)}): {APT}" if missing else None


if __name__ == "__main__":
    sys.exit(message())
