"""Parallel methods and trainers beside each other: throughput, memory, and the table of both."""

from collections.abc import Sequence

import matplotlib.figure
import pandas as pd
from matplotlib.axes import Axes

from tokenscale.analysis.statistics import summary
from tokenscale.report import captions, panels, text_layout
from tokenscale.report.figure import Figure
from tokenscale.report.paired_comparisons import describe_certificate
from tokenscale.report.style import BLUE, GREY, ORANGE, PURPLE, SKY, TEXT, figure, jitter, no_data, number, style
from tokenscale.report.table import Table
from tokenscale.settings.run import OURS

#: what fills a device, as it is stacked
PARTS = {"parameters": BLUE, "gradients": SKY, "optimizer": ORANGE, "activations": PURPLE}
#: what efficiencies of a cell are worth, in the words of a table
_MEASURES = {
    "": "yes",
    captions.OVERSUBSCRIBED: "no: oversubscribed CPU",
    captions.SHARED_CORES: "no: shares the single rank's cores",
}


def cells(parallelism: pd.DataFrame) -> list[tuple[str, int, pd.DataFrame]]:
    """(method, ranks, its repeats), in the order of the query; other factors are named where they vary."""
    further = ["approach", "factors", "storage"]
    several = [column for column in further if parallelism[column].nunique() > 1]
    grouped = parallelism.groupby([*further, "world_size", "method", "layout"], sort=False)
    return [
        (", ".join([key[4], *filter(None, (key[further.index(column)] for column in several))]), int(key[3]), rows)
        for key, rows in grouped
    ]


def _measure(world: int, group: pd.DataFrame) -> str:
    """Does the efficiency of a cell say how the method scales?"""
    if world == 1:
        return "reference"
    if group["efficiency"].isna().all():
        return "no: no run on one rank"
    if (reason := captions.caution(group)) == "" and (group["device_kind"] == "cpu").all():
        return "yes, if idle"  # nobody records what else ran
    return _MEASURES[reason]


def _same(group: pd.DataFrame) -> str:
    known = group["same_data"].dropna()
    return "–" if known.empty else "yes" if known.astype(bool).all() else "no"


def _draw_speeds(
    every: Sequence[Axes], labels: Sequence[str], blocks: Sequence, groups: Sequence[pd.DataFrame], looks: Sequence
) -> None:
    """Rows from the top of the first panel: useful tokens/s of each run a dot, medians as bars.

    A dotted line crosses every panel between two blocks; `looks` are the colours of a row and of its dots' faces.
    """
    left = every[0]
    for y, (group, (colour, face)) in enumerate(zip(groups, looks, strict=True)):
        speeds = group["useful_tokens_per_s"]
        left.plot(speeds, [y + o for o in jitter(len(speeds))], "o", color=colour, markerfacecolor=face, markersize=5)
        left.plot([speeds.median()] * 2, [y - 0.36, y + 0.36], color=colour, linewidth=2)
    for y in range(1, len(labels)):
        if blocks[y] != blocks[y - 1]:
            for axes in every:
                axes.axhline(y - 0.5, color=GREY, linewidth=0.7, linestyle=":")
    left.set_yticks(range(len(labels)), text_layout.names(labels))
    left.set_ylim(len(labels) - 0.4, -0.6)
    for axes in every:
        axes.set_xlim(left=0)
        axes.grid(False, axis="y")
        panels.steps_of(axes.xaxis)


def _warning(shown: list[tuple[str, int, pd.DataFrame]]) -> str:
    """Why cells are no scaling measurement, with their numbers of ranks; or nothing."""
    worlds: dict[str, set[int]] = {}
    for _, world, group in shown:
        if reason := captions.caution(group):
            worlds.setdefault(reason, set()).add(world)
    texts = [f"{captions.listing([str(n) for n in sorted(found)])} ranks, {why}" for why, found in worlds.items()]
    return "; ".join(texts)


