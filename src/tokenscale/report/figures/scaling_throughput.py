"""Throughput and efficiency by world size."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import words
from tokenscale.report.style import GREY, dots, figure, legend_columns, look, no_data, number, ordered, plain, style

TITLE = "Throughput and efficiency by world size"
QUERIES = ("scaling", "inventory")


def data(scaling: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """One row a run, of those that are like for like at every world size."""
    return _alike(scaling, inventory)[0].reset_index(drop=True)


def _alike(scaling: pd.DataFrame, inventory: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """See `words.alike`."""
    return words.alike(scaling, inventory, "world_size")


def draw(scaling: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """Left: useful tokens/s, every run a dot, medians joined, ideal dotted. Right: efficiency of each pair of runs."""
    scaling, refused = _alike(scaling, inventory)
    with style():
        made, (left, right) = figure(2, height=4.0)
        for axes in (left, right):
            axes.set_xlabel("world size (ranks)")
        left.set_ylabel("useful tokens / s")
        bases = _bases(scaling)
        at = "1" if set(bases) <= {1} else "N0"
        right.set_ylabel(f"efficiency T(N) / ({'N' if at == '1' else 'N / N0'} × T({at})) (%)")
        if scaling.empty:
            for axes in (left, right):
                no_data(axes, words.nothing(inventory, refused))
            return made
        worlds = sorted(int(w) for w in scaling["world_size"].unique())
        names = ordered(scaling["series"])
        for i, name in enumerate(names):
            here = scaling[scaling["series"] == name]
            shift = 1 + 0.03 * (i - (len(names) - 1) / 2)  # parts approaches that would hide each other
            for axes, column, factor in ((left, "useful_tokens_per_s", 1), (right, "efficiency", 100)):
                rows = here.dropna(subset=[column])
                axes.plot(rows["world_size"] * shift, factor * rows[column], **dots(name))
                middle = rows.groupby("world_size")[column].median() * factor
                line = {k: v for k, v in look(name).items() if k in ("color", "linestyle")}
                axes.plot(middle.index * shift, middle, **line, linewidth=1.2)
            left.plot([], [], **look(name), label=name)
            base = int(here["base_world_size"].iloc[0])
            rates = here.loc[here["world_size"] == base, "useful_tokens_per_s"]
            above = [w for w in worlds if w >= base]
            if len(rates) and len(above) > 1:
                ideal = [w / base * rates.median() for w in above]
                left.plot(above, ideal, color=look(name)["color"], linestyle=":", linewidth=0.9)
        left.plot(
            [],
            [],
            color=GREY,
            linestyle=":",
            linewidth=0.9,
            label=f"ideal: {'N' if at == '1' else 'N / N0'} × median T({at})",
        )
        right.axhline(100, color=GREY, linestyle=":", linewidth=0.9)
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(worlds, [str(w) for w in worlds])
            axes.minorticks_off()
            axes.set_xlim(worlds[0] / 1.25, worlds[-1] * 1.25)
            axes.set_ylim(bottom=0)
            plain(axes.yaxis)
        right.set_ylim(0, max(110.0, 105 * scaling["efficiency"].max()))
        if scaling["efficiency"].dropna().empty:
            right.text(
                0.5,
                0.5,
                f"no run at world size {words.listing(map(str, bases))}\nto compare with",
                transform=right.transAxes,
                ha="center",
                style="italic",
            )
        labels = left.get_legend_handles_labels()[1]
        made.legend(loc="outside upper left", ncols=legend_columns(labels, 3), handlelength=3)
        if warning := words.caution(scaling):
            left.set_title(warning, fontsize=9)
        return made


def caption(scaling: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The reference with its absolute value, and whether this is a scaling measurement at all."""
    scaling, refused = _alike(scaling, inventory)
    bases = _bases(scaling)
    text = (
        "Strong scaling at a fixed global batch, useful tokens per second over all ranks; "
        f"{words.counted(len(scaling), inventory)}. "
        "Efficiency is of each run against the run of the same repeat at "
        f"{'world size 1' if set(bases) <= {1} else 'N0, the smallest world size measured'}. "
    )
    base = [
        f"{name}{'' if size == 1 else f' (N0 = {size})'} {words.spread(rates['useful_tokens_per_s'])}"
        for name in ordered(scaling["series"])
        for size in _bases(scaling[scaling["series"] == name])
        if len(rates := scaling[(scaling["series"] == name) & (scaling["world_size"] == size)])
    ]
    text += f"{refused} " if refused else ""
    if base:
        text += f"T({'1' if set(bases) <= {1} else 'N0'}) in useful tokens / s: {words.listing(base)}. "
    for reason, rows in scaling.groupby("not_compared"):
        text += f"{len(rows)} run{'s have' if len(rows) > 1 else ' has'} no efficiency: {reason}. "
    if warning := words.caution(scaling):
        text = f"{warning[0].upper()}{warning[1:]}. " + text
    return text + words.kinds([g for _, g in scaling.groupby(["series", "world_size"])["useful_tokens_per_s"]])


def _bases(scaling: pd.DataFrame) -> list[int]:
    """World sizes that efficiencies are against."""
    return sorted(int(size) for size in scaling["base_world_size"].unique())


def alt(scaling: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """Medians of throughput, read aloud."""
    scaling = data(scaling, inventory)
    medians = scaling.groupby(["series", "world_size"])["useful_tokens_per_s"].median()
    texts = [f"{name} on {world}: {number(value)}" for (name, world), value in medians.items()]
    medians_read = words.listing(texts) or "No data"
    return (
        f"Throughput by world size, median useful tokens per second. {medians_read}. {words.caution(scaling)}".strip()
    )
