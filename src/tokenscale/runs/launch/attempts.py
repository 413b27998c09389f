"""Attempts of a run and the locks that protect them: choose the next one, recognise a finished run."""

import atexit
import fcntl
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import acquire, canonical_json, lock_folder, read_json, sha256_file, sha256_text, write_json
from tokenscale.runs.launch import submission
from tokenscale.runs.records.provenance import read_sealed
from tokenscale.settings.run import RunSettings

#: final statuses of a run; divergence is a result, which the report shows, and so is another trainer that failed
FINAL_STATUSES = ("complete", "nonfinite", "failed")
#: exit code of a run that was stopped and can be resumed (EX_TEMPFAIL of sysexits.h)
RESUME_EXIT_CODE = 75


@dataclass(frozen=True)
class Identity:
    """Code and inputs of an attempt. Only attempts with equal digests are resumed or merged.

    Digests are computed from contents; only the names of paths count, so that a project can be moved.
    """

    code: dict[str, str]
    inputs: dict[str, str]
    state: str | None = None  # of another run, that this one goes on from

    @property
    def digest(self) -> str:
        """Digest of all code and inputs, and of the state of another run if there is one."""
        made = self.code_and_inputs
        return made if self.state is None else sha256_text(f"{made} {self.state}")

    @property
    def code_and_inputs(self) -> str:
        """Digest of code and inputs alone, shared by the repeats of a cell, which may resume from different states."""
        return sha256_text(canonical_json({"code": sorted(self.code.items()), "inputs": sorted(self.inputs.items())}))

    @property
    def code_sha256(self) -> str:
        """Digest of the code alone: equal for runs that can resume from each other's checkpoints."""
        return sha256_text(canonical_json(sorted(self.code.items())))

    def record(self) -> dict[str, Any]:
        """Return the record that an attempt stores."""
        resumed = {"code_and_inputs": self.code_and_inputs, "state": self.state} if self.state else {}
        digests = {"digest": self.digest, "code_sha256": self.code_sha256}
        return {**digests, "code": self.code, "inputs": self.inputs, **resumed}


def hash_identity(code: list[Path], inputs: dict[str, Path], state: Path | None = None) -> Identity:
    """Hash the code files (by path below the package), the manifests (by role) and another run's state record."""
    hashes = _hash_files(code)
    roles = {role: sha256_file(path) for role, path in inputs.items()}
    return Identity(hashes, roles, sha256_file(state) if state else None)


def _hash_files(code: Sequence[Path]) -> dict[str, str]:
    hashes = {}
    for path in code:
        parts = path.resolve().parts
        start = len(parts) - parts[::-1].index("tokenscale") if "tokenscale" in parts else len(parts) - 1
        hashes["/".join(parts[start:])] = sha256_file(path)
    return hashes


def is_sealed(directory: Path, identity: Identity) -> bool:
    """Whether a run has ended with this identity."""
    record = read_sealed(directory / "run.json")
    return (
        record is not None and record.get("digest") == identity.digest and record["outcome"]["status"] in FINAL_STATUSES
    )


def prepare_attempt(
    directory: Path, run: RunSettings, identity: Identity, launch: dict[str, Any] | None = None
) -> int | None:
    """Prepare the next attempt and return its number; None if the run is already sealed with this identity.

    `launch` describes machine and job in the record. Attempts of other code or inputs move to `superseded/`, together
    with their record.
    """
    if is_sealed(directory, identity):
        return None
    record = read_sealed(directory / "run.json")
    attempts = sorted(directory.glob("attempt=*"))
    stale = [a for a in attempts if _read_digest(a) != identity.digest]
    if stale or (record is not None and record.get("digest") != identity.digest):
        number = 1 + max((int(p.name) for p in directory.glob("superseded/*") if p.name.isdigit()), default=-1)
        folder = directory / "superseded" / f"{number:03d}"
        folder.mkdir(parents=True)
        for name in ("run.json", "dirty.diff", "status.json", "checkpoints"):
            if (directory / name).exists():
                (directory / name).rename(folder / name)
        for attempt in stale:
            attempt.rename(folder / attempt.name)
    number = 1 + max((int(a.name.split("=")[1]) for a in directory.glob("attempt=*")), default=-1)
    attempt = directory / f"attempt={number:02d}"
    attempt.mkdir(parents=True)
    write_json(attempt / "attempt.json", identity.record() | ({"launch": launch} if launch else {}))
    return number


def find_interrupted_step(directory: Path, attempt: int) -> int | None:
    """Return the step after which an attempt was stopped resumably; None if it ended otherwise."""
    path = directory / f"attempt={attempt:02d}" / "rank=00000" / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    last = json.loads(lines[-1]) if lines and lines[-1].endswith("}") else {}
    return last.get("step") if last.get("event") == "run_stop" and last.get("status") == "interrupted" else None


def delete_resume_states(directory: Path, run: RunSettings) -> None:
    """Delete the resume states of a finished run, which may have been killed before it did so itself."""
    for folder in directory.glob("checkpoints/step=*"):
        if not run.checkpoints.keep_resume_state:
            shutil.rmtree(folder, ignore_errors=True)


def _read_digest(attempt: Path) -> str | None:
    path = attempt / "attempt.json"
    return read_json(path, "attempt's record").get("digest") if path.is_file() else None


