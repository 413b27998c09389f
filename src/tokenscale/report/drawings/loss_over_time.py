"""Training and validation losses by useful tokens and by time, and their differences between world
sizes.
"""

import pandas as pd
from matplotlib.ticker import LogLocator, NullLocator

from tokenscale.report import captions, panels
from tokenscale.report.figure import CURVES, POINTS, Drawing, Figure
from tokenscale.report.style import GREY, figure, format_ticks, jitter, looks, number, order_series


def _smallest(rows: pd.DataFrame) -> pd.DataFrame:
    """The smallest world size of each series: other world sizes train on the same data (see the
    proof table).
    """
    smallest = rows.groupby("series")["world_size"].transform("min")
    return rows[(rows["world_size"] == smallest) & rows["loss"].notna()]


_TOKENS = ("useful_tokens_seen", "useful tokens trained on")
_SECONDS = ("training_s", "seconds of training steps")


class LossOverTime(Figure):
    title = "Loss by useful tokens trained on, and by time"
    queries = ("loss_curves", "validation", "inventory")
    factor = "approach"
    columns = (
        "split",
        "series",
        "world_size",
        "repeat",
        "run_id",
        "stopped",
        "step",
        "useful_tokens_seen",
        "loss",
        "training_s",
        "steps",
        "loss_lowest",
        "loss_highest",
    )
    validation: pd.DataFrame

    def prepare(self) -> None:
        super().prepare()
        stopped = self.rows["stopped"].astype(bool)
        self.training = _smallest(self.rows[~stopped])
        self.held_out = _smallest(
            captions.select_comparable(self.validation, self.inventory, self.factor)[0]
        )
        #: of runs whose training stopped at a loss that was not finite; no median counts them
        self.stopped = _smallest(self.rows[stopped])

    def finding(self) -> str:
        found = captions.median_extremes(
            self.held_out[self.held_out["last"].astype(bool)], column="loss", unit=" nats"
        )
        return f"Final validation loss: {found}" if found else self.title

    def data(self) -> pd.DataFrame:
        """Return training and validation points of the drawn runs, one below the other."""
        trained = pd.concat([self.training, self.stopped]).assign(split="training")
        held_out = self.held_out.assign(split="validation", stopped=False)
        return pd.concat([trained, held_out], ignore_index=True).reindex(columns=list(self.columns))

    def draw(self) -> Drawing:
        """Draw three panels: training loss by tokens and by time, and validation loss by tokens.

        Repeats are thin, their median point by point bold. A cross is a stop.
        """
        train = self.training
        held_out = self.held_out
        stopped = self.stopped
        names = order_series(pd.concat([train["series"], held_out["series"], stopped["series"]]))
        found = panels.order_layers(looks(names))
        every = panels.find_interval(train, times=2)
        made, axes_of = figure(3, height=4.0, sharey=True, width_ratios=(1.3, 1.3, 1))
        last = axes_of[2]
        for axes, (_, label) in zip(axes_of, (_TOKENS, _SECONDS, _TOKENS), strict=True):
            axes.set_xlabel(label)
        axes_of[0].set_ylabel("training loss (nats / useful token)")
        last.set_ylabel("validation loss (nats / useful token)")
        for name, options in found.items():
            here = train[train["series"] == name]
            for axes, (x, _) in zip(axes_of, (_TOKENS, _SECONDS), strict=False):
                if len(here):
                    panels.draw_curve(
                        axes,
                        rows=here,
                        x=x,
                        y="loss",
                        options=options,
                        label=name,
                        every=every,
                    )
                for _, run in stopped[stopped["series"] == name].groupby("run_id"):
                    axes.plot(
                        run[x], run["loss"], color=options["color"], linewidth=0.7, alpha=0.45
                    )
                    axes.plot(
                        run[x].iloc[-1:],
                        run["loss"].iloc[-1:],
                        "x",
                        color=options["color"],
                        markersize=9,
                    )
            for _, run in held_out[held_out["series"] == name].groupby("run_id"):
                line = {"linewidth": 0.5 * options["linewidth"], "marker": "none"}
                last.plot(run[_TOKENS[0]], run["loss"], **options | line)
                last.plot(run[_TOKENS[0]], run["loss"], **options | {"linestyle": "none"})
        for axes in axes_of:
            if not axes.lines:
                self.no_data(made, axes)
                continue
            axes.set_xlim(left=0)
            panels.steps_of(axes.xaxis, most=3)
            format_ticks(axes.yaxis)
        panels.draw_legend(made, axes=axes_of[0], order=names)
        return made

    def sentences(self) -> str:
        train = self.training
        stopped = self.stopped["run_id"].nunique()
        listed = self.inventory.dropna(subset=["series", "world_size"])
        expected = listed[
            listed["world_size"] == listed.groupby("series")["world_size"].transform("min")
        ]
        text = (
            "Training loss by useful tokens (left) and by time (middle), and validation loss "
            "(right), at the smallest "
            f"world size; {captions.count_shown(train['run_id'].nunique(), expected)}. "
        )
        if train["run_id"].nunique() > train["series"].nunique():
            text += CURVES
        if stopped:
            runs = captions.count(stopped, "run")
            text += (
                f"A cross ends {runs} whose training stopped at a loss that was not finite; no "
                "median counts them. "
            )
        final = self.held_out[self.held_out["last"].astype(bool)]
        if len(final):
            ends = sorted({f"{loss:.4f}" for loss in (final["loss"].min(), final["loss"].max())})
            text += (
                "Validation is on one fixed slice of "
                f"{number(final['validation_tokens'].max(), digits=6)} useful tokens; "
                f"after the last step it {'is' if len(ends) == 1 else 'lies between'} "
                f"{' and '.join(ends)} over "
                f"{captions.count(len(final), 'run')}. "
            )
        return text + (
            "Approaches that cut documents into rows differently train on different rows at a "
            "step, so their training "
            "losses differ by data as well. If the global batch grows with the world size, each "
            "step sees more tokens, "
            f"so a lower loss by step is not an advantage. {POINTS}"
        )

    def numbers(self) -> str:
        return captions.describe_medians(
            self.training.groupby("run_id").tail(1),
            column="loss",
            factor=1,
            unit=" nats",
            by=["series"],
        )


