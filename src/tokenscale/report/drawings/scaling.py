"""Figures over the world size: strong and weak scaling, time, and FLOPs utilisation."""

import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import DOTS, FLOPS, JOINED, SLOWEST, Drawing, Figure
from tokenscale.report.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    figure,
    look,
    number,
    order_series,
)


class Scaling(Figure):
    """Base class. Left: useful tokens/s, medians joined, the ideal dotted. Right: efficiency of
    each pair of runs.
    """

    factor = "world_size"
    main = "useful_tokens_per_s"
    measures = {"useful_tokens_per_s": ("useful tokens / s", 1.0)}

    def draw(self) -> Drawing:
        rows = self.rows
        (made, (left, right)) = figure(2, height=4.0)
        for axes in (left, right):
            axes.set_xlabel("world size (ranks)")
        left.set_ylabel("useful tokens / s")
        bases = sorted(int(size) for size in rows["base_world_size"].dropna().unique())
        times, base = ("N", "1") if set(bases) <= {1} else ("N / N0", "N0")
        right.set_ylabel(f"efficiency T(N) / ({times} × T({base})) (%)")
        if rows.empty:
            return self.no_data(made)
        worlds = sorted(int(w) for w in rows["world_size"].unique())
        series = order_series(rows["series"])
        line: dict = {"linestyle": ":", "linewidth": 0.9}
        for name, shift in zip(series, panels.find_shifts(len(series)), strict=True):
            panels.draw_joined_runs(
                left,
                rows,
                column="useful_tokens_per_s",
                factor=1,
                name=name,
                shift=shift,
            )
            panels.draw_joined_runs(
                right,
                rows,
                column="efficiency",
                factor=100,
                name=name,
                shift=shift,
            )
            left.plot([], [], **look(name), label=name)
            # throughput that grows as the world does, from the smallest measured
            first = rows.loc[rows["series"] == name, "base_world_size"].iloc[0]
            rates = panels.select_cell(rows, cell=(name, first))["useful_tokens_per_s"]
            above = [w for w in worlds if w >= first]
            if len(rates) and len(above) > 1:
                left.plot(
                    above,
                    [w / first * rates.median() for w in above],
                    color=look(name)["color"],
                    **line,
                )
        left.plot([], [], color=GREY, **line, label=f"ideal: {times} × median T({base})")
        right.axhline(100, color=GREY, **line)
        for axes in (left, right):
            panels.from_zero(axes, sizes=worlds)
        right.set_ylim(0, max(110.0, 105 * rows["efficiency"].max()))
        if rows["efficiency"].dropna().empty:
            text = (
                f"no run at world size {captions.listing(list(map(str, bases)))}\nto compare with"
            )
            right.text(0.5, 0.5, text, transform=right.transAxes, ha="center", style="italic")
        panels.draw_legend(made, axes=left, most=3)
        panels.write_heading(left, text=self.warning())
        return made

    def data(self) -> pd.DataFrame:
        return self.rows.reset_index(drop=True)

    def folded(self) -> str:
        return super().folded() or captions.as_sentence(self.warning()).strip(". ")

    def finding(self) -> str:
        """Return the range of median efficiencies at the largest world size, and if it is no
        scaling measurement.
        """
        above = self.rows[
            (self.rows["world_size"] > self.rows["base_world_size"])
            & self.rows["efficiency"].notna()
        ]
        world = above["world_size"].max()
        found = captions.median_extremes(
            above[above["world_size"] == world],
            column="efficiency",
            unit=" %",
            factor=100,
        )
        text = f"Efficiency at world size {world:.0f}: {found}" if found else self.title
        return f"{text}; no scaling measurement" if found and self.warning() else text

    def warning(self) -> str:
        return captions.caution(self.rows)

    def crowded(self) -> str:
        return captions.as_sentence(self.warning() if len(self.rows) else "")

    def sentences(self) -> str:
        """Return what is compared, the references with their absolute values, and why runs have no
        efficiency.
        """
        rates = [
            (
                f"{name}{'' if world == 1 else f' (N0 = {world})'} "
                f"{captions.format_spread(rows['useful_tokens_per_s'])}"
            )
            for name, world, rows in captions.cells(
                self.rows[self.rows["world_size"] == self.rows["base_world_size"]]
            )
        ]
        alone = set(self.rows["base_world_size"]) <= {1}
        zero, named = (
            ("1", "world size 1") if alone else ("N0", "N0, the smallest world size measured")
        )
        text = (
            super().sentences()
            + f"Efficiency is of each run against the run of the same repeat at {named}. "
        )
        text += f"T({zero}) in useful tokens / s: {captions.listing(rates)}. " if rates else ""
        for reason, rows in self.rows.groupby("not_compared"):
            text += (
                f"{len(rows)} run{'s have' if len(rows) > 1 else ' has'} no efficiency: {reason}. "
            )
        return text


