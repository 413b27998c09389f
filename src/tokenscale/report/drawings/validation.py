"""Figures of what training reached: losses of a mixture, time to a loss, and BLEU of
translations.
"""

import re

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from tokenscale.report import captions, panels
from tokenscale.report.figure import DOTS, Drawing, Figure
from tokenscale.report.style import dots, figure, format_ticks, jitter, looks, number
from tokenscale.report.table import Table, columns


class MixtureLosses(Figure):
    title = "Validation loss of each corpus by its share of the training data"
    queries = ("source_validation", "inventory")
    factor = "corpus"
    cores_matter = False
    main = "loss"
    by = ("cell", "source")
    columns = (
        "corpus",
        "series",
        "world_size",
        "repeat",
        "run_id",
        "source",
        "share",
        "step",
        "loss",
    )

    def prepare(self) -> None:
        super().prepare()
        rows = self.rows[self.rows["last"].astype(bool) & self.rows["share"].notna()]
        cells = rows["corpus"].astype(str)
        parts = rows["series"].map(
            lambda name: [p for p in name.split(", ") if not re.match(r"corpus(\.name)?=", p)]
        )
        others = parts.map(", ".join)
        if others.nunique() > 1 or rows["world_size"].nunique() > 1:
            cells = cells + ", " + others + ", " + rows["world_size"].map(panels.format_ranks)
        self.rows = rows.assign(cell=cells)
        first = self.rows[self.rows["source"] == self.rows["source"].min()]
        self.cells = first.groupby("cell")["share"].median().sort_values().index.tolist()

    def draw(self) -> Drawing:
        """Draw one panel per corpus: every run a dot, the median of each cell a bar."""
        sources = sorted(self.rows["source"].unique())
        label = "validation loss (nats / useful token)"
        made, every = panels.make_grid(
            len(sources),
            height=2.8,
            x="share of sequences (%)",
            y=label,
        )
        if not sources:
            return self.no_data(made)
        for source, axes in zip(sources, every, strict=True):
            panels.write_heading(axes, text=source)
            for cell, look in looks(self.cells).items():
                here = self.rows[(self.rows["source"] == source) & (self.rows["cell"] == cell)]
                share = 100 * here["share"]
                loss = here["loss"]
                axes.plot(share, loss, **look | {"linestyle": "none", "markersize": 5}, label=cell)
                axes.plot(share.median(), loss.median(), "_", color=look["color"], markersize=18)
            axes.set_xlim(-6, 106)
            format_ticks(axes.yaxis)
        panels.draw_legend(made, axes=every, order=self.cells)
        return made

    def sentences(self) -> str:
        slices = self.rows.groupby("source")["validation_tokens"].max()
        sizes = [f"{number(tokens, digits=6)} of {source}" for source, tokens in slices.items()]
        if len(sizes) > 3:
            sizes = [
                f"{number(slices.min(), digits=6)} to {number(slices.max(), digits=6)} a corpus"
            ]
        return (
            "Loss after the last step on a fixed held-out slice of each corpus, the same for "
            "every mixture "
            f"(useful tokens: {captions.listing(sizes) or 'none'}); "
            f"{captions.count_shown(self.rows['run_id'].nunique(), self.inventory)}. {DOTS}"
            "The share is of the sequences of the whole run; mixtures with "
            "stages reach it in their own order. "
        )

    def table(self) -> Table:
        """Return medians, a row per mixture and corpus."""
        rows = [
            [str(mixture), str(source), f"{100 * group['share'].median():.1f}", str(len(group))]
            + [
                f"{group['loss'].median():.3f}",
                f"{group['loss'].min():.3f} to {group['loss'].max():.3f}",
            ]
            for (mixture, source), group in self.rows.groupby(list(self.by))
        ]
        heads = columns("mixture", "corpus", ">share (%)", ">runs", ">loss", ">lowest to highest")
        return Table(columns=heads, rows=rows)


