"""Figures of the time of a training: measures over its seconds, and the parts of a step."""

from tokenscale.report import captions, panels, style
from tokenscale.report.figure import CURVES, POINTS, Drawing, Figure
from tokenscale.report.style import (
    BLUE,
    GREEN,
    GREY,
    OPEN_DOTS,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    figure,
    jitter,
    number,
)


class TokensPerSecondOverTime(Figure):
    title = "Throughput in the course of a training"
    queries = ("loss_curves", "inventory")
    factor = "approach"
    columns = (
        "series",
        "world_size",
        "repeat",
        "run_id",
        "step",
        "steps",
        "training_s",
        "useful_tokens_per_s",
        "total_tokens_per_s",
    )
    read = "Line plot of useful tokens per second over the time of training. {}."

    def prepare(self) -> None:
        super().prepare()
        self.rows = self.rows[~self.rows["stopped"].astype(bool)].dropna(
            subset=["useful_tokens_per_s"]
        )

    def draw(self) -> Drawing:
        """Draw a panel per world size, a line a series."""
        rows = self.rows
        worlds = sorted(int(w) for w in self.rows["world_size"].unique())
        made, every = panels.make_grid(
            len(worlds),
            height=2.7,
            x="seconds of training steps",
            y="useful tokens / s",
            sharey=True,
        )
        if not worlds:
            return self.no_data(made)
        names = style.order_series(rows["series"])
        found = panels.order_layers(style.looks(names))
        nth = panels.find_interval(rows)
        for axes, world in zip(every, worlds, strict=True):
            here = rows[rows["world_size"] == world]
            for name, options in found.items():
                if len(line := here[here["series"] == name]):
                    panels.draw_curve(
                        axes,
                        rows=line,
                        x="training_s",
                        y="useful_tokens_per_s",
                        options=options,
                        label=name,
                        every=nth,
                    )
            if len(worlds) > 1:
                panels.write_heading(axes, text=panels.format_ranks(world))
            axes.set_xlim(left=0)
            axes.set_ylim(0, 1.08 * rows["useful_tokens_per_s"].max())
            panels.steps_of(axes.xaxis, most=4)
            style.format_ticks(axes.yaxis)
        panels.draw_legend(made, axes=every, order=names)
        return made

    def counted(self) -> str:
        return captions.count_shown(self.rows["run_id"].nunique(), runs=self.inventory)

    def sentences(self) -> str:
        text = f"Useful tokens per second of all ranks; {self.counted()}. {POINTS}"
        if self.rows.empty:
            return text
        most = int(self.rows["steps"].max())
        point = "a step" if most == 1 else f"the mean of up to {most} steps"
        return f"{text}A point is {point}; the first includes the warm-up. {CURVES}"

    def numbers(self) -> str:
        texts = []
        for name, world, rows in captions.cells(self.rows):
            middle = rows.groupby(panels.number_points(rows))["useful_tokens_per_s"].median()
            texts.append(
                f"{name} on {world} from {number(middle.iloc[0])} to {number(middle.iloc[-1])}"
            )
        return captions.listing(texts)


#: part → name, colour, hatch; as they are stacked
PARTS = {
    "data_wait_s": ("data wait", ORANGE, ""),
    "h2d_s": ("to the device", PURPLE, "///"),
    "forward_s": ("forward", SKY, ""),
    "backward_s": ("backward", BLUE, ""),
    "bubble_s": ("waiting for stages", GREEN, "xx"),
    "exposed_communication_s": ("exposed communication", RED, "\\\\\\"),
    "optimizer_s": ("optimizer", PURPLE, ""),
    "rest_s": ("rest", GREY, ""),
}


class StepTimeBreakdown(Figure):
    title = "What a step's time is made of"
    queries = ("phases", "inventory")
    factor = "approach"
    main = "step_s"
    unit = (1e3, " ms")
    read = "Stacked bars of a step's time. Median step: {}."

    def finding(self) -> str:
        shares = self.rows[list(PARTS)].div(self.rows["step_s"], axis=0).median().dropna()
        if shares.empty:
            return self.title
        part = PARTS[shares.idxmax()][0]
        share = number(100 * shares.max(), digits=2)
        return f"The largest part of a step is {part}: {share} % of its time"

    def draw(self) -> Drawing:
        """Draw one row per cell: the parts of its median run stacked, and every run's whole step a
        dot.
        """
        listed = panels.cells(self.inventory)[::-1]
        made, (axes,) = figure(height=1.7 + 0.34 * max(4, len(listed)))
        axes.set_xlabel("time of a step, mean over ranks (ms)")
        if self.rows.empty:
            return self.no_data(made)
        for y, cell in enumerate(listed):
            here = panels.select_cell(self.rows, cell).sort_values("step_s")
            if here.empty:
                panels.write_note(axes, y, text="no data")
                continue
            begin = 0.0
            median = here.iloc[(len(here) - 1) // 2]
            for part, (_, colour, hatch) in PARTS.items():
                width = 1e3 * max(0.0, median[part])
                axes.barh(
                    y,
                    width,
                    left=begin,
                    height=0.62,
                    color=colour,
                    hatch=hatch,
                    edgecolor="white",
                    linewidth=0,
                )
                begin += width
            axes.plot(
                1e3 * here["step_s"], [y + o for o in jitter(len(here), width=0.4)], **OPEN_DOTS
            )
        for part, (label, colour, hatch) in PARTS.items():
            if (self.rows[part] > 0).any():
                axes.barh(
                    [0], [0], color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=label
                )
        panels.finish_rows(axes, texts=panels.name_cells(listed), most=6)
        panels.draw_legend(made, axes, most=4)
        panels.write_heading(axes, text=captions.caution_crowding(self.inventory))
        return made

    def sentences(self) -> str:
        text = (
            "Bars: mean time of each part of a step in the run with the median step; "
            f"{self.counted()}. Dots: the "
            "whole step of every run. Means are over all ranks and steps after warm-up; of two "
            "middle runs, the one "
            "with the shorter step is drawn. Exposed communication is the wait for gradients "
            "after backward; "
            "communication during backward counts as backward. The rest is time that belongs to "
            "no named part. "
        )
        if len(over := self.rows[self.rows["rest_s"] < -0.01 * self.rows["step_s"]]):
            several = "s" if len(over) > 1 else ""
            text += f"In {len(over)} run{several} parts overlap, and add up to more than the step. "
        return text
