"""Attempts of a run: which one comes next, which ones belong to other code or data, when nothing is left to do."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenscale.base.files import canonical_json, read_json, sha256_file, sha256_text, write_json
from tokenscale.runs.records.provenance import sealed
from tokenscale.settings.run import RunSettings

#: outcomes that are results: a run that diverged is one, and the report shows it
ENDED = ("complete", "nonfinite")
#: exit code of what was stopped in time to go on from where it was (EX_TEMPFAIL of sysexits.h)
AGAIN = 75


@dataclass(frozen=True)
class Identity:
    """What an attempt is made of: only attempts with equal digests are ever resumed or merged.

    Digests are over contents; paths count by their names only, so that a project can be moved.
    """

    code: dict[str, str]
    inputs: dict[str, str]
    layout: dict[str, str] = field(default_factory=dict)  # the part of the code that is the layout's alone
    state: str | None = None  # of another run, that this one goes on from

    @property
    def digest(self) -> str:
        """Over all code and inputs, and the state of another run where there is one."""
        made = self.code_and_inputs
        return made if self.state is None else sha256_text(f"{made} {self.state}")

    @property
    def code_and_inputs(self) -> str:
        """Over these alone: repeats of a cell share them, each of which has a state of its own to go on from."""
        return sha256_text(canonical_json({"code": sorted(self.code.items()), "inputs": sorted(self.inputs.items())}))

    @property
    def science_code(self) -> str:
        """Over the code without the layout's: equal for runs of which one may go on from the other's checkpoint."""
        return sha256_text(canonical_json(sorted(self.code.items() - self.layout.items())))

    @property
    def layout_digest(self) -> str:
        """Over the layout's code."""
        return sha256_text(canonical_json(sorted(self.layout.items())))

    def record(self) -> dict[str, Any]:
        """As an attempt keeps it."""
        digests = {name: getattr(self, name) for name in ("digest", "science_code", "layout_digest")}
        resumed = {"code_and_inputs": self.code_and_inputs, "state": self.state} if self.state else {}
        return {**digests, "code": self.code, "inputs": self.inputs, **resumed}


def identity_of(
    code: list[Path], inputs: dict[str, Path], layout: list[Path] = (), state: Path | None = None
) -> Identity:
    """Hash the code files (by their path below the package), the manifests (by their role), and the record of the state
    of another run, which names the content of its files."""
    hashes = _hashes(code)
    roles = {role: sha256_file(path) for role, path in inputs.items()}
    layout = {name: hashes[name] for name in _hashes(layout)}
    return Identity(hashes, roles, layout, sha256_file(state) if state else None)


def _hashes(code: list[Path]) -> dict[str, str]:
    hashes = {}
    for path in code:
        parts = path.resolve().parts
        start = len(parts) - parts[::-1].index("tokenscale") if "tokenscale" in parts else len(parts) - 1
        hashes["/".join(parts[start:])] = sha256_file(path)
    return hashes


def prepare(directory: Path, run: RunSettings, identity: Identity, launch: dict[str, Any] | None = None) -> int | None:
    """Make room for the next attempt and return its number; None when the run is sealed already, with this
    identity. `launch` is what its record says of the machine and the job.

    Attempts of other code or inputs move to `superseded/`, with the record that belongs to them.
    """
    record = sealed(directory / "run.json")
    if record is not None and record.get("digest") == identity.digest and record["outcome"]["status"] in ENDED:
        return None
    attempts = sorted(directory.glob("attempt=*"))
    stale = [a for a in attempts if _digest(a) != identity.digest]
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


def interrupted(directory: Path, attempt: int) -> int | None:
    """The step after which an attempt was stopped in time to go on; None for one that ended otherwise."""
    path = directory / f"attempt={attempt:02d}" / "rank=00000" / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    last = json.loads(lines[-1]) if lines and lines[-1].endswith("}") else {}
    return last.get("step") if last.get("event") == "run_stop" and last.get("status") == "interrupted" else None


def drop_states(directory: Path, run: RunSettings) -> None:
    """Delete what a run that has ended was to be resumed from: it may have been killed before it did so itself."""
    for folder in directory.glob("checkpoints/step=*"):
        if not run.checkpoints.keep_resume_state:
            shutil.rmtree(folder, ignore_errors=True)


def _digest(attempt: Path) -> str | None:
    path = attempt / "attempt.json"
    return read_json(path, "attempt's record").get("digest") if path.is_file() else None


def finish(directory: Path, output: Path, identity: Identity, run: RunSettings) -> bool:
    """Write `done.json` from the sealed record. False when the record is not sealed, or not of this identity."""
    record = sealed(directory / "run.json")
    if record is None or record.get("digest") != identity.digest or record["outcome"]["status"] not in ENDED:
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
