"""Cautions of an experiment's first screen: what disturbed its measurements, in short sentences."""

from datetime import UTC, datetime

import pandas as pd

from tokenscale.analysis import campaign
from tokenscale.report.paired_comparisons import TOO_FEW
from tokenscale.report.style import number

#: tasks beside the run's own that its machine may have run or queued on average, as a share of its cores
BUSY = 0.5
#: highest less lowest throughput of a cell's repeats over their median, from which on a spread is a caution
SPREAD = 0.2
#: efficiency above 1 by more than this is no noise
EFFICIENCY = 0.05


def find_cautions(
    runs: pd.DataFrame,
    throughput: pd.DataFrame,
    scaling: pd.DataFrame,
    stragglers: pd.DataFrame | None = None,
    verdicts: list[str] | None = None,
) -> list[str]:
    """Return the cautions of an experiment; nothing for a quiet campaign with enough runs.

    `runs`, `throughput`, `scaling` and `stragglers` are the rows of the queries `inventory`, `throughput`, `scaling`
    and `stragglers`; `verdicts` those of its comparisons.
    """
    found = [
        _describe_validity(runs),
        _describe_compilation(runs),
        _describe_load(runs),
        _describe_drift(runs, throughput),
        _describe_spread(throughput),
        _describe_stragglers(stragglers),
        _describe_efficiency(scaling),
        _describe_too_few(verdicts or []),
    ]
    return [text for text in found if text]


def _describe_validity(runs: pd.DataFrame) -> str:
    """Runs that are not valid, with the reason of the first."""
    wrong = runs[runs["validity"].isin(["invalid", "suspect"])]
    if wrong.empty:
        return ""
    parts = [f"{n} {word}" for word in ("invalid", "suspect") if (n := int((wrong["validity"] == word).sum()))]
    first = wrong.sort_values("validity", kind="stable").iloc[0]
    reason = (first["reasons"] or "no reason recorded").split("; ")[0]
    return f"{' and '.join(parts)} of {len(runs)} runs: {first['run_id']}: {reason}."


def _describe_compilation(runs: pd.DataFrame) -> str:
    """Runs that asked for compile and ran blocks eagerly, with the counts of the first."""
    if "eager_blocks" not in runs:  # tables of an earlier version
        return ""
    requested = runs.dropna(subset=["blocks", "eager_blocks"])
    eager = requested[requested["eager_blocks"] > 0]
    if eager.empty:
        return ""
    first = eager.iloc[0]
    return (
        f"Blocks ran eagerly in {len(eager)} of {len(requested)} runs that ask for compile: {first['run_id']}: "
        f"{int(first['eager_blocks'])} of {int(first['blocks'])} blocks."
    )


def _describe_load(runs: pd.DataFrame) -> str:
    """Load average when runs began, above what the run before it may have left: ranks × threads.

    The load average counts runnable tasks over about the last minute (getloadavg(3)), and so the ranks of the run
    before this one, too; they are taken to be as many as the largest run of the experiment has.
    """
    known = runs[runs["validity"].isin(["valid", "suspect"]) & (runs["device_kind"] == "cpu")]
    if "load_average" not in known:  # tables of an earlier version
        return ""
    known = known.dropna(subset=["load_average", "cores", "world_size"])
    if known.empty:
        return ""
    own = (known["world_size"] * known["threads_per_rank"].fillna(1)).max()
    others = (known["load_average"] - own) / known["cores"]
    busy = others > BUSY
    if not busy.any():
        return ""
    load = known.loc[busy, "load_average"]
    average = f"{number(load.median(), 2)} (up to {number(load.max(), 2)})"
    return (
        f"Other work ran on the machine: when {int(busy.sum())} of {len(known)} runs began, its load average was "
        f"{average} on {int(known['cores'].max())} cores; the runs' own threads are at most {int(own)}."
    )


def _describe_drift(runs: pd.DataFrame, throughput: pd.DataFrame) -> str:
    started = runs[["run_id", "started_unix_s", "external"]]
    timed = throughput.merge(started, on="run_id").dropna(subset=["started_unix_s"]).sort_values("started_unix_s")
    timed = timed[~timed["external"].fillna(False).astype(bool)]
    if len(timed) < 2:
        return ""
    cells = list(zip(timed["series"], timed["world_size"], strict=True))
    drift = campaign.drift(timed["started_unix_s"], timed["useful_tokens_per_s"], cells)
    if drift.verdict != "drift":
        return ""
    return (
        f"Throughput drifted by {number(100 * drift.share, 2)} % from the first run to the last "
        f"({drift.n} runs, p = {number(drift.p, 2)})."
    )


def _describe_spread(throughput: pd.DataFrame) -> str:
    """Cells whose repeats differ widely."""
    wide = []
    for (series, world), rates in throughput.groupby(["series", "world_size"])["useful_tokens_per_s"]:
        share = (rates.max() - rates.min()) / rates.median()
        if len(rates) > 1 and share > SPREAD:
            wide.append((share, f"{series} at world size {world}"))
    if not wide:
        return ""
    share, where = max(wide)
    cells = throughput.groupby(["series", "world_size"]).ngroups
    return (
        f"Repeats of {len(wide)} of {cells} cells differ by more than {100 * SPREAD:.0f} % of their median, up to "
        f"{number(100 * share, 2)} % ({where})."
    )


def _describe_stragglers(stragglers: pd.DataFrame | None) -> str:
    """Ranks that were slower than their peers for a stretch, with the one that took the most time."""
    if stragglers is None or stragglers.empty:
        return ""
    worst = stragglers.iloc[0]  # in order of the time that they took
    begins, ends = (datetime.fromtimestamp(worst[f"{end}_unix_s"], UTC) for end in ("started", "stopped"))
    node = f" on {worst['node']}" if isinstance(worst["node"], str) else ""
    more = f" {len(stragglers) - 1} more stretches: query stragglers." if len(stragglers) > 1 else ""
    return (
        f"Rank {int(worst['rank'])} of {worst['run_id']}{node} was {number(worst['slowdown'], 3)} times slower than "
        f"its peers in steps {int(worst['first_step'])} to {int(worst['last_step'])} ({begins:%Y-%m-%d %H:%M:%S} to "
        f"{ends:%H:%M:%S} UTC), mostly in {worst['part']}, {number(worst['lost_s'], 2)} s in all.{more}"
    )


def _describe_efficiency(scaling: pd.DataFrame) -> str:
    """Efficiency above 1: ranks cannot do more than as many single ones, so the base was disturbed or differs."""
    known = scaling[(scaling["world_size"] > scaling["base_world_size"]) & scaling["efficiency"].notna()]
    above = known[known["efficiency"] > 1 + EFFICIENCY]
    if above.empty:
        return ""
    worst = above.loc[above["efficiency"].idxmax()]
    shared = (above["device_kind"] == "cpu").any()
    return (
        f"Scaling efficiency is above 100 % in {len(above)} of {len(known)} runs, up to "
        f"{number(100 * worst['efficiency'], 3)} % ({worst['series']} at world size {int(worst['world_size'])})"
        + (
            ": ranks that share cores do not measure scaling."
            if shared
            else ": look at the run that it is measured from."
        )
    )


def _describe_too_few(verdicts: list[str]) -> str:
    few = sum(verdict == TOO_FEW for verdict in verdicts)
    if not few:
        return ""
    return f"{few} of {len(verdicts)} comparisons have too few runs for a verdict."
