"""Kinds of panels that several figures share: strips of dots by approach, points by world size, curves."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tokenscale.report import captions, text_layout
from tokenscale.report.style import (
    GREY,
    dots,
    figure,
    jitter,
    legend_columns,
    look,
    looks,
    no_data,
    online,
    ordered,
    plain,
    style,
)

#: column of the rows → (label of its axis with the unit, factor to that unit)
Columns = Mapping[str, tuple[str, float]]
Cell = tuple[str, int]
#: of the curves of repeats in one figure: a page holds many figures
MOST_POINTS = 5000


def cells(runs: pd.DataFrame) -> list[Cell]:
    """(series, world size) of each cell, in the order of the palette."""
    listed = runs.dropna(subset=["series", "world_size"])
    return [
        (name, int(world))
        for name in ordered(listed["series"])
        for world in sorted(listed.loc[listed["series"] == name, "world_size"].unique())
    ]


def at(rows: pd.DataFrame, cell: Cell) -> pd.DataFrame:
    """The rows of a cell."""
    return rows[(rows["series"] == cell[0]) & (rows["world_size"] == cell[1])]


def ranks(world: int) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{world} rank{'s' * (world > 1)}"


def names(shown: Sequence[Cell], ranks_only: bool = False) -> list[str]:
    """Cells in words, shortened as in a legend; without the ranks where all have as many."""
    texts = short([name for name, _ in shown])
    several = ranks_only or len({world for _, world in shown}) > 1
    return [f"{text}, {ranks(world)}" if several else text for text, (_, world) in zip(texts, shown, strict=True)]


def heading(axes: Axes, text: str, *, ends: bool = False) -> None:
    """A sentence over a panel, small; nothing where it is empty. It `ends` where the panel does, as over a lone one:
    names of rows may leave little room right of where they begin."""
    if text:
        with style():
            axes.set_title(text, fontsize=9, loc="right" if ends or len(axes.figure.axes) == 1 else "left")


def steps_of(axis: Any, most: int = 5) -> None:
    """At most so many ticks, at numbers that people count in."""
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    plain(axis)


def write_note(axes: Axes, y: float, text: str) -> None:
    """Words in the row of a strip that has no value."""
    axes.text(0.02, y, text, transform=axes.get_yaxis_transform(), va="center", style="italic", fontsize=9)


def name_rows(axes: Axes, texts: Sequence[str]) -> None:
    """Rows from 0 up, named on the left."""
    axes.set_yticks(range(len(texts)), text_layout.names(texts))
    axes.set_ylim(-0.6, len(texts) - 0.4)
    axes.grid(False, axis="y")


def strips(
    rows: pd.DataFrame, shown: pd.DataFrame, refused: str, inventory: pd.DataFrame, columns: Columns
) -> tuple[Figure, list[Axes]]:
    """A panel a column of `rows` (one a run), a row a cell that the inventory lists: every run a dot, medians as bars.

    Of them the comparable ones are `shown`; cells of others say so. Medians are over the repeats that all cells have.
    """
    listed = cells(inventory)[::-1]
    with style():
        made, panels = figure(len(columns), height=1.3 + 0.36 * max(4, len(listed)), sharey=True)
        for axes, (column, (label, factor)) in zip(panels, columns.items(), strict=True):
            axes.set_xlabel(label)
            values = {cell: factor * at(shown, cell)[column].dropna().astype(float) for cell in listed}
            if not any(map(len, values.values())):
                no_data(axes, captions.nothing(inventory, refused))
                continue
            common = captions.common_repeats(shown.dropna(subset=[column]))
            for y, (cell, found) in enumerate(values.items()):
                if found.empty:
                    write_note(axes, y, "not comparable" if len(at(rows, cell)) > len(at(shown, cell)) else "no data")
                else:
                    axes.plot(found, [y + o for o in jitter(len(found))], **dots(cell[0]), clip_on=False)
                    median = factor * at(common, cell)[column].median()
                    axes.plot([median] * 2, [y - 0.32, y + 0.32], color=dots(cell[0])["color"], linewidth=2)
            name_rows(axes, names(listed))
            most = max(found.max() for found in values.values() if len(found))
            axes.set_xlim(0.0, 1.08 * most if most > 0 else None)
            steps_of(axes.xaxis)
        return made, panels


def doublings(axes: Axes, sizes: Sequence[int]) -> None:
    """A logarithmic axis below, with these sizes named."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)


