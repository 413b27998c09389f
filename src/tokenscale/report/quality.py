"""How good the measurements of an experiment are: spread inside a run and between runs, and what stands behind them."""

from typing import Any

import pandas as pd

from tokenscale.report.captions import kinds, spread
from tokenscale.report.style import number, ordered
from tokenscale.report.table import Table


def steadiness(step_times: pd.DataFrame, throughput: pd.DataFrame) -> Table:
    """A row a series and world size: how steps spread inside a run, and throughput between runs."""
    columns = [("approach", False), ("world size", True), ("runs", True), ("median step (ms)", True)]
    columns += [("p95 / median", True), ("p99 / median", True), ("slowest / median", True)]
    columns += [("within a run: IQR (%)", True), ("between runs: range (%)", True)]
    late = step_times["late_s"].notna().any()
    columns += [("slowest rank behind (ms)", True)] if late else []
    rows = []
    for name in ordered(step_times["series"]):
        for world, group in step_times[step_times["series"] == name].groupby("world_size"):
            of = throughput[(throughput["series"] == name) & (throughput["world_size"] == world)]["useful_tokens_per_s"]
            between = number(100 * (of.max() - of.min()) / of.median(), 2) if len(of) > 1 else "–"
            rows.append(
                [name, str(world), str(len(group)), spread(1e3 * group["median_s"])]
                + [number((group[f"{tail}_s"] / group["median_s"]).median()) for tail in ("p95", "p99", "slowest")]
                + [number(100 * group["iqr_share"].median(), 2), between]
                + ([spread(1e3 * group["late_s"].dropna())] if late else [])
            )
    return Table(
        columns,
        rows,
        "After warm-up; steps are as long as on the slowest rank. Quantiles are of one run's steps, medians over runs. "
        "Between runs: highest less lowest throughput over the median.",
    )


def energy(rows: pd.DataFrame) -> str:
    """What the devices counted, in a sentence; empty where none did."""
    counted = rows.dropna(subset=["energy_j"])
    if counted.empty:
        return ""
    texts = []
    for name in ordered(counted["series"]):
        for world, group in counted[counted["series"] == name].groupby("world_size"):
            each = spread(1e3 * group["j_per_useful_token"])
            texts.append(f"{name}, world size {world}: {each} mJ a useful token")
    return f"Energy of the devices' boards, by their own counters ({len(counted)} runs): {'; '.join(texts)}."


def facts(
    runs: pd.DataFrame, throughput: pd.DataFrame, scaling: pd.DataFrame, energy_of: pd.DataFrame
) -> dict[str, Any]:
    """What checklists ask for, as numbers and texts."""
    used = runs[runs["validity"].isin(["valid", "suspect"])]
    repeats = used.groupby(["cell", "external"], dropna=False)["run_id"].nunique()
    seconds = (used["stopped_unix_s"] - used["started_unix_s"]) * used["world_size"]
    based = scaling[(scaling["world_size"] > scaling["base_world_size"]) & scaling["efficiency"].notna()]
    return {
        "runs_used": len(used),
        "fewest_repeats": int(repeats.min()) if len(repeats) else 0,
        "most_repeats": int(repeats.max()) if len(repeats) else 0,
        "committed": int(used["git_commit"].notna().sum()),
        "timed": int(seconds.notna().sum()),
        "external": int(used["external"].fillna(False).astype(bool).sum()),
        "peaks": int(used["peak_flops"].notna().sum()),
        "metered": int(energy_of["energy_j"].notna().sum()),
        "sealed": int(used["sealed"].fillna(False).astype(bool).sum()),
        "dirty": int(used["git_dirty"].fillna(False).astype(bool).sum()),
        "device_s": float(seconds.fillna(0).sum()),
        "kinds": kinds([g for _, g in throughput.groupby(["series", "world_size"])["useful_tokens_per_s"]]),
        "bases": [
            f"{name} at world size {base}: {spread(group['base_useful_tokens_per_s'])} useful tokens/s"
            for (name, base), group in based.groupby(["series", "base_world_size"], sort=False)
        ],
        "energy": energy(energy_of),
    }
