"""Training loss by step, by useful tokens and by time, side by side: what is equal in one is not in the others."""

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import figure, looks, no_data, number, ordered, plain, style

QUERIES = ("loss_curves", "inventory")
_ABSCISSAE = {
    "step": "optimizer steps",
    "useful_tokens_seen": "useful tokens trained on",
    "training_s": "seconds of training steps",
}


def _split(kept: pd.DataFrame) -> list[tuple[str, dict[str, pd.DataFrame]]]:
    """(heading, line → its rows) of each row of panels: series with their world sizes; of one size, all series."""
    worlds = sorted(int(w) for w in kept["world_size"].unique())
    series = ordered(kept["series"])
    if len(worlds) < 2:
        return [("", {name: kept[kept["series"] == name] for name in series})]
    rows = []
    for name in series:
        lines = {panels.ranks(w): panels.at(kept, (name, w)) for w in worlds}
        rows.append((name, {label: line for label, line in lines.items() if len(line)}))
    return rows


class SplitLossCurves(Figure):
    """Training loss by step, by useful tokens and by time, side by side: what is equal in one is not in the others."""

    title = "Training loss by step, by useful tokens and by time"
    queries = QUERIES
    loss_curves: pd.DataFrame

    def prepare(self) -> None:
        """Compare along world sizes where series have several (others are left out), else along approaches."""
        several = self.loss_curves["world_size"].nunique() > 1
        kept, refused = captions.comparable(self.loss_curves, self.inventory, "world_size" if several else "approach")
        kept = kept[~kept["stopped"].astype(bool) & kept["loss"].notna()]
        sizes = kept.groupby("series")["world_size"].transform("nunique")
        self.rows, self.refusals = kept[sizes > 1] if (sizes > 1).any() else kept, refused

    def data(self) -> pd.DataFrame:
        """Return A row a point of a run, of runs that count and are like for like."""
        columns = [
            "series",
            "world_size",
            "repeat",
            "run_id",
            *_ABSCISSAE,
            "steps",
            "loss",
            "loss_lowest",
            "loss_highest",
        ]
        return self.rows[columns].reset_index(drop=True)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw a row of panels per approach, lines are world sizes; of one size, one row, lines are approaches."""
        split = _split(self.rows)
        with style():
            made, axes = figure(3, rows=len(split), height=1.0 + 2.1 * len(split), sharey="row", sharex="col")
            names = list(dict.fromkeys(name for _, lines in split for name in lines))
            found, every = panels.layered(looks(names)), panels.thinned(self.rows, len(_ABSCISSAE))
            for row, (name, lines) in enumerate(split):
                for place, (column, label) in enumerate(_ABSCISSAE.items()):
                    panel = axes[3 * row + place]
                    if row == len(split) - 1 or self.rows.empty:
                        panel.set_xlabel(label)
                    if self.rows.empty:
                        no_data(panel, captions.nothing(self.inventory, self.refusals) if place == 1 else "")
                        continue
                    for line in (line for line in found if line in lines):
                        panels.curve(panel, lines[line], column, "loss", found[line], line, every)
                    panels.steps_of(panel.xaxis, 3)
                    plain(panel.yaxis)
                axes[3 * row].set_ylabel("loss (nats / token)")
                panels.heading(axes[3 * row], name)
            for panel in axes[:3]:  # the others share its limits
                panel.set_xlim(left=0)
            panels.legend(made, axes, 6, order=names)
            return made

    def caption(self) -> str:
        """Return what is equal in which column, and what a point is."""
        runs = self.rows["run_id"].nunique()
        text = captions.sentence(captions.crowded(self.inventory) if runs else "") + (
            f"Training loss by step, by useful tokens and by time; {captions.counted(runs, self.inventory)}. At a "
            "fixed global batch, world sizes train on the same data at each step: their curves must coincide by step "
            "and by tokens, and may differ in time only. If the global batch grows with the world size, each step sees "
            "more tokens, so a lower loss by step is not an advantage. A run has at most 100 points. "
        )
        if runs > self.rows.groupby(["series", "world_size"]).ngroups:
            text += "Thin lines are repeats, bold ones their median point by point: no interval. "
        return (text + self.refusals).strip()

    def alt(self) -> str:
        """Return last losses, read aloud."""
        last = self.rows.groupby("run_id").tail(1)
        texts = [
            f"{name} on {world} {number(group['loss'].median())} after {number(group['training_s'].median())} s"
            for (name, world), group in last.groupby(["series", "world_size"])
        ]
        return f"Line plots of training loss. Median of the last point: {captions.listing(texts) or 'no data'}."
