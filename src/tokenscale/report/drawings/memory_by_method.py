"""What the fullest rank holds under each parallel method: measured, beside what the settings predict."""

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import BLUE, GREY, ORANGE, PURPLE, SKY, TEXT, figure, no_data, number, style

QUERIES = ("memory", "inventory")
#: what fills a device, as it is stacked
PARTS = {"parameters": BLUE, "gradients": SKY, "optimizer": ORANGE, "activations": PURPLE}


def cells(memory: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
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
    queries = QUERIES
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
        shown = cells(self.rows)[::-1]
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
            for name, rows in cells(self.rows)
        ]
        return f"Stacked bars of the memory of the fullest rank. {captions.listing(texts) or 'No data'}."