def write_done_file(directory: Path, output: Path, identity: Identity, run: RunSettings) -> bool:
    """Write `done.json` from the sealed record. Returns False if the record is not sealed or of another identity."""
    record = read_sealed(directory / "run.json")
    if record is None or record.get("digest") != identity.digest or record["outcome"]["status"] not in FINAL_STATUSES:
        return False
    write_json(
        output,
        {
            "schema": 1,
            "run_id": run.identity,
            "status": record["outcome"]["status"],
            "steps": record["outcome"]["steps"],
            "attempt": record["attempt"],
            "seal": record["seal"],
        },
    )
    return True


#: seconds to retry a queue that does not answer about the job that holds a lock
PATIENCE_S = 120.0


@contextmanager
def hold_run_folder(
    directory: Path,
    what: str,
    *,
    wait: bool = False,
    may_write: Callable[[str], bool | None] = submission.may_still_write,
    poll_s: float = 1.0,
) -> Iterator[int]:
    """Lock the folder while the block runs. Yields the lock's descriptor; processes that inherit it keep the lock.

    If another process has the lock: UserError, or with `wait`, wait until it is free. The lock file names the owner's
    process, host and job. A file system may not share locks between nodes (Lustre without `flock`), and ranks may
    outlive their launcher. So a free lock that another job left behind is taken only once that job has ended.
    """
    mine = submission.job_id()
    with lock_folder(
        directory,
        what,
        wait=wait,
        poll_s=poll_s,
        owner=f", job {mine}" if mine else "",
        check=lambda owner: _wait_for_job(owner, directory / ".lock", what, wait, may_write, poll_s),
    ) as held:
        yield held


def _wait_for_job(
    owner: str, path: Path, what: str, wait: bool, may_write: Callable[[str], bool | None], poll_s: float
) -> None:
    found = re.search(r"job (\S+)", owner)
    if found is None or found[1] == submission.job_id():
        return
    other, reported, since = found[1], False, time.monotonic()
    while (answer := may_write(other)) is not False:
        unknown = answer is None
        if unknown and not submission.job_id():
            return  # results of a cluster on a machine without its queue: the lock itself is free
        if not wait or (unknown and time.monotonic() - since > PATIENCE_S):
            raise UserError(
                f"{what} may still be written by job {other}.",
                lock=path,
                owner=owner,
                found="the queue does not answer" if unknown else f"job {other} is in the queue",
                next=f"wait for it, or scancel {other}",
            )
        if not unknown:
            since = time.monotonic()
        if not reported:
            print(f"tokenscale: {what} may still be written by job {other}; waiting for its end", flush=True)
            reported = True
        time.sleep(poll_s)


#: options with which Snakemake runs no jobs, besides -n
DRY_OPTIONS = {"--dry-run", "--dryrun", "--dag", "--rulegraph", "--filegraph", "--lint", "--report", "--summary", "-S"}
DRY_OPTIONS |= {"--detailed-summary", "-D", "--list", "-l", "--list-rules", "--version", "-v"}
_held: list[IO[str]] = []


def enter_workflow(arguments: Sequence[str], folder: Path = Path(".snakemake")) -> bool:
    """Register this Snakemake process before it takes Snakemake's own lock. Returns False for dry runs and the like.

    Concurrent processes share a lock of the operating system, which ends with them. A process that finds it free is
    alone: a lock of Snakemake is then stale and is removed. File systems may not share locks between nodes, so a
    process registered on another node counts as alive until `--unlock` is given.
    """
    if DRY_OPTIONS & set(arguments) or any(a.startswith("-n") for a in arguments):
        return False
    if _held:
        return True
    folder.mkdir(exist_ok=True)
    owners_file = folder / "tokenscale.owners"
    file = open(owners_file, "a+", encoding="utf-8")  # held until the process ends
    try:
        alone = acquire(file)
    except OSError:  # a file system without locks: Snakemake's own has to do
        file.close()
        return True
    file.seek(0)
    owners = file.read().splitlines()
    elsewhere = [owner for owner in owners if not owner.endswith(f" on {platform.node()}")]
    locks = folder / "locks"
    if alone and (not elsewhere or "--unlock" in arguments):
        if locks.is_dir() and any(locks.iterdir()):
            print("tokenscale: removing the lock of a Snakemake process that was killed.", file=sys.stderr)
            shutil.rmtree(locks)
        file.truncate(0)
    elif locks.is_dir() and any(locks.iterdir()):
        others = ", ".join(owners if not alone else elsewhere)
        how = "may still be" if alone else "is"
        print(f"tokenscale: Snakemake {how} running in this folder: {others}.", file=sys.stderr)
    fcntl.flock(file, fcntl.LOCK_SH)
    file.write(f"process {os.getpid()} on {platform.node()}\n")
    file.flush()
    _held.append(file)
    atexit.register(_release, file, os.getpid())
    return True


def _release(file: IO[str], process: int) -> None:
    if os.getpid() == process and acquire(file):
        file.truncate(0)


def use_this_python() -> None:
    """Put the folder of the running Python first in PATH, so that Snakemake's jobs run with it, activated or not."""
    here = str(Path(sys.executable).parent)
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if folders[0] != here:
        os.environ["PATH"] = os.pathsep.join([here, *folders])
