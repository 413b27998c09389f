"""Find files of the current report that were deleted. Snakemake counts them as up to date while no job needs them."""

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenscale.base.files import write_json
from tokenscale.cli.snakemake_dry_run import Job

#: files of the report that the workflow last planned in this folder; the workflow writes this record
RECORD = Path(".snakemake/tokenscale-report.json")
#: without this page there is no current report
PAGE = "results/report/index.html"
#: a command for more files than this takes their names from `status --missing`
MAX_IN_COMMAND = 4
#: maximum number of files in a list
MAX_LISTED = 12


@dataclass(frozen=True)
class MissingFiles:
    """Missing files of the report, one per job, and the Snakemake command without targets."""

    files: list[str]
    call: str

    @property
    def command(self) -> str:
        """Return the command that restores all missing files."""
        named = shlex.join(self.files)
        if len(self.files) > MAX_IN_COMMAND:
            named = "$(python -m tokenscale status --missing)"
        return f"{self.call} {named}"

    def render(self) -> str:
        """List the missing files by kind and name, and the command; "" if nothing is missing."""
        if not self.files:
            return ""
        files, jobs = self.files[:MAX_LISTED], [Job("", {}, (file,)) for file in self.files[:MAX_LISTED]]
        count = f"{len(self.files):,} part{'s' * (len(self.files) > 1)}"
        lines = [f"missing  {count} of the report. Snakemake does not rebuild a deleted file that no other job needs."]
        lines += [f"  {job.kind:<9}  {job.name or file}" for job, file in zip(jobs, files, strict=True)]
        if len(self.files) > MAX_LISTED:
            lines.append(f"  and {len(self.files) - MAX_LISTED:,} more: python -m tokenscale status --missing")
        return "\n".join([*lines, f"  {'next':<9}  {self.command}"])


def find_missing(folder: Path = Path()) -> MissingFiles:
    """Compare the recorded files of the current report with the files on disk."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        outputs, call = [[str(file) for file in files] for files in record["outputs"]], str(record["call"])
    except (OSError, ValueError, KeyError, TypeError):
        return MissingFiles([], "")
    return MissingFiles(find_missing_outputs(outputs, folder) if (folder / PAGE).is_file() else [], call)


def find_missing_outputs(outputs: Iterable[Sequence[str]], folder: Path = Path()) -> list[str]:
    """Return the first missing output of each job with missing outputs; as a target, it makes the job run."""
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