class ParallelMethods(Figure):
    title = "Parallel methods: throughput and memory"
    queries = ("parallelism", "inventory")
    factor = "layout"
    cores_matter = False
    main = "useful_tokens_per_s"
    read = "Dot plot and bars by parallel method, median useful tokens per second. {}."

    def finding(self) -> str:
        """Return the range of memory at the most ranks."""
        rows = self.rows.dropna(subset=["memory_bytes"])
        rows = rows[rows["world_size"] == rows["world_size"].max()]
        rows = captions.common_repeats(rows, ["method"])
        if rows["method"].nunique() < 2:
            return self.title
        memory = 1e-6 * rows.groupby("method")["memory_bytes"].median()
        return f"Memory of the fullest of {int(rows['world_size'].iloc[0])} ranks: {captions.extremes(memory, ' MB')}"

    def data(self) -> pd.DataFrame:
        """Return the table as numbers: one row per cell, medians over its runs with the ends of their spread."""
        columns = [
            "gpus",
            "method",
            "runs",
            "useful_tokens_per_s",
            "useful_tokens_per_s_low",
            "useful_tokens_per_s_high",
        ]
        columns += [
            "memory_bytes",
            *(f"{part}_bytes" for part in PARTS),
            "efficiency",
            "efficiency_low",
            "efficiency_high",
        ]
        columns += ["scaling_measurement", "final_loss", "largest_loss_difference", "same_data", "layout"]
        rows = []
        for name, world, group in cells(self.rows):
            speed, share = summary(group["useful_tokens_per_s"]), summary(group["efficiency"].dropna())
            rows.append(
                [world, name, len(group), speed.median, speed.low, speed.high]
                + [group[f"{part}_bytes"].max() for part in ("memory", *PARTS)]
                + [share.median, share.low, share.high, _measure(world, group), group["final_loss"].median()]
                + [group["largest_loss_difference"].max(), _same(group), group["layout"].iloc[0]]
            )
        return pd.DataFrame(rows, columns=columns)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw one row per cell. Left: useful tokens/s, medians as bars. Right: memory of the fullest rank."""
        shown = cells(self.rows)
        with style():
            made, (left, right) = figure(2, height=1.6 + 0.3 * max(4, len(shown)), sharey=True)
            left.set_xlabel("useful tokens / s, all ranks together")
            right.set_xlabel("memory of the fullest rank (MB)")
            if not shown:
                for axes in (left, right):
                    no_data(axes, captions.nothing(self.inventory, self.refusals))
                return made
            held = False
            for y, (_, _, group) in enumerate(shown):
                begin = 0.0
                fullest = group.loc[group["memory_bytes"].idxmax()] if group["memory_bytes"].notna().any() else None
                if fullest is None:
                    right.text(
                        0.02, y, "not measured", transform=right.get_yaxis_transform(), va="center", style="italic"
                    )
                    continue
                held = True
                for part, filled in PARTS.items():
                    width = 1e-6 * fullest[f"{part}_bytes"]
                    right.barh(y, width, left=begin, height=0.66, color=filled)
                    begin += width
            worlds = [world for _, world, _ in shown]
            texts = [f"{name}, {world}" if world > 1 else name for name, world, _ in shown]
            colours = [GREY if world == 1 else BLUE for world in worlds]
            groups = [group for *_, group in shown]
            faces = [
                "none" if captions.caution(group) else colour for group, colour in zip(groups, colours, strict=True)
            ]
            _draw_speeds((left, right), texts, worlds, groups, list(zip(colours, faces, strict=True)))
            left.set_ylabel("method, ranks")
            if held:
                for part, filled in PARTS.items():
                    right.barh([0], [0], color=filled, label=part)
                made.legend(loc="outside upper right", ncols=len(PARTS), handlelength=1.2)
            if _warning(shown):
                left.set_title("open: no scaling measurement", fontsize=9)
            return made

    def sentences(self) -> str:
        """Return what is compared, whether it is a scaling measurement, and whether the losses agree."""
        text = (
            "The same training under each parallel method: global batch, learning rate and steps are equal; "
            f"{self.counted()}. Each dot is a run, each bar the median of a cell. "
        )
        if warning := _warning(cells(self.rows)):
            text += f"Open dots: {warning}. "
        several = self.rows[self.rows["world_size"] > 1]
        if several["largest_loss_difference"].notna().any():
            text += (
                "Against the run on one rank of the same repeat, losses differ by at most "
                f"{several['largest_loss_difference'].max():.2g} nats at any step. "
            )
        return text

    def groups(self) -> list[pd.Series]:
        """Return the useful tokens/s of each cell."""
        return [group[self.main] for *_, group in cells(self.rows)]

    def alt(self) -> str:
        """Return medians, and whether this is a scaling measurement."""
        return f"{super().alt()} {_warning(cells(self.rows))}".strip()

    def numbers(self) -> str:
        """Return the median of each cell in words."""
        found = [f"{name} on {world}: {number(rows[self.main].median())}" for name, world, rows in cells(self.rows)]
        return captions.listing(found)

    def table(self) -> Table:
        """Return the same as people read it."""
        columns = [("GPUs (ranks)", True), ("method", False), ("runs", True), ("useful tokens / s", True)]
        columns += [("memory per device (MB)", True), ("efficiency (%)", True), ("a scaling measurement?", False)]
        columns += [("final loss", True), ("largest loss difference (nats)", True), ("same data", False)]
        rows = []
        for name, world, group in cells(self.rows):
            difference = group["largest_loss_difference"].max()
            rows.append(
                [
                    str(world),
                    name,
                    str(len(group)),
                    captions.spread(group["useful_tokens_per_s"]),
                    number(1e-6 * group["memory_bytes"].max()),
                    captions.spread(100 * group["efficiency"].dropna()),
                    _measure(world, group),
                    captions.spread(group["final_loss"], 5),
                    "reference" if world == 1 else "–" if pd.isna(difference) else f"{difference:.2g}",
                    _same(group),
                ]
            )
        text = (
            "A rank is a GPU where there are GPUs. Medians over runs, their spread in brackets; efficiency is T(N) / "
            "(N × T(1)), against the run on one rank of the same repeat. Memory: what the fullest rank holds of "
            "parameters, gradients, optimizer state and activations. The loss difference is the largest of all steps "
            "and repeats, the last step included, against the run on one rank."
        )
        return Table(columns, rows, f"{text} {captions.kinds(self.groups())}".strip())


def _memory_cells(memory: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(method or levels of the layout, approach where there are several, ranks; its runs), by world size."""
    several = memory["approach"].nunique() > 1
    keys, groups = [], []
    for (world, method, series), rows in memory.groupby(["world_size", "method", "series"]):
        levels = series.partition(", ")[2] or method
        keys.append((f"{rows['approach'].iloc[0]}, {levels}" if several else levels, int(world)))
        groups.append(rows)
    return list(zip(panels.names(keys, ranks_only=True), groups, strict=True))