def joined(
    axes: Axes, rows: pd.DataFrame, column: str, factor: float, name: str, shift: float, x: str = "world_size"
) -> None:
    """Every run of a series a dot over `x`, medians over the repeats that all cells of `rows` have joined.

    `shift` parts series that would hide others.
    """
    rows = rows.dropna(subset=[column])
    here, alike = (part[part["series"] == name] for part in (rows, captions.common_repeats(rows, ["series", x])))
    axes.plot(here[x] * shift, factor * here[column], **dots(name))
    middle = factor * alike.groupby(x)[column].median()
    line = {key: value for key, value in look(name).items() if key in ("color", "linestyle")}
    axes.plot(middle.index * shift, middle, **line, linewidth=1.2)


def shifts(count: int) -> list[float]:
    """Factors that part so many series on a logarithmic axis."""
    return [1 + 0.03 * (i - (count - 1) / 2) for i in range(count)]


def joined_panels(
    rows: pd.DataFrame,
    inventory: pd.DataFrame,
    columns: Columns,
    refused: str,
    key: str = "world_size",
    label: str = "world size (ranks)",
) -> tuple[Figure, list[Axes]]:
    """A panel a column over a key, a line a series: every run a dot, medians joined; with a legend."""
    with style():
        made, panels = figure(len(columns), height=4.0)
        series = ordered(rows["series"])
        for axes, (column, (name_of, factor)) in zip(panels, columns.items(), strict=True):
            axes.set_xlabel(label)
            axes.set_ylabel(name_of)
            if rows[column].dropna().empty:
                no_data(axes, captions.nothing(inventory, refused))
                continue
            for name, shift in zip(series, shifts(len(series)), strict=True):
                joined(axes, rows, column, factor, name, shift, key)
            doublings(axes, sorted(int(size) for size in rows[key].unique()))
            axes.set_ylim(bottom=0)
            plain(axes.yaxis)
        for name in series:
            panels[0].plot([], [], **look(name), label=name)
        legend(made, panels[0])
        return made, panels


def scaling(rows: pd.DataFrame, inventory: pd.DataFrame, refused: str, warning: str) -> Figure:
    """Rows of `scaling.sql` or `scaling_weak.sql`. Left: useful tokens/s, medians joined, the ideal dotted. Right: the
    efficiency of each pair of runs."""
    with style():
        made, (left, right) = figure(2, height=4.0)
        for axes in (left, right):
            axes.set_xlabel("world size (ranks)")
        left.set_ylabel("useful tokens / s")
        bases = sorted(int(size) for size in rows["base_world_size"].dropna().unique())
        at_one = set(bases) <= {1}
        base = "1" if at_one else "N0"
        right.set_ylabel(f"efficiency T(N) / ({'N' if at_one else 'N / N0'} × T({base})) (%)")
        if rows.empty:
            for axes in (left, right):
                no_data(axes, captions.nothing(inventory, refused))
            return made
        worlds = sorted(int(w) for w in rows["world_size"].unique())
        series, common = ordered(rows["series"]), captions.common_repeats(rows)
        for name, shift in zip(series, shifts(len(series)), strict=True):
            joined(left, rows, "useful_tokens_per_s", 1, name, shift)
            joined(right, rows, "efficiency", 100, name, shift)
            left.plot([], [], **look(name), label=name)
            # throughput that grows as the world does, from the smallest measured
            first = rows.loc[rows["series"] == name, "base_world_size"].iloc[0]
            rates = at(common, (name, first))["useful_tokens_per_s"]
            above = [w for w in worlds if w >= first]
            if len(rates) and len(above) > 1:
                ideal = [w / first * rates.median() for w in above]
                left.plot(above, ideal, color=look(name)["color"], linestyle=":", linewidth=0.9)
        text = f"ideal: {'N' if at_one else 'N / N0'} × median T({base})"
        left.plot([], [], color=GREY, linestyle=":", linewidth=0.9, label=text)
        right.axhline(100, color=GREY, linestyle=":", linewidth=0.9)
        for axes in (left, right):
            doublings(axes, worlds)
            axes.set_ylim(bottom=0)
            plain(axes.yaxis)
        right.set_ylim(0, max(110.0, 105 * rows["efficiency"].max()))
        if rows["efficiency"].dropna().empty:
            text = f"no run at world size {captions.listing(list(map(str, bases)))}\nto compare with"
            right.text(0.5, 0.5, text, transform=right.transAxes, ha="center", style="italic")
        legend(made, left, 3)
        heading(left, warning)
        return made


