"""Parallel methods and trainers beside each other: throughput, memory, and the table of both."""

import matplotlib.figure
import pandas as pd
from matplotlib.ticker import MaxNLocator

from tokenscale.analysis.statistics import summary
from tokenscale.report import captions, panels, text_layout
from tokenscale.report.figure import Figure
from tokenscale.report.paired_comparisons import describe_certificate
from tokenscale.report.style import BLUE, GREY, ORANGE, PURPLE, SKY, TEXT, figure, jitter, no_data, number, plain, style
from tokenscale.report.table import Table
from tokenscale.settings.run import OURS

#: what fills a device, as it is stacked
_PARTS = {"parameters": BLUE, "gradients": SKY, "optimizer": ORANGE, "activations": PURPLE}
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


def _spreads(parallelism: pd.DataFrame) -> str:
    return captions.kinds([group["useful_tokens_per_s"] for _, _, group in cells(parallelism)])


def _warning(shown: list[tuple[str, int, pd.DataFrame]]) -> str:
    """Why cells are no scaling measurement, with their numbers of ranks; or nothing."""
    worlds: dict[str, set[int]] = {}
    for _, world, group in shown:
        if reason := captions.caution(group):
            worlds.setdefault(reason, set()).add(world)
    texts = [f"{captions.listing([str(n) for n in sorted(found)])} ranks, {why}" for why, found in worlds.items()]
    return "; ".join(texts)


class ParallelMethods(Figure):
    """Parallel methods beside each other: throughput, memory of a device, and the table of both."""

    title = "Parallel methods: throughput and memory"
    queries = ("parallelism", "inventory")
    factor = "layout"

    def finding(self) -> str:
        """Return the range of memory at the most ranks."""
        rows = self.rows.dropna(subset=["memory_bytes"])
        rows = rows[rows["world_size"] == rows["world_size"].max()]
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
            *(f"{part}_bytes" for part in _PARTS),
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
                + [group[f"{part}_bytes"].max() for part in ("memory", *_PARTS)]
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
            for y, (_, world, group) in enumerate(shown):
                colour = GREY if world == 1 else BLUE
                face = "none" if captions.caution(group) else colour
                speeds = group["useful_tokens_per_s"]
                left.plot(
                    speeds, [y + o for o in jitter(len(speeds))], "o", color=colour, markerfacecolor=face, markersize=5
                )
                left.plot([speeds.median()] * 2, [y - 0.36, y + 0.36], color=colour, linewidth=2)
                begin = 0.0
                fullest = group.loc[group["memory_bytes"].idxmax()] if group["memory_bytes"].notna().any() else None
                if fullest is None:
                    right.text(
                        0.02, y, "not measured", transform=right.get_yaxis_transform(), va="center", style="italic"
                    )
                    continue
                held = True
                for part, filled in _PARTS.items():
                    width = 1e-6 * fullest[f"{part}_bytes"]
                    right.barh(y, width, left=begin, height=0.66, color=filled)
                    begin += width
            worlds = [world for _, world, _ in shown]
            for y in range(1, len(shown)):
                if worlds[y] != worlds[y - 1]:
                    for axes in (left, right):
                        axes.axhline(y - 0.5, color=GREY, linewidth=0.7, linestyle=":")
            texts = [f"{name}, {world}" if world > 1 else name for name, world, _ in shown]
            left.set_yticks(range(len(shown)), text_layout.names(texts))
            left.set_ylim(len(shown) - 0.4, -0.6)
            left.set_xlim(left=0)
            left.set_ylabel("method, ranks")
            for axes in (left, right):
                axes.grid(False, axis="y")
                axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
                plain(axes.xaxis)
            right.set_xlim(left=0)
            if held:
                for part, filled in _PARTS.items():
                    right.barh([0], [0], color=filled, label=part)
                made.legend(loc="outside upper right", ncols=len(_PARTS), handlelength=1.2)
            if _warning(shown):
                left.set_title("open: no scaling measurement", fontsize=9)
            return made

    def caption(self) -> str:
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
        text += self.refused()
        return text + _spreads(self.rows)

    def alt(self) -> str:
        """Return medians, read aloud."""
        texts = [
            f"{name} on {world}: {number(group['useful_tokens_per_s'].median())}"
            for name, world, group in cells(self.rows)
        ]
        read = captions.listing(texts) or "No data"
        warning = _warning(cells(self.rows))
        return f"Dot plot and bars by parallel method, median useful tokens per second. {read}. {warning}".strip()

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
        return Table(columns, rows, f"{text} {_spreads(self.rows)}".strip())


#: what fills a device, as it is stacked
PARTS = {"parameters": BLUE, "gradients": SKY, "optimizer": ORANGE, "activations": PURPLE}


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
    """What the fullest rank holds under each parallel method: measured, beside what the settings predict."""

    title = "Memory by parallel method, measured and predicted"
    queries = ("memory", "inventory")
    factor = "layout"

    def prepare(self) -> None:
        """Read bytes as numbers with gaps."""
        super().prepare()
        kept = self.rows
        numbers = [column for column in kept if column.endswith("bytes") or column == "predicted_per_measured"]
        self.rows = kept.astype(dict.fromkeys(numbers, float))

    def data(self) -> pd.DataFrame:
        """Return one row per run, of those that are like for like: bytes."""
        return self.rows.drop(columns="approach").reset_index(drop=True)

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

    def caption(self) -> str:
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
        text += self.refused()
        return text + captions.kinds(captions.by_cell(self.rows, "bytes"))

    def alt(self) -> str:
        """Return measured and predicted sums, read aloud."""
        texts = [
            f"{name}: {number(1e-6 * rows['bytes'].max())} MB measured, {number(1e-6 * rows['predicted_bytes'].max())} "
            "MB predicted"
            for name, rows in _memory_cells(self.rows)
        ]
        return f"Stacked bars of the memory of the fullest rank. {captions.listing(texts) or 'No data'}."


#: columns of which a group is one trainer with one model
_CELL = ["model", "world_size", "arm", "cell"]


class Frameworks(Figure):
    """Trainers beside each other on the same weights and batches."""

    title = "Trainers on the same weights and batches"
    queries = ("frameworks", "certificates", "inventory")
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
