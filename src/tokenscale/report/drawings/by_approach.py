"""Figures with a row per approach and world size: every run is a dot, medians are bars."""

from tokenscale.report import captions, panels
from tokenscale.report.figure import DOTS, JOINED, RATES, Drawing, Figure
from tokenscale.report.style import GREY, SKY, number


class ByApproach(Figure):
    """Base class: one panel per column of `measures`."""

    factor = "approach"

    def draw(self) -> Drawing:
        drawing = panels.draw_strips(self)
        if self.cores_matter and len(self.first):
            panels.write_heading(
                drawing.axes[-1], text=captions.caution_crowding(self.inventory), ends=True
            )
        return drawing


class TokensPerSecondComparison(ByApproach):
    title = "Training throughput by approach"
    queries = ("throughput", "inventory")
    measures = {
        "useful_tokens_per_s": ("useful tokens / s", 1.0),
        "total_tokens_per_s": ("total tokens / s (padding included)", 1.0),
    }
    columns = ("series", "repeat", "run_id", *measures, "not_useful_share", "steps", "seconds")
    main = "useful_tokens_per_s"
    found = "Useful tokens per second:"
    words = (
        f"One process; {{counted}}. {DOTS}Open markers tokenize while training, filled ones read "
        f"a store. {RATES}"
    )

    def prepare(self) -> None:
        self.first, self.inventory = (
            rows[rows["world_size"] == 1] for rows in (self.first, self.inventory)
        )
        super().prepare()


class DataStallShare(ByApproach):
    title = "Share of the training step spent waiting for data"
    queries = ("stalls", "inventory")
    measures = {"data_stall_share": ("time waiting for the batch / step time (%)", 100.0)}
    columns = (
        "run_id",
        "approach",
        "series",
        "world_size",
        "repeat",
        "data_wait_s",
        "seconds",
        "data_stall_share",
        "largest_gain",
    )
    cores_matter = False  # a share says the same where ranks share cores
    main = "data_stall_share"
    unit = (100, " %")

    def finding(self) -> str:
        most = 100 * self.rows["data_stall_share"].max()
        return (
            f"Waiting for data takes at most {most:.2g} % of a training step"
            if len(self.rows)
            else self.title
        )

    def draw(self) -> Drawing:
        drawing = super().draw()
        if len(self.rows):
            drawing.axes[0].set_xlim(0, max(1.0, 110 * self.rows["data_stall_share"].max()))
        return drawing

    def sentences(self) -> str:
        text = (
            "Time waiting for the batch over step time, of the slowest rank, after warm-up; "
            f"{self.counted()}. "
        )
        if self.rows.empty:
            return text
        worst = self.rows.loc[self.rows["data_stall_share"].idxmax()]
        return text + (
            f"The largest share, {100 * worst['data_stall_share']:.2g} % ({worst['series']}, "
            f"{panels.format_ranks(int(worst['world_size']))}), bounds what any data format could gain "
            "there: at most "
            f"{number(worst['largest_gain'], digits=4)}× (Amdahl's law). "
        )


_PARTS = {
    "padding_share": (SKY, "padding, in an epoch of the store"),
    "ignored_share": (GREY, "first labels"),
}


class PaddingShare(ByApproach):
    title = "Processed tokens that are not useful"
    queries = ("padding", "inventory")
    measures = {
        "not_useful_share": ("positions that are not useful / all processed positions (%)", 100.0)
    }
    cores_matter = False
    main = "not_useful_share"
    unit = (100, " %")
    found = "Processed tokens that are not useful:"
    words = (
        "Dots: share of a run's processed tokens that are not useful, after warm-up, medians as "
        "lines; {counted}. "
        "Bars: the same in a whole epoch of the run's store, from its manifest. Approaches that "
        "tokenize while "
        "training read no store and have no bar. Padding and first labels are counted apart: a "
        "label is ignored where "
        "it begins a document or a piece of one. A few steps read part of an epoch, so dots and "
        "bars may differ. "
    )

    def draw(self) -> Drawing:
        """Draw one row per cell: every run a dot; stacked behind them, what its store holds in a
        whole epoch.
        """
        made = super().draw()
        if self.rows.empty:
            return made
        (axes,) = made.axes
        for y, cell in enumerate(panels.cells(self.inventory)[::-1]):
            begin = 0.0
            here = panels.select_cell(self.rows, cell).dropna(subset=list(_PARTS))
            for column, (colour, _) in _PARTS.items() if len(here) else ():
                width = 100 * here[column].median()
                axes.barh(y, width, left=begin, height=0.62, color=colour, alpha=0.55, zorder=0.5)
                begin += width
        if self.rows["padding_share"].notna().any():
            for colour, text in _PARTS.values():
                axes.barh([0], [0], color=colour, alpha=0.55, label=text)
            panels.draw_legend(made, axes)
        axes.set_xlim(0, 100 if 100 * self.rows["not_useful_share"].max() > 60 else None)
        return made


class BatchSizeComparison(Figure):
    title = "Training throughput by micro-batch"
    queries = ("throughput", "inventory")
    measures = {
        "useful_tokens_per_s": ("useful tokens / s", 1.0),
        "total_tokens_per_s": ("processed tokens / s (padding included)", 1.0),
    }
    columns = (
        "series",
        "micro_batch",
        "world_size",
        "repeat",
        "run_id",
        *measures,
        "not_useful_share",
        "sequence_length",
    )
    cores_matter = False
    main = "useful_tokens_per_s"
    by = ("series", "micro_batch")

    def prepare(self) -> None:
        """Choose runs at the smallest world size, comparable along micro-batches and along
        approaches.
        """
        smallest = self.inventory["world_size"].min()
        rows, self.inventory = (
            rows[rows["world_size"] == smallest] for rows in (self.first, self.inventory)
        )
        rows, along = captions.select_comparable(rows, self.inventory, factor="micro_batch")
        rows, across = captions.select_comparable(rows, self.inventory, factor="approach")
        self.refusals = along if along == across else f"{along} {across}".strip()
        rows = rows.merge(self.inventory[["run_id", "micro_batch", "sequence_length"]], on="run_id")
        series = captions.strip_level(rows["series"], key="micro_batch")
        self.rows = rows.assign(series=series).dropna(subset=["micro_batch"])

    def draw(self) -> Drawing:
        return panels.draw_joined_panels(
            self, key="micro_batch", label="micro-batch (rows of a forward pass)"
        )

    def sentences(self) -> str:
        text = (
            f"At the smallest world size and a fixed global batch; {self.counted()}. "
            f"{JOINED}Gradient accumulation "
        )
        text += "keeps learning rate and number of steps along the axis. "
        lengths = sorted(int(n) for n in self.rows["sequence_length"].dropna().unique())
        text += (
            f"Sequence length {captions.listing([number(n, digits=9) for n in lengths])}. "
            if lengths
            else ""
        )
        sizes = self.rows["micro_batch"].unique()
        if len(sizes) == 1:
            text += f"All runs have the micro-batch {int(sizes[0])}, so no trend can be seen. "
        return text + RATES
