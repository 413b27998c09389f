"""Training losses by step, useful tokens and time, and their differences between world sizes."""

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import GREY, figure, jitter, looks, no_data, number, ordered, plain, style


def _smallest(rows: pd.DataFrame) -> pd.DataFrame:
    """The smallest world size of each series: other world sizes train on the same data (see the proof table)."""
    smallest = rows.groupby("series")["world_size"].transform("min")
    return rows[(rows["world_size"] == smallest) & rows["loss"].notna()]


class LossOverTime(Figure):
    title = "Loss by useful tokens trained on"
    queries = ("loss_curves", "validation", "inventory")
    read = "Line plot of loss against useful tokens. Median training loss: {}."
    loss_curves: pd.DataFrame
    validation: pd.DataFrame

    def finding(self) -> str:
        """Return lowest and highest median of the last validation losses."""
        found = captions.common_extremes(self.held_out[self.held_out["last"].astype(bool)], "loss", " nats")
        return f"Final validation loss: {found}" if found else self.title

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

    def numbers(self) -> str:
        """Return the first and last median loss of each series in words."""
        train = self.training
        texts = []
        for name in ordered(train["series"]):
            here = train[train["series"] == name]
            middle = here.groupby(panels.points(here))["loss"].median()
            texts.append(f"{name} from {middle.iloc[0]:.2f} to {middle.iloc[-1]:.2f}")
        return captions.listing(texts)


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
    title = "Training loss by step, by useful tokens and by time"
    queries = ("loss_curves", "inventory")
    columns = (
        *("series", "world_size", "repeat", "run_id", *_ABSCISSAE, "steps", "loss", "loss_lowest", "loss_highest"),
    )
    read = "Line plots of training loss. Median of the last point: {}."
    loss_curves: pd.DataFrame

    def prepare(self) -> None:
        """Compare along world sizes where series have several (others are left out), else along approaches."""
        several = self.loss_curves["world_size"].nunique() > 1
        kept, refused = captions.comparable(self.loss_curves, self.inventory, "world_size" if several else "approach")
        kept = kept[~kept["stopped"].astype(bool) & kept["loss"].notna()]
        sizes = kept.groupby("series")["world_size"].transform("nunique")
        self.rows, self.refusals = kept[sizes > 1] if (sizes > 1).any() else kept, refused

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

    def sentences(self) -> str:
        """Return what is equal in which column, and what a point is."""
        runs = self.rows["run_id"].nunique()
        text = (
            f"Training loss by step, by useful tokens and by time; {captions.counted(runs, self.inventory)}. At a "
            "fixed global batch, world sizes train on the same data at each step: their curves must coincide by step "
            "and by tokens, and may differ in time only. If the global batch grows with the world size, each step sees "
            "more tokens, so a lower loss by step is not an advantage. A run has at most 100 points. "
        )
        if runs > self.rows.groupby(["series", "world_size"]).ngroups:
            text += "Thin lines are repeats, bold ones their median point by point: no interval. "
        return text

    def numbers(self) -> str:
        """Return the last median loss of each cell in words."""
        last = self.rows.groupby("run_id").tail(1)
        texts = [
            f"{name} on {world} {number(group['loss'].median())} after {number(group['training_s'].median())} s"
            for (name, world), group in last.groupby(["series", "world_size"])
        ]
        return captions.listing(texts)


def _floor(kept: pd.DataFrame) -> float:
    """Where zeros stand on a logarithmic axis: below all that differ."""
    above = kept.loc[kept["largest_difference"] > 0, "largest_difference"]
    return float(above.min()) / 3 if len(above) else 1e-9


