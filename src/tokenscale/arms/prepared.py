"""What `environments.prepare` has built of an arm. Apart from it: a container of ranks may lack
what that imports.
"""

from pathlib import Path
from typing import Any

from tokenscale.base import files

ARMS = Path("arms")


def python_of(record: Path) -> Path:
    return record.parent / "environment/bin/python"


def source_of(record: Path) -> Path:
    return record.parent / "source"


def read_record(record: Path) -> dict[str, Any]:
    """Read what `prepare` wrote. Raises UserError for a missing or malformed file."""
    next_step = f"snakemake -f {record}"
    found = files.read_record(record, what="record of an arm's environment", next=next_step)
    with files.report_malformed(record, what="record of an arm's environment", next=next_step):
        return {"error": found["error"], "files": found["files"], **found}
