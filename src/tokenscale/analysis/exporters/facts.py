"""What made a run's numbers, flat, as trackers want it: settings, commit, hashes of the data, versions, hardware."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json, read_json, sha256_file
from tokenscale.runs.records import provenance
from tokenscale.settings.options import from_dict
from tokenscale.settings.run import RunSettings

Value = bool | int | float | str

#: parts of run.json that stand elsewhere, or only in the file itself (which goes along)
LEFT_OUT = ("schema", "run_id", "run", "code", "argv", "outcome", "installed")


@dataclass(frozen=True)
class Facts:
    """A run's record for a tracker."""

    run_id: str
    status: str  # running, complete, nonfinite
    started_unix_s: float
    ended_unix_s: float | None
    settings: dict[str, Value]  # all settings by dotted name, the default ones too
    provenance: dict[str, Value]  # git.commit, inputs.store (SHA-256 of its manifest), versions.torch, …
    files: tuple[Path, ...]  # run.json, and dirty.diff where the tree was dirty

    @property
    def commit(self) -> str | None:
        """The commit, where it is known."""
        commit = self.provenance.get("git.commit")
        return str(commit) if commit else None

    @property
    def diff(self) -> str:
        """What had been changed since that commit, "" where nothing was."""
        texts = [p.read_text(encoding="utf-8", errors="replace") for p in self.files if p.name == "dirty.diff"]
        return "".join(texts)


def is_sealed(directory: Path) -> bool:
    """Whether the run in this folder has ended and its record is whole."""
    return provenance.read_sealed(directory / "run.json") is not None


def read(directory: Path) -> Facts:
    """The facts of a run that has started. Raises UserError for a record that is missing or broken."""
    record = read_json(directory / "run.json", "run's record", next="name a folder of a run: results/runs/RUN_ID")
    if not isinstance(record, dict) or "run_id" not in record:
        raise UserError(
            "this run.json is no record of a run.",
            path=directory / "run.json",
            next="name the folder of a run, such as results/runs/RUN_ID",
        )
    rest = {name: value for name, value in record.items() if name not in LEFT_OUT}
    rest |= {"tokenizer": _tokenizer(record)} if _tokenizer(record) else {}
    outcome = record.get("outcome") or {}
    settings, effective = _settings(record.get("run") or {})
    if effective is not None:
        rest["effective_seed"] = effective
    diff = directory / "dirty.diff"
    dirty = diff.is_file() and (record.get("git") or {}).get("diff_sha256") == sha256_file(diff)
    return Facts(
        run_id=record["run_id"],
        status=outcome.get("status", "unknown"),
        started_unix_s=float(record.get("started_unix_s") or 0.0),
        ended_unix_s=outcome.get("ended_unix_s"),
        settings=settings,
        provenance=flat(rest),
        files=(directory / "run.json", *([diff] if dirty else [])),
    )


def _settings(stated: dict[str, Any]) -> tuple[dict[str, Value], int | None]:
    """(all settings, the seed that follows from seed and repeat); only the stated ones where another version made
    them."""
    try:
        run = from_dict(RunSettings, stated)
    except (UserError, TypeError, AttributeError, ValueError):
        return flat(stated), None
    return flat(asdict(run)), run.effective_seed


def _tokenizer(record: dict[str, Any]) -> Any:
    """Name and hash of the tokenizer that a store was made with, where its manifest is still the one that was read."""
    argv, expected = record.get("argv") or [], (record.get("inputs") or {}).get("store")
    for flag, text in zip(argv, argv[1:], strict=False):
        path = Path(str(text))
        if flag == "--store" and path.is_file() and sha256_file(path) == expected:
            return read_json(path, "manifest").get("tokenizer")
    return None


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Value]:
    """Nested values by dotted names; lists as JSON; null as the word.

    >>> flat({"optimizer": {"beta1": 0.9, "clip_norm": None}, "sizes": [1, 2]})
    {'optimizer.beta1': 0.9, 'optimizer.clip_norm': 'null', 'sizes': '[1,2]'}
    """
    found: dict[str, Value] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            scalar = isinstance(value, (bool, int, float, str))
            found[f"{prefix}{name}"] = value if scalar else canonical_json(value)
    return found
