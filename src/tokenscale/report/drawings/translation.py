"""What a translation model costs and what it is worth: seconds of an epoch, tokens per second, BLEU."""

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import Figure
from tokenscale.report.style import dots, number
from tokenscale.report.table import Table

QUERIES = ("translation", "epochs", "inventory")
_COLUMNS = {
    "epoch_s": ("an epoch of the corpus (s)", 1.0),
    "target_tokens_per_s": ("target tokens / s", 1.0),
    "bleu": ("BLEU", 1.0),
}


def _medians(scores: pd.Series) -> str:
    """Return the medians over runs of scores after each epoch, which every run has as text.

    >>> _medians(pd.Series(["1.0, 3.0", "2.0, 4.0", "9.0, 3.5"]))
    '2.0, 3.5'
    """
    return ", ".join(f"{value:.1f}" for value in scores.str.split(", ", expand=True).astype(float).median())


class Translation(Figure):
    """What a translation model costs and what it is worth: seconds of an epoch, tokens per second, BLEU."""

    title = "Translation: time of an epoch, tokens per second, and BLEU"
    queries = QUERIES
    factor = "approach"
    translation: pd.DataFrame
    epochs: pd.DataFrame

    def prepare(self) -> None:
        """Add the times of the training and of an epoch to each run."""
        times = self.epochs[["run_id", "epoch_s", "epochs", "training_s"]]
        self.translation = self.translation.merge(times, on="run_id", how="left")
        super().prepare()

    def data(self) -> pd.DataFrame:
        """Return one row per run that translated, of those that are like for like along the approach."""
        columns = ["series", "world_size", "repeat", "run_id", "global_batch", "steps", "epochs", *_COLUMNS]
        columns += ["positions_per_s", "validation_loss", "bleu_low", "bleu_high", "bleu_sentences", "bleu_signature"]
        columns += ["training_s", "bleu_by_epoch"]
        return self.rows[columns].reset_index(drop=True)

    def draw(self) -> matplotlib.figure.Figure:
        """Draw three panels, a row per cell: runs as dots, medians as bars, at each BLEU its bootstrap interval."""
        shown = self.rows
        made, axes = panels.strips(self.translation, shown, self.refusals, self.inventory, _COLUMNS)
        if len(shown):
            for y, cell in enumerate(panels.cells(self.inventory)[::-1]):
                for _, run in panels.at(shown, cell).iterrows():
                    axes[-1].plot(
                        [run["bleu_low"], run["bleu_high"]], [y, y], color=dots(cell[0])["color"], linewidth=0.8
                    )
            axes[-1].set_xlim(0, max(1.0, 1.08 * shown["bleu_high"].max()))
        return made

    def caption(self) -> str:
        """Return what is counted, what the two kinds of spread are, and how BLEU was computed."""
        kept = self.rows
        text = self.crowded() + (
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
        text += self.refused()
        return text + captions.kinds(captions.by_cell(kept, "bleu"))

    def alt(self) -> str:
        """Return the medians, read aloud."""
        read = captions.medians(self.data(), "bleu")
        return f"Time of an epoch, tokens per second and BLEU of translation models. Median BLEU: {read or 'no data'}."

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
            middle = group[[*_COLUMNS, "training_s", "positions_per_s", "validation_loss"]].median()
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
