"""Stores: bytes of a token, its entropy, and the speeds of reading and of writing."""

import math

import matplotlib.figure
import pandas as pd
from matplotlib.lines import Line2D

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    TEXT,
    figure,
    no_data,
    number,
    plain,
    style,
)

#: column → name, colour, marker
_BOUNDS = {
    "entropy_bytes": ("entropy of single ids", RED, "D"),
    "fixed_bytes": ("whole bits of the vocabulary", GREEN, "^"),
    "text_bytes": ("UTF-8 of the text", GREY, "s"),
}


class StorageAgainstEntropy(Figure):
    title = "Stored tokens: bytes a token, and the entropy of their ids"
    queries = ("storage",)
    read = "Bars of bytes a token of each store. {}."
    storage: pd.DataFrame

    def finding(self) -> str:
        """Return the stores with the fewest and the most bytes a token."""
        sizes = self.data().groupby("store")["bytes_per_id"].median().dropna()
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

    def numbers(self) -> str:
        """Return the bytes a token of each store in words."""
        texts = [
            f"{r.store} {number(r.bytes_per_id)} (entropy {number(r.entropy_bytes)})" for r in self.data().itertuples()
        ]
        return captions.listing(texts)


_MARKERS = {"padded": "s", "token-list": "D", "packed": "v"}
_OWN = "the format's own"
_COLOURS = {"none": GREY, "snappy": GREEN, "lz4": SKY, "zstd-1": "#f0c35e", "zstd-3": ORANGE, "zstd-9": RED,
            "zstd-22": PURPLE, _OWN: BLUE}  # fmt: skip
_SPEEDS = {
    "shuffled_us_per_token": "useful tokens / s read, shuffled\n(log scale)",
    "write_us_per_token": "useful tokens / s written\n(log scale)",
}


def _points(rounds: pd.DataFrame) -> pd.DataFrame:
    """Return one row per way to store: medians over rounds."""
    stores = rounds[rounds["format"] != "text"].copy()
    stores["codec"] = stores["codec"].fillna(_OWN)
    named = ["store", "format", "dtype", "codec", "row_group_rows"]
    return stores.drop(columns=["benchmark", "round"]).groupby(named, dropna=False).median().reset_index()


def _on_the_fly(axes, rounds: pd.DataFrame) -> None:
    """A line an engine, with its name."""
    text = rounds[rounds["format"] == "text"]
    for store, rounds in text.groupby("store"):
        speed = 1e6 / rounds["sequential_us_per_token"].median()
        if math.isfinite(speed):
            axes.axhline(speed, color=GREY, linestyle="--", linewidth=1.2)
            axes.text(0.99, speed, store.split(", ")[-1], transform=axes.get_yaxis_transform(), ha="right", va="bottom",
                      fontsize=8)  # fmt: skip


def _handles(points: pd.DataFrame) -> list[Line2D]:
    """What markers and colours mean, of those that are there."""
    forms = [
        Line2D([], [], color=TEXT, marker=m, linestyle="none", label=name)
        for name, m in _MARKERS.items()
        if name in set(points["format"])
    ]
    codecs = [
        Line2D([], [], color=c, marker="o", linestyle="none", label=f"codec: {name}" if name != _OWN else _OWN)
        for name, c in _COLOURS.items()
        if name in set(points["codec"])
    ]
    wide = [Line2D([], [], color=TEXT, marker="o", markerfacecolor="none", linestyle="none", label="open: int64")]
    line = [Line2D([], [], color=RED, linestyle=":", label="entropy of single ids")]
    return [*forms, *codecs, *(wide if (points["dtype"] == "int64").any() else []), *line]


def _cold(points: pd.DataFrame, storage_benchmark: pd.DataFrame) -> str:
    """What it costs that files are on disk only; or why that is not known."""
    both = points.dropna(subset=["cold_us_per_token", "sequential_us_per_token"])
    if both.empty:
        reasons = storage_benchmark.loc[storage_benchmark["round"].notna(), "left_out"].dropna().unique()
        return f"Nothing was read cold: {captions.listing(sorted(reasons))}. " if len(reasons) else ""
    ratio = (both["cold_us_per_token"] / both["sequential_us_per_token"]).median()
    return (
        f"In order, from files that were dropped from the page cache, it takes {number(ratio)} times as long (median). "
    )


def _break_even(points: pd.DataFrame) -> str:
    """From which epoch on a store saves time, in the best and the worst case."""
    found = []
    for column, engine in (("break_even_epochs", "the fastest engine"), ("break_even_epochs_tokenizers", "tokenizers")):
        epochs = points[column].dropna()
        if len(epochs):
            low, high = (number(v) if math.isfinite(v) else "never" for v in (epochs.min(), epochs.max()))
            found.append(f"{low} to {high} epochs of tokenizing on the fly with {engine}")
    return f"Making a store pays after {captions.listing(found)}. " if found else ""


