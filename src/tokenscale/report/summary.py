"""What the page and the PDF say about one experiment, as plain values: computed here, laid out elsewhere."""

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import duckdb
import numpy as np
import pandas as pd

from tokenscale.analysis import campaign, likeness, statistics
from tokenscale.analysis.queries import connect, query
from tokenscale.analysis.tables import TABLES
from tokenscale.errors import UserError
from tokenscale.files import canonical_json, read_json, sha256_file, sha256_text
from tokenscale.report.registry import FIGURES
from tokenscale.report.style import number, ordered
from tokenscale.report.words import caution, kinds, left_out, spread
from tokenscale.settings.experiments import COMPARISONS, dotted

#: all that is asked here
QUERIES = ("inventory", "throughput", "order", "scaling", "stalls", "validation")
VALIDITY = ("valid", "suspect", "invalid", "missing")
_MARGIN = f"1 ± {statistics.MARGIN:g}"


class Link(str):
    """A cell's text that leads to a file, named as seen from the project's folder."""

    href: str = ""

    @classmethod
    def to(cls, text: str, path: str) -> "Link":
        """The text with its target, as seen from the folder of the page (`results/report/`)."""
        link = cls(text)
        link.href = quote(f"../../{path}")
        return link


@dataclass(frozen=True)
class Table:
    """Columns with a flag for those aligned to the right, and rows of texts, of which some may be links."""

    columns: list[tuple[str, bool]]
    rows: list[list[str]]
    caption: str = ""


def experiment(name: str, tables: Path) -> dict[str, Any]:
    """Everything that is said about `<tables>/<name>`; see the keys below. Empty tables give empty parts."""
    folder = tables / name
    head = read_json(folder / "experiment.json", "experiment's description", next="python -m tokenscale ingest …")
    with connect(folder) as connection:
        runs = query("inventory", connection)
        throughput = query("throughput", connection)
        order = query("order", connection)
        compared, refused = comparisons(throughput, runs)
        return {
            "name": name,
            "question": head.get("question") or "",
            "scale": head.get("scale") or "",
            "note": head.get("note") or "",
            "repeats": head.get("repeats"),
            "figures": [f for f in head.get("figures") or FIGURES if f in FIGURES],
            "runs": len(runs),
            "validity": {word: int((runs["validity"] == word).sum()) for word in VALIDITY},
            "text": _text(runs),
            "machines": _machines(runs),
            "commits": _commits(runs),
            "data_from": _dates(runs),
            "digest": digest(folder),
            "caution": caution(query("scaling", connection)),
            "answers": answers(compared),
            "design": design(runs, head.get("repeats"), head.get("left_out") or []),
            "throughput": throughput_table(throughput, query("stalls", connection), runs, head.get("repeats")),
            "comparisons": comparison_table(compared, refused),
            "power": power_table(compared),
            "validation": validation_table(query("validation", connection)),
            "proof": proof(order),
            "inventory": inventory_table(runs),
            "quarantine": quarantine_table(connection),
            "versions": _versions(runs),
        }


def digest(folder: Path) -> str:
    """One digest over all tables of an experiment: equal digests, equal report."""
    hashes = {t: sha256_file(folder / f"{t}.parquet") for t in TABLES}
    return sha256_text(canonical_json(hashes | {"experiment": sha256_file(folder / "experiment.json")}))


