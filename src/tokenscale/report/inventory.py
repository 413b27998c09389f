"""Every run that an experiment lists: done, missing or broken; and the lines that nobody could read."""

from typing import Any

import duckdb
import pandas as pd

from tokenscale.analysis.queries import damage_reported
from tokenscale.report.table import Link, Table, count
from tokenscale.settings.experiments import dotted


def design(runs: pd.DataFrame, repeats: Any, not_run: list[dict[str, Any]] = ()) -> Table:
    """The grid of the experiment: a row a cell, repeats by validity; `nonfinite` are invalid ones that stopped so.

    The caption names the combinations that are not run, and why, and the canary, whose runs are repeats beyond these.
    """
    canary = runs[(runs["repeat"] >= repeats) & ~runs["external"]] if repeats else runs[:0]
    runs = runs.drop(canary.index)
    columns = [
        ("cell", False),
        *((f"repeat {r}", False) for r in sorted(runs["repeat"].dropna().unique())),
        ("done", True),
    ]
    rows = []
    for (cell, external), group in runs.groupby(["cell", "external"], sort=False):
        by_repeat = {r.repeat: "nonfinite" if r.status == "nonfinite" else r.validity for r in group.itertuples()}
        done = int(group["validity"].isin(["valid", "suspect"]).sum())
        marks = [by_repeat.get(r, "–") for r in sorted(runs["repeat"].dropna().unique())]
        asked = len(group) if external else repeats or len(group)
        rows.append([(cell or "(one cell)") + " (external)" * external, *marks, f"{done} of {asked}"])
    without = [
        f"{', '.join(f'{key}={level}' for key, level in dotted(left['cells']).items())} ({left['reason']})"
        for left in not_run
    ]
    said = [f"Not run: {'; '.join(without)}."] if without else []
    if len(canary):
        done = int(canary["validity"].isin(["valid", "suspect"]).sum())
        said.append(f"Canary, between the others: {done} of {len(canary)} runs of {canary['cell'].iloc[0]}.")
    return Table(columns, rows, " ".join(said))


def inventory_table(runs: pd.DataFrame) -> Table:
    """Every run, also those that count for nothing."""
    columns = [
        ("run", False),
        ("validity", False),
        ("status", False),
        ("reasons", False),
        ("order", True),
        ("attempts", True),
    ]
    columns += [("steps", True), ("repeated rows", True), ("broken lines", True), ("sealed", False)]
    queued = runs["job_ids"].notna().any()
    if queued:
        columns += [("nodes", False), ("queued s", True), ("SLURM log", False)]
    rows = []
    for r in runs.itertuples():
        rows.append(
            [r.run_id, r.validity, r.status, r.reasons or "", count(r.position), count(r.attempts)]
            + [f"{count(r.steps_seen)} of {count(r.steps_asked)}", count(r.overlap_rows)]
            + [f"{count(r.quarantined)}" + (f" ({count(r.quarantined_benign)} benign)" if r.quarantined else "")]
            + ["yes" if r.sealed else "no"]
            + ([r.node_names or "", count(r.queue_s), _newest_log(r)] if queued else [])
        )
    return Table(columns, rows)


def _newest_log(run: Any) -> str:
    """The log of a run's newest job."""
    if not run.job_ids:
        return ""
    jobs, logs = run.job_ids.split(", "), (run.slurm_logs or "").split(", ")
    return Link.to(f"job {jobs[-1]}", logs[-1]) if logs[-1] else f"job {jobs[-1]}"


def quarantine_table(connection: duckdb.DuckDBPyConnection) -> Table:
    """Broken log lines; the ones that a killed process does not explain come first."""
    with damage_reported(connection):
        rows = connection.execute(
            "SELECT file, line, reason, benign, text FROM quarantine ORDER BY benign, file, line LIMIT 100"
        ).fetchall()
    columns = [("file", False), ("line", True), ("reason", False), ("benign", False), ("text", False)]
    return Table(columns, [[f, str(n), why, "yes" if benign else "no", text[:120]] for f, n, why, benign, text in rows])
