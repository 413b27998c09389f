"""Validation loss of each corpus of a mixture, by its share of the training data."""

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import figure, looks, no_data, number, plain, style
from tokenscale.report.table import Table

QUERIES = ("source_validation", "inventory")
#: panels beside each other
COLUMNS = 3


class MixtureLosses(Figure):
    """Validation loss of each corpus of a mixture, by its share of the training data."""

    title = "Validation loss of each corpus by its share of the training data"
    queries = QUERIES
    factor = "corpus"
    source_validation: pd.DataFrame

    def prepare(self) -> None:
        """Keep the last validation of each comparable run."""
        super().prepare()
        rows = self.rows[self.rows["last"].astype(bool) & self.rows["share"].notna()]
        several = rows["series"].map(_other_factors).nunique() > 1 or rows["world_size"].nunique() > 1
        cells = rows["corpus"].astype(str)
        if several:
            ranks = rows["world_size"].map(panels.ranks)
            cells = cells + ", " + rows["series"].map(_other_factors) + ", " + ranks
        self.rows = rows.assign(cell=cells)

    def data(self) -> pd.DataFrame:
        """Return one row per run and corpus."""
        columns = ["corpus", "series", "world_size", "repeat", "run_id", "source", "share", "step", "loss"]
        return self.rows[columns].reset_index(drop=True)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw one panel per corpus: every run a dot, the median of each cell a bar."""
        sources = sorted(self.rows["source"].unique())
        columns = min(COLUMNS, max(1, len(sources)))
        rows = -(-max(1, len(sources)) // columns)
        made, axes = figure(columns, rows=rows, height=0.8 + 2.8 * rows)
        options = looks(self._cells())
        with style():
            if not sources:
                no_data(axes[0], captions.nothing(self.inventory, self.refusals))
            for panel in axes[len(sources) :] if sources else ():
                panel.set_visible(False)
            for number_of_panel, panel in enumerate(axes):
                panel.set_xlabel("share of sequences (%)")
                if number_of_panel % columns == 0:
                    panel.set_ylabel("validation loss (nats / useful token)")
            for source, panel in zip(sources, axes, strict=False):
                panels.heading(panel, source)
                for cell, look in options.items():
                    here = self.rows[(self.rows["source"] == source) & (self.rows["cell"] == cell)]
                    share = 100 * here["share"]
                    panel.plot(share, here["loss"], **look | {"linestyle": "none", "markersize": 5}, label=cell)
                    panel.plot(share.median(), here["loss"].median(), "_", color=look["color"], markersize=18)
                panel.set_xlim(-6, 106)
                plain(panel.yaxis)
            panels.legend(made, axes[: len(sources)], order=list(options))
        return made

    def caption(self) -> str:
        """Return what is validated, and how many runs are shown."""
        slices = self.rows.groupby("source")["validation_tokens"].max()
        sizes = [f"{number(tokens, 6)} of {source}" for source, tokens in slices.items()]
        if len(sizes) > COLUMNS:
            sizes = [f"{number(slices.min(), 6)} to {number(slices.max(), 6)} a corpus"]
        text = (
            "Loss after the last step on a fixed held-out slice of each corpus, the same for every mixture "
            f"(useful tokens: {captions.listing(sizes) or 'none'}); "
            f"{captions.counted(self.rows['run_id'].nunique(), self.inventory)}. Each dot is a run, bars are "
            "medians. The share is of the sequences of the whole run; mixtures with stages reach it in their own "
            "order. "
        )
        groups = [group for _, group in self.rows.groupby(["cell", "source"])["loss"]]
        return text + self.refused() + captions.kinds(groups)

    def alt(self) -> str:
        """Return the medians, read aloud."""
        found = self.rows.groupby(["source", "cell"])["loss"].median()
        texts = [f"{source} with {mixture}: {loss:.3f}" for (source, mixture), loss in found.items()]
        return f"Validation loss by corpus and mixture. Medians: {captions.listing(texts) or 'no data'}."

    def table(self) -> Table:
        """Return medians, a row per mixture and corpus."""
        columns = [("mixture", False), ("corpus", False), ("share (%)", True), ("runs", True), ("loss", True)]
        columns.append(("lowest to highest", True))
        rows = []
        for (mixture, source), group in self.rows.groupby(["cell", "source"]):
            low, high = group["loss"].min(), group["loss"].max()
            spread = f"{low:.3f} to {high:.3f}"
            share, loss = f"{100 * group['share'].median():.1f}", f"{group['loss'].median():.3f}"
            rows.append([str(mixture), str(source), share, str(len(group)), loss, spread])
        return Table(columns, rows)

    def _cells(self) -> list[str]:
        """Return the cells, by the share of the first corpus."""
        first = self.rows[self.rows["source"] == self.rows["source"].min()]
        return first.groupby("cell")["share"].median().sort_values().index.tolist()


def _other_factors(series: str) -> str:
    """Return the name of a series without its mixture.

    >>> _other_factors("packed, corpus=half, sequence_length=512")
    'packed, sequence_length=512'
    """
    return ", ".join(part for part in series.split(", ") if not part.startswith(("corpus=", "corpus.name=")))