def comparisons(throughput: pd.DataFrame, runs: pd.DataFrame) -> tuple[list[dict[str, Any]], str]:
    """(the pairs of `COMPARISONS`, one comparison a group, paired by repeat, p after Holm over all; who is refused).

    A group is what both have in common: all factors but the approach, at the smallest world size that both have.
    Factors of the Parquet store are those of the approach that is compared; its baseline reads none. Runs that are not
    like for like (`analysis/likeness.py`, on the rows of `runs`) are in no pair, and sentences say so. Raises UserError
    where two runs are the same repeat of a cell. Runs of other programs are in no pair: they have no repeats of ours.
    """
    refused = likeness.refusals(runs, "approach")
    out = likeness.refused(refused) | set(runs.loc[runs["external"], "run_id"])
    cells = _cells(throughput[~throughput["run_id"].isin(out)])
    device_s = _device_seconds(runs)
    family = []
    for approach, baseline in COMPARISONS:
        groups = {(c.factors, c.storage, c.layout) for c in cells if c.approach == approach}
        for factors, storage, layout in sorted(groups):
            of = _Cell(approach, factors, storage, layout, 0)
            over = _Cell(baseline, factors, "", layout, 0)
            worlds = [c.world_size for c in cells if c == replace(of, world_size=c.world_size)]
            shared = [w for w in worlds if replace(over, world_size=w) in cells]
            if not shared:
                continue
            of, over = (replace(cell, world_size=min(shared)) for cell in (of, over))
            values, bases = cells[of], cells[over]
            if pairs := values.keys() & bases.keys():
                rates, base_rates = _rates(values), _rates(bases)
                compared = statistics.ratio_of_medians(rates, base_rates)
                spread = statistics.spread_of_pairs([rates[k] / base_rates[k] for k in sorted(pairs)])
                took = [device_s[values[k].run_id] + device_s[bases[k].run_id] for k in pairs]
                family.append((of, baseline, compared, spread, float(np.median(took))))
    corrected = statistics.holm([c.p for _, _, c, *_ in family])
    reachable = statistics.holm([c.smallest_p for _, _, c, *_ in family])
    sizes = {of.world_size for of, *_ in family}
    found = []
    for (of, baseline, c, noise, took), p, smallest in zip(family, corrected, reachable, strict=True):
        spread = statistics.Summary(c.n, c.paired, c.low, c.high, c.kind)
        group = [of.factors, of.storage, of.layout, f"world size {of.world_size}" if len(sizes) > 1 else ""]
        found.append(
            {
                "approach": of.approach,
                "baseline": baseline,
                "group": ", ".join(filter(None, group)),
                "result": c,
                "p": p,
                "smallest_p": smallest,
                "verdict": statistics.verdict(spread, p, smallest),
                "spread_of_pairs": noise,
                "device_s": took,
            }
        )
    return found, likeness.sentences(refused)


def _device_seconds(runs: pd.DataFrame) -> dict[str, float]:
    """run id → seconds from its first event to its last, times its ranks."""
    seconds = (runs["stopped_unix_s"] - runs["started_unix_s"]) * runs["world_size"]
    return dict(zip(runs["run_id"], seconds.astype(float), strict=True))


@dataclass(frozen=True)
class _Cell:
    """What the repeats of a cell share; see `analysis/tables.py`."""

    approach: str
    factors: str
    storage: str
    layout: str
    world_size: int


def _cells(throughput: pd.DataFrame) -> dict[_Cell, dict[Any, Any]]:
    """Cell → repeat → row of `throughput.sql`."""
    cells: dict[_Cell, dict[Any, Any]] = {}
    for row in throughput.itertuples():
        cell = _Cell(row.approach, row.factors, row.storage, row.layout, row.world_size)
        other = cells.setdefault(cell, {}).setdefault(row.repeat, row)
        if other is not row:
            raise UserError(
                "two runs are the same repeat of the same cell.",
                cell=f"{row.series}, world size {row.world_size}, repeat {row.repeat}",
                runs=f"{other.run_id}, {row.run_id}",
                next="name what tells them apart as a factor of the experiment",
            )
    return cells


def _rates(rows: dict[Any, Any]) -> dict[Any, float]:
    return {repeat: row.useful_tokens_per_s for repeat, row in rows.items()}


