"""Kinds of panels that several figures share: strips of dots by approach, points by world size,
curves.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import MaxNLocator

from tokenscale.report import captions, text_layout
from tokenscale.report.figure import Drawing, Figure
from tokenscale.report.style import (
    dots,
    figure,
    format_ticks,
    is_online,
    jitter,
    legend_columns,
    look,
    order_series,
)

Cell = tuple[str, int]
#: of the curves of repeats in one figure: a page holds many figures
MOST_POINTS = 5000


def cells(runs: pd.DataFrame) -> list[Cell]:
    """Return (series, world size) of each cell, in the order of the palette."""
    listed = runs.dropna(subset=["series", "world_size"])
    return [(name, world) for name, world, _ in captions.cells(listed)]


def select_cell(rows: pd.DataFrame, cell: Cell) -> pd.DataFrame:
    """Return the rows of a cell."""
    return rows[(rows["series"] == cell[0]) & (rows["world_size"] == cell[1])]


def format_ranks(world: int) -> str:
    """Return `1 rank` or `2 ranks`."""
    return f"{world} rank{'s' * (world > 1)}"


def name_cells(shown: Sequence[Cell], ranks_only: bool = False) -> list[str]:
    """Return names of cells, shortened as in a legend, without ranks if all cells have as many."""
    texts = shorten_names([name for name, _ in shown])
    several = ranks_only or len({world for _, world in shown}) > 1
    return [
        f"{text}, {format_ranks(world)}" if several else text
        for text, (_, world) in zip(texts, shown, strict=True)
    ]


def write_heading(axes: Axes, text: str, *, ends: bool = False) -> None:
    """Write a small sentence over a panel, if there is one. With `ends`, or in a figure of one
    panel, it is right-aligned, since long names stand on the left.
    """
    if text:
        axes.set_title(
            text, fontsize=9, loc="right" if ends or len(axes.figure.axes) == 1 else "left"
        )


def steps_of(axis: Axis, most: int = 5) -> None:
    """Return at most this number of ticks, at round numbers."""
    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    format_ticks(axis)


def write_note(axes: Axes, y: float, text: str) -> None:
    """Write a note in the row of a strip that has no value."""
    axes.text(
        0.02, y, text, transform=axes.get_yaxis_transform(), va="center", style="italic", fontsize=9
    )


def name_rows(axes: Axes, texts: Sequence[str]) -> None:
    """Rows from 0 up, named on the left."""
    axes.set_yticks(range(len(texts)), text_layout.wrap_names(texts))
    axes.set_ylim(-0.6, len(texts) - 0.4)
    axes.grid(False, axis="y")


def finish_rows(axes: Axes, texts: Sequence[str], most: int = 5) -> None:
    """Rows named on the left, of bars or dots from zero."""
    name_rows(axes, texts)
    axes.set_xlim(left=0)
    steps_of(axes.xaxis, most)


def draw_strips(shown: Figure) -> Drawing:
    """Draw a panel per measure with a row per cell of the inventory: runs as dots, medians as bars.

    Rows of cells whose runs are not comparable have a note.
    """
    listed = cells(shown.inventory)[::-1]
    made, panels = figure(len(shown.measures), height=1.3 + 0.36 * max(4, len(listed)), sharey=True)
    for axes, (column, (label, factor)) in zip(panels, shown.measures.items(), strict=True):
        axes.set_xlabel(label)
        values = {
            cell: factor * select_cell(shown.rows, cell)[column].dropna().astype(float)
            for cell in listed
        }
        if not any(map(len, values.values())):
            shown.no_data(made, axes)
            continue
        for y, (cell, found) in enumerate(values.items()):
            if found.empty:
                refused = len(select_cell(shown.first, cell)) > len(select_cell(shown.rows, cell))
                write_note(axes, y, text="not comparable" if refused else "no data")
            else:
                axes.plot(
                    found, [y + o for o in jitter(len(found))], **dots(cell[0]), clip_on=False
                )
                axes.plot(
                    [found.median()] * 2,
                    [y - 0.32, y + 0.32],
                    color=dots(cell[0])["color"],
                    linewidth=2,
                )
        name_rows(axes, texts=name_cells(listed))
        most = max(found.max() for found in values.values() if len(found))
        axes.set_xlim(0.0, 1.08 * most if most > 0 else None)
        steps_of(axes.xaxis)
    return made


def scale_by_doublings(axes: Axes, sizes: Sequence[int]) -> None:
    """Make the x axis logarithmic, with ticks at these sizes."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlim(sizes[0] / 1.25, sizes[-1] * 1.25)


def from_zero(axes: Axes, sizes: Sequence[int]) -> None:
    """Numbers from zero over doublings."""
    scale_by_doublings(axes, sizes)
    axes.set_ylim(bottom=0)
    format_ticks(axes.yaxis)


def draw_joined_runs(
    axes: Axes,
    rows: pd.DataFrame,
    column: str,
    factor: float,
    name: str,
    shift: float,
    x: str = "world_size",
) -> None:
    """Draw each run of a series as a dot over `x`, and join the medians.

    `shift` separates series that would hide each other.
    """
    rows = rows.dropna(subset=[column])
    here = rows[rows["series"] == name]
    axes.plot(here[x] * shift, factor * here[column], **dots(name))
    middle = here.groupby(x)[column].median()
    line = {key: value for key, value in look(name).items() if key in ("color", "linestyle")}
    axes.plot(middle.index * shift, factor * middle, **line, linewidth=1.2)