class DdpVerificationLoss(Figure):
    title = "Loss of several ranks against the fewest, step by step"
    queries = ("loss_difference", "inventory")
    factor = "world_size"
    cores_matter = False

    def finding(self) -> str:
        text = (
            "Largest loss difference to the run with the fewest ranks: "
            f"{self.rows['largest_difference'].max():.1g}"
        )
        return f"{text} nats".replace("e-0", "e-") if len(self.rows) else self.title

    def prepare(self) -> None:
        super().prepare()
        self.rows = self.rows.assign(
            so_far=self.rows.groupby("run_id")["largest_difference"].cummax()
        )

    def draw(self) -> Drawing:
        """Draw two panels, logarithmic. Left: the largest difference up to each point, every pair a
        line.

        Right: the largest of each pair, by series and world size. A difference of zero stands at
        the lower edge.
        """
        cells = panels.cells(self.rows)[::-1]
        made, (left, right) = figure(
            2, height=1.8 + 0.3 * max(6, len(cells)), width_ratios=(1.5, 1)
        )
        left.set_xlabel("optimizer steps")
        left.set_ylabel("largest |difference| so far\n(nats / useful token)")
        right.set_xlabel("largest of any step\n(nats / useful token)")
        if self.rows.empty:
            return self.no_data(made)
        above = self.rows.loc[self.rows["largest_difference"] > 0, "largest_difference"]
        floor = above.min() / 3 if len(above) else 1e-9  # where zeros stand, below all that differ
        names = order_series(self.rows["series"])
        found = panels.order_layers(looks(names))
        every = panels.find_interval(self.rows)
        for name, options in found.items():
            line = {
                "color": options["color"],
                "linestyle": options["linestyle"],
                "linewidth": 0.9,
                "alpha": 0.7,
            }
            for _, run in self.rows[self.rows["series"] == name].groupby("run_id"):
                left.plot(
                    run["step"].iloc[::every], run["so_far"].iloc[::every].clip(lower=floor), **line
                )
            left.plot([], [], **options, label=name)
        largest = self.rows.groupby(["series", "world_size", "run_id"], as_index=False)[
            "largest_difference"
        ].max()
        for y, cell in enumerate(cells):
            values = panels.select_cell(largest, cell)["largest_difference"]
            options = found[cell[0]] | {"linestyle": "none"}
            right.plot(
                values.clip(lower=floor),
                [y + o for o in jitter(len(values))],
                **options,
                clip_on=False,
            )
        panels.name_rows(right, texts=panels.name_cells(cells, ranks_only=len(names) > 1))
        left.set_yscale("log")
        right.set_xscale("log")
        low = floor / 2
        high = max(10 * floor, 3 * self.rows["largest_difference"].max())
        left.set_ylim(low, high)
        right.set_xlim(low, high)
        for axis in (left.yaxis, right.xaxis):  # powers of ten as `1e-6`
            axis.set_major_locator(LogLocator(base=10, numticks=8))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(
                lambda value, _: f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
            )
        if (self.rows["so_far"] == 0).any():
            left.axhline(floor, color=GREY, linestyle=":", linewidth=0.9)
            look: dict = {
                "transform": left.get_yaxis_transform(),
                "ha": "right",
                "va": "bottom",
                "fontsize": 8,
            }
            left.text(0.99, floor, "no difference", **look)
        left.set_xlim(left=0)
        panels.steps_of(left.xaxis)
        panels.draw_legend(made, axes=left, order=names)
        return made

    def sentences(self) -> str:
        pairs = self.rows["run_id"].nunique()
        more = self.inventory["world_size"] > self.inventory.groupby("series")[
            "world_size"
        ].transform("min")
        expected = self.inventory[more | self.inventory["resumed_from"].notna()]
        text = (
            "Largest absolute difference of training losses so far, between a run and the run of "
            "the same repeat at "
            f"the smallest world size; {captions.count_shown(pairs, expected)}. Expected: rounding "
            "only, as sums are in "
            "another order, which training amplifies. A wrong sum of gradients would show at the "
            "first steps. Both "
            f"runs have the same settings. {POINTS}"
        )
        if resumed := self.rows.loc[self.rows["resumed_from"].notna(), "run_id"].nunique():
            text += (
                f"Of these, {resumed} resumed from another run's state in another layout. They "
                "are compared with the "
                "uninterrupted run that the state came from, and their lines begin at that step. "
            )
        if not pairs:
            return text + "No pair of runs at two world sizes shares batch and settings. "
        same = self.rows.groupby("run_id")["same_data"].all()
        formats = captions.in_brackets(
            captions.listing(sorted(self.inventory["precision"].dropna().unique()))
        )
        text += (
            f"In {int(same.sum())} of {captions.count(pairs, 'pair')} samples have equal digests "
            "at every step. "
        )
        return text + (
            f"The largest difference is {self.rows['largest_difference'].max():.2g} nats{formats}. "
        )

    def numbers(self) -> str:
        largest = self.rows.groupby(["series", "world_size"])["largest_difference"].max()
        return captions.listing(
            [f"{name} on {world} {value:.2g}" for (name, world), value in largest.items()]
        )