class TimeToTargetLoss(Figure):
    title = "Time to a validation loss"
    queries = ("time_to_target", "inventory")
    factor = "approach"
    main = "seconds"
    measures = {
        "seconds": ("seconds of training steps", 1.0),
        "useful_tokens": ("useful tokens trained on", 1.0),
    }
    columns = (
        "series",
        "world_size",
        "repeat",
        "run_id",
        "target",
        "reached",
        "step",
        "seconds_before",
        *measures,
        "loss",
        "runs_of_cell",
        "reached_of_cell",
        "median_s_of_cell",
    )

    def finding(self) -> str:
        runs = captions.count(len(self.rows), "run")
        target = number(self.rows["target"].max(), digits=4)
        reached = (
            f"{int(self.rows['reached'].sum())} of {runs} reached a validation loss of {target} "
            "nats"
        )
        return reached if len(self.rows) else self.title

    def draw(self) -> Drawing:
        """Draw one row per cell: every run a dot, with a line back to the validation before.

        Arrows at the edge are runs that did not reach the target; beside them, how many did.
        """
        listed = panels.cells(self.inventory)[::-1]
        made, both = figure(2, height=1.3 + 0.36 * max(4, len(listed)), sharey=True)
        for axes, (column, (label, _)) in zip(both, self.measures.items(), strict=True):
            axes.set_xlabel(label)
            if self.rows.empty:
                self.no_data(made, axes)
                continue
            finite = captions.select_finite(self.rows[column])
            edge = 1.12 * finite.max() if len(finite) and finite.max() > 0 else 1.0
            axes.set_xlim(0, 1.06 * edge)
            for y, cell in enumerate(listed):
                here = panels.select_cell(self.rows, cell)
                if len(here):
                    _draw_cell(
                        axes,
                        y,
                        here=here,
                        column=column,
                        edge=edge,
                        middle=panels.select_cell(self.rows, cell)[column].median(),
                    )
                else:
                    panels.write_note(
                        axes, y, text="not comparable" if self.refusals else "no validation"
                    )
            panels.name_rows(axes, texts=panels.name_cells(listed))
            panels.steps_of(axes.xaxis, most=4)
        if len(self.rows):
            target = f"loss ≤ {number(self.rows['target'].iloc[0], digits=5)} nats / useful token"
            panels.write_heading(both[0], text=captions.caution_crowding(self.inventory) or target)
            right = both[1].secondary_yaxis("right")
            counts = [panels.select_cell(self.rows, cell)["reached"] for cell in listed]
            right.set_yticks(
                range(len(listed)),
                [f"{int(c.sum())} of {len(c)}" if len(c) else "" for c in counts],
            )
            right.set_ylabel("reached")
            right.spines["right"].set_visible(False)
        return made

    def sentences(self) -> str:
        if self.rows.empty:
            return f"No comparable run was validated; {self.counted()}. "
        reached = self.rows[self.rows["reached"].astype(bool)]
        stated = self.rows["target_stated"].astype(bool).all()
        chosen = "stated before the runs" if stated else "the highest that any run ended with"
        text = (
            f"Target: a validation loss of {number(self.rows['target'].iloc[0], digits=5)} nats a "
            f"useful token, {chosen}. "
            f"Shown: {self.counted()}, of which {len(reached)} reached it. Each dot is the "
            "first validation at or below the target. Thin lines begin at the validation before: "
            "the loss passed the "
            "target in between. Arrows at the right edge are runs that did not reach it; a "
            "median counts their time as "
            "longest. "
        )
        if short := int((~reached["whole_window"].astype(bool)).sum()):
            text += f"{short} of them ended before a whole window after it was seen. "
        return text

    def groups(self) -> list[pd.Series]:
        return [group for group in super().groups() if np.isfinite(group).all()]

    def numbers(self) -> str:
        texts = []
        for name, world, group in captions.cells(self.rows):
            middle = panels.select_cell(self.rows, cell=(name, world))["seconds"].median()
            median = f"{number(middle)} s" if np.isfinite(middle) else "not"
            texts.append(
                f"{name} on {world}: {median} ({int(group['reached'].sum())} of {len(group)} "
                "reached)"
            )
        return "; ".join(texts)


def _draw_cell(
    axes: Axes, y: float, here: pd.DataFrame, column: str, edge: float, middle: float
) -> None:
    """Runs of a cell; a median where it is finite, as more than half of them reached the target."""
    options = dots(here["series"].iloc[0])
    for offset, run in zip(jitter(len(here)), here.sort_values(column).itertuples(), strict=True):
        value = getattr(run, column)
        if np.isfinite(value):
            if column == "seconds" and not pd.isna(run.seconds_before):
                line = {"color": options["color"], "linewidth": 0.8, "alpha": 0.6}
                axes.plot([run.seconds_before, value], [y + offset] * 2, **line)
            axes.plot([value], [y + offset], **options, clip_on=False)
        else:
            axes.plot(
                [edge],
                [y + offset],
                **options | {"marker": ">", "markerfacecolor": "none"},
                clip_on=False,
            )
    if np.isfinite(middle):
        axes.plot([middle] * 2, [y - 0.32, y + 0.32], color=options["color"], linewidth=2)


