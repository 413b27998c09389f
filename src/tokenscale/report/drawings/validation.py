"""Figures of what training reached: losses of a mixture, time to a loss, and BLEU of translations."""

import matplotlib.figure
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import dots, figure, jitter, looks, no_data, number, plain, style
from tokenscale.report.table import Table

#: panels beside each other
COLUMNS = 3


class MixtureLosses(Figure):
    title = "Validation loss of each corpus by its share of the training data"
    queries = ("source_validation", "inventory")
    factor = "corpus"
    columns = ("corpus", "series", "world_size", "repeat", "run_id", "source", "share", "step", "loss")
    cores_matter = False
    main = "loss"
    read = "Validation loss by corpus and mixture. Medians: {}."

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

    def sentences(self) -> str:
        """Return what is validated, and how many runs are shown."""
        slices = self.rows.groupby("source")["validation_tokens"].max()
        sizes = [f"{number(tokens, 6)} of {source}" for source, tokens in slices.items()]
        if len(sizes) > COLUMNS:
            sizes = [f"{number(slices.min(), 6)} to {number(slices.max(), 6)} a corpus"]
        return (
            "Loss after the last step on a fixed held-out slice of each corpus, the same for every mixture "
            f"(useful tokens: {captions.listing(sizes) or 'none'}); "
            f"{captions.counted(self.rows['run_id'].nunique(), self.inventory)}. Each dot is a run, bars are "
            "medians. The share is of the sequences of the whole run; mixtures with stages reach it in their own "
            "order. "
        )

    def groups(self) -> list[pd.Series]:
        """Return the losses of each mixture on each corpus."""
        return [group for _, group in self.rows.groupby(["cell", "source"])[self.main]]

    def numbers(self) -> str:
        """Return the median of each corpus and mixture in words."""
        found = self.rows.groupby(["source", "cell"])["loss"].median()
        return captions.listing([f"{source} with {mixture}: {loss:.3f}" for (source, mixture), loss in found.items()])

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
    title = "Time to a validation loss"
    queries = ("time_to_target", "inventory")
    factor = "approach"
    columns = (
        *("series", "world_size", "repeat", "run_id", "target", "reached", "step", "seconds_before", *_COLUMNS),
        *("loss", "runs_of_cell", "reached_of_cell", "median_s_of_cell"),
    )
    main = "seconds"
    read = "Dot plot of the time to a validation loss. Medians: {}."

    def finding(self) -> str:
        """Return how many runs reached the target."""
        if self.rows.empty:
            return self.title
        reached, target = int(self.rows["reached"].sum()), number(self.rows["target"].iloc[0], 4)
        return f"{reached} of {len(self.rows)} runs reach a validation loss of {target} nats"

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
        text = self.crowded() + (
            f"Target: a validation loss of {number(self.rows['target'].iloc[0], 5)} nats a useful token, {chosen}. "
            f"{len(reached)} of {len(self.rows)} runs reached it; {self.counted()}. Each dot is the first validation "
            "at or below the target. Thin lines begin at the validation before: the loss passed the target in between. "
            "Arrows at the right edge are runs that did not reach it; a median counts their time as longest. "
        )
        short = reached[~reached["whole_window"].astype(bool)]
        if len(short):
            text += f"{len(short)} of them ended before a whole window after it was seen. "
        return text + self.refused() + captions.kinds(self.groups())

    def groups(self) -> list[pd.Series]:
        """Return the seconds of each cell whose runs all reached the target."""
        return [group for group in super().groups() if np.isfinite(group).all()]

    def numbers(self) -> str:
        """Return the median and counts of each cell in words."""
        texts = []
        for (name, world), group in self.rows.groupby(["series", "world_size"]):
            middle = group["seconds"].median()
            median_text = f"{number(middle)} s" if np.isfinite(middle) else "not"
            texts.append(f"{name} on {world}: {median_text} ({int(group['reached'].sum())} of {len(group)} reached)")
        return captions.listing(texts)


def _medians(scores: pd.Series) -> str:
    """Return the medians over runs of scores after each epoch, which every run has as text.

    >>> _medians(pd.Series(["1.0, 3.0", "2.0, 4.0", "9.0, 3.5"]))
    '2.0, 3.5'
    """
    return ", ".join(f"{value:.1f}" for value in scores.str.split(", ", expand=True).astype(float).median())


