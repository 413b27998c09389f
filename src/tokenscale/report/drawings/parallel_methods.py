"""Parallel methods, pipelines and trainers beside each other: throughput, memory, waiting, and
tables with more.
"""

import pandas as pd

from tokenscale.costs.pipeline_schedules import bubble_share
from tokenscale.report import captions, panels
from tokenscale.report.figure import Drawing, Figure
from tokenscale.report.paired_comparisons import describe_certificate
from tokenscale.report.style import (
    BLUE,
    GREY,
    OPEN_DOTS,
    ORANGE,
    PURPLE,
    SCHEDULES,
    SKY,
    figure,
    jitter,
    number,
)
from tokenscale.report.table import Table, columns
from tokenscale.settings.run import OURS

#: what fills a device, as it is stacked
PARTS = {"parameters": BLUE, "gradients": SKY, "optimizer": ORANGE, "activations": PURPLE}
#: what efficiencies of a cell are worth, in the words of a table
_MEASURES = {
    "": "yes",
    captions.OVERSUBSCRIBED: "no: oversubscribed CPU",
    captions.SHARED_CORES: "no: shares the single rank's cores",
}


class Speeds(Figure):
    """Base class: a row per cell, useful tokens/s of each run a dot, medians over the repeats of
    all cells as bars.
    """

    main = "useful_tokens_per_s"
    by = ("label",)
    #: columns that name a cell; the first parts blocks of rows
    keys: tuple[str, ...]
    heading = ""

    def prepare(self) -> None:
        super().prepare()
        labels = self.labels()
        self.rows = self.rows.assign(label=labels)
        self.cells = [group for _, group in self.rows.groupby(list(self.keys), sort=False)]

    def labels(self) -> list[str]:
        """Return the name of each row's cell."""
        raise NotImplementedError

    def look(self, group: pd.DataFrame) -> tuple[str, str]:
        """Return the colour of a cell, and of the faces of its dots."""
        raise NotImplementedError

    def draw(self) -> Drawing:
        made, (axes,) = figure(height=1.6 + 0.32 * max(4, len(self.cells)))
        axes.set_xlabel("useful tokens / s, all ranks together")
        if not self.cells:
            return self.no_data(made)
        for y, group in enumerate(self.cells):
            (colour, face) = self.look(group)
            places = [y + offset for offset in jitter(len(group))]
            axes.plot(
                group[self.main], places, "o", color=colour, markerfacecolor=face, markersize=5
            )
            median = group[self.main].median()
            axes.plot([median] * 2, [y - 0.36, y + 0.36], color=colour, linewidth=2)
            if y and group[self.keys[0]].iloc[0] != self.cells[y - 1][self.keys[0]].iloc[0]:
                axes.axhline(y - 0.5, color=GREY, linewidth=0.7, linestyle=":")
        panels.finish_rows(axes, texts=[group["label"].iloc[0] for group in self.cells])
        axes.invert_yaxis()
        panels.write_heading(axes, text=self.heading)
        return made


def _measure(group: pd.DataFrame) -> str:
    """Does the efficiency of a cell say how the method scales?"""
    if group["world_size"].iloc[0] == 1:
        return "reference"
    if group["efficiency"].isna().all():
        return "no: no run on one rank"
    if (reason := captions.caution(group)) == "" and (group["device_kind"] == "cpu").all():
        return "yes, if idle"  # nobody records what else ran
    return _MEASURES[reason]


def _difference(group: pd.DataFrame) -> str:
    largest = group["largest_loss_difference"].max()
    return "–" if pd.isna(largest) else f"{largest:.2g}"


def _same(group: pd.DataFrame) -> str:
    known = group["same_data"].dropna()
    if known.empty:
        return "–"
    if known.astype(bool).all():
        return "yes"
    return "no"