class ScalingThroughput(Scaling):
    title = "Throughput and efficiency by world size"
    queries = ("scaling", "inventory")
    words = (
        "Strong scaling at a fixed global batch, useful tokens per second over all ranks; "
        "{counted}. "
    )


class ScalingWeak(Scaling):
    title = "Weak scaling: throughput and efficiency by world size"
    queries = ("scaling_weak", "inventory")
    words = (
        "Weak scaling: the batch per rank is the same at every world size, so the global batch "
        "grows. Useful tokens "
        "per second over all ranks; {counted}. "
    )

    def prepare(self) -> None:
        super().prepare()
        rows = self.rows.assign(
            series=captions.strip_level(self.rows["series"], key="global_batch")
        )
        line = ["series", "rows_per_rank", "base_world_size"]
        self.rows = rows[rows.groupby(line)["world_size"].transform("nunique") > 1]

    def sentences(self) -> str:
        rows = [number(n) for n in sorted(self.rows["rows_per_rank"].unique())]
        return super().sentences() + (
            f"Rows of a rank's batch: {captions.listing(rows)}. " if rows else ""
        )

    def warning(self) -> str:
        return captions.caution_crowding(self.inventory)


class TrainingTime(Figure):
    title = "Time of a run and of an epoch by world size"
    queries = ("epochs", "inventory")
    factor = "world_size"
    measures = {
        "training_s": ("training steps of the run (s)", 1.0),
        "epoch_s": ("an epoch of the corpus (s)", 1.0),
    }
    columns = (
        "series",
        "world_size",
        "repeat",
        "run_id",
        "steps",
        "rows",
        "rows_per_s",
        "epoch_rows",
        *measures,
    )
    main = "training_s"
    unit = (1, " s")

    def draw(self) -> Drawing:
        drawing = panels.draw_joined_panels(self)
        if len(self.rows):
            panels.write_heading(drawing.axes[0], text=captions.caution_crowding(self.inventory))
        return drawing

    def sentences(self) -> str:
        text = (
            "A run's time is the sum of all its steps, warm-up included; an epoch's is its rows "
            "over the run's rows "
            f"per second after warm-up; {self.counted()}. {JOINED}{SLOWEST}An epoch is the "
            "content of the "
            "run's token store; for an approach that tokenizes while training, of its offline "
            "twin's store. "
        )
        if len(whole := self.rows["wall_s"].dropna()):
            text += (
                "From the first event to the last, with start, validation and checkpoints, runs "
                "took "
            )
            text += f"{number(whole.min())} to {number(whole.max())} s. "
        if lacking := int(self.rows["epoch_s"].isna().sum()):
            text += (
                f"{lacking} run{'s have' if lacking > 1 else ' has'} no epoch, because that "
                "store is missing. "
            )
        return text


#: column → name of the convention, colour, marker
CONVENTIONS = {
    "hfu": ("hardware: with what backward computes again (HFU)", ORANGE, "s"),
    "mfu_palm": ("palm: attention over the full square", BLUE, "o"),
    "mfu_causal": ("causal: half of the square", GREEN, "^"),
    "mfu_useful": ("useful: palm, without padding", RED, "D"),
}