class MemoryByMethod(Figure):
    title = "Memory by parallel method, measured and predicted"
    queries = ("memory", "inventory")
    factor = "layout"
    cores_matter = False
    main = "bytes"
    read = "Stacked bars of the memory of the fullest rank. {}."

    def prepare(self) -> None:
        """Read bytes as numbers with gaps."""
        super().prepare()
        numbers = [name for name in self.rows if name.endswith("bytes") or name == "predicted_per_measured"]
        self.rows = self.rows.astype(dict.fromkeys(numbers, float))

    def draw(self) -> matplotlib.figure.Figure:
        """Draw two bars per cell: the parts of the run that held most; below, hatched, what was predicted."""
        shown = _memory_cells(self.rows)[::-1]
        with style():
            made, (axes,) = figure(height=1.7 + 0.42 * max(4, len(shown)))
            if self.rows.empty:
                axes.set_xlabel("memory of the fullest rank (MB)")
                no_data(axes, captions.nothing(self.inventory, self.refusals))
                return made
            large = self.rows[["bytes", "predicted_bytes"]].max().max() >= 1e10
            unit, name = (1e-9, "GB") if large else (1e-6, "MB")
            axes.set_xlabel(f"memory of the fullest rank ({name})")
            for y, (_, rows) in enumerate(shown):
                fullest = rows.sort_values("bytes", na_position="first").iloc[-1]
                for prefix, place, hatch in (("", y + 0.2, ""), ("predicted_", y - 0.2, "////")):
                    begin = 0.0
                    for part, colour in PARTS.items():
                        width = fullest[f"{prefix}{part}_bytes"]
                        width = 0.0 if pd.isna(width) else unit * width
                        look: dict = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
                        axes.barh(place, width, left=begin, height=0.34, **look)
                        begin += width
                    if pd.isna(fullest[f"{prefix}bytes"]):
                        text = "in part not predicted" if prefix else "in part not measured"
                        axes.annotate(text, (begin, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
                dots: dict = {"color": TEXT, "markersize": 3.5, "markerfacecolor": "white", "linestyle": "none"}
                axes.plot(unit * rows["bytes"], [y + 0.2] * len(rows), "o", **dots)
            panels.name_rows(axes, [text for text, _ in shown])
            axes.set_xlim(left=0)
            panels.steps_of(axes.xaxis, 6)
            for part, colour in PARTS.items():
                axes.barh([0], [0], color=colour, label=part)
            axes.barh([0], [0], color=GREY, hatch="////", edgecolor="white", linewidth=0, label="predicted")
            panels.legend(made, axes)
            return made

    def sentences(self) -> str:
        """Return what is measured, what is predicted, and how far they lie apart."""
        text = (
            "Solid: measured parameters, gradients, optimizer state and activations of the fullest rank in the first "
            f"step. Hatched: the prediction from the run's settings; {self.counted()}. Dots are runs, and the bar is "
            "the run with the most memory in its cell. Communication buffers, the allocator's reserve and the program "
            "itself are in neither. "
        )
        known = self.rows.dropna(subset=["predicted_per_measured"])["predicted_per_measured"]
        if len(known):
            low, high = number(known.min()), number(known.max())
            text += f"Predicted over measured: {low if low == high else f'{low} to {high}'}. "
        return text

    def numbers(self) -> str:
        """Return the measured and predicted sum of each cell in words."""
        texts = [
            f"{name}: {number(1e-6 * rows['bytes'].max())} MB measured, {number(1e-6 * rows['predicted_bytes'].max())} "
            "MB predicted"
            for name, rows in _memory_cells(self.rows)
        ]
        return captions.listing(texts)


class Frameworks(Figure):
    title = "Trainers on the same weights and batches"
    queries = ("frameworks", "certificates", "inventory")
    factor = "arm"
    main = "useful_tokens_per_s"
    read = "Dot plot of trainers, median useful tokens per second. {}."
    certificates: pd.DataFrame

    def parity(self, group: pd.DataFrame) -> str:
        """Return the certificate of a cell over this project's trainer, in words."""
        if group["arm"].iloc[0] == OURS:
            return "reference"
        found = self.certificates[self.certificates["of_cell"] == group["cell"].iloc[0]].to_dict("records")
        return describe_certificate(found[0] if found else None)

    def cells(self) -> list[tuple[str, str, pd.DataFrame]]:
        """Return (label, trainer, its repeats) of each cell, in the order of the query."""
        several = {column: self.rows[column].nunique() > 1 for column in ("model", "world_size")}
        found = []
        for (model, world, arm, _), group in self.rows.groupby(["model", "world_size", "arm", "cell"], sort=False):
            parts = [arm, *[model] * several["model"], *[f"{world} ranks"] * several["world_size"]]
            found.append((", ".join(parts), arm, group))
        return found

    def finding(self) -> str:
        """Return how many trainers compute the same as this project's."""
        others = [self.parity(group) for _, arm, group in self.cells() if arm != OURS]
        if not others:
            return self.title
        equal = sum(parity in ("equal", "equal to rounding") for parity in others)
        return f"{equal} of {len(others)} other trainers equal ours to rounding"

    def data(self) -> pd.DataFrame:
        """Return one row per trainer and model: medians over its runs with the ends of their spread."""
        columns = ["model", "arm", "world_size", "runs", "useful_tokens_per_s", "useful_tokens_per_s_low"]
        columns += ["useful_tokens_per_s_high", "median_step_s", "memory_bytes", "steps", "final_loss", "parity"]
        rows = []
        for _, _, group in self.cells():
            speed, first = summary(group["useful_tokens_per_s"]), group.iloc[0]
            rows.append(
                [first["model"], first["arm"], first["world_size"], len(group), speed.median, speed.low, speed.high]
                + [group["median_step_s"].median(), group["memory_bytes"].max(), first["steps"]]
                + [group["final_loss"].median(), self.parity(group)]
            )
        return pd.DataFrame(rows, columns=columns)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw one row per trainer: useful tokens per second of each run, medians as bars."""
        shown = self.cells()
        with style():
            made, (axes,) = figure(1, height=1.6 + 0.32 * max(4, len(shown)))
            axes.set_xlabel("useful tokens / s, all ranks together")
            if not shown:
                no_data(axes, captions.nothing(self.inventory, self.refusals))
                return made
            looks = [(GREY, GREY) if arm == OURS else (BLUE, BLUE) for _, arm, _ in shown]
            models = [group["model"].iloc[0] for *_, group in shown]
            _draw_speeds([axes], [label for label, *_ in shown], models, [group for *_, group in shown], looks)
            return made

    def caption(self) -> str:
        """Return what is compared and what the certificates cover."""
        without = [label for label, _, group in self.cells() if self.parity(group).startswith("no ")]
        text = (
            "Each trainer runs its own loop in its own environment, on the same initial weights, batches and learning "
            f"rates; {self.counted()}. Each dot is a run, each bar the median; grey: this project's trainer. "
        )
        if without:
            text += f"Without a parity certificate: {captions.listing(without)}. "
        return text + self.crowded() + self.refused() + captions.kinds(self.groups())

    def groups(self) -> list[pd.Series]:
        """Return the useful tokens/s of each cell."""
        return [group[self.main] for *_, group in self.cells()]

    def numbers(self) -> str:
        """Return the median of each cell in words."""
        return captions.listing([f"{label}: {number(group[self.main].median())}" for label, _, group in self.cells()])

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
        for label, _, group in self.cells():
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