def answers(compared: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One line a comparison: effect, spread, word."""
    return [
        {
            "text": (f"{c['group']}: " if c["group"] else "")
            + f"{c['approach']} trains on {number(c['result'].paired)} × as many useful tokens a second "
            f"as {c['baseline']}",
            "spread": f"{number(c['result'].low)}–{number(c['result'].high)}, {_pairs(c['result'].n)}, "
            f"{c['result'].kind}" + (f", within {_MARGIN}" if c["verdict"] == "equivalent" else ""),
            "verdict": c["verdict"],
        }
        for c in compared
    ]


def _pairs(n: int) -> str:
    return f"{n} pair{'s' * (n != 1)}"


def comparison_table(compared: list[dict[str, Any]], refused: str = "") -> Table:
    """Online against offline: ratios, test and verdict. Groups are named where there are any, and who is in none."""
    grouped = any(c["group"] for c in compared)
    columns = [
        ("approach", False),
        ("against", False),
        *([("at", False)] if grouped else []),
        ("pairs", True),
        ("ratio of medians", True),
        ("median of paired ratios", True),
    ]
    columns += [
        ("spread", True),
        ("what the spread is", False),
        ("p (Holm)", True),
        ("smallest possible p", True),
        ("verdict", False),
    ]
    rows = []
    for c in compared:
        r = c["result"]
        rows.append(
            [
                c["approach"],
                c["baseline"],
                *([c["group"]] if grouped else []),
                str(r.n),
                number(r.ratio),
                number(r.paired),
                f"{number(r.low)}–{number(r.high)}",
            ]
            + [r.kind, number(c["p"], 2), number(c["smallest_p"], 2), c["verdict"]]
        )
    return Table(
        columns,
        rows,
        "Useful tokens per second at the smallest world size that both have, paired by repeat, all other factors "
        "equal. Exact sign-flip test on log ratios, Holm-corrected over the rows; “too few runs” means that no data "
        "from so many pairs could reach p < 0.05, “equivalent” that the whole interval of the ratios lies within "
        f"{_MARGIN}. {refused}".strip(),
    )


def power_table(compared: list[dict[str, Any]]) -> Table:
    """How many pairs it takes to show effects of several sizes, from the spread of the pairs that there are."""
    columns = [("approach", False), ("against", False), ("at", False), ("pairs here", True), ("spread (%)", True)]
    columns += [(f"to show {100 * effect:g} %", True) for effect in statistics.EFFECTS]
    rows = []
    for c in compared:
        needed = statistics.power_table(c["spread_of_pairs"], c["device_s"], family=len(compared))
        rows.append(
            [c["approach"], c["baseline"], c["group"], str(c["result"].n), number(100 * c["spread_of_pairs"])]
            + [_needed(row, c["spread_of_pairs"]) for row in needed]
        )
    text = (
        "Pairs of runs, and the time of devices (on a CPU: of ranks) that they take, with which a difference of that "
        f"size is shown in {100 * statistics.POWER:g} of 100 campaigns: interval and sign test, at "
        f"{100 * statistics.LEVEL:g} % over as many comparisons as there are rows, exclude “no difference”. The spread "
        "is the standard deviation of the pairs' log ratios; from few pairs it is known badly."
    )
    return Table(columns, rows, text)


def _needed(row: statistics.Power, spread: float) -> str:
    if row.runs is None:
        return f"more than {statistics.MOST_PAIRS}" if spread == spread else "not known"
    if row.device_hours is None:
        return f"{row.runs} pairs"
    long = row.device_hours >= 1
    return f"{row.runs} pairs, {number(row.device_hours * (1 if long else 60), 2)} {'h' if long else 'min'}"


def campaign_text(throughput: pd.DataFrame, runs: pd.DataFrame, repeats: Any) -> str:
    """Sentences on the order in which runs were started, on drift, and on the noise between runs of equal settings."""
    order = campaign.order_kept(runs["position"].astype(float), runs["started_unix_s"].astype(float))
    if not order.pairs:
        return ""
    text = f"Runs were started {order.verdict}"
    text += f" ({order.inversions} of {order.pairs} pairs the other way round)" if order.inversions else ""
    timed = throughput.merge(runs[["run_id", "started_unix_s", "external"]], on="run_id").dropna(
        subset=["started_unix_s"]
    )
    timed = timed.sort_values("started_unix_s")
    drift = campaign.drift(
        timed["started_unix_s"],
        timed["useful_tokens_per_s"],
        list(zip(timed["series"], timed["world_size"], strict=True)),
    )
    text += f". Drift of useful tokens per second over the campaign: {drift.verdict}"
    if drift.verdict != "too few runs":
        text += f" ({number(100 * drift.share, 2)} % from first to last start, p = {number(drift.p, 2)})"
    canary = timed[(timed["repeat"] >= repeats) & ~timed["external"]] if repeats else timed[:0]
    if len(canary) > 1:
        noise = campaign.noise_floor(canary["useful_tokens_per_s"])
        difference = noise.difference
        text += (
            f". Noise floor: neighbouring runs of the canary ({canary['series'].iloc[0]}) differ by "
            f"{number(100 * difference.median)} % ({_pairs(noise.pairs)}"
            + (f", {number(100 * difference.low)}–{number(100 * difference.high)} %" if noise.pairs > 1 else "")
            + ")"
        )
    return f"{text}."


def throughput_table(throughput: pd.DataFrame, stalls: pd.DataFrame, runs: pd.DataFrame, repeats: Any) -> Table:
    """A row a series and world size: medians with their spread; below them, what the campaign was like."""
    columns = [
        ("approach", False),
        ("world size", True),
        ("runs", True),
        ("useful tokens / s", True),
        ("total tokens / s", True),
    ]
    columns += [("not useful (%)", True), ("median step (ms)", True), ("data stall (%)", True)]
    rows = []
    for name in ordered(throughput["series"]):
        for world, group in throughput[throughput["series"] == name].groupby("world_size"):
            stall = stalls[(stalls["series"] == name) & (stalls["world_size"] == world)]["data_stall_share"]
            rows.append(
                [
                    name,
                    str(world),
                    str(len(group)),
                    spread(group["useful_tokens_per_s"]),
                    spread(group["total_tokens_per_s"]),
                ]
                + [
                    number(100 * group["not_useful_share"].median()),
                    spread(1e3 * group["median_step_s"]),
                    spread(100 * stall),
                ]
            )
    kind = kinds([group for _, group in throughput.groupby(["series", "world_size"])["useful_tokens_per_s"]])
    text = "Medians over runs, their spread in brackets; after warm-up, sum over sum."
    return Table(
        columns,
        rows,
        " ".join(filter(None, [text, kind, left_out(runs), campaign_text(throughput, runs, repeats)])),
    )


def validation_table(validation: pd.DataFrame) -> Table:
    """A row a series and world size: the loss after the last step."""
    columns = [
        ("approach", False),
        ("world size", True),
        ("runs", True),
        ("steps", True),
        ("useful tokens trained on", True),
    ]
    columns += [("first loss", True), ("last loss", True), ("perplexity", True)]
    rows = []
    for name in ordered(validation["series"]):
        for world, group in validation[validation["series"] == name].groupby("world_size"):
            last, first = group[group["last"].astype(bool)], group[group["step"] == 0]
            rows.append(
                [
                    name,
                    str(world),
                    str(len(last)),
                    spread(last["step"]),
                    spread(last["useful_tokens_seen"]),
                    spread(first["loss"], 5),
                ]
                + [spread(last["loss"], 5), spread(last["perplexity"])]
            )
    final = validation[validation["last"].astype(bool)]
    kind = kinds([group for _, group in final.groupby(["series", "world_size"])["loss"]])
    text = (
        "Nats a useful token on one fixed held-out slice, the same rows for every approach; medians, their spread in "
        "brackets."
    )
    return Table(columns, rows, f"{text} {kind}")


#: kind of pair → (what the sentence is about, what is true of a proven pair)
_PROOFS = {
    "world sizes": ("across world sizes", "the same samples and the same useful tokens at every step"),
    "online and offline": (
        "online against offline",
        "the same samples, the same useful tokens, and bit-identical losses at every step",
    ),
}


def proof(order: pd.DataFrame) -> dict[str, Any]:
    """Do the runs of a pair train on the same batches? A sentence and a table for each kind of pair.

    The digest names samples, not their content. Across world sizes that is enough, as both read the same store; online
    against offline the losses must be bit-identical, too.
    """
    parts = []
    for kind, (what, true) in _PROOFS.items():
        pairs = order[order["kind"] == kind]
        pairs = pairs.assign(finding=[_finding(kind, pair) for pair in pairs.itertuples()])
        proven = int((pairs["finding"] == "proven").sum())
        if pairs.empty:
            state, text = "none", f"Same data {what}: no pair of runs to compare."
        elif proven == len(pairs):
            state, text = "proven", f"Same data {what}: proven. {_all(proven)} {true}."
        else:
            why = pairs.loc[pairs["finding"] != "proven", "finding"].value_counts(sort=False)
            others = "; ".join(f"{_pairs(n)}: {finding}" for finding, n in why.items())
            state = "broken"
            text = f"Same data {what}: not proven. {proven} of {_pairs(len(pairs))} have {true}; {others}."
        if kind == "world sizes" and len(pairs):
            text += (
                " The sums of a step are in another order there; the losses differ by at most "
                f"{pairs['largest_loss_difference'].max():.2g} nats a useful token."
            )
        parts.append({"kind": kind, "state": state, "text": text, "table": _proof_table(pairs)})
    return {"parts": parts}


def _finding(kind: str, pair: Any) -> str:
    """What a pair shows, in words: `proven`, or what is missing."""
    if not pair.same_data:
        return "other samples or another order: not proven"
    if not pair.same_useful_tokens:
        return "same order, useful tokens differ: not proven"
    if kind == "online and offline" and not pair.losses_identical:
        return "same order, losses differ: not proven"
    return "proven"


def _all(n: int) -> str:
    return f"All {_pairs(n)} have" if n > 1 else "The one pair has"


def _proof_table(pairs: pd.DataFrame) -> Table:
    """A row for the pairs of two series and two world sizes."""
    columns = [
        ("approach", False),
        ("against", False),
        ("world sizes", False),
        ("pairs", True),
        ("steps with equal digests", True),
        ("same useful tokens", False),
        ("losses bit-identical", False),
        ("largest loss difference (nats)", True),
        ("finding", False),
    ]
    rows = []
    for (a, b, w, v), group in pairs.groupby(["series", "other_series", "world_size", "other_world_size"]):
        rows.append(
            [
                a,
                b,
                str(w) if w == v else f"{w} and {v}",
                str(len(group)),
                f"{group['steps_equal'].sum()} of {group['steps_compared'].sum()}",
                "yes" if group["same_useful_tokens"].all() else "no",
                "yes" if group["losses_identical"].all() else "no",
                f"{group['largest_loss_difference'].max():.2g}",
                "; ".join(dict.fromkeys(group["finding"])),
            ]
        )
    return Table(
        columns,
        rows,
        "Digests name the samples of a step by their numbers, not their content.",
    )


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
            [r.run_id, r.validity, r.status, r.reasons or "", _count(r.position), _count(r.attempts)]
            + [f"{_count(r.steps_seen)} of {_count(r.steps_asked)}", _count(r.overlap_rows)]
            + [f"{_count(r.quarantined)}" + (f" ({_count(r.quarantined_benign)} benign)" if r.quarantined else "")]
            + ["yes" if r.sealed else "no"]
            + ([r.node_names or "", _count(r.queue_s), _newest_log(r)] if queued else [])
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
    rows = connection.execute(
        "SELECT file, line, reason, benign, text FROM quarantine ORDER BY benign, file, line LIMIT 100"
    ).fetchall()
    columns = [("file", False), ("line", True), ("reason", False), ("benign", False), ("text", False)]
    return Table(columns, [[f, str(n), why, "yes" if benign else "no", text[:120]] for f, n, why, benign, text in rows])


def _count(value: Any) -> str:
    return "–" if pd.isna(value) else str(int(value))


def _text(runs: pd.DataFrame) -> str:
    """What the runs read: corpora, and the tokenizers that made ids of them. Empty where no record says it."""
    named = runs.dropna(subset=["corpus", "tokenizer"])
    pairs = sorted({(r.corpus, r.tokenizer) for r in named.itertuples()})
    return "; ".join(f"corpus {corpus}, tokenizer {tokenizer}" for corpus, tokenizer in pairs)


def _machines(runs: pd.DataFrame) -> list[str]:
    found = set()
    for r in runs.dropna(subset=["device"]).itertuples():
        cpu = r.cpu or "unknown CPU"
        cores = "" if pd.isna(r.cores) else f", {int(r.cores)} cores"
        found.add(f"{cpu}{cores}" if r.device == "cpu" else f"{r.device} ({cpu}{cores})")
    return sorted(found)


def _commits(runs: pd.DataFrame) -> list[dict[str, Any]]:
    pairs = {(r.git_commit, bool(r.git_dirty)) for r in runs.dropna(subset=["git_commit"]).itertuples()}
    return [{"commit": commit[:12], "dirty": dirty} for commit, dirty in sorted(pairs)]


def _dates(runs: pd.DataFrame) -> str:
    """The days on which the runs ran, UTC; of the data, not of the report."""
    if runs["started_unix_s"].isna().all():
        return ""
    ends = (runs["started_unix_s"].min(), runs["stopped_unix_s"].max())
    days = list(dict.fromkeys(datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d") for t in ends))
    return " to ".join(days)


def _versions(runs: pd.DataFrame) -> list[tuple[str, str]]:
    found: dict[str, set[str]] = {}
    for text in runs["versions"].dropna():
        for package, version in json.loads(text).items():
            found.setdefault(package, set()).add(str(version))
    return [(package, ", ".join(sorted(v))) for package, v in sorted(found.items())]