def no_peak(computing: pd.DataFrame) -> str:
    """Why there is no utilisation: devices without a known peak; nothing where there are no
    runs.
    """
    devices = sorted(computing["device"].dropna().unique())
    return (
        f"no known peak of {captions.listing(devices)}: achieved TFLOP/s, no utilisation"
        if devices
        else ""
    )


class MfuComparison(Figure):
    title = "Model FLOPs utilisation by approach"
    queries = ("computing", "inventory")
    factor = "approach"
    main = "tflops_per_device_s"
    columns = (
        "series",
        "world_size",
        "repeat",
        "run_id",
        "device",
        "number_format",
        "peak_flops",
        "peak_source",
        *CONVENTIONS,
        "tflops_per_device_s",
    )

    def prepare(self) -> None:
        super().prepare()
        self.known = bool(self.rows["mfu_palm"].notna().any())
        self.measures = {self.main: ("achieved TFLOP/s of a device", 1.0)}
        if self.known:
            self.main = "mfu_palm"
            self.unit = (100, " %")
            self.found = "MFU (palm):"
            self.measures = {self.main: ("MFU, convention palm (%)", 100.0)}

    def folded(self) -> str:
        return super().folded() or ("" if self.known else no_peak(self.rows))

    def draw(self) -> Drawing:
        """Draw one row per cell, a marker per convention: runs and medians; without a peak,
        achieved TFLOP/s.
        """
        if not self.known:
            made = panels.draw_strips(self)
            panels.write_heading(made.axes[0], text=no_peak(self.rows))
            return made
        listed = panels.cells(self.inventory)[::-1]
        made, (axes,) = figure(height=1.6 + 0.44 * max(4, len(listed)))
        axes.set_xlabel("FLOP/s of the model / peak FLOP/s of its devices (%)")
        for y, cell in enumerate(listed):
            here = panels.select_cell(self.rows, cell)
            if here["mfu_palm"].dropna().empty:
                panels.write_note(axes, y, text="no peak known" if len(here) else "no data")
            for place, (column, (_, colour, marker)) in enumerate(CONVENTIONS.items()):
                values = 100 * here[column].dropna()
                height = y + 0.27 - 0.18 * place
                options: dict = {
                    "color": colour,
                    "marker": marker,
                    "markersize": 5,
                    "linestyle": "none",
                }
                axes.plot(
                    values, [height] * len(values), **options, markerfacecolor="none", clip_on=False
                )
                median = 100 * panels.select_cell(self.rows, cell)[column].median()
                axes.plot([median] * 2, [height - 0.08, height + 0.08], color=colour, linewidth=2)
        panels.name_rows(axes, texts=panels.name_cells(listed))
        axes.set_xlim(0, 108 * self.rows[list(CONVENTIONS)].max().max())
        panels.steps_of(axes.xaxis)
        for text, colour, marker in CONVENTIONS.values():
            axes.plot(
                [],
                [],
                color=colour,
                marker=marker,
                linestyle="none",
                markerfacecolor="none",
                label=text,
            )
        panels.draw_legend(made, axes, most=2)
        return made

    def sentences(self) -> str:
        known = self.rows.dropna(subset=["peak_flops"]).drop_duplicates(
            ["device", "number_format", "peak_flops"]
        )
        text = captions.as_sentence("" if self.known else no_peak(self.rows))
        text += (
            f"Processed tokens per second times FLOPs a token, padding included; {self.counted()}. "
        )
        if self.known:
            peaks = [
                (
                    f"{r.device} {number(1e-12 * r.peak_flops, digits=4)} TFLOP/s in {r.number_format} "
                    f"({r.peak_source})"
                )
                for r in known.itertuples()
            ]
            text += (
                "palm: over the peak of the devices; causal: the attention term halved; useful: "
                "palm for useful tokens "
                "alone; hardware (HFU): palm and what backward computes again. "
                f"Peaks: {'; '.join(peaks)}. "
            )
        return text + FLOPS + DOTS