class DdpVerificationLoss(Figure):
    title = "Loss of several ranks against the fewest, step by step"
    queries = ("loss_difference", "inventory")
    factor = "world_size"
    cores_matter = False
    read = "Differences of training loss between world sizes, in nats. Largest: {}."

    def finding(self) -> str:
        """Return the largest difference of all pairs."""
        if self.rows.empty:
            return self.title
        largest = self.rows["largest_difference"].max()
        return f"Largest loss difference to the run with the fewest ranks: {largest:.1g} nats".replace("e-0", "e-")

    def prepare(self) -> None:
        """Add the largest difference of a pair up to each point."""
        super().prepare()
        so_far = self.rows.groupby("run_id")["largest_difference"].cummax()
        self.rows = self.rows.assign(so_far=so_far)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw two panels, logarithmic. Left: the largest difference up to each point, every pair a line.

        Right: the largest of each pair, by series and world size. A difference of zero stands at the lower edge.
        """
        cells = panels.cells(self.rows)[::-1]
        with style():
            made, (left, right) = figure(2, height=1.8 + 0.3 * max(6, len(cells)), width_ratios=(1.5, 1))
            left.set_xlabel("optimizer steps")
            left.set_ylabel("largest |difference| so far\n(nats / useful token)")
            right.set_xlabel("largest of any step\n(nats / useful token)")
            if self.rows.empty:
                for axes in (left, right):
                    no_data(axes, captions.nothing(self.inventory, self.refusals))
                return made
            floor = _floor(self.rows)
            names = ordered(self.rows["series"])
            found, every = panels.layered(looks(names)), panels.thinned(self.rows)
            for name, options in found.items():
                line = {"color": options["color"], "linestyle": options["linestyle"], "linewidth": 0.9, "alpha": 0.7}
                for _, run in self.rows[self.rows["series"] == name].groupby("run_id"):
                    shown = run.iloc[::every]
                    left.plot(shown["step"], shown["so_far"].clip(lower=floor), **line)
                left.plot([], [], **options, label=name)
            largest = self.rows.groupby(["series", "world_size", "run_id"], as_index=False)["largest_difference"].max()
            for y, cell in enumerate(cells):
                values = panels.at(largest, cell)["largest_difference"].clip(lower=floor)
                options = found[cell[0]] | {"linestyle": "none"}
                right.plot(values, [y + o for o in jitter(len(values))], **options, clip_on=False)
            panels.name_rows(right, panels.names(cells, ranks_only=len(names) > 1))
            left.set_yscale("log")
            right.set_xscale("log")
            low, high = floor / 2, max(10 * floor, 3 * self.rows["largest_difference"].max())
            left.set_ylim(low, high)
            right.set_xlim(low, high)
            for axis in (left.yaxis, right.xaxis):
                panels.decades(axis)
            if (self.rows["so_far"] == 0).any():
                left.axhline(floor, color=GREY, linestyle=":", linewidth=0.9)
                left.text(0.99, floor, "no difference", transform=left.get_yaxis_transform(), ha="right", va="bottom",
                          fontsize=8)  # fmt: skip
            left.set_xlim(left=0)
            panels.steps_of(left.xaxis, 5)
            panels.legend(made, left, order=names)
            return made

    def sentences(self) -> str:
        """Return what was expected, and what is there."""
        pairs = self.rows["run_id"].nunique()
        more = self.inventory["world_size"] > self.inventory.groupby("series")["world_size"].transform("min")
        expected = self.inventory[more | self.inventory["resumed_from"].notna()]
        text = (
            "Largest absolute difference of training losses so far, between a run and the run of the same repeat at "
            f"the smallest world size; {captions.counted(pairs, expected)}. Expected: rounding only, as sums are in "
            "another order, which training amplifies. A wrong sum of gradients would show at the first steps. Both "
            "runs have the same settings. A run has at most 100 points. "
        )
        if resumed := self.rows.loc[self.rows["resumed_from"].notna(), "run_id"].nunique():
            text += (
                f"Of these, {resumed} resumed from another run's state in another layout. They are compared with the "
                "uninterrupted run that the state came from, and their lines begin at that step. "
            )
        if pairs:
            same = self.rows.groupby("run_id")["same_data"].all()
            formats = captions.listing(sorted(self.inventory["precision"].dropna().unique()))
            text += (
                f"{int(same.sum())} of {pairs} pairs have equal digests of the samples at every step. The largest "
                f"difference is {self.rows['largest_difference'].max():.2g} nats{f' ({formats})' if formats else ''}. "
            )
        else:
            text += "No pair of runs at two world sizes shares batch and settings. "
        return text

    def numbers(self) -> str:
        """Return the largest difference of each cell in words."""
        largest = self.rows.groupby(["series", "world_size"])["largest_difference"].max()
        texts = [f"{name} on {world} {value:.2g}" for (name, world), value in largest.items()]
        return captions.listing(texts)