class ParallelMethods(Speeds):
    title = "Throughput of parallel methods"
    queries = ("parallelism", "inventory")
    factor = "layout"
    cores_matter = False
    keys = ("world_size", "approach", "factors", "storage", "method", "layout")

    def prepare(self) -> None:
        super().prepare()
        worlds: dict[str, set[str]] = {}
        for group in self.cells:
            if reason := captions.caution(group):
                worlds.setdefault(reason, set()).add(str(group["world_size"].iloc[0]))
        self.warning = "; ".join(
            f"{captions.listing(sorted(found))} ranks, {why}" for why, found in worlds.items()
        )
        self.heading = "open: no scaling measurement" if self.warning else ""

    def labels(self) -> list[str]:
        further = [
            key for key in ("approach", "factors", "storage") if self.rows[key].nunique() > 1
        ]
        named = [
            ", ".join(filter(None, key))
            for key in self.rows[["method", *further]].itertuples(index=False)
        ]
        self.rows = self.rows.assign(name=named)
        return [
            n + (f", {panels.format_ranks(w)}" if w > 1 else "")
            for n, w in zip(named, self.rows["world_size"], strict=True)
        ]

    def alt(self) -> str:
        return f"{super().alt()} {self.warning}".strip()

    def look(self, group: pd.DataFrame) -> tuple[str, str]:
        colour = GREY if group["world_size"].iloc[0] == 1 else BLUE
        return colour, "none" if captions.caution(group) else colour

    def data(self) -> pd.DataFrame:
        """Return one row per cell: medians over all its runs with the ends of their spread."""
        names = [
            "gpus",
            "method",
            "runs",
            "useful_tokens_per_s",
            "useful_tokens_per_s_low",
            "useful_tokens_per_s_high",
        ]
        names += [
            "memory_bytes",
            *(f"{part}_bytes" for part in PARTS),
            "sent_bytes",
            "predicted_sent_bytes",
            "efficiency",
            "efficiency_low",
        ]
        names += [
            "efficiency_high",
            "scaling_measurement",
            "final_loss",
            "largest_loss_difference",
            "same_data",
            "layout",
        ]
        rows = [
            [
                group["world_size"].iloc[0],
                group["name"].iloc[0],
                len(group),
                *captions.find_ends(group[self.main]),
            ]
            + [
                group[f"{part}_bytes"].max()
                for part in ("memory", *PARTS, "sent", "predicted_sent")
            ]
            + [
                *captions.find_ends(group["efficiency"]),
                _measure(group),
                group["final_loss"].median(),
            ]
            + [group["largest_loss_difference"].max(), _same(group), group["layout"].iloc[0]]
            for group in self.cells
        ]
        return pd.DataFrame(rows, columns=names)

    def sentences(self) -> str:
        """Return what is compared, whether it is a scaling measurement, and whether the losses
        agree.
        """
        text = (
            "The same training under each parallel method: global batch, learning rate and steps "
            "are equal; "
        )
        text += f"{self.counted()}. " + (f"Open dots: {self.warning}. " if self.warning else "")
        largest = self.rows.loc[self.rows["world_size"] > 1, "largest_loss_difference"].max()
        against = (
            "Against the run on one rank of the same repeat, losses differ by at most "
            f"{largest:.2g} nats at any "
        )
        return text if pd.isna(largest) else f"{text}{against}step. "

    def table(self) -> Table:
        """Return the same as people read it, with memory, losses and what efficiencies are
        worth.
        """
        heads = columns(
            *(
                ">GPUs (ranks)",
                "method",
                ">runs",
                ">useful tokens / s",
                ">memory per device (MB)",
                ">sent a step (MB)",
                ">efficiency (%)",
            ),
            *(
                "a scaling measurement?",
                ">final loss",
                ">largest loss difference (nats)",
                "same data",
            ),
        )
        rows = []
        for group in self.cells:
            world = group["world_size"].iloc[0]
            rows.append(
                [
                    str(world),
                    group["name"].iloc[0],
                    str(len(group)),
                    captions.format_spread(group[self.main]),
                ]
                + [
                    number(1e-6 * group["memory_bytes"].max()),
                    number(1e-6 * group["sent_bytes"].max()),
                    captions.format_spread(100 * group["efficiency"].dropna()),
                ]
                + [_measure(group), captions.format_spread(group["final_loss"], digits=5)]
                + ["reference" if world == 1 else _difference(group), _same(group)]
            )
        text = (
            "A rank is a GPU where there are GPUs. Spread in brackets."
            "Efficiency is T(N) / (N × T(1)), against the run on one rank of the same repeat. "
            "Memory: what the fullest "
            "rank holds of parameters, gradients, optimizer state and activations. Sent: by the "
            "rank that sends most, counted in the first step, collectives as rings send them. The loss "
            "difference is the largest "
            "of all steps and repeats, the last step included, against the run on one rank."
        )
        return Table(columns=heads, rows=rows, caption=text)


