"""Read a run's folder: its record, its logs as typed tables, and the tokens of its inputs, counted
again.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tokenscale.analysis import tables
from tokenscale.analysis.bleu import bleu_rows
from tokenscale.analysis.logs import launches, merge, read_run
from tokenscale.analysis.recount import Counts, Recount
from tokenscale.analysis.run_contents import PARTS, RunContents
from tokenscale.analysis.run_record import Row, RunRecord, read_settings
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, sha256_file
from tokenscale.settings.manifests import list_manifests
from tokenscale.settings.registry import OBJECTIVES
from tokenscale.settings.run import RunSettings


class InputsAtHand:
    """Manifests of stores and texts, by the SHA-256 in `manifests`, or where the workflow writes them
    below `project`.
    """

    def __init__(self, manifests: Mapping[str, Path], project: Path):
        self._manifests = manifests
        self._project = project
        self._hashes: dict[Path, str | None] = {}

    def find(self, name: str, recorded: str | None) -> Path:
        """Return where the manifest of this name is, or would be."""
        return self._manifests.get(recorded or "", self._project / name)

    def hash(self, name: str, recorded: str | None) -> str | None:
        """Return the SHA-256 of the manifest at hand, which many runs may name; None without it."""
        path = self.find(name, recorded)
        if path not in self._hashes:
            self._hashes[path] = sha256_file(path) if path.is_file() else None
        return self._hashes[path]


def read_contents(folder: Path, found: RunRecord, at_hand: InputsAtHand) -> RunContents:
    """Read the logs of a run's folder, and of a sealed run its inputs."""
    record = found.record
    columns = launches(folder)
    if record is None and not found.trouble:
        return RunContents(found, columns, parts=_build_tables({}), hashes={})
    record = record or {}
    run_id = folder.name
    log = read_run(folder, run_id, digest=record.get("digest"))
    steps = merge(log.steps, events=log.events)
    translated = bleu_rows(log.events) if found.sealed else []
    columns |= {
        "attempts": len(log.merged),
        "overlap_rows": len(log.steps) - len(steps),
        "quarantined": len(log.quarantine),
        "quarantined_benign": sum(q["benign"] for q in log.quarantine),
        "validation_tokens": log.validation_tokens(),
        **log.lasted(),
        "unknown_facts": json.dumps(found.unknown) if found.unknown else None,
    }
    rows = {
        "events": log.events,
        "attempts": log.attempts(steps),
        "bleu": [{"run_id": run_id, **score} for score in translated],
        "quarantine": log.quarantine,
    }
    recount = Recount()
    run = None if record.get("external") else read_settings(record.get("run"))
    if run is not None and found.sealed:
        recount = count_again(record, run, steps=steps["step"].to_numpy(), at_hand=at_hand)
    return RunContents(
        found=found,
        columns=columns,
        parts={**_build_tables(rows), "raw": log.steps, "steps": steps, "spans": log.spans},
        hashes=log.hashes,
        changed=tuple(log.changed(record)) if found.sealed else (),
        recount=recount,
    )


def _build_tables(rows: Mapping[str, list[Row]]) -> dict[str, pa.Table]:
    return {part: tables.of_rows(table, rows.get(part, ())) for part, table in PARTS.items()}


def count_again(record: Row, run: RunSettings, steps: np.ndarray, at_hand: InputsAtHand) -> Recount:
    """Return counts of a run's inputs, as far as they are at hand with the hashes that it read.
    `steps` are the numbers of its steps.
    """
    recorded = record.get("inputs")
    recorded = recorded if isinstance(recorded, dict) else {}
    code = record.get("code")
    changes = "data/batches/objectives.py"
    objectives = Path(__file__).parents[1] / changes
    masks = OBJECTIVES[run.objective].special_ids
    if masks and (code if isinstance(code, dict) else {}).get(changes) != sha256_file(objectives):
        reason = "the run chose labels by another version of the code"
        return Recount(counted=reason, held_out=reason)
    names = list_manifests(run)
    found: dict[str, Path] = {}
    reasons: dict[str, str] = {}
    for role, name in names.items():
        what = role.replace("_", " ").replace("validation", "held-out")
        path = at_hand.find(name, recorded.get(role))
        sha256 = at_hand.hash(name, recorded.get(role))
        if sha256 is None:
            reasons[role] = f"the {what} is not at hand"
        elif recorded.get(role) != sha256:
            reasons[role] = f"the {what} at hand is not the one that the run read"
        else:
            found[role] = path.parent if role == "tokenizer" else path
    store = found.get("store")
    size = None
    if store is not None and run.mixture is None and not masks:
        size = read_json(store, what="manifest of the token store").get("vocabulary_size")
    failures = []

    def attempt(role: str, count: Callable[[Any, Any], Any]) -> Any:
        needed = []
        if role != "store" or run.store is not None:
            needed.append(role)
        if role == "store" and run.online:
            needed += ["corpus", "tokenizer"]
        if masks:
            needed.append("tokenizer")
        missing = [reasons[name] for name in needed if name in reasons]
        try:
            # with packages that a report does without
            from tokenscale.data.batches import batch, recount

            get = found.get
            inputs = batch.Inputs(
                corpus=get("corpus"),
                tokenizer=get("tokenizer"),
                store=get("store"),
                validation_store=get("validation_store"),
            )
            return missing[0] if missing else count(recount, inputs)
        except (UserError, ImportError, OSError) as error:
            failures.append(role)
            return (
                "the inputs were not read again: "
                f"{str(error).splitlines()[0].removeprefix('tokenscale: ').rstrip('.')}"
            )

    counted: Counts | str = "the logs hold no step"
    if len(steps):
        first = int(steps.min())
        stop = int(steps.max()) + 1
        counted = attempt(
            "store", lambda r, inputs: Counts(**vars(r.recount_steps(run, inputs, first, stop)))
        )
    held_out: dict[str, tuple[int, int]] | str = {}
    if run.validation.rows:
        held_out = attempt(
            "validation_store", lambda r, inputs: r.recount_held_out(run, inputs, 1 << 31)
        )
    return Recount(
        counted=counted,
        held_out=held_out,
        vocabulary_size=size if isinstance(counted, str) else counted.vocabulary_size,
        inputs={name: recorded.get(role) for role, name in names.items()},
        failed=bool(failures),
    )
