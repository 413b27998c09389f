"""Throughput by micro-batch and approach."""

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import figure, look, no_data, number, ordered, plain, style

QUERIES = ("throughput", "inventory")


class BatchSizeComparison(Figure):
    """Throughput by micro-batch and approach."""

    title = "Training throughput by micro-batch"
    queries = QUERIES
    throughput: pd.DataFrame

    def prepare(self) -> None:
        """Choose runs at the smallest world size that are comparable along micro-batches and along approaches.

        Series are named without their micro-batch.
        """
        smallest = self.inventory["world_size"].min()
        listed = self.inventory[self.inventory["world_size"] == smallest]
        kept, along = captions.comparable(
            self.throughput[self.throughput["world_size"] == smallest], listed, "micro_batch"
        )
        kept, across = captions.comparable(kept, listed, "approach")
        shape = self.inventory[["run_id", "micro_batch", "sequence_length"]]
        kept = kept.merge(shape, on="run_id").assign(
            series=lambda rows: captions.without(rows["series"], "micro_batch")
        )
        self.rows, self.refusals = (
            kept.dropna(subset=["micro_batch"]),
            " ".join(dict.fromkeys(filter(None, (along, across)))),
        )

    def data(self) -> pd.DataFrame:
        """Return one row per run at the smallest world size, of those that are like for like."""
        columns = [
            "series",
            "micro_batch",
            "world_size",
            "repeat",
            "run_id",
            "useful_tokens_per_s",
            "total_tokens_per_s",
        ]
        return self.rows[[*columns, "not_useful_share", "sequence_length"]].reset_index(drop=True)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw useful tokens/s (left) and processed tokens/s (right): runs as dots, medians joined per approach."""
        with style():
            made, both = figure(2, height=4.0)
            for axes, column, label in zip(
                both,
                ("useful_tokens_per_s", "total_tokens_per_s"),
                ("useful tokens / s", "processed tokens / s (padding included)"),
                strict=True,
            ):
                axes.set_xlabel("micro-batch (rows of a forward pass)")
                axes.set_ylabel(label)
                if self.rows.empty:
                    no_data(axes, captions.nothing(self.inventory, self.refusals))
                    continue
                sizes = sorted(int(size) for size in self.rows["micro_batch"].unique())
                names = ordered(self.rows["series"])
                for name, shift in zip(names, panels.shifts(len(names)), strict=True):
                    panels.joined(axes, self.rows[self.rows["series"] == name], column, 1, name, shift, "micro_batch")
                    axes.plot([], [], **look(name), label=name)
                panels.doublings(axes, sizes)
                axes.set_ylim(0, 1.06 * self.rows[column].max())
                plain(axes.yaxis)
            panels.legend(made, both[0])
            return made

    def caption(self) -> str:
        """Return at which world size and sequence length, and what else changes with the micro-batch."""
        smallest = self.inventory[self.inventory["world_size"] == self.inventory["world_size"].min()]
        text = (
            "Tokens per second after warm-up, at the smallest world size and a fixed global batch; "
            f"{captions.counted(len(self.rows), smallest)}. Each dot is a run; medians are joined. Gradient "
            "accumulation keeps the global batch, so learning rate and number of steps do not change along the axis. "
        )
        if len(self.rows):
            lengths = sorted(int(n) for n in self.rows["sequence_length"].dropna().unique())
            if lengths:
                text += f"Sequence length {captions.listing([number(n, 9) for n in lengths])}. "
            if self.rows["micro_batch"].nunique() == 1:
                text += (
                    f"All runs have the micro-batch {int(self.rows['micro_batch'].iloc[0])}, so no trend can be seen. "
                )
        text += self.refused()
        groups = [g for _, g in self.rows.groupby(["series", "micro_batch"])["useful_tokens_per_s"]]
        return text + captions.kinds(groups)

    def alt(self) -> str:
        """Return the medians, read aloud."""
        found = self.data().groupby(["series", "micro_batch"])["useful_tokens_per_s"].median()
        texts = [f"{name} at {int(size)}: {number(value)}" for (name, size), value in found.items()]
        return f"Median useful tokens per second by micro-batch. {captions.listing(texts) or 'No data'}."
