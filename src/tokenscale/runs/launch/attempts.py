"""Attempts of a run: choose the next one, set aside those of other code or data, recognise a
finished run.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    canonical_json,
    read_record,
    sha256_file,
    sha256_text,
    write_json,
    write_sealed,
)
from tokenscale.runs.records.provenance import read_sealed
from tokenscale.settings.extensions import FOLDER
from tokenscale.settings.run import RunSettings

#: final statuses of a run; divergence is a result, which the report shows, and so is another
#: trainer that failed
FINAL_STATUSES = ("complete", "nonfinite", "failed")
#: exit code of a run that was stopped and can be resumed (EX_TEMPFAIL of sysexits.h)
RESUME_EXIT_CODE = 75


@dataclass(frozen=True)
class Identity:
    """Code and inputs of an attempt. Only attempts with equal digests are resumed or merged.

    Digests are computed from contents; only the names of paths count, so that a project can be
    moved.
    """

    code: dict[str, str]
    inputs: dict[str, str]
    state: str | None = None  # of another run, that this one goes on from

    @property
    def digest(self) -> str:
        """Digest of all code and inputs, and of another run's state."""
        alone = self.code_and_inputs
        return alone if self.state is None else sha256_text(f"{alone} {self.state}")

    @property
    def code_and_inputs(self) -> str:
        """Digest of code and inputs alone, shared by the repeats of a cell, which may resume from
        different states.
        """
        return sha256_text(
            canonical_json(
                {"code": sorted(self.code.items()), "inputs": sorted(self.inputs.items())}
            )
        )

    @property
    def code_sha256(self) -> str:
        """Digest of the code alone: equal for runs that can resume from each other's
        checkpoints.
        """
        return sha256_text(canonical_json(sorted(self.code.items())))

    def record(self) -> dict[str, Any]:
        resumed = (
            {"code_and_inputs": self.code_and_inputs, "state": self.state} if self.state else {}
        )
        digests = {"digest": self.digest, "code_sha256": self.code_sha256}
        return {**digests, "code": self.code, "inputs": self.inputs, **resumed}


def hash_identity(code: list[Path], inputs: dict[str, Path], state: Path | None = None) -> Identity:
    """Hash the code files (by path below the package, or with the folder of extensions), the
    manifests (by role) and another run's state record.
    """
    hashes = {}
    for path in code:
        parts = path.resolve().parts
        start = (
            len(parts) - parts[::-1].index("tokenscale")
            if "tokenscale" in parts
            else len(parts) - 1
        )
        own = path.is_relative_to(FOLDER)
        hashes[path.as_posix() if own else "/".join(parts[start:])] = sha256_file(path)
    roles = {role: sha256_file(path) for role, path in inputs.items()}
    return Identity(code=hashes, inputs=roles, state=sha256_file(state) if state else None)


def read_final(directory: Path, identity: Identity) -> dict[str, Any] | None:
    """Return the sealed record of a run that has ended with this identity, else None."""
    record = read_sealed(directory / "run.json")
    ended = record is not None and record.get("digest") == identity.digest
    return record if record and ended and record["outcome"]["status"] in FINAL_STATUSES else None


def prepare_attempt(
    directory: Path, run: RunSettings, identity: Identity, launch: dict[str, Any] | None = None
) -> int | None:
    """Prepare the next attempt and return its number; None if the run is already sealed with this
    identity.

    `launch` describes machine and job in the record. Attempts of other code or inputs move to
    `superseded/`.
    """
    if read_final(directory, identity):
        return None
    record = read_sealed(directory / "run.json")
    attempts = sorted(directory.glob("attempt=*"))
    stale = [a for a in attempts if _read_digest(a / "attempt.json") != identity.digest]
    if stale or (record is not None and record.get("digest") != identity.digest):
        number = 1 + max(
            (int(p.name) for p in directory.glob("superseded/*") if p.name.isdigit()), default=-1
        )
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
    write_sealed(
        attempt / "attempt.json", record=identity.record() | ({"launch": launch} if launch else {})
    )
    return number


def find_interrupted_step(directory: Path, attempt: int) -> int | None:
    """Return the step after which an attempt was stopped resumably; None if it ended otherwise."""
    path = directory / f"attempt={attempt:02d}" / "rank=00000" / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    last = json.loads(lines[-1]) if lines and lines[-1].endswith("}") else {}
    return (
        last.get("step")
        if last.get("event") == "run_stop" and last.get("status") == "interrupted"
        else None
    )


def describe_saved_state(directory: Path) -> str:
    """Describe where the next attempt of a run that was ended at once begins: at its newest resume
    state, if any.
    """
    states = [path.parent.name for path in directory.glob("checkpoints/step=*/checkpoint.json")]
    saved = max((int(name[5:]) for name in states if name[5:].isdigit()), default=None)
    if saved is None:
        return "no state was saved; the next attempt starts at its first step"
    return f"its last saved state is of step {saved}; the next attempt goes on from there"


def _read_digest(path: Path) -> str | None:
    """Return the digest of an attempt; None where its record is missing or damaged, so that it is
    put aside.
    """
    with suppress(UserError):
        return read_record(path, what="attempt's record")["digest"]
    return None


def write_done_file(directory: Path, output: Path, identity: Identity, run: RunSettings) -> bool:
    """Write `done.json` from the sealed record. Returns False if the record is not sealed or of
    another identity.
    """
    record = read_final(directory, identity)
    if record is None:
        return False
    write_json(output, value=mark_end(run.identity, record))
    return True


def mark_end(run_id: str, record: dict[str, Any]) -> dict[str, Any]:
    """Return the content of `done.json` for a sealed record."""
    ended = {key: record["outcome"][key] for key in ("status", "steps")}
    return {
        "schema": 1,
        "run_id": run_id,
        "attempt": record["attempt"],
        "seal": record["seal"],
    } | ended
