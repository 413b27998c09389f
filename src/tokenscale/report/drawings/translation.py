"""What a translation model costs and what it is worth: seconds of an epoch, tokens per second, BLEU."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import captions as words
from tokenscale.report import panels
from tokenscale.report.style import dots, number
from tokenscale.report.table import Table

TITLE = "Translation: time of an epoch, tokens per second, and BLEU"
QUERIES = ("translation", "epochs", "inventory")
_COLUMNS = {
    "epoch_s": ("an epoch of the corpus (s)", 1.0),
    "target_tokens_per_s": ("target tokens / s", 1.0),
    "bleu": ("BLEU", 1.0),
}


def _joined(translation: pd.DataFrame, epochs: pd.DataFrame) -> pd.DataFrame:
    return translation.merge(epochs[["run_id", "epoch_s", "epochs"]], on="run_id", how="left")


def data(translation: pd.DataFrame, epochs: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """One row a run that translated, of those that are like for like along the approach."""
    kept, _ = words.alike(_joined(translation, epochs), inventory, "approach")
    columns = ["series", "world_size", "repeat", "run_id", "global_batch", "steps", "epochs", *_COLUMNS]
    columns += ["positions_per_s", "validation_loss", "bleu_low", "bleu_high", "bleu_sentences", "bleu_signature"]
    return kept[columns].reset_index(drop=True)


def table(translation: pd.DataFrame, epochs: pd.DataFrame, inventory: pd.DataFrame) -> Table:
    """The medians as people read them, a row a cell."""
    columns = [("runs of", False), ("ranks", True), ("runs", True), ("epoch (s)", True), ("target tokens / s", True)]
    columns += [("positions / s", True), ("validation loss", True), ("BLEU", True), ("lowest to highest", True)]
    rows = []
    for (name, world), group in data(translation, epochs, inventory).groupby(["series", "world_size"]):
        middle = group[[*_COLUMNS, "positions_per_s", "validation_loss"]].median()
        rows.append(
            [str(name), str(world), str(len(group))]
            + [number(middle[key]) for key in ("epoch_s", "target_tokens_per_s", "positions_per_s")]
            + [f"{middle['validation_loss']:.3f}", f"{middle['bleu']:.1f}"]
            + [f"{group['bleu'].min():.1f} to {group['bleu'].max():.1f}"]
        )
    return Table(columns, rows)


def draw(translation: pd.DataFrame, epochs: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """A row a cell, three panels: every run a dot, medians bars; at each BLEU the interval over its sentences."""
    rows = _joined(translation, epochs)
    shown, _ = words.alike(rows, inventory, "approach")
    made, axes = panels.strips(rows, inventory, _COLUMNS)
    if len(shown):
        for y, cell in enumerate(panels.cells(inventory)[::-1]):
            for _, run in panels.at(shown, cell).iterrows():
                axes[-1].plot([run["bleu_low"], run["bleu_high"]], [y, y], color=dots(cell[0])["color"], linewidth=0.8)
        axes[-1].set_xlim(0, max(1.0, 1.08 * shown["bleu_high"].max()))
    return made


def caption(translation: pd.DataFrame, epochs: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """What is counted, what the two kinds of spread are, and how BLEU was computed."""
    kept, refused = words.alike(_joined(translation, epochs), inventory, "approach")
    text = words.sentence(words.crowded(inventory) if len(kept) else "") + (
        "Rows of an epoch over rows per second after warm-up; target tokens (labels that are trained on) over step "
        "time, making the batch included; BLEU of greedy translations of held-out sentences; "
        f"{words.counted(len(kept), inventory)}. Each dot is a run, bars are medians. "
    )
    if len(kept):
        sentences = sorted({int(n) for n in kept["bleu_sentences"]})
        text += (
            "The thin line at a BLEU is the 95 % interval of a bootstrap over its "
            f"{words.listing([str(n) for n in sentences])} sentences: what other sentences would do. The distance "
            f"between dots is what other seeds do. {words.listing(sorted(set(kept['bleu_signature'])))}. "
        )
    text += f"{refused} " if refused else ""
    return text + words.kinds(words.by_cell(kept, "bleu"))


def alt(translation: pd.DataFrame, epochs: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """The medians, read aloud."""
    read = words.medians(data(translation, epochs, inventory), "bleu")
    return f"Time of an epoch, tokens per second and BLEU of translation models. Median BLEU: {read or 'no data'}."
