"""Time and tokens to a validation loss, by approach and world size; runs that did not reach it stay in the picture."""

import matplotlib.figure
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import dots, figure, jitter, no_data, number, style

QUERIES = ("time_to_target", "inventory")
_COLUMNS = {
    "seconds": "seconds of training steps",
    "useful_tokens": "useful tokens trained on",
}


def _cell(axes: Axes, y: float, here: pd.DataFrame, column: str, edge: float) -> None:
    """Runs of a cell; a median where more than half of them reached the target."""
    options = dots(here["series"].iloc[0])
    for offset, run in zip(jitter(len(here)), here.sort_values(column).itertuples(), strict=True):
        value = getattr(run, column)
        if np.isfinite(value):
            if column == "seconds" and not pd.isna(run.seconds_before):
                line = {"color": options["color"], "linewidth": 0.8, "alpha": 0.6}
                axes.plot([run.seconds_before, value], [y + offset] * 2, **line)
            axes.plot([value], [y + offset], **options, clip_on=False)
        else:
            marked = options | {"marker": ">", "markerfacecolor": "none"}
            axes.plot([edge], [y + offset], **marked, clip_on=False)
    middle = here[column].median()
    if np.isfinite(middle):
        axes.plot([middle] * 2, [y - 0.32, y + 0.32], color=options["color"], linewidth=2)


class TimeToTargetLoss(Figure):
    """Time and tokens to a validation loss, by approach and world size, with runs that did not reach it."""

    title = "Time to a validation loss"
    queries = QUERIES
    factor = "approach"

    def finding(self) -> str:
        """Return how many runs reached the target."""
        if self.rows.empty:
            return self.title
        reached, target = int(self.rows["reached"].sum()), number(self.rows["target"].iloc[0], 4)
        return f"{reached} of {len(self.rows)} runs reach a validation loss of {target} nats"

    def data(self) -> pd.DataFrame:
        """Return one row per run, of those that are like for like; +inf where the target was not reached."""
        columns = ["series", "world_size", "repeat", "run_id", "target", "reached", "step", "seconds_before"]
        columns += [*_COLUMNS, "loss", "runs_of_cell", "reached_of_cell", "median_s_of_cell"]
        return self.rows[columns].reset_index(drop=True)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw one row per cell: every run a dot, with a line back to the validation before.

        Arrows at the edge are runs that did not reach the target; beside them, how many did.
        """
        listed = panels.cells(self.inventory)[::-1]
        with style():
            made, both = figure(2, height=1.3 + 0.36 * max(4, len(listed)), sharey=True)
            for axes, (column, label) in zip(both, _COLUMNS.items(), strict=True):
                axes.set_xlabel(label)
                if self.rows.empty:
                    no_data(axes, captions.nothing(self.inventory, self.refusals))
                    continue
                finite = self.rows.loc[np.isfinite(self.rows[column]), column]
                edge = 1.12 * finite.max() if len(finite) and finite.max() > 0 else 1.0
                axes.set_xlim(0, 1.06 * edge)
                for y, cell in enumerate(listed):
                    here = panels.at(self.rows, cell)
                    if here.empty:
                        panels.write_note(axes, y, "no validation" if self.refusals == "" else "not comparable")
                        continue
                    _cell(axes, y, here, column, edge)
                panels.name_rows(axes, panels.names(listed))
                panels.steps_of(axes.xaxis, 4)
            if len(self.rows):
                target = f"loss ≤ {number(self.rows['target'].iloc[0], 5)} nats / useful token"
                panels.heading(both[0], captions.crowded(self.inventory) or target)
                right = both[1].secondary_yaxis("right")
                counts = [panels.at(self.rows, cell)["reached"] for cell in listed]
                right.set_yticks(range(len(listed)), [f"{int(c.sum())} of {len(c)}" if len(c) else "" for c in counts])
                right.set_ylabel("reached")
                right.spines["right"].set_visible(False)
            return made

    def caption(self) -> str:
        """Return the target, how exact the time is, and how many runs reached it."""
        if self.rows.empty:
            return f"No comparable run was validated; {self.counted()}. {self.refusals}".strip()
        reached = self.rows[self.rows["reached"].astype(bool)]
        stated = self.rows["target_stated"].astype(bool).all()
        chosen = "stated before the runs" if stated else "the highest that any run ended with"
        text = captions.sentence(captions.crowded(self.inventory)) + (
            f"Target: a validation loss of {number(self.rows['target'].iloc[0], 5)} nats a useful token, {chosen}. "
            f"{len(reached)} of {len(self.rows)} runs reached it; {self.counted()}. Each dot is the first validation "
            "at or below the target. Thin lines begin at the validation before: the loss passed the target in between. "
            "Arrows at the right edge are runs that did not reach it; a median counts their time as longest. "
        )
        short = reached[~reached["whole_window"].astype(bool)]
        if len(short):
            text += f"{len(short)} of them ended before a whole window after it was seen. "
        text += self.refused()
        return text + captions.kinds([g for g in captions.by_cell(self.rows, "seconds") if np.isfinite(g).all()])

    def alt(self) -> str:
        """Return medians and counts, read aloud."""
        kept = self.data()
        texts = []
        for (name, world), group in kept.groupby(["series", "world_size"]):
            middle = group["seconds"].median()
            median_text = f"{number(middle)} s" if np.isfinite(middle) else "not"
            texts.append(f"{name} on {world}: {median_text} ({int(group['reached'].sum())} of {len(group)} reached)")
        return f"Dot plot of the time to a validation loss. Medians: {captions.listing(texts) or 'no data'}."
