"""Attempts of a run: which one comes next, which ones belong to other code or data, when nothing is left to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenscale.files import canonical_json, read_json, sha256_file, sha256_text, write_json
from tokenscale.records.provenance import sealed
from tokenscale.settings.run import RunSettings

#: outcomes that are results: a run that diverged is one, and the report shows it
ENDED = ("complete", "nonfinite")


@dataclass(frozen=True)
class Identity:
    """What an attempt is made of: only attempts with equal digests are ever resumed or merged."""

    code: dict[str, str]
    inputs: dict[str, str]

    @property
    def digest(self) -> str:
        """Over the content of code and inputs; paths count by their names only, so that a project can be moved."""
        return sha256_text(canonical_json({"code": sorted(self.code.items()), "inputs": sorted(self.inputs.items())}))


def identity_of(code: list[Path], inputs: dict[str, Path]) -> Identity:
    """Hash the code files (by their path below the package) and the manifests (by their role)."""
    hashes = {}
    for path in code:
        parts = path.resolve().parts
        start = len(parts) - parts[::-1].index("tokenscale") if "tokenscale" in parts else len(parts) - 1
        hashes["/".join(parts[start:])] = sha256_file(path)
    return Identity(hashes, {role: sha256_file(path) for role, path in inputs.items()})


def prepare(directory: Path, run: RunSettings, identity: Identity) -> int | None:
    """Make room for the next attempt and return its number; None when the run is sealed already, with this
    identity.

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
        for name in ("run.json", "dirty.diff", "status.json"):
            if (directory / name).exists():
                (directory / name).rename(folder / name)
        for attempt in stale:
            attempt.rename(folder / attempt.name)
    number = 1 + max((int(a.name.split("=")[1]) for a in directory.glob("attempt=*")), default=-1)
    attempt = directory / f"attempt={number:02d}"
    attempt.mkdir(parents=True)
    content: dict[str, Any] = {"digest": identity.digest, "code": identity.code, "inputs": identity.inputs}
    write_json(attempt / "attempt.json", content)
    return number


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