class Translation(Figure):
    title = "Translation: time of an epoch, tokens per second, and BLEU"
    queries = ("translation", "epochs", "inventory")
    factor = "approach"
    main = "bleu"
    measures = {
        "epoch_s": ("an epoch of the corpus (s)", 1),
        "target_tokens_per_s": ("target tokens / s", 1),
        "bleu": ("BLEU", 1),
    }
    columns = (
        "series",
        "world_size",
        "repeat",
        "run_id",
        "global_batch",
        "steps",
        "epochs",
        *measures,
        "positions_per_s",
        "validation_loss",
        "bleu_low",
        "bleu_high",
        "bleu_sentences",
        "bleu_signature",
        "training_s",
        "bleu_by_epoch",
    )
    epochs: pd.DataFrame

    def prepare(self) -> None:
        times = self.epochs[["run_id", "epoch_s", "epochs", "training_s"]]
        self.first = self.first.merge(times, on="run_id", how="left")
        super().prepare()

    def draw(self) -> Drawing:
        """Draw three panels, a row per cell: runs as dots, medians as bars, at each BLEU its
        bootstrap interval.
        """
        made = panels.draw_strips(self)
        if len(self.rows):
            axes = made.axes[-1]
            for y, cell in enumerate(panels.cells(self.inventory)[::-1]):
                for ends in panels.select_cell(self.rows, cell)[["bleu_low", "bleu_high"]].values:
                    axes.plot(ends, [y, y], color=dots(cell[0])["color"], linewidth=0.8)
            axes.set_xlim(0, max(1.0, 1.08 * self.rows["bleu_high"].max()))
        return made

    def sentences(self) -> str:
        text = (
            "Time of an epoch, target tokens per second, and BLEU of greedy translations of "
            "held-out sentences; "
            f"{self.counted()}. {DOTS}An epoch's time is its rows over rows per second after "
            "warm-up. Target tokens "
            "are labels that are trained on; their time includes building the batch. "
        )
        if self.rows["series"].str.contains("schedule=naive", regex=False).any():
            text += "Schedule naive is model parallelism: one stage works, the others wait. "
        if len(self.rows):
            sentences = captions.listing(
                [str(n) for n in sorted({int(n) for n in self.rows["bleu_sentences"]})]
            )
            text += (
                "The thin line at a BLEU is the 95 % interval of a bootstrap over its "
                f"{sentences} sentences: the "
                "spread due to sentences. The distance between dots is the spread due to seeds. "
                f"{captions.listing(sorted(set(self.rows['bleu_signature'])))}. "
            )
        return text

    def table(self) -> Table:
        """Return medians, a row per cell; at BLEU the lowest and highest of several runs."""
        measured = self.rows.dropna(subset=[self.main])
        names = dict(
            zip(
                named := list(dict.fromkeys(measured["series"])),
                panels.shorten_names(named),
                strict=True,
            )
        )
        epochs = bool(measured["bleu_by_epoch"].notna().any())
        heads = columns("runs of", ">ranks", ">training (s)", ">target tokens / s", ">BLEU")
        heads += columns(">BLEU after each epoch") * epochs
        heads += columns(">validation loss", ">epoch (s)", ">positions / s", ">runs")
        rows = []
        for (name, world), group in measured.groupby(["series", "world_size"]):
            middle = group[
                [*self.measures, "training_s", "positions_per_s", "validation_loss"]
            ].median()
            bleu = group["bleu"]
            each = group["bleu_by_epoch"].dropna().str.split(", ", expand=True)
            rows.append(
                [
                    names[name],
                    str(world),
                    number(middle["training_s"]),
                    number(middle["target_tokens_per_s"]),
                ]
                + [
                    f"{middle['bleu']:.1f}"
                    + (f" ({bleu.min():.1f} to {bleu.max():.1f})" if len(group) > 1 else "")
                ]
                + [", ".join(f"{value:.1f}" for value in each.astype(float).median())] * epochs
                + [
                    f"{middle['validation_loss']:.3f}",
                    number(middle["epoch_s"]),
                    number(middle["positions_per_s"]),
                ]
                + [str(len(group))]
            )
        return Table(columns=heads, rows=rows)