def find_shifts(count: int) -> list[float]:
    """Return factors that separate this number of series on a logarithmic axis."""
    return [1 + 0.03 * (i - (count - 1) / 2) for i in range(count)]


def draw_joined_panels(
    shown: Figure, key: str = "world_size", label: str = "world size (ranks)"
) -> Drawing:
    """Draw a panel per measure over a key, with a legend: runs as dots, medians joined by a line per
    series.
    """
    made, panels = figure(len(shown.measures), height=4.0)
    series = order_series(shown.rows["series"])
    for axes, (column, (name, factor)) in zip(panels, shown.measures.items(), strict=True):
        axes.set_xlabel(label)
        axes.set_ylabel(name)
        if shown.rows[column].dropna().empty:
            shown.no_data(made, axes)
            continue
        for one, shift in zip(series, find_shifts(len(series)), strict=True):
            draw_joined_runs(
                axes,
                rows=shown.rows,
                column=column,
                factor=factor,
                name=one,
                shift=shift,
                x=key,
            )
        from_zero(axes, sizes=sorted(int(size) for size in shown.rows[key].unique()))
    for one in series:
        panels[0].plot([], [], **look(one), label=one)
    draw_legend(made, axes=panels[0])
    return made


def draw_legend(
    made: Drawing, axes: Axes | Sequence[Axes], most: int = 5, order: Sequence[str] = ()
) -> None:
    """Draw the names of the panels' lines above the figure, in as many columns as fit. The figure
    grows by their height.
    """
    found: dict[str, Any] = {}
    for panel in [axes] if isinstance(axes, Axes) else axes:
        found = dict(zip(*panel.get_legend_handles_labels()[::-1], strict=True)) | found
    labels = [name for name in order if name in found] or list(found)
    if not labels:
        return
    columns = legend_columns(texts := shorten_names(labels), most)
    texts = text_layout.wrap_entries(texts)
    lines = -(-len(texts) // columns) + sum(text.count("\n") for text in texts)
    made.set_figheight(made.get_figheight() + 0.19 * (lines - 1))
    handles = [found[name] for name in labels]
    made.legend(handles, texts, loc="outside upper left", ncols=columns, handlelength=3)


def shorten_names(labels: Sequence[str]) -> list[str]:
    """Return names of series without common levels and without the sections of factors' keys.

    >>> shorten_names(["packed, layout.tensor=2", "packed, layout.tensor=4", "packed"])
    ['tensor=2', 'tensor=4', 'packed']
    """
    if len(labels) < 2 or not any("=" in label for label in labels):
        return list(labels)
    parts = [label.split(", ") for label in labels]
    shared = set.intersection(*map(set, parts))
    kept = [[part for part in own if part not in shared] or own for own in parts]
    return [", ".join(part.removeprefix("layout.") for part in own) for own in kept]


def number_points(rows: pd.DataFrame) -> pd.Series:
    """Return the number of each row in its run, from 0. Points of repeats have equal numbers."""
    return rows.groupby("run_id").cumcount()


def find_interval(rows: pd.DataFrame, times: int = 1) -> int:
    """Return n, where every n-th point is drawn, so that all repeats stay within `MOST_POINTS`."""
    return max(1, -(-len(rows) * times // MOST_POINTS))


def draw_curve(
    axes: Axes,
    rows: pd.DataFrame,
    x: str,
    y: str,
    options: Mapping[str, Any],
    label: str,
    every: int = 1,
) -> None:
    """Draw the runs of a series: repeats as thin lines (every n-th point), and their median at each
    point as a bold line with some markers.
    """
    thin = {
        "color": options["color"],
        "linestyle": options["linestyle"],
        "linewidth": 0.7,
        "alpha": 0.45,
    }
    if rows["run_id"].nunique() > 1:
        for _, run in rows.groupby("run_id"):
            axes.plot(run[x].iloc[::every], run[y].iloc[::every], **thin)
    middle = rows.groupby(number_points(rows))[[x, y]].median()
    axes.plot(
        middle[x],
        middle[y],
        **options,
        label=label,
        markersize=5,
        markevery=max(1, len(middle) // 8),
    )


def order_layers(found: Mapping[str, dict]) -> dict[str, dict]:
    """Return options with line widths, in the order of drawing, so that lines below a coinciding
    line stay visible.
    """
    widths = {name: max(1.0, 2.8 - 0.6 * i) for i, name in enumerate(found)}
    if any(map(is_online, found)):
        widths = {name: 1.3 if is_online(name) else 2.4 for name in sorted(found, key=is_online)}
    return {name: found[name] | {"linewidth": width} for name, width in widths.items()}


def make_grid(count: int, height: float, x: str, y: str, **options) -> tuple[Drawing, list[Axes]]:
    """Return a figure with `count` panels (at least one), three beside each other, each `height`
    inches high, with labels.
    """
    count = max(1, count)
    columns = min(3, count)
    lines = -(-count // columns)
    made, every = figure(columns, rows=lines, height=0.8 + height * lines, **options)
    for place, axes in enumerate(every):
        axes.set_xlabel(x)
        axes.set_ylabel("" if place % columns else y)
        axes.set_visible(place < count)
    return made, every[:count]
