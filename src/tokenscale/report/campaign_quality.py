"""Quality of an experiment's measurements: spread within and between runs, same data, design and
inventory of runs.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import duckdb
import pandas as pd

from tokenscale.analysis.queries import damage_reported
from tokenscale.referee.expectations import ONE_SOURCE, TOO_NOISY
from tokenscale.report.captions import cells, format_spread, select_usable
from tokenscale.report.paired_comparisons import in_pairs
from tokenscale.report.style import number
from tokenscale.report.table import Table, columns, count, fold_columns
from tokenscale.settings.experiments import flatten_cell


def steadiness(step_times: pd.DataFrame, throughput: pd.DataFrame) -> Table:
    """Return a row for each series and world size: spread of steps within a run, and of throughput
    between runs.
    """
    late = step_times["late_s"].notna().any()
    rows = []
    for name, world, group in cells(step_times):
        of = throughput[(throughput["series"] == name) & (throughput["world_size"] == world)][
            "useful_tokens_per_s"
        ]
        between = (
            number(100 * (of.max() - of.min()) / of.median(), digits=2) if len(of) > 1 else "–"
        )
        rows.append(
            [
                *(name, str(world), str(len(group)), format_spread(1e3 * group["median_s"])),
                *(
                    number((group[f"{tail}_s"] / group["median_s"]).median())
                    for tail in ("p95", "p99", "slowest")
                ),
                *(number(100 * group["iqr_share"].median(), digits=2), between),
                *([format_spread(1e3 * group["late_s"].dropna())] if late else []),
            ]
        )
    heads = columns(
        "approach",
        ">world size",
        ">runs",
        ">median step (ms)",
        ">p95 / median",
        ">p99 / median",
        ">slowest / median",
        ">within a run: IQR (%)",
        ">between runs: range (%)",
        *([">slowest rank behind (ms)"] if late else []),
    )
    text = (
        "Quantiles are of one run's steps, medians over runs. Between runs: highest less lowest "
        "throughput over the "
    )
    return Table(
        columns=heads,
        rows=rows,
        caption=f"After warm-up; steps are as long as on the slowest rank. {text}median.",
    )


def energy(rows: pd.DataFrame) -> str:
    """Return a sentence on the energy that the devices counted; empty where none did."""
    counted = rows.dropna(subset=["energy_j"])
    texts = [
        f"{name}, world size {world}: {format_spread(1e3 * group['j_per_useful_token'])} mJ a useful token"
        for name, world, group in cells(counted)
    ]
    heading = f"Energy of the devices' boards, by their own counters ({len(counted)} runs)"
    return f"{heading}: {'; '.join(texts)}." if texts else ""


RESUMED = "resumed and uninterrupted"
OFFLINE = "online and offline"
#: kind of pair → (what the sentence is about, what is true of a proven pair)
_SAME = "the same samples and useful tokens at every step"
_PROOFS = {
    "world sizes": ("across world sizes", f"{_SAME}, and losses within rounding"),
    RESUMED: (
        "after resuming from another run's state",
        f"{_SAME} that is left, and losses within rounding",
    ),
    OFFLINE: (
        "online against offline",
        "the same samples, the same useful tokens, and bit-identical losses at every step",
    ),
}


def proof(order: pd.DataFrame) -> dict[str, Any]:
    """Return a sentence and a table for each kind of pair: whether its runs trained on the same
    batches.

    Digests name samples; equal losses show equal content (`order.sql`), within rounding unless
    online and offline.
    """
    parts = []
    for kind, (what, true) in _PROOFS.items():
        pairs = order[order["kind"] == kind]
        if kind == RESUMED and pairs.empty:  # few experiments resume
            continue
        if len(pairs) and pairs["largest_loss_difference"].isna().all():  # of runs that only read
            true = _SAME
        pairs = pairs.assign(finding=[_finding(kind, pair) for pair in pairs.itertuples()])
        proven = int((pairs["finding"] == "proven").sum())
        if pairs.empty:
            state = "none"
            text = "no pair of runs to compare."
        elif proven == len(pairs):
            all_have = f"All {in_pairs(proven)} have" if proven > 1 else "The one pair has"
            state = "proven"
            text = f"proven. {all_have} {true}."
        else:
            why = pairs.loc[pairs["finding"] != "proven", "finding"].value_counts(sort=False)
            others = "; ".join(f"{in_pairs(n)}: {finding}" for finding, n in why.items())
            state = "broken"
            text = f"not proven. {proven} of {in_pairs(len(pairs))} have {true}; {others}."
        if kind != OFFLINE and len(pairs):
            text += (
                f" Losses differ by up to {pairs['largest_loss_difference'].max():.2g} nats a "
                "useful token. Rounding "
                f"explains {pairs['loss_tolerance'].min():.2g} in the first 20 steps, growing to "
                f"{pairs['late_loss_tolerance'].min():.2g} at the last step (query order)."
            )
        text = f"Same data {what}: {text}"
        parts.append({"kind": kind, "state": state, "text": text, "table": _proof_table(pairs)})
    return {"parts": parts}


def _finding(kind: str, pair: Any) -> str:
    """Return what a pair shows: `proven`, or what is missing."""
    if not pair.same_data:
        return "other samples or another order: not proven"
    if not pair.same_useful_tokens:
        return "same order, useful tokens differ: not proven"
    if kind == OFFLINE and not pair.losses_identical:
        return "same order, losses differ: not proven"
    return (
        "proven"
        if pair.losses_agree
        else "same order, losses differ by more than rounding: not proven"
    )


def _proof_table(pairs: pd.DataFrame) -> Table:
    """Return a row for the pairs of two series and two world sizes."""
    heads = columns(
        "approach",
        "against",
        "world sizes",
        ">pairs",
        ">steps with equal digests",
        "same useful tokens",
        "losses bit-identical",
        ">largest loss difference (nats)",
        "finding",
    )
    rows = [
        [
            *(a, b, str(w) if w == v else f"{w} and {v}", str(len(group))),
            f"{group['steps_equal'].sum()} of {group['steps_compared'].sum()}",
            "yes" if group["same_useful_tokens"].all() else "no",
            *_compare_losses(group),
            "; ".join(dict.fromkeys(group["finding"])),
        ]
        for (a, b, w, v), group in pairs.groupby(
            ["series", "other_series", "world_size", "other_world_size"]
        )
    ]
    return Table(
        columns=heads,
        rows=rows,
        caption="Digests name the samples of a step by their numbers, not their content.",
    )


def _compare_losses(pairs: pd.DataFrame) -> tuple[str, str]:
    """Return whether losses are bit-identical, and their largest difference; dashes of runs that only
    read.
    """
    if pairs["largest_loss_difference"].isna().all():
        return "–", "–"
    identical = "yes" if pairs["losses_identical"].all() else "no"
    return identical, f"{pairs['largest_loss_difference'].max():.2g}"


def of_canary(runs: pd.DataFrame, planned: Mapping[str, int | None]) -> pd.Series:
    """Return which rows are runs of the canary: repeats beyond those that `planned` (cell →
    repeats) has for a cell.
    """
    repeats = runs["cell"].map(planned).astype(float)
    return (runs["repeat"].astype(float) >= repeats) & ~runs["external"].fillna(False).astype(bool)


def design(
    runs: pd.DataFrame, planned: Mapping[str, int | None], not_run: Sequence[dict[str, Any]] = ()
) -> Table:
    """Return a row for each cell with the validity of its repeats; `nonfinite` are invalid ones
    that stopped so.
    """
    canary = runs[of_canary(runs, planned)]
    columns_shown = ["cell", "external", "repeat", "status", "validity"]
    runs = runs.drop(canary.index)[columns_shown]
    repeats = sorted(runs["repeat"].dropna().unique())
    rows = []
    for (cell, external), group in runs.groupby(["cell", "external"], sort=False):
        by_repeat = {
            r.repeat: "nonfinite" if r.status == "nonfinite" else r.validity
            for r in group.itertuples()
        }
        wanted = len(group) if external else planned.get(cell) or len(group)
        name = (cell or "(one cell)") + " (external)" * external
        rows.append(
            [
                name,
                *(by_repeat.get(r, "–") for r in repeats),
                f"{len(select_usable(group))} of {wanted}",
            ]
        )
    left_out = (
        ", ".join(f"{key}={level}" for key, level in flatten_cell(left["cells"]).items())
        for left in not_run
    )
    without = "; ".join(
        f"{cell} ({left['reason']})" for cell, left in zip(left_out, not_run, strict=True)
    )
    notes = [f"Not run: {without}."] if without else []
    if len(canary):
        done = f"{len(select_usable(canary))} of {len(canary)} runs of {canary['cell'].iloc[0]}"
        notes.append(f"Canary, between the others: {done}.")
    return Table(
        columns=columns("cell", *(f"repeat {r}" for r in repeats), ">done"),
        rows=rows,
        caption=" ".join(notes),
    )


def inventory_table(runs: pd.DataFrame, validation: pd.DataFrame) -> Table:
    """Return a row for each run, invalid runs included. The caption names the values that were not
    checked, and the numbers of runs and validations that have one source.
    """
    queued = runs["job_ids"].notna().any()
    jobs = [_newest_job(r) if queued else ("", "") for r in runs.itertuples()]
    heads = columns(
        "run",
        "validity",
        "status",
        "reasons",
        ">order",
        ">attempts",
        ">steps",
        ">repeated rows",
        ">broken lines",
        "sealed",
        *(["nodes", ">queued s", "SLURM log"] if queued else []),
    )
    rows = [
        [
            *(r.run_id, r.validity, r.status),
            *(
                "; ".join(text for text in (r.reasons, r.cautions) if pd.notna(text) and text),
                count(r.position),
            ),
            *(
                count(r.attempts),
                f"{count(r.steps_seen)} of {count(r.steps_asked)}",
                count(r.overlap_rows),
            ),
            f"{count(r.quarantined)}"
            + (f" ({count(r.quarantined_benign)} benign)" if r.quarantined else ""),
            "yes" if r.sealed else "no",
            *([r.node_names or "", count(r.queue_s), job] if queued else []),
        ]
        for r, (job, _) in zip(runs.itertuples(), jobs, strict=True)
    ]
    unchecked = Counter(
        text
        for of in runs["unchecked"].dropna()
        for text in of.split("; ")
        if TOO_NOISY not in text
    )
    parts = [
        f"Not checked in {n} run{'s' * (n > 1)}: {text}." for text, n in unchecked.items() if text
    ]
    known = {name for of in (runs, validation) for name in of if of[name].notna().any()}
    alone = [f"{of.quantity} ({of.why})" for of in ONE_SOURCE.values() if of.column in known]
    if alone:
        parts.append(f"One source, which no second one could contradict: {', '.join(alone)}.")
    made = Table(
        columns=heads,
        rows=rows,
        caption=" ".join(parts),
        links={job: quote(f"../../{log}") for job, log in jobs if job and log},
    )
    return fold_columns(made, "attempts", "steps", "repeated rows", "broken lines", "sealed")


def _newest_job(run: Any) -> tuple[str, str]:
    """Return a run's newest SLURM job and the path of its log, relative to the project's folder."""
    job, log = ((of or "").split(", ")[-1] for of in (run.job_ids, run.slurm_logs))
    return job and f"job {job}", log


def quarantine_table(connection: duckdb.DuckDBPyConnection) -> Table:
    """Return the broken log lines; those that a killed process does not explain come first."""
    query = (
        "SELECT file, line, reason, benign, text FROM quarantine ORDER BY benign, file, line "
        "LIMIT 100"
    )
    with damage_reported(connection):
        rows = connection.execute(query).fetchall()
    heads = columns("file", ">line", "reason", "benign", "text")
    return Table(
        heads,
        rows=[
            [f, str(n), why, "yes" if benign else "no", text[:120]]
            for f, n, why, benign, text in rows
        ],
    )
