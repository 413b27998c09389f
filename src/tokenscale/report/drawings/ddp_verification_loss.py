"""Do several ranks compute what the fewest compute, and a resumed run what was never interrupted? Losses by step."""

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import GREY, figure, jitter, looks, no_data, ordered, style

QUERIES = ("loss_difference", "inventory")


def _floor(kept: pd.DataFrame) -> float:
    """Where zeros stand on a logarithmic axis: below all that differ."""
    above = kept.loc[kept["largest_difference"] > 0, "largest_difference"]
    return float(above.min()) / 3 if len(above) else 1e-9


class DdpVerificationLoss(Figure):
    """Losses by step: do several ranks compute what the fewest compute, and a resumed run what a whole one does?"""

    title = "Loss of several ranks against the fewest, step by step"
    queries = QUERIES
    factor = "world_size"

    def finding(self) -> str:
        """Return the largest difference of all pairs."""
        if self.rows.empty:
            return self.title
        largest = self.rows["largest_difference"].max()
        if largest == 0:
            return "Losses of several ranks are bit-identical to those of the fewest"
        return f"Losses of several ranks differ by at most {f'{largest:.0e}'.replace('e-0', 'e-')} nats from the fewest"

    def prepare(self) -> None:
        """Add the largest difference of a pair up to each point."""
        super().prepare()
        so_far = self.rows.groupby("run_id")["largest_difference"].cummax()
        self.rows = self.rows.assign(so_far=so_far)

    def data(self) -> pd.DataFrame:
        """Return A row a point of a pair of runs."""
        return self.rows.drop(columns="approach").reset_index(drop=True)

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

    def caption(self) -> str:
        """Return what was expected, and what is there."""
        pairs = self.rows["run_id"].nunique()
        more = self.inventory["world_size"] > self.inventory.groupby("series")["world_size"].transform("min")
        expected = self.inventory[more | self.inventory["resumed_from"].notna()]
        text = (
            "Largest absolute difference of training losses so far, between a run and the run of the same repeat at "
            f"the smallest world size; {captions.counted(pairs, expected)}. Expected: rounding only, which training "
            "amplifies. A wrong sum of gradients would show at the first steps. Both runs have the same settings, "
            "train on the same samples at every step, and sum in a different order. A run has at most 100 points. "
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
        return (text + self.refusals).strip()

    def alt(self) -> str:
        """Return the largest differences, read aloud."""
        largest = self.rows.groupby(["series", "world_size"])["largest_difference"].max()
        texts = [f"{name} on {world} {value:.2g}" for (name, world), value in largest.items()]
        return (
            "Differences of training loss between world sizes, in nats. Largest: "
            f"{captions.listing(texts) or 'no data'}."
        )
