"""Training loss by useful tokens, and the validation points."""

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import figure, looks, no_data, number, ordered, plain, style

QUERIES = ("loss_curves", "validation", "inventory")


def _smallest(rows: pd.DataFrame) -> pd.DataFrame:
    """The smallest world size of each series: other world sizes train on the same data (see the proof table)."""
    smallest = rows.groupby("series")["world_size"].transform("min")
    return rows[(rows["world_size"] == smallest) & rows["loss"].notna()]


class LossOverTime(Figure):
    """Training loss by useful tokens, and the validation points."""

    title = "Loss by useful tokens trained on"
    queries = QUERIES
    loss_curves: pd.DataFrame
    validation: pd.DataFrame

    def finding(self) -> str:
        """Return lowest and highest median of the last validation losses."""
        final = self.held_out[self.held_out["last"].astype(bool)]
        medians = final.groupby("series")["loss"].median().dropna()
        if medians.empty:
            return self.title
        return f"Final validation loss: {captions.extremes(medians, ' nats').split(' (')[0]}"

    def prepare(self) -> None:
        """Choose the points of runs that count, of those that stopped, and of validation."""
        self.rows, self.refusals = captions.comparable(self.loss_curves, self.inventory, "approach")
        held_out, _ = captions.comparable(self.validation, self.inventory, "approach")
        stopped = self.rows["stopped"].astype(bool)
        self.training, self.held_out = _smallest(self.rows[~stopped]), _smallest(held_out)
        #: of runs whose training stopped at a loss that was not finite; no median counts them
        self.stopped = _smallest(self.rows[stopped])

    def data(self) -> pd.DataFrame:
        """Return training and validation points of the drawn runs, one below the other."""
        columns = ["split", "series", "world_size", "repeat", "run_id", "stopped", "step", "useful_tokens_seen", "loss"]
        parts = [
            pd.concat([self.training, self.stopped]).assign(split="training"),
            self.held_out.assign(split="validation", stopped=False),
        ]
        return pd.concat(parts, ignore_index=True)[columns]

    def draw(self) -> matplotlib.figure.Figure:
        """Draw two panels. Left: training loss, repeats thin, their median by step bold, a cross where one stopped.

        Right: validation loss, a point a run and time.
        """
        train, held_out, stopped = self.training, self.held_out, self.stopped
        names = ordered(pd.concat([train["series"], held_out["series"], stopped["series"]]))
        found, every = panels.layered(looks(names)), panels.thinned(train)
        with style():
            made, (left, right) = figure(2, height=4.0, sharey=True, width_ratios=(1.6, 1))
            left.set_xlabel("useful tokens trained on")
            left.set_ylabel("training loss (nats / useful token)")
            right.set_xlabel("useful tokens trained on")
            right.set_ylabel("validation loss (nats / useful token)")
            for name, options in found.items():
                if len(here := train[train["series"] == name]):
                    panels.curve(left, here, "useful_tokens_seen", "loss", options, name, every)
                for _, run in held_out[held_out["series"] == name].groupby("run_id"):
                    line = {"linewidth": 0.5 * options["linewidth"], "marker": "none"}
                    right.plot(run["useful_tokens_seen"], run["loss"], **options | line)
                    right.plot(run["useful_tokens_seen"], run["loss"], **options | {"linestyle": "none"})
            for _, run in stopped.groupby("run_id"):
                colour = found[run["series"].iloc[0]]["color"]
                left.plot(run["useful_tokens_seen"], run["loss"], color=colour, linewidth=0.7, alpha=0.45)
                left.plot(run["useful_tokens_seen"].iloc[-1:], run["loss"].iloc[-1:], "x", color=colour, markersize=9)
            for axes in (left, right):
                if not axes.lines:
                    no_data(axes, captions.nothing(self.inventory, self.refusals))
                    continue
                axes.set_xlim(left=0)
                panels.steps_of(axes.xaxis, 4)
                plain(axes.yaxis)
            panels.legend(made, left, order=names)
            return made

    def caption(self) -> str:
        """Return what the lines are, and how many runs carry them."""
        train, held_out, stopped = self.training, self.held_out, self.stopped["run_id"].nunique()
        listed = self.inventory.dropna(subset=["series", "world_size"])
        smallest = listed.groupby("series")["world_size"].transform("min")
        expected = listed[listed["world_size"] == smallest]
        text = (
            "Training loss (left) and validation loss (right) against useful tokens, at the smallest world size; "
            f"{captions.counted(train['run_id'].nunique(), expected)}. "
        )
        if train["run_id"].nunique() > train["series"].nunique():
            text += "Thin lines are repeats, bold ones their median point by point. "
        if stopped:
            text += (
                f"A cross ends {stopped} run{'s' * (stopped != 1)} whose training stopped there, at a loss that was "
                "not finite; no median counts them. "
            )
        final = held_out[held_out["last"].astype(bool)] if len(held_out) else held_out
        if len(final):
            low, high = final["loss"].min(), final["loss"].max()
            text += (
                f"Validation is on one fixed slice of {number(final['validation_tokens'].max(), 6)} useful tokens; "
                f"after the last step it lies between {low:.4f} and {high:.4f} over {len(final)} "
                f"run{'s' * (len(final) != 1)}. "
            )
        text += self.refused()
        text += (
            "Approaches that cut documents into rows differently train on different rows at a step, so their training "
            "losses differ by data as well. The training loss is the sum over all ranks over their useful tokens; a "
            "run has at most 100 points."
        )
        return text

    def alt(self) -> str:
        """Return first and last losses, read aloud."""
        train = self.training
        texts = []
        for name in ordered(train["series"]):
            here = train[train["series"] == name]
            middle = here.groupby(panels.points(here))["loss"].median()
            texts.append(f"{name} from {middle.iloc[0]:.2f} to {middle.iloc[-1]:.2f}")
        return f"Line plot of loss against useful tokens. Median training loss: {captions.listing(texts) or 'no data'}."
