"""Files of the current report that have been deleted. Snakemake counts them as up to date while no job needs them."""

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenscale.base.files import write_json
from tokenscale.cli.snakemake_dry_run import Job

#: files of the report that the workflow planned last in this folder, written by the workflow itself
RECORD = Path(".snakemake/tokenscale-report.json")
#: without this page there is no current report
PAGE = "results/report/index.html"
#: a command with more files than this takes their names from `status --missing`
MOST_NAMED = 4
#: a longer list is cut
MOST_LISTED = 12


@dataclass(frozen=True)
class Missing:
    """Missing files of the report, one for each job that makes them, and the Snakemake call without targets."""

    files: list[str]
    call: str

    @property
    def command(self) -> str:
        """The one command that restores all of them."""
        named = shlex.join(self.files)
        if len(self.files) > MOST_NAMED:
            named = "$(python -m tokenscale status --missing)"
        return f"{self.call} {named}"

    def render(self) -> str:
        """What is missing, by kind and name, and the command; empty where nothing is missing."""
        if not self.files:
            return ""
        files, jobs = self.files[:MOST_LISTED], [Job("", {}, (file,)) for file in self.files[:MOST_LISTED]]
        count = f"{len(self.files):,} part{'s' * (len(self.files) > 1)}"
        lines = [f"missing  {count} of the report. Snakemake does not rebuild a deleted file that no other job needs."]
        lines += [f"  {job.kind:<9}  {job.name or file}" for job, file in zip(jobs, files, strict=True)]
        if len(self.files) > MOST_LISTED:
            lines.append(f"  and {len(self.files) - MOST_LISTED:,} more: python -m tokenscale status --missing")
        return "\n".join([*lines, f"  {'next':<9}  {self.command}"])


def missing(folder: Path = Path()) -> Missing:
    """Compare the recorded files of the current report with the files on disk."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        outputs, call = [[str(file) for file in files] for files in record["outputs"]], str(record["call"])
    except (OSError, ValueError, KeyError, TypeError):
        return Missing([], "")
    return Missing(missing_of(outputs, folder) if (folder / PAGE).is_file() else [], call)


def missing_of(outputs: Iterable[Sequence[str]], folder: Path = Path()) -> list[str]:
    """The first missing output of each job that misses one: as a target it makes the job run."""
    gone = ([file for file in files if not (folder / file).exists()] for files in outputs)
    return sorted({files[0] for files in gone if files})


def write_record(outputs: Iterable[Sequence[str]], call: str, folder: Path = Path()) -> None:
    """Record the files of the current report, a list for each job, and the command line that planned it.

    A call for other targets, whose files hold no page of a report, leaves the record as it is.
    """
    found = sorted(map(list, outputs))
    if not any(PAGE in files for files in found):
        return
    try:
        write_json(folder / RECORD, {"call": call, "outputs": found})
    except OSError:  # the folder may be read-only: `status` then lists nothing
        pass