class Translation(Figure):
    title = "Translation: time of an epoch, tokens per second, and BLEU"
    queries = ("translation", "epochs", "inventory")
    factor = "approach"
    measures = {
        "epoch_s": ("an epoch of the corpus (s)", 1.0),
        "target_tokens_per_s": ("target tokens / s", 1.0),
        "bleu": ("BLEU", 1.0),
    }
    columns = (
        *("series", "world_size", "repeat", "run_id", "global_batch", "steps", "epochs", *measures, "positions_per_s"),
        *("validation_loss", "bleu_low", "bleu_high", "bleu_sentences", "bleu_signature"),
        *("training_s", "bleu_by_epoch"),
    )
    main = "bleu"
    read = "Time of an epoch, tokens per second and BLEU of translation models. Median BLEU: {}."
    translation: pd.DataFrame
    epochs: pd.DataFrame

    def prepare(self) -> None:
        """Add the times of the training and of an epoch to each run."""
        times = self.epochs[["run_id", "epoch_s", "epochs", "training_s"]]
        self.translation = self.translation.merge(times, on="run_id", how="left")
        super().prepare()

    def draw(self) -> matplotlib.figure.Figure:
        """Draw three panels, a row per cell: runs as dots, medians as bars, at each BLEU its bootstrap interval."""
        shown = self.rows
        made, axes = panels.strips(self.translation, shown, self.refusals, self.inventory, self.measures)
        if len(shown):
            for y, cell in enumerate(panels.cells(self.inventory)[::-1]):
                for _, run in panels.at(shown, cell).iterrows():
                    axes[-1].plot(
                        [run["bleu_low"], run["bleu_high"]], [y, y], color=dots(cell[0])["color"], linewidth=0.8
                    )
            axes[-1].set_xlim(0, max(1.0, 1.08 * shown["bleu_high"].max()))
        return made

    def sentences(self) -> str:
        """Return what is counted, what the two kinds of spread are, and how BLEU was computed."""
        kept = self.rows
        text = (
            "Time of an epoch, target tokens per second, and BLEU of greedy translations of held-out sentences; "
            f"{self.counted()}. Each dot is a run, bars are medians. An epoch's time is its rows over rows per second "
            "after warm-up. Target tokens are labels that are trained on; their time includes building the batch. "
        )
        if kept["series"].str.contains("schedule=naive", regex=False).any():
            text += "Schedule naive is model parallelism: one stage works, the others wait. "
        if len(kept):
            sentences = sorted({int(n) for n in kept["bleu_sentences"]})
            text += (
                "The thin line at a BLEU is the 95 % interval of a bootstrap over its "
                f"{captions.listing([str(n) for n in sentences])} sentences: the spread due to sentences. The distance "
                "between dots is the spread due to seeds. "
                f"{captions.listing(sorted(set(kept['bleu_signature'])))}. "
            )
        return text

    def table(self) -> Table:
        """Return medians, a row per cell; at BLEU the lowest and highest of several runs."""
        data = self.data()
        cells = list(dict.fromkeys(zip(data["series"], data["world_size"], strict=True)))
        names = dict(zip(cells, panels.short([name for name, _ in cells]), strict=True))
        epochs = bool(data["bleu_by_epoch"].notna().any())
        columns = [
            ("runs of", False),
            *((name, True) for name in ("ranks", "training (s)", "target tokens / s", "BLEU")),
        ]
        columns += [("BLEU after each epoch", True)] * epochs
        columns += [(name, True) for name in ("validation loss", "epoch (s)", "positions / s", "runs")]
        rows = []
        for cell, group in data.groupby(["series", "world_size"]):
            middle = group[[*self.measures, "training_s", "positions_per_s", "validation_loss"]].median()
            low, high = group["bleu"].min(), group["bleu"].max()
            rows.append(
                [names[cell], str(cell[1])]
                + [number(middle[key]) for key in ("training_s", "target_tokens_per_s")]
                + [f"{middle['bleu']:.1f}" + f" ({low:.1f} to {high:.1f})" * (len(group) > 1)]
                + [_medians(group["bleu_by_epoch"].dropna())] * epochs
                + [f"{middle['validation_loss']:.3f}"]
                + [number(middle[key]) for key in ("epoch_s", "positions_per_s")]
                + [str(len(group))]
            )
        return Table(columns, rows)