class MemoryByMethod(Figure):
    title = "Memory by parallel method, measured and predicted"
    queries = ("memory", "inventory")
    factor = "layout"
    cores_matter = False

    def prepare(self) -> None:
        """Read bytes as numbers with gaps, and name the cells: method or levels of the layout, and
        ranks.
        """
        super().prepare()
        numbers = [
            name for name in self.rows if name.endswith("bytes") or name == "predicted_per_measured"
        ]
        self.rows = self.rows.astype(dict.fromkeys(numbers, float))
        several = self.rows["approach"].nunique() > 1
        found = []
        for (world, method, series), rows in self.rows.groupby(["world_size", "method", "series"]):
            name = f"{rows['approach'].iloc[0]}, " * several + (series.partition(", ")[2] or method)
            found.append(((name, int(world)), rows))
        named = panels.name_cells([cell for cell, _ in found], ranks_only=True)
        self.cells = list(zip(named, [rows for _, rows in found], strict=True))

    def finding(self) -> str:
        rows = self.rows.dropna(subset=["bytes"])
        rows = rows[rows["world_size"] == rows["world_size"].max()]
        if rows["method"].nunique() < 2:
            return self.title
        found = captions.describe_extremes(
            1e-6 * rows.groupby("method")["bytes"].median(), unit=" MB"
        )
        return (
            "Memory of the fullest of "
            f"{captions.count(int(rows['world_size'].iloc[0]), 'rank')}: {found}"
        )

    def draw(self) -> Drawing:
        """Draw two bars per cell: the parts of the run that held most; below, hatched, what was
        predicted.
        """
        made, (axes,) = figure(height=1.7 + 0.42 * max(4, len(self.cells)))
        large = self.rows[["bytes", "predicted_bytes"]].max().max() >= 1e10
        unit, name = (1e-9, "GB") if large else (1e-6, "MB")
        axes.set_xlabel(f"memory of the fullest rank ({name})")
        if self.rows.empty:
            return self.no_data(made)
        for y, (_, rows) in enumerate(self.cells[::-1]):
            fullest = rows.sort_values("bytes", na_position="first").iloc[-1]
            for prefix, place, hatch in (("", y + 0.2, ""), ("predicted_", y - 0.2, "////")):
                begin = 0.0
                look: dict = {"height": 0.34, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
                for part, colour in PARTS.items():
                    width = fullest[f"{prefix}{part}_bytes"]
                    width = 0.0 if pd.isna(width) else unit * width
                    axes.barh(place, width, left=begin, color=colour, **look)
                    begin += width
                if pd.isna(fullest[f"{prefix}bytes"]):
                    text = "in part not predicted" if prefix else "in part not measured"
                    axes.annotate(
                        text,
                        (begin, place),
                        (4, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=8,
                    )
            axes.plot(unit * rows["bytes"], [y + 0.2] * len(rows), **OPEN_DOTS)
        panels.finish_rows(axes, texts=[text for text, _ in self.cells[::-1]], most=6)
        for part, colour in PARTS.items():
            axes.barh([0], [0], color=colour, label=part)
        axes.barh(
            [0], [0], color=GREY, hatch="////", edgecolor="white", linewidth=0, label="predicted"
        )
        panels.draw_legend(made, axes)
        return made

    def sentences(self) -> str:
        text = (
            "Solid: measured parameters, gradients, optimizer state and activations of the "
            "fullest rank in the first "
            f"step. Hatched: the prediction from the run's settings; {self.counted()}. Dots are "
            "runs, and the bar is "
            "the run with the most memory in its cell. Communication buffers, the allocator's "
            "reserve and the program "
            "itself are in neither. "
        )
        known = self.rows["predicted_per_measured"].dropna()
        low = number(known.min())
        high = number(known.max())
        if len(known) > 0:
            range_of_ratios = low if low == high else f"{low} to {high}"
            text += f"Predicted over measured: {range_of_ratios}. "
        return text

    def numbers(self) -> str:
        most = [
            (name, *(1e-6 * rows[["bytes", "predicted_bytes"]].max())) for name, rows in self.cells
        ]
        return captions.listing(
            [f"{name}: {number(a)} MB measured, {number(b)} MB predicted" for name, a, b in most]
        )


class Frameworks(Speeds):
    title = "Trainers on the same weights and batches"
    queries = ("frameworks", "certificates", "inventory")
    factor = "arm"
    keys = ("model", "world_size", "arm", "cell")
    certificates: pd.DataFrame

    def labels(self) -> list[str]:
        """Return trainers, with model and ranks where these vary, or all levels of the cell where
        more does.
        """
        named = [column for column in ("model", "world_size") if self.rows[column].nunique() > 1]
        cells = self.rows.groupby(["arm", *named], dropna=False)["cell"].nunique()
        columns = ["arm", *(["cell"] if cells.max() > 1 else named)]
        rows = self.rows.assign(world_size=self.rows["world_size"].map(panels.format_ranks))[
            columns
        ]
        return [", ".join(map(str, row)) for row in rows.itertuples(index=False)]

    def look(self, group: pd.DataFrame) -> tuple[str, str]:
        return (GREY, GREY) if group["arm"].iloc[0] == OURS else (BLUE, BLUE)

    def parity(self, group: pd.DataFrame) -> str:
        """Return the certificate of a cell over this project's trainer, in words."""
        if group["arm"].iloc[0] == OURS:
            return "reference"
        found = self.certificates[self.certificates["of_cell"] == group["cell"].iloc[0]].to_dict(
            "records"
        )
        return describe_certificate(found[0] if found else None)

    def finding(self) -> str:
        others = [parity for parity in map(self.parity, self.cells) if parity != "reference"]
        equal = sum(parity in ("equal", "equal to rounding") for parity in others)
        return (
            f"{equal} of {len(others)} other trainers equal ours to rounding"
            if others
            else self.title
        )

    def data(self) -> pd.DataFrame:
        """Return one row per trainer and model: medians over all its runs with the ends of their
        spread.
        """
        names = [
            "model",
            "arm",
            "world_size",
            "runs",
            "useful_tokens_per_s",
            "useful_tokens_per_s_low",
            "useful_tokens_per_s_high",
        ]
        names += ["median_step_s", "memory_bytes", "steps", "final_loss", "parity"]
        rows = [
            [
                *group.iloc[0][["model", "arm", "world_size"]],
                len(group),
                *captions.find_ends(group[self.main]),
            ]
            + [group["median_step_s"].median(), group["memory_bytes"].max(), group["steps"].iloc[0]]
            + [group["final_loss"].median(), self.parity(group)]
            for group in self.cells
        ]
        return pd.DataFrame(rows, columns=names)

    def sentences(self) -> str:
        without = [
            group["label"].iloc[0] for group in self.cells if self.parity(group).startswith("no ")
        ]
        text = (
            "Each trainer runs its own loop in its own environment, on the same initial weights, "
            "batches and learning "
            f"rates; {self.counted()}. Grey: this project's trainer. "
        )
        return text + (
            f"Without a parity certificate: {captions.listing(without)}. " if without else ""
        )

    def table(self) -> Table:
        """Return trainer, speed, step, memory, loss and certificate."""
        heads = columns(
            "trainer",
            ">useful tokens / s",
            "parity certificate",
            ">median step (ms)",
            ">memory (MB)",
            ">loss after the last step",
            ">runs",
        )
        rows = [
            [
                group["label"].iloc[0],
                captions.format_spread(group[self.main]),
                self.parity(group),
                captions.format_spread(1e3 * group["median_step_s"]),
                number(1e-6 * group["memory_bytes"].max()),
                captions.format_spread(group["final_loss"], digits=6),
                str(len(group)),
            ]
            for group in self.cells
        ]
        listed = self.inventory[~self.inventory["cell"].isin(self.rows["cell"])]
        for (arm, model, _), group in listed.groupby(["arm", "model", "cell"], sort=False):
            reasons = captions.listing(list(dict.fromkeys(group["reasons"].dropna()))[:2])
            rows.append([f"{arm}, {model}", "–", f"no valid run: {reasons}", *["–"] * 3, "0"])
        text = (
            "Spread in brackets. Memory is the peak of the fullest rank: "
            "allocated on a GPU, resident on a CPU with Python and all libraries. The "
            "certificate compares the first "
            "steps with this project's trainer (A) on the same weights and batches, against a "
            "measured rounding floor."
        )
        return Table(columns=heads, rows=rows, caption=text)


_KEYS = ["pipeline", "schedule", "stages_per_rank", "micro_batches"]
_DRAWN = {"bubble_share": ("time spent waiting (%)", 100), "speed_up": ("speed, × naive", 1)}


def _name(schedule: str, chunks: int) -> str:
    """The schedule, with its stages where there are several a rank."""
    return schedule + (f", {chunks} stages a rank" if chunks > 1 else "")


def _predict(ranks: int, schedule: str, chunks: int, micro_batches: int) -> dict[str, float]:
    """Share of the time that ranks wait, and speed over naive, where nothing but the schedule makes
    them wait.
    """
    waiting, naive = (
        bubble_share(
            name,
            ranks,
            micro_batches=micro_batches,
            chunks=v,
        )
        for name, v in ((schedule, chunks), ("naive", 1))
    )
    return {"bubble_share": waiting, "speed_up": (1 - waiting) / (1 - naive)}


def _oversubscribed(pipeline: pd.DataFrame) -> bool:
    cpu = pipeline["device_kind"] == "cpu"
    return bool((cpu & pipeline["oversubscribed"].fillna(False).astype(bool)).any())


class PipelineBubble(Figure):
    title = "Pipelines: waiting, and speed over model parallelism"
    queries = ("pipeline", "inventory")
    factor = "layout"
    main = "bubble_share"
    by = ("label",)
    unit = (100, " %")

    def prepare(self) -> None:
        """Find the cells, (ranks, schedule, stages a rank, micro-batches) → runs, in the order of
        the legend.
        """
        super().prepare()
        each = zip(*(self.rows[key] for key in _KEYS), strict=True)
        labels = [
            f"{_name(s, chunks=v)} with {captions.count(m, 'micro-batch')} on {panels.format_ranks(p)}"
            for p, s, v, m in each
        ]
        self.rows = self.rows.assign(label=labels)
        found = [
            ((int(p), str(s), int(v), int(m)), rows)
            for (p, s, v, m), rows in self.rows.groupby(_KEYS)
        ]
        self.cells = dict(
            sorted(
                found,
                key=lambda cell: (cell[0][0], list(SCHEDULES).index(cell[0][1]), *cell[0][2:]),
            )
        )

    def data(self) -> pd.DataFrame:
        """Return one row per cell: medians over all its runs with the ends of their spread, and
        predictions.
        """
        names = [
            "ranks",
            "schedule",
            "stages_per_rank",
            "micro_batches",
            "micro_batch",
            "runs",
            "bubble_measured",
            "bubble_low",
        ]
        names += [
            "bubble_high",
            "bubble_predicted",
            "useful_tokens_per_s",
            "speed_up_over_naive",
            "speed_up_low",
            "speed_up_high",
        ]
        names += ["largest_loss_difference", "oversubscribed", "speed_up_predicted"]
        rows = [
            [
                *key,
                group["micro_batch"].max(),
                len(group),
                *captions.find_ends(group["bubble_share"]),
            ]
            + [
                _predict(*key)["bubble_share"],
                group["useful_tokens_per_s"].median(),
                *captions.find_ends(group["speed_up"]),
            ]
            + [
                group["largest_loss_difference"].max(),
                _oversubscribed(group),
                _predict(*key)["speed_up"],
            ]
            for key, group in self.cells.items()
        ]
        return pd.DataFrame(rows, columns=names)

    def draw(self) -> Drawing:
        """Draw waiting and speed over micro-batches, per length of pipeline: lines predicted,
        points measured.
        """
        sizes = sorted({key[0] for key in self.cells})
        made, axes_of = figure(2, rows=max(1, len(sizes)), height=0.9 + 3.0 * max(1, len(sizes)))
        for axes, (label, _) in zip(axes_of, [*_DRAWN.values()] * max(1, len(sizes)), strict=True):
            axes.set_xlabel("micro-batches a step")
            axes.set_ylabel(label)
        if not sizes:
            return self.no_data(made)
        series = list(dict.fromkeys(key[1:3] for key in self.cells))
        for place, axes in enumerate(axes_of):
            ranks = sizes[place // 2]
            (column, (_, factor)) = list(_DRAWN.items())[place % 2]
            for (schedule, chunks), shift in zip(
                series, panels.find_shifts(len(series)), strict=True
            ):
                rows = {key[3]: key for key in self.cells if key[:3] == (ranks, schedule, chunks)}
                (colour, marker, dash) = SCHEDULES[schedule]
                predicted = [_predict(*key) for key in rows.values()]
                look: dict = {
                    "color": colour,
                    "markerfacecolor": "none",
                    "markeredgewidth": 1.4,
                    "markersize": 5,
                }
                line: dict = {"color": colour, "linestyle": dash, "linewidth": 1.4}
                axes.plot(list(rows), [factor * values[column] for values in predicted], **line)
                axes.plot([], [], **look | line, marker=marker, label=_name(schedule, chunks))
                for count, key in rows.items():
                    values = factor * self.cells[key][column].dropna().astype(float)
                    axes.plot([count * shift] * len(values), values, marker, **look)
            panels.from_zero(axes, sizes=sorted({key[3] for key in self.cells if key[0] == ranks}))
            if len(sizes) > 1:
                panels.write_heading(axes, text=f"{ranks} ranks in the pipeline")
        panels.draw_legend(made, axes=axes_of, order=[_name(*key) for key in series])
        if _oversubscribed(self.rows):
            panels.write_heading(axes_of[0], text=captions.OVERSUBSCRIBED)
        return made

    def crowded(self) -> str:
        return captions.as_sentence(captions.OVERSUBSCRIBED if _oversubscribed(self.rows) else "")

    def sentences(self) -> str:
        text = (
            "Left: share of time that ranks wait. Right: speed over the naive run of the same "
            "repeat and number of "
            "micro-batches; naive is model parallelism, where one stage works and the others "
            "wait. Lines: predicted, "
            "with equal stages, a backward pass of twice a forward pass, and free transfers. "
            "Points: measured, one "
            f"per run; {self.counted()}. With p ranks, m micro-batches and v stages a rank, the "
            "predicted share is "
            "(p − 1) / (m + p − 1) for gpipe and 1f1b, whose lines coincide, (p − 1) / (v m + p "
            "− 1) for interleaved, "
            "and (p − 1) / p for naive; the predicted speed is (1 − share) / (1 − naive's "
            "share). Measured is waiting "
            "over waiting plus passes, summed over ranks and steps. "
        )
        largest = self.rows["largest_loss_difference"].max()
        against = (
            "Against naive with the fewest micro-batches, losses differ by at most "
            f"{largest:.2g} nats at any "
        )
        return text if pd.isna(largest) else f"{text}{against}step. "

    def table(self) -> Table:
        """Return the same as people read it."""
        heads = columns(
            "schedule",
            ">ranks",
            ">micro-batches",
            ">runs",
            ">bubble, measured (%)",
            ">predicted (%)",
        )
        heads += columns(
            ">useful tokens / s",
            ">speed, × naive",
            ">predicted (×)",
            ">largest loss difference (nats)",
        )
        rows = []
        for key, group in self.cells.items():
            predicted = _predict(*key)
            rows.append(
                [
                    _name(*key[1:3]),
                    str(key[0]),
                    str(key[3]),
                    str(len(group)),
                    captions.format_spread(100 * group[self.main]),
                ]
                + [
                    number(100 * predicted["bubble_share"]),
                    captions.format_spread(group["useful_tokens_per_s"]),
                ]
                + [
                    captions.format_spread(group["speed_up"].dropna()),
                    number(predicted["speed_up"]),
                    _difference(group),
                ]
            )
        text = (
            "Spread in brackets. Speed is against naive with as many "
            "micro-batches of the same repeat; the loss difference is the largest of all steps "
            "and repeats, against "
            "naive with the fewest of them."
        )
        return Table(columns=heads, rows=rows, caption=text)
