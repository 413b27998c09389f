"""What a run's folder gave: what reading hands to judging."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tokenscale.analysis.recount import Recount, decode
from tokenscale.analysis.run_record import Row, RunRecord
from tokenscale.base.files import check_types

#: tables of a run; `raw` are the steps of all merged attempts, by attempt and rank in the order of
#: the files
PARTS = {
    "raw": "steps",
    "steps": "steps",
    "spans": "spans",
    "events": "events",
    "attempts": "attempts",
    "bleu": "bleu",
    "quarantine": "quarantine",
}
#: columns by which logs are ordered
AS_LOGGED = ("attempt", "rank", "step")


@dataclass(frozen=True)
class RunContents:
    """What the files of a run gave. `parts` are the tables of `PARTS`; `columns` are those of the
    table `runs` that the logs and the launcher alone give.
    """

    found: RunRecord
    columns: Row
    parts: Mapping[str, pa.Table]
    hashes: Mapping[str, str]  # log below the run's folder → SHA-256
    changed: tuple[str, ...] = ()  # logs that differ from their sealed hashes
    recount: Recount = Recount()


def is_disordered(contents: RunContents) -> bool:
    """Return whether a log has a step twice or out of order, so that `order_as_logged` does not give
    the rows back as they were logged.
    """
    raw = contents.parts["raw"]
    steps = contents.parts["steps"]
    if len(raw) != len(steps):
        return True
    places = np.stack([raw[name].to_numpy() for name in AS_LOGGED])
    return not (places[:, np.lexsort(places[::-1])] == places).all()


def order_as_logged(steps: pa.Table) -> pa.Table:
    """Return merged step rows in the order of logs that have each step once, in its order."""
    return steps.sort_by([(name, "ascending") for name in AS_LOGGED])


def decode_contents(
    rows: Mapping[str, pa.Table], *, sealed: bool, columns: Row | None = None
) -> RunContents:
    """Return what a run's folder gave, from its rows of the tables. `sealed` tells whether the seal of
    its record is valid, `columns` are those of its row that the logs and the launcher alone give.

    Raises LookupError, TypeError or ValueError where tables of other hands lack what is needed.
    """
    (record,) = rows["records"].to_pylist()
    values = {name: json.loads(record[name]) for name in ("record", "hashes", "changed")}
    check_types(values, fields={"hashes": dict, "changed": list})
    logged = rows["logged"]
    recounts = rows["recounts"]
    parts = {name: rows[name] for name in PARTS if name in rows}
    parts["raw"] = logged if len(logged) else order_as_logged(rows["steps"])
    return RunContents(
        found=RunRecord(values["record"], sealed=sealed, trouble=record["trouble"]),
        columns=columns or {},
        parts=parts,
        hashes=values["hashes"],
        changed=tuple(values["changed"]),
        recount=decode(json.loads(recounts["recount"][0].as_py()), rows=recounts.slice(1)),
    )
