"""Bytes that a token takes in each store, beside the entropy of its id."""

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import BLUE, GREEN, GREY, RED, figure, no_data, number, style

QUERIES = ("storage",)
#: column → name, colour, marker
_BOUNDS = {
    "entropy_bytes": ("entropy of single ids", RED, "D"),
    "fixed_bytes": ("whole bits of the vocabulary", GREEN, "^"),
    "text_bytes": ("UTF-8 of the text", GREY, "s"),
}


class StorageAgainstEntropy(Figure):
    """Bytes that a token takes in each store, beside the entropy of its id."""

    title = "Stored tokens: bytes a token, and the entropy of their ids"
    queries = QUERIES
    storage: pd.DataFrame

    def finding(self) -> str:
        """Return the stores with the fewest and the most bytes a token."""
        rows = self.data()
        sizes = rows.groupby("store")["bytes_per_id"].median().dropna()
        return f"Bytes a token: {captions.extremes(sizes)}" if len(sizes) else self.title

    def data(self) -> pd.DataFrame:
        """Return one row per store."""
        return self.storage.astype({"bytes_per_id": float, **dict.fromkeys(_BOUNDS, float)})

    def draw(self) -> matplotlib.figure.Figure:
        """Draw a bar a store, and on it what its ids take in three other ways."""
        rows = self.data()[::-1]
        with style():
            made, (axes,) = figure(height=1.6 + 0.42 * max(3, len(rows)))
            axes.set_xlabel("bytes a token")
            if rows.empty:
                no_data(axes, "no data: 0 of 0 stores")
                return made
            axes.barh(range(len(rows)), rows["bytes_per_id"], height=0.5, color=BLUE, alpha=0.55)
            for column, (label, colour, marker) in _BOUNDS.items():
                look: dict = {"color": colour, "marker": marker, "markerfacecolor": "none", "markeredgewidth": 1.5}
                axes.plot(rows[column], range(len(rows)), linestyle="none", **look, label=label)
            several = rows["tokenizer"].nunique() > 1 or rows["corpus"].nunique() > 1
            named = [f"{r.corpus}, {r.tokenizer}, {r.store}" if several else r.store for r in rows.itertuples()]
            panels.name_rows(axes, named)
            axes.set_xlim(left=0)
            panels.steps_of(axes.xaxis, 6)
            panels.legend(made, axes)
            return made

    def caption(self) -> str:
        """Return what is counted, and which stores lie below the entropy."""
        rows = self.data()
        text = (
            "Bars: bytes of a store's files over the token ids it contains, without padding. Marks: the order-0 "
            "entropy of the ids, the whole bits that number the vocabulary, and the UTF-8 bytes of the text per id. "
            "Stores are built once: these are counts, without a spread. No code of single ids is shorter than their "
            "order-0 entropy. A store below it exploits which ids follow each other. Text bytes are given where no "
            "document is cut. "
        )
        if rows.empty:
            return f"{text}There is no store of a training split."
        sizes = [
            f"{r.store} {number(r.bytes_per_id / r.entropy_bytes)}" for r in rows.itertuples() if r.entropy_bytes > 0
        ]
        return f"{text}Bytes over entropy: {captions.listing(sizes)}."

    def alt(self) -> str:
        """Return bytes a token, read aloud."""
        texts = [
            f"{r.store} {number(r.bytes_per_id)} (entropy {number(r.entropy_bytes)})" for r in self.data().itertuples()
        ]
        return f"Bars of bytes a token of each store. {captions.listing(texts) or 'No data'}."
