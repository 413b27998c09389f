"""Stores: bytes of a token, its entropy, and the speeds of reading and of writing."""

import math

import pandas as pd
from matplotlib.lines import Line2D

from tokenscale.report import captions, panels
from tokenscale.report.figure import Drawing, Figure
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
    format_ticks,
    no_data,
    number,
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
    cores_matter = False

    def prepare(self) -> None:
        """Read bytes as numbers with gaps, and name the stores, with corpus and tokenizer where
        there are several.
        """
        super().prepare()
        self.rows = self.rows.astype({"bytes_per_id": float, **dict.fromkeys(_BOUNDS, float)})
        self.several = bool((self.rows[["corpus", "tokenizer"]].nunique() > 1).any())
        named = ["corpus", "tokenizer", "store"] if self.several else ["store"]
        self.names = [", ".join(key) for key in self.rows[named].itertuples(index=False)]

    def finding(self) -> str:
        """Return the stores of a text with the fewest and the most bytes a token; the title for
        several texts.
        """
        sizes = self.rows.set_index("store")["bytes_per_id"].dropna()
        return (
            f"Bytes a token: {captions.describe_extremes(sizes)}"
            if len(sizes) and not self.several
            else self.title
        )

    def data(self) -> pd.DataFrame:
        return self.rows

    def draw(self) -> Drawing:
        rows = self.rows[::-1]
        made, (axes,) = figure(height=1.6 + 0.42 * max(3, len(rows)))
        axes.set_xlabel("bytes a token")
        if rows.empty:
            no_data(axes, text="no data: 0 of 0 stores")
            return made
        axes.barh(range(len(rows)), rows["bytes_per_id"], height=0.5, color=BLUE, alpha=0.55)
        for column, (label, colour, marker) in _BOUNDS.items():
            look: dict = {
                "color": colour,
                "marker": marker,
                "markerfacecolor": "none",
                "markeredgewidth": 1.5,
            }
            axes.plot(rows[column], range(len(rows)), linestyle="none", **look, label=label)
        panels.finish_rows(axes, texts=self.names[::-1], most=6)
        panels.draw_legend(made, axes)
        return made

    def sentences(self) -> str:
        each = zip(self.names, self.rows.itertuples(), strict=True)
        sizes = [
            f"{name} {number(r.bytes_per_id / r.entropy_bytes)}"
            for name, r in each
            if r.entropy_bytes > 0
        ]
        return (
            "Bars: bytes of a store's files over the token ids it contains, without padding. "
            "Marks: the order-0 "
            "entropy of the ids, the whole bits that number the vocabulary, and the UTF-8 bytes "
            "of the text per id, "
            "where no document is cut. Stores are built once: these are counts, without a "
            "spread. No code of single "
            "ids is shorter than their order-0 entropy; a store below it exploits which ids "
            "follow each other. "
        ) + (
            f"Bytes over entropy: {'; '.join(sizes)}."
            if sizes
            else "There is no store of a training split."
        )

    def numbers(self) -> str:
        each = zip(self.names, self.rows.itertuples(), strict=True)
        return "; ".join(
            f"{name} {number(r.bytes_per_id)} (entropy {number(r.entropy_bytes)})"
            for name, r in each
        )


_MARKERS = {"padded": "s", "token-list": "D", "packed": "v"}
_OWN = "the format's own"
_COLOURS = {
    "none": GREY,
    "snappy": GREEN,
    "lz4": SKY,
    "zstd-1": "#f0c35e",
    "zstd-3": ORANGE,
    "zstd-9": RED,
    "zstd-22": PURPLE,
    _OWN: BLUE,
}
_SPEEDS = {
    "shuffled_us_per_token": "useful tokens / s read, shuffled\n(log scale)",
    "write_us_per_token": "useful tokens / s written\n(log scale)",
}
#: column → what a store competes with
_EPOCHS = {"break_even_epochs": "the fastest engine", "break_even_epochs_tokenizers": "tokenizers"}