def legend(made: Figure, axes: Axes | Sequence[Axes], most: int = 5, order: Sequence[str] = ()) -> None:
    """The names of the lines of panels above the figure, which grows for them; as many columns as fit."""
    found: dict[str, Any] = {}
    for panel in [axes] if isinstance(axes, Axes) else axes:
        found = dict(zip(*panel.get_legend_handles_labels()[::-1], strict=True)) | found
    labels = [name for name in order if name in found] or list(found)
    if not labels:
        return
    texts = short(labels)
    columns = legend_columns(texts, most)
    texts = text_layout.entries(texts)
    lines = -(-len(texts) // columns) + sum(text.count("\n") for text in texts)
    with style():
        made.set_figheight(made.get_figheight() + 0.19 * (lines - 1))
        handles = [found[name] for name in labels]
        made.legend(handles, texts, loc="outside upper left", ncols=columns, handlelength=3)


def short(labels: Sequence[str]) -> list[str]:
    """Names of series without the levels that all share, and without the section of a factor's key.

    >>> short(["packed, layout.tensor=2", "packed, layout.tensor=4", "packed"])
    ['tensor=2', 'tensor=4', 'packed']
    """
    parts = [label.split(", ") for label in labels]
    if len(labels) < 2 or not any("=" in label for label in labels):
        return list(labels)
    shared = set.intersection(*map(set, parts))
    kept = [[part for part in own if part not in shared] or own for own in parts]
    return [", ".join(part.removeprefix("layout.") for part in own) for own in kept]


def points(rows: pd.DataFrame) -> pd.Series:
    """The number of each row in its run, from 0: repeats have their points at the same places."""
    return rows.groupby("run_id").cumcount()


def thinned(rows: pd.DataFrame, times: int = 1) -> int:
    """Return n, where every n-th point is drawn, so that all repeats stay within `MOST_POINTS`."""
    return max(1, -(-len(rows) * times // MOST_POINTS))


def curve(
    axes: Axes, rows: pd.DataFrame, x: str, y: str, options: Mapping[str, Any], label: str, every: int = 1
) -> None:
    """Runs of a series: repeats thin (every n-th point), their median point by point bold, with some markers."""
    thin = {"color": options["color"], "linestyle": options["linestyle"], "linewidth": 0.7, "alpha": 0.45}
    if rows["run_id"].nunique() > 1:
        for _, run in rows.groupby("run_id"):
            axes.plot(run[x].iloc[::every], run[y].iloc[::every], **thin)
    middle = rows.groupby(points(rows))[[x, y]].median()
    axes.plot(middle[x], middle[y], **options, label=label, markersize=5, markevery=max(1, len(middle) // 8))


def layered(found: Mapping[str, dict]) -> dict[str, dict]:
    """Options with widths, in the order to draw: a line that coincides with those below it leaves them to be seen."""
    if any(online(name) for name in found):
        widths = {name: 1.3 if online(name) else 2.4 for name in sorted(found, key=online)}
    else:
        widths = {name: max(1.0, 2.8 - 0.6 * i) for i, name in enumerate(found)}
    return {name: found[name] | {"linewidth": width} for name, width in widths.items()}


def over_time(rows: pd.DataFrame, inventory: pd.DataFrame, column: str, label: str, refused: str) -> Figure:
    """A panel a world size: a column of `loss_curves.sql` over the seconds of training, a line a series."""
    worlds = sorted(int(w) for w in rows["world_size"].unique())
    columns = min(3, max(1, len(worlds)))
    lines = -(-max(1, len(worlds)) // columns)
    with style():
        made, panels = figure(columns, rows=lines, height=0.8 + 2.7 * lines, sharey=True)
        for axes in panels:
            axes.set_xlabel("seconds of training steps")
        for axes in panels[::columns]:
            axes.set_ylabel(label)
        for axes in panels[len(worlds) or 1 :]:
            axes.set_visible(False)
        if not worlds:
            no_data(panels[0], captions.nothing(inventory, refused))
            return made
        names_of = ordered(rows["series"])
        found, every = layered(looks(names_of)), thinned(rows)
        for axes, world in zip(panels, worlds, strict=False):
            here = rows[rows["world_size"] == world]
            for name, options in found.items():
                if len(line := here[here["series"] == name]):
                    curve(axes, line, "training_s", column, options, name, every)
            if len(worlds) > 1:
                heading(axes, ranks(world))
            axes.set_xlim(left=0)
            axes.set_ylim(0, 1.08 * rows[column].max())
            steps_of(axes.xaxis, 4)
            plain(axes.yaxis)
        legend(made, panels, order=names_of)
        return made


def decades(axis: Any) -> None:
    """Powers of ten on a logarithmic axis, as `1e-6`."""
    axis.set_major_locator(LogLocator(base=10, numticks=8))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")))
