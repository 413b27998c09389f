"""Model FLOPs utilisation in the course of a training."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels
from tokenscale.report.drawings.mfu_comparison import no_peak
from tokenscale.report.style import number

TITLE = "Model FLOPs utilisation in the course of a training"
QUERIES = ("loss_curves", "inventory")


def data(loss_curves: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """A row a point of a run, of runs that count and are like for like; `mfu` is empty where no peak is known."""
    kept, _ = _alike(loss_curves, inventory)
    columns = ["series", "world_size", "repeat", "run_id", "step", "steps", "training_s", "total_tokens_per_s"]
    return kept[[*columns, "tflops_per_device_s", "mfu"]].reset_index(drop=True)


def _alike(loss_curves: pd.DataFrame, inventory: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """See `words.alike`; FLOPs a token and peaks are those of the inventory."""
    kept, refused = words.alike(loss_curves, inventory, "approach")
    costs = inventory[["run_id", "flops_per_token", "peak_flops", "peak_source", "device", "number_format"]]
    kept = kept[~kept["stopped"].astype(bool)].merge(costs, on="run_id", how="left")
    flops = kept["total_tokens_per_s"] * kept["flops_per_token"] / kept["world_size"]
    kept = kept.assign(tflops_per_device_s=1e-12 * flops, mfu=flops / kept["peak_flops"].astype(float))
    return kept.dropna(subset=["tflops_per_device_s"]), refused


def _shown(kept: pd.DataFrame) -> tuple[pd.DataFrame, str, str]:
    """(rows with the column `shown`, its label, what there is to say of it)."""
    if kept["mfu"].notna().any():
        known = kept[kept["mfu"].notna()]
        return known.assign(shown=100 * known["mfu"]), "MFU, convention palm (%)", ""
    return kept.assign(shown=kept["tflops_per_device_s"]), "achieved TFLOP/s of a device", no_peak(kept)


def draw(loss_curves: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """A panel a world size: repeats thin, their median bold. Without a known peak: achieved TFLOP/s."""
    kept, refused = _alike(loss_curves, inventory)
    rows, label, _ = _shown(kept)
    return panels.over_time(rows, inventory, "shown", label, refused)


def caption(loss_curves: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The convention, the peak with its source, and what a point is."""
    kept, refused = _alike(loss_curves, inventory)
    rows, label, note = _shown(kept)
    runs = rows["run_id"].nunique()
    text = words.sentence(words.crowded(inventory) if runs else "") + words.sentence(note)
    text += "Processed tokens/s times 6 N + 12 L d T FLOPs a token (Chowdhery et al. 2022, appendix B)"
    if rows["mfu"].notna().any():
        peaks = rows.drop_duplicates(["device", "number_format"])
        sources = [
            f"{r.device}, {number(1e-12 * r.peak_flops, 4)} TFLOP/s ({r.peak_source})" for r in peaks.itertuples()
        ]
        text += f" over the peak of the devices: {words.listing(sources)}"
    text += (
        "; sum over sum of the steps that a point stands for, at most 100 points a run; "
        f"{words.counted(runs, inventory)}. "
    )
    if runs:
        text += "The first point holds the warm-up. Thin lines are repeats, bold ones their median: no interval. "
    elif len(inventory) and inventory["flops_per_token"].isna().all():
        text += "FLOPs a token are not known of any run. "
    return (text + refused).strip()


def alt(loss_curves: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """First and last values, read aloud."""
    rows, label, _ = _shown(_alike(loss_curves, inventory)[0])
    texts = []
    for (name, world), group in rows.groupby(["series", "world_size"]):
        middle = group.groupby(panels.points(group))["shown"].median()
        texts.append(f"{name} on {world} from {number(middle.iloc[0])} to {number(middle.iloc[-1])}")
    return f"Line plot over the time of training, {label}. {words.listing(texts) or 'No data'}."