class StorageBenchmark(Figure):
    title = "Stored tokens: bytes a token against reading and writing speed"
    queries = ("storage_benchmark",)
    columns = (
        "benchmark",
        "store",
        "format",
        "dtype",
        "codec",
        "row_group_rows",
        "round",
        "bytes_per_useful_token",
        "entropy_bytes",
        "write_us_per_token",
        "sequential_us_per_token",
        "shuffled_us_per_token",
        "cold_us_per_token",
        "single_row_ms",
        *_EPOCHS,
    )
    main = "sequential_us_per_token"
    by = ("store",)

    def prepare(self) -> None:
        """Leave out stores without a measurement; compute medians over rounds, one row per way to
        store.
        """
        self.rows = self.first[self.first["round"].notna()]
        self.refusals = ""
        stores = self.data()[self.rows["format"].to_numpy() != "text"].fillna({"codec": _OWN})
        named = ["store", "format", "dtype", "codec", "row_group_rows"]
        self.points = (
            stores.drop(columns=["benchmark", "round"])
            .groupby(named, dropna=False)
            .median()
            .reset_index()
        )

    def draw(self) -> Drawing:
        """Draw two panels, a point per way to store (median): marker the format, colour the codec,
        open for 64-bit ids.

        The vertical line is the entropy of single ids; horizontal lines, each with its engine,
        tokenize on the fly.
        """
        points = self.points
        text = self.rows[self.rows["format"] == "text"]
        made, axes_of = figure(2, height=4.6, sharex=True)
        for axes, (column, label) in zip(axes_of, _SPEEDS.items(), strict=True):
            axes.set_ylabel(label)
            axes.set_xlabel("bytes / useful token\n(log scale)")
            shown = points[points[column] > 0]
            if shown.empty:
                no_data(axes, text="no data: 0 of 0 rounds")
                continue
            axes.set_xscale("log")
            axes.set_yscale("log")
            for row in shown.itertuples():
                colour = _COLOURS.get(row.codec, TEXT)
                look: dict = {
                    "color": colour,
                    "marker": _MARKERS.get(row.format, "P"),
                    "linestyle": "none",
                }
                look |= {
                    "markerfacecolor": "none" if row.dtype == "int64" else colour,
                    "markeredgewidth": 1.3,
                }
                axes.plot([row.bytes_per_useful_token], [1e6 / getattr(row, column)], **look)
            axes.axvline(shown["entropy_bytes"].median(), color=RED, linestyle=":", linewidth=1.4)
            for store, speed in (
                1e6 / text.groupby("store")["sequential_us_per_token"].median()
            ).items():
                if math.isfinite(speed):
                    axes.axhline(speed, color=GREY, linestyle="--", linewidth=1.2)
                    look = {
                        "transform": axes.get_yaxis_transform(),
                        "ha": "right",
                        "va": "bottom",
                        "fontsize": 8,
                    }
                    axes.text(0.99, speed, store.split(", ")[-1], **look)
            format_ticks(axes.xaxis, log=True)
            format_ticks(axes.yaxis, log=True)
        if len(points):
            made.legend(handles=self._handles(), loc="outside lower center", ncols=4)
        return made

    def _handles(self) -> list[Line2D]:
        """Return what markers and colours mean, of those that are there."""
        formats = set(self.points["format"])
        codecs = set(self.points["codec"])
        found: list[dict] = [
            {"color": TEXT, "marker": m, "label": f} for f, m in _MARKERS.items() if f in formats
        ]
        for codec, colour in _COLOURS.items():
            label = codec if codec == _OWN else f"codec: {codec}"
            if codec in codecs:
                found += [{"color": colour, "marker": "o", "label": label}]
        if (self.points["dtype"] == "int64").any():
            found.append(
                {"color": TEXT, "marker": "o", "markerfacecolor": "none", "label": "open: int64"}
            )
        marks = [Line2D([], [], linestyle="none", **options) for options in found]
        return [*marks, Line2D([], [], color=RED, linestyle=":", label="entropy of single ids")]

    def caption(self) -> str:
        if self.points.empty:
            return "No storage benchmark was given for this experiment."
        first = self.rows.iloc[0]
        n = int(self.rows["round"].nunique())
        text = (
            f"{number(first['documents'])} documents of {first['corpus']}, tokenizer "
            f"{first['tokenizer']}, rows of "
            f"{first['sequence_length']} positions, in "
            f"{captions.count(len(self.points), 'store')}. Each point is "
            f"the median of {captions.count(n, 'interleaved round')} on one core. Reading is "
            "opening plus one pass in "
            "random order through the store's own reader, with a cache that fits the store. "
            "Padding counts as bytes, "
            "not as tokens. "
        )
        if self.points["cold_us_per_token"].isna().all():
            reasons = self.rows["left_out"].dropna().unique()
            text += (
                f"Nothing was read cold: {captions.listing(sorted(reasons))}. "
                if len(reasons)
                else ""
            )
        found = []
        for column, engine in _EPOCHS.items():
            if len(epochs := self.points[column].dropna()):
                low, high = (
                    number(v) if math.isfinite(v) else "never" for v in (epochs.min(), epochs.max())
                )
                found.append(f"{low} to {high} epochs of tokenizing on the fly with {engine}")
        text += f"Making a store pays after {captions.listing(found)}. " if found else ""
        text += captions.explain_left_out(self.first[self.first["round"].isna()], column="store")
        return text + captions.describe_spread(self.groups(), one="round", cell="a store")

    def numbers(self) -> str:
        columns = ["bytes_per_useful_token", "store", "shuffled_us_per_token"]
        each = self.points.sort_values(columns[0])[columns].itertuples(index=False)
        return "; ".join(
            f"{s} {number(b)} bytes a useful token, {number(t)} µs to read it" for b, s, t in each
        )
