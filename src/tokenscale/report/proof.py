"""Did runs that are compared train on the same data? Pairs of orders and losses, and what follows in words."""

from typing import Any

import pandas as pd

from tokenscale.report.paired_comparisons import in_pairs
from tokenscale.report.table import Table

RESUMED = "resumed and uninterrupted"
#: kind of pair → (what the sentence is about, what is true of a proven pair)
_PROOFS = {
    "world sizes": ("across world sizes", "the same samples and the same useful tokens at every step"),
    RESUMED: (
        "after another run's state was gone on from",
        "the same samples and the same useful tokens at every step that is left",
    ),
    "online and offline": (
        "online against offline",
        "the same samples, the same useful tokens, and bit-identical losses at every step",
    ),
}


def proof(order: pd.DataFrame) -> dict[str, Any]:
    """Do the runs of a pair train on the same batches? A sentence and a table for each kind of pair.

    The digest names samples, not their content. Across world sizes and after a resumption that is enough, as both read
    the same store; online against offline the losses must be bit-identical, too.
    """
    parts = []
    for kind, (what, true) in _PROOFS.items():
        pairs = order[order["kind"] == kind]
        if kind == RESUMED and pairs.empty:  # few experiments ask
            continue
        pairs = pairs.assign(finding=[_finding(kind, pair) for pair in pairs.itertuples()])
        proven = int((pairs["finding"] == "proven").sum())
        if pairs.empty:
            state, text = "none", f"Same data {what}: no pair of runs to compare."
        elif proven == len(pairs):
            state, text = "proven", f"Same data {what}: proven. {_all(proven)} {true}."
        else:
            why = pairs.loc[pairs["finding"] != "proven", "finding"].value_counts(sort=False)
            others = "; ".join(f"{in_pairs(n)}: {finding}" for finding, n in why.items())
            state = "broken"
            text = f"Same data {what}: not proven. {proven} of {in_pairs(len(pairs))} have {true}; {others}."
        if kind != "online and offline" and len(pairs):
            text += (
                " The sums of a step are in another order there; the losses differ by at most "
                f"{pairs['largest_loss_difference'].max():.2g} nats a useful token."
            )
        parts.append({"kind": kind, "state": state, "text": text, "table": _proof_table(pairs)})
    return {"parts": parts}


def _finding(kind: str, pair: Any) -> str:
    """What a pair shows, in words: `proven`, or what is missing."""
    if not pair.same_data:
        return "other samples or another order: not proven"
    if not pair.same_useful_tokens:
        return "same order, useful tokens differ: not proven"
    if kind == "online and offline" and not pair.losses_identical:
        return "same order, losses differ: not proven"
    return "proven"


def _all(n: int) -> str:
    return f"All {in_pairs(n)} have" if n > 1 else "The one pair has"


def _proof_table(pairs: pd.DataFrame) -> Table:
    """A row for the pairs of two series and two world sizes."""
    columns = [
        ("approach", False),
        ("against", False),
        ("world sizes", False),
        ("pairs", True),
        ("steps with equal digests", True),
        ("same useful tokens", False),
        ("losses bit-identical", False),
        ("largest loss difference (nats)", True),
        ("finding", False),
    ]
    rows = []
    for (a, b, w, v), group in pairs.groupby(["series", "other_series", "world_size", "other_world_size"]):
        rows.append(
            [
                a,
                b,
                str(w) if w == v else f"{w} and {v}",
                str(len(group)),
                f"{group['steps_equal'].sum()} of {group['steps_compared'].sum()}",
                "yes" if group["same_useful_tokens"].all() else "no",
                "yes" if group["losses_identical"].all() else "no",
                f"{group['largest_loss_difference'].max():.2g}",
                "; ".join(dict.fromkeys(group["finding"])),
            ]
        )
    return Table(
        columns,
        rows,
        "Digests name the samples of a step by their numbers, not their content.",
    )
