"""Trainers beside each other: throughput of each, and a table with memory, loss and parity certificate."""

import matplotlib.figure
import pandas as pd
from matplotlib.ticker import MaxNLocator

from tokenscale.analysis.statistics import summary
from tokenscale.report import captions, text_layout
from tokenscale.report.figure import Figure
from tokenscale.report.paired_comparisons import describe_certificate
from tokenscale.report.style import BLUE, GREY, figure, jitter, no_data, number, plain, style
from tokenscale.report.table import Table
from tokenscale.settings.run import OURS

QUERIES = ("frameworks", "certificates", "inventory")
#: columns of which a group is one trainer with one model
_CELL = ["model", "world_size", "arm", "cell"]


class Frameworks(Figure):
    """Trainers beside each other on the same weights and batches."""

    title = "Trainers on the same weights and batches"
    queries = QUERIES
    factor = "arm"

    certificates: pd.DataFrame

    def parity(self, group: pd.DataFrame) -> str:
        """Return the certificate of a cell over this project's trainer, in words."""
        if group["arm"].iloc[0] == OURS:
            return "reference"
        found = self.certificates[self.certificates["of_cell"] == group["cell"].iloc[0]].to_dict("records")
        return describe_certificate(found[0] if found else None)

    def groups(self) -> list[tuple[str, str, pd.DataFrame]]:
        """Return (label, trainer, its repeats) of each cell, in the order of the query."""
        several = {column: self.rows[column].nunique() > 1 for column in ("model", "world_size")}
        found = []
        for (model, world, arm, _), group in self.rows.groupby(_CELL, sort=False):
            parts = [arm, *[model] * several["model"], *[f"{world} ranks"] * several["world_size"]]
            found.append((", ".join(parts), arm, group))
        return found

    def finding(self) -> str:
        """Return how many trainers compute the same as this project's."""
        others = [self.parity(group) for _, arm, group in self.groups() if arm != OURS]
        if not others:
            return self.title
        equal = sum(parity in ("equal", "equal to rounding") for parity in others)
        return f"{equal} of {len(others)} other trainers equal ours to rounding"

    def data(self) -> pd.DataFrame:
        """Return one row per trainer and model: medians over its runs with the ends of their spread."""
        columns = ["model", "arm", "world_size", "runs", "useful_tokens_per_s", "useful_tokens_per_s_low"]
        columns += ["useful_tokens_per_s_high", "median_step_s", "memory_bytes", "steps", "final_loss", "parity"]
        rows = []
        for _, _, group in self.groups():
            speed, first = summary(group["useful_tokens_per_s"]), group.iloc[0]
            rows.append(
                [first["model"], first["arm"], first["world_size"], len(group), speed.median, speed.low, speed.high]
                + [group["median_step_s"].median(), group["memory_bytes"].max(), first["steps"]]
                + [group["final_loss"].median(), self.parity(group)]
            )
        return pd.DataFrame(rows, columns=columns)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw one row per trainer: useful tokens per second of each run, medians as bars."""
        shown = self.groups()
        with style():
            made, (axes,) = figure(1, height=1.6 + 0.32 * max(4, len(shown)))
            axes.set_xlabel("useful tokens / s, all ranks together")
            if not shown:
                no_data(axes, captions.nothing(self.inventory, self.refusals))
                return made
            for y, (_, arm, group) in enumerate(shown):
                colour, speeds = GREY if arm == OURS else BLUE, group["useful_tokens_per_s"]
                axes.plot(speeds, [y + o for o in jitter(len(speeds))], "o", color=colour, markersize=5)
                axes.plot([speeds.median()] * 2, [y - 0.36, y + 0.36], color=colour, linewidth=2)
            models = [group["model"].iloc[0] for _, _, group in shown]
            for y in range(1, len(shown)):
                if models[y] != models[y - 1]:
                    axes.axhline(y - 0.5, color=GREY, linewidth=0.7, linestyle=":")
            axes.set_yticks(range(len(shown)), text_layout.names([label for label, _, _ in shown]))
            axes.set_ylim(len(shown) - 0.4, -0.6)
            axes.set_xlim(left=0)
            axes.grid(False, axis="y")
            axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
            plain(axes.xaxis)
            return made

    def caption(self) -> str:
        """Return what is compared and what the certificates cover."""
        without = [label for label, _, group in self.groups() if self.parity(group).startswith("no ")]
        text = (
            "Each trainer runs its own loop in its own environment, on the same initial weights, batches and learning "
            f"rates; {self.counted()}. Each dot is a run, each bar the median; grey: this project's trainer. "
        )
        if without:
            text += f"Without a parity certificate: {captions.listing(without)}. "
        text += self.crowded() + self.refused()
        return text + captions.kinds([group["useful_tokens_per_s"] for _, _, group in self.groups()])

    def alt(self) -> str:
        """Return medians, read aloud."""
        texts = [f"{label}: {number(group['useful_tokens_per_s'].median())}" for label, _, group in self.groups()]
        return f"Dot plot of trainers, median useful tokens per second. {captions.listing(texts) or 'No data'}."

    def table(self) -> Table:
        """Return trainer, speed, step, memory, loss and certificate."""
        columns = [("trainer", False), ("useful tokens / s", True), ("parity certificate", False)]
        columns += [
            ("median step (ms)", True),
            ("memory (MB)", True),
            ("loss after the last step", True),
            ("runs", True),
        ]
        rows = []
        for label, _, group in self.groups():
            rows.append(
                [
                    label,
                    captions.spread(group["useful_tokens_per_s"]),
                    self.parity(group),
                    captions.spread(1e3 * group["median_step_s"]),
                    number(1e-6 * group["memory_bytes"].max()),
                    captions.spread(group["final_loss"], 6),
                    str(len(group)),
                ]
            )
        listed = self.inventory[~self.inventory["cell"].isin(self.rows["cell"])]
        for (arm, model, _), group in listed.groupby(["arm", "model", "cell"], sort=False):
            reasons = captions.listing(list(dict.fromkeys(group["reasons"].dropna()))[:2])
            rows.append([f"{arm}, {model}", "–", f"no valid run: {reasons}", *["–"] * 3, "0"])
        text = (
            "Medians over runs, their spread in brackets. Memory is the peak of the fullest rank: allocated on a GPU, "
            "resident on a CPU with Python and all libraries. The certificate compares the first steps with this "
            "project's trainer (A) on the same weights and batches, against a measured rounding floor."
        )
        return Table(columns, rows, text)