class StorageBenchmark(Figure):
    title = "Stored tokens: bytes a token against reading and writing speed"
    queries = ("storage_benchmark",)
    columns = (
        *("benchmark", "store", "format", "dtype", "codec", "row_group_rows", "round", "bytes_per_useful_token"),
        *("entropy_bytes", "write_us_per_token", "sequential_us_per_token", "shuffled_us_per_token"),
        *("cold_us_per_token", "single_row_ms", "break_even_epochs", "break_even_epochs_tokenizers"),
    )
    read = "Scatter plot of bytes a useful token against speed. {}."
    storage_benchmark: pd.DataFrame

    def prepare(self) -> None:
        """Leave out stores without a measurement; compute medians over rounds."""
        self.rows = self.storage_benchmark[self.storage_benchmark["round"].notna()]
        self.points = _points(self.data())

    def draw(self) -> matplotlib.figure.Figure:
        """Draw two panels, a point per way to store (median): marker the format, colour the codec, open for 64-bit ids.

        The vertical line is the entropy of single ids; horizontal lines tokenize the text on the fly.
        """
        points = self.points
        with style():
            made, axes_of = figure(2, height=4.6, sharex=True)
            for axes, (column, label) in zip(axes_of, _SPEEDS.items(), strict=True):
                axes.set_ylabel(label)
                axes.set_xlabel("bytes / useful token\n(log scale)")
                shown = points[points[column] > 0]
                if shown.empty:
                    no_data(axes, "no data: 0 of 0 rounds")
                    continue
                axes.set_xscale("log")
                axes.set_yscale("log")
                for row in shown.itertuples():
                    colour = _COLOURS.get(row.codec, TEXT)
                    look: dict = {"color": colour, "marker": _MARKERS.get(row.format, "P"), "linestyle": "none"}
                    look |= {"markerfacecolor": "none" if row.dtype == "int64" else colour, "markeredgewidth": 1.3}
                    axes.plot([row.bytes_per_useful_token], [1e6 / getattr(row, column)], **look)
                axes.axvline(shown["entropy_bytes"].median(), color=RED, linestyle=":", linewidth=1.4)
                _on_the_fly(axes, self.data())
                plain(axes.xaxis, log=True)
                plain(axes.yaxis, log=True)
            if len(points):
                made.legend(handles=_handles(points), loc="outside lower center", ncols=4)
            return made

    def caption(self) -> str:
        """Return what was stored, the extremes, the effect of cold files and of single rows, and break-even."""
        points = self.points
        if points.empty:
            return "No storage benchmark was given for this experiment."
        first, n = self.rows.iloc[0], int(self.rows["round"].nunique())
        text = (
            f"{number(first['documents'])} documents of {first['corpus']}, tokenizer {first['tokenizer']}, rows of "
            f"{first['sequence_length']} positions, in {len(points)} stores. Each point is the median of {n} "
            f"interleaved round{'s' * (n != 1)} on one core. Reading is opening plus one pass in random order through "
            "the store's own reader, with a cache that fits the store. Padding counts as bytes, not as tokens. "
        )
        small, fast = (
            points.loc[points["bytes_per_useful_token"].idxmin()],
            points.dropna(subset="shuffled_us_per_token"),
        )
        text += (
            f"Smallest is {small['store']} with {number(small['bytes_per_useful_token'])} bytes a token (entropy of "
            f"single ids {number(small['entropy_bytes'])}). "
        )
        if len(fast):
            best, worst = (fast.loc[getattr(fast["shuffled_us_per_token"], f)()] for f in ("idxmin", "idxmax"))
            text += (
                f"Fastest to read is {best['store']} at {number(best['shuffled_us_per_token'])} µs a useful token, "
                f"slowest {worst['store']} at {number(worst['shuffled_us_per_token'])}. "
            )
        text += _cold(points, self.storage_benchmark) + _break_even(points)
        text += captions.reasons(self.storage_benchmark[self.storage_benchmark["round"].isna()], "store")
        return text + captions.kinds(
            [g for _, g in self.rows.groupby("store")["sequential_us_per_token"]], "round", "a store"
        )

    def numbers(self) -> str:
        """Return bytes and speed of each store in words."""
        points = self.points.sort_values("bytes_per_useful_token")
        texts = [
            f"{r.store} {number(r.bytes_per_useful_token)} bytes, {number(r.shuffled_us_per_token)} µs"
            for r in points.itertuples()
        ]
        return captions.listing(texts)
