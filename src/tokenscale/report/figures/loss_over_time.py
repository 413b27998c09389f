"""Training loss by useful tokens, and the validation points."""

import pandas as pd
from matplotlib.figure import Figure

from tokenscale.report import words
from tokenscale.report.style import figure, legend_columns, look, no_data, number, online, ordered, plain, style

TITLE = "Loss by useful tokens trained on"
QUERIES = ("loss", "validation", "inventory")


def data(loss: pd.DataFrame, validation: pd.DataFrame, inventory: pd.DataFrame) -> pd.DataFrame:
    """Training and validation points of the drawn runs, one below the other."""
    loss, validation, _ = _alike(loss, validation, inventory)
    columns = ["split", "series", "world_size", "repeat", "run_id", "stopped", "step", "useful_tokens_seen", "loss"]
    parts = [
        pd.concat([_drawn(_counted(loss)), _stopped(loss)]).assign(split="training"),
        _drawn(validation).assign(split="validation", stopped=False),
    ]
    return pd.concat(parts, ignore_index=True)[columns]


def _alike(
    loss: pd.DataFrame, validation: pd.DataFrame, inventory: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """See `words.alike`."""
    loss, refused = words.alike(loss, inventory, "approach")
    return loss, words.alike(validation, inventory, "approach")[0], refused


def _drawn(rows: pd.DataFrame) -> pd.DataFrame:
    """The smallest world size of each series: other world sizes train on the same data (see the proof table)."""
    smallest = rows.groupby("series")["world_size"].transform("min")
    return rows[(rows["world_size"] == smallest) & rows["loss"].notna()]


def _counted(loss: pd.DataFrame) -> pd.DataFrame:
    """Rows of runs that count: medians and numbers come from these alone."""
    return loss[~loss["stopped"].astype(bool)]


def _stopped(loss: pd.DataFrame) -> pd.DataFrame:
    """Rows of runs whose training stopped at a loss that was not finite, at the smallest world size of their series."""
    return _drawn(loss[loss["stopped"].astype(bool)])


def draw(loss: pd.DataFrame, validation: pd.DataFrame, inventory: pd.DataFrame) -> Figure:
    """Left: training loss, repeats thin, their median by step bold, a cross where one stopped.

    Right: validation loss, a point a run and time.
    """
    loss, validation, refused = _alike(loss, validation, inventory)
    train, held_out, stopped = _drawn(_counted(loss)), _drawn(validation), _stopped(loss)
    names = ordered(pd.concat([train["series"], held_out["series"], stopped["series"]]))
    with style():
        made, (left, right) = figure(2, height=4.0, sharey=True, width_ratios=(1.6, 1))
        left.set_xlabel("useful tokens trained on")
        left.set_ylabel("training loss (nats / useful token)")
        right.set_xlabel("useful tokens trained on")
        right.set_ylabel("validation loss (nats / useful token)")
        for axes, rows in ((left, train), (right, held_out)):
            if rows.empty and (axes is right or stopped.empty):
                no_data(axes, words.nothing(inventory, refused))
                continue
            for name in sorted(names, key=online):  # the thin dashed lines on top
                here = rows[rows["series"] == name]
                options = look(name) | {"linewidth": 1.3 if online(name) else 2.4}
                thin = {"color": options["color"], "linestyle": options["linestyle"], "linewidth": 0.7, "alpha": 0.45}
                for _, run in here.groupby("run_id"):
                    if axes is right:
                        axes.plot(
                            run["useful_tokens_seen"],
                            run["loss"],
                            **thin | {"linewidth": 0.5 * options["linewidth"], "alpha": 1},
                        )
                        axes.plot(run["useful_tokens_seen"], run["loss"], **options | {"linestyle": "none"})
                    elif here["run_id"].nunique() > 1:
                        axes.plot(run["useful_tokens_seen"], run["loss"], **thin)
                if axes is left and len(here):
                    middle = here.groupby("step")[["useful_tokens_seen", "loss"]].median()
                    axes.plot(
                        middle["useful_tokens_seen"],
                        middle["loss"],
                        **options,
                        label=name,
                        markersize=5,
                        markevery=_sparse(middle),
                    )
            for _, run in stopped.groupby("run_id") if axes is left else ():
                colour = look(run["series"].iloc[0])["color"]
                axes.plot(run["useful_tokens_seen"], run["loss"], color=colour, linewidth=0.7, alpha=0.45)
                axes.plot(run["useful_tokens_seen"].iloc[-1:], run["loss"].iloc[-1:], "x", color=colour, markersize=9)
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(_ticks())
            plain(axes.xaxis)
            plain(axes.yaxis)
        if names:
            handles = dict(zip(*left.get_legend_handles_labels()[::-1], strict=True))
            shown = [name for name in names if name in handles]
            made.legend(
                [handles[n] for n in shown],
                shown,
                loc="outside upper left",
                ncols=legend_columns(shown, 5),
                handlelength=3,
            )
        return made


def _sparse(rows: pd.DataFrame) -> int:
    return max(1, len(rows) // 8)


def _ticks():
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4, steps=[1, 2, 5, 10])


def caption(loss: pd.DataFrame, validation: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """What the lines are, and how many runs carry them."""
    loss, validation, refused = _alike(loss, validation, inventory)
    train, held_out, stopped = _drawn(_counted(loss)), _drawn(validation), _stopped(loss)["run_id"].nunique()
    listed = inventory.dropna(subset=["series", "world_size"])
    smallest = listed.groupby("series")["world_size"].transform("min")
    asked = listed[listed["world_size"] == smallest]
    text = (
        f"Global loss of a step (sum over sum, all ranks) against useful tokens, smallest world size of each approach; "
        f"{words.counted(train['run_id'].nunique(), asked)}. "
    )
    if train["run_id"].nunique() > train["series"].nunique():
        text += "Thin lines are repeats, bold ones their median by step. "
    if stopped:
        text += (
            f"A cross ends {stopped} run{'s' * (stopped != 1)} whose training stopped there, at a loss that was not "
            "finite; no median counts them. "
        )
    final = held_out[held_out["last"].astype(bool)] if len(held_out) else held_out
    if len(final):
        low, high = final["loss"].min(), final["loss"].max()
        text += (
            f"Validation is on one fixed slice of {number(final['validation_tokens'].max(), 6)} useful tokens; after "
            f"the last step it lies between {low:.4f} and {high:.4f} over {len(final)} run{'s' * (len(final) != 1)}. "
        )
    text += f"{refused} " if refused else ""
    return (
        text
        + "Training losses of approaches that cut documents into rows differently are not over the same rows at a step."
    )


def alt(loss: pd.DataFrame, validation: pd.DataFrame, inventory: pd.DataFrame) -> str:
    """First and last losses, read aloud."""
    loss, validation, _ = _alike(loss, validation, inventory)
    train = _drawn(_counted(loss))
    texts = []
    for name in ordered(train["series"]):
        middle = train[train["series"] == name].groupby("step")["loss"].median()
        texts.append(f"{name} from {middle.iloc[0]:.2f} to {middle.iloc[-1]:.2f}")
    return f"Line plot of loss against useful tokens. Median training loss: {words.listing(texts) or 'no data'}."
