"""Sentences that captions share. Every number in them is counted from the tables."""

import re
from collections.abc import Iterator, Sequence

import pandas as pd

from tokenscale.base.wording import count, listing
from tokenscale.referee import comparability
from tokenscale.referee.statistics import summary
from tokenscale.report.style import number, order_series

#: letters of a caption that is read with its figure: three lines beside the answers, fewer
#: elsewhere
SHORT = 230
OVERSUBSCRIBED = "oversubscribed CPU: a correctness run, not a scaling measurement"
SHARED_CORES = (
    "ranks share the cores that one process had: a correctness run, not a scaling measurement"
)


def caution(scaling: pd.DataFrame) -> str:
    """Why the rows of `scaling.sql` are no scaling measurement, or nothing.

    It is about shared cores, and so about CPUs alone: ranks on devices of their own share none.
    """
    several = scaling[(scaling["world_size"] > 1) & (scaling["device_kind"] == "cpu")]
    if several["oversubscribed"].fillna(False).astype(bool).any():
        return OVERSUBSCRIBED
    if (several["threads_per_rank"].fillna(0) < several["single_threads_per_rank"].fillna(0)).any():
        return SHARED_CORES
    return ""


def select_usable(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs that figures may show."""
    return runs[runs["validity"].isin(["valid", "suspect"])]


def select_comparable(
    rows: pd.DataFrame, inventory: pd.DataFrame, factor: str
) -> tuple[pd.DataFrame, str]:
    """Return (rows of runs that are comparable along the factor, sentences on the runs that are
    not).
    """
    found = comparability.refusals(inventory, factor)
    return rows[~rows["run_id"].isin(comparability.refused(found))], comparability.sentences(found)


def in_brackets(text: str) -> str:
    """Return the text in brackets, after a space; empty for an empty text."""
    return f" ({text})" if text else ""


def explain_absence(runs: pd.DataFrame, refused: str) -> str:
    """What stands in an empty figure: that there are no runs, or that those there are may not be
    compared.
    """
    return "not comparable: see the method below" if refused else f"no data: {count_shown(0, runs)}"


def _count_validities(runs: pd.DataFrame, **words: str) -> list[str]:
    """Return in words how many runs have each validity that occurs."""
    return [
        f"{n} {word}"
        for kind, word in words.items()
        if (n := int((runs["validity"] == kind).sum()))
    ]


def count_shown(shown: int, runs: pd.DataFrame) -> str:
    """`6 of 6 runs`, and which were left out."""
    out = _count_validities(runs, invalid="invalid", missing="missing", suspect="suspect, shown")
    return f"{shown} of {count(len(runs), 'run')}" + in_brackets(", ".join(out))


def describe_left_out(runs: pd.DataFrame) -> str:
    """A sentence on the runs that no number counts, or nothing."""
    out = _count_validities(runs, invalid="invalid", missing="missing")
    several = out not in (["1 invalid"], ["1 missing"])
    return f"Left out: {listing(out)} run{'s' * several} of {len(runs)}." if out else ""


def describe_spread(groups: list[pd.Series], one: str = "run", cell: str = "a cell") -> str:
    """What the spread of groups is, where a value is of `one` run and a group is of `cell`, in a
    sentence or more.

    >>> describe_spread([pd.Series([1.0]), pd.Series([1.0, 2.0])])
    'A median of one run has no known spread. The spread is the range over the runs of a cell.'
    """
    found = {summary(values).kind for values in map(select_finite, groups) if len(values)}
    sentences = [f"A median of one {one} has no known spread."] if "single run" in found else []
    if "range" in found:
        sentences.append(f"The spread is the range over the {one}s of {cell}.")
    return " ".join(sentences)


def explain_left_out(left_out: pd.DataFrame, column: str) -> str:
    """A sentence on the rows of a benchmark that were left out, with a space after it; nothing
    without any.
    """
    texts = [
        f"{name} ({why})" for name, why in zip(left_out[column], left_out["left_out"], strict=True)
    ]
    return f"Left out: {'; '.join(texts)}. " if texts else ""


def select_finite(values: pd.Series) -> pd.Series:
    """Values that are known and finite."""
    values = values.astype(float)
    return values[values.abs() < float("inf")]


def format_spread(values: pd.Series, digits: int = 3) -> str:
    """Median with its range: `1 230 (1 200–1 260)`. Values that are not finite are left
    out.
    """
    s = summary(select_finite(values))
    median, low, high = (number(value, digits) for value in (s.median, s.low, s.high))
    if s.n == 0:
        return "–"
    if s.low == s.high:
        return median
    return f"{median} ({low}–{high})"


def find_ends(values: pd.Series) -> list[float]:
    """Median, and the ends of its range; values that are not known are left out."""
    s = summary(values.dropna())
    return [s.median, s.low, s.high]


def caution_crowding(inventory: pd.DataFrame) -> str:
    """Return `caution` for the runs of an inventory, each compared with the smallest world size of
    its series.
    """
    runs = select_usable(inventory).sort_values("world_size", kind="stable")
    fewest = runs.groupby("series")["threads_per_rank"].transform("first")
    return caution(runs.assign(single_threads_per_rank=fewest))


def as_sentence(text: str) -> str:
    """Return a text as a sentence of a caption, with a space after it; empty for an empty text."""
    return f"{text[0].upper()}{text[1:]}. " if text else ""


def describe_medians(
    rows: pd.DataFrame,
    column: str,
    factor: float = 1.0,
    unit: str = "",
    by: Sequence[str] = ("series", "world_size"),
) -> str:
    """Medians of cells: `packed on 2: 1 230; padded on 2: 400`; empty without a value.

    >>> rows = pd.DataFrame({"series": ["padded", "packed", "packed"], "s": [4.0, 1.0, 9.0]})
    >>> describe_medians(rows, "s", by=["series"])
    'packed: 5; padded: 4'
    """
    found = rows.dropna(subset=[column]).groupby(list(by))[column].median()
    keys = [key if isinstance(key, tuple) else (key,) for key in found.index]
    named = [
        " on ".join(part if isinstance(part, str) else f"{part:g}" for part in key) for key in keys
    ]
    texts = [
        f"{key}: {number(factor * value)}{unit}" for key, value in zip(named, found, strict=True)
    ]
    return "; ".join(texts)


def describe_extremes(values: pd.Series, unit: str = "") -> str:
    """Smallest and largest of named values; of one value, the value. A ratio belongs to the tested
    comparisons.

    >>> describe_extremes(pd.Series({"padded": 400.0, "packed": 1000.0}), " tokens/s")
    '400 tokens/s with padded to 1\u202f000 tokens/s with packed'
    """
    values = values.dropna().astype(float)
    texts = [
        f"{number(values[name])}{unit} with {name}" for name in (values.idxmin(), values.idxmax())
    ]
    if len(values) == 1 or texts[0].split(" with ")[0] == texts[1].split(" with ")[0]:
        return (
            f"{number(values.max())}{unit} with "
            f"{f'all {len(values)}' if len(values) > 1 else values.index[0]}"
        )
    return f"{texts[0]} to {texts[1]}"


def cells(rows: pd.DataFrame) -> Iterator[tuple[str, int, pd.DataFrame]]:
    """(series, world size, rows) of each cell, series in the order of the palette."""
    for name in order_series(rows["series"]):
        for world, group in rows[rows["series"] == name].groupby("world_size"):
            yield name, int(world), group


def median_extremes(
    rows: pd.DataFrame,
    column: str,
    unit: str = "",
    *,
    factor: float = 1.0,
    by: Sequence[str] = ("series",),
) -> str:
    """Extremes of cells' medians over all their runs, at the smallest of several world sizes; empty
    without any.

    >>> rows = pd.DataFrame({"series": ["padded", "packed", "packed"], "world_size": 1, "s": [4.0, 1.0, 9.0]})
    >>> median_extremes(rows, "s", " s")
    '4 s with padded to 5 s with packed'
    >>> median_extremes(pd.concat([rows, rows.assign(world_size=2, s=1.0)]), "s", " s")
    '4 s with padded to 5 s with packed (1 rank)'
    """
    rows = rows.dropna(subset=[column])
    if rows.empty:
        return ""
    ranks = ""
    if "world_size" in rows and rows["world_size"].nunique() > 1:
        fewest = rows["world_size"].min()
        rows = rows[rows["world_size"] == fewest]
        ranks = count(int(fewest), "rank")
    medians = factor * rows.groupby(list(by))[column].median()
    return describe_extremes(medians, unit) + in_brackets(ranks)


def group_by_cell(
    rows: pd.DataFrame, column: str, by: Sequence[str] = ("series", "world_size")
) -> list[pd.Series]:
    """Return the values of each cell, for `describe_spread`."""
    return [group for _, group in rows.dropna(subset=[column]).groupby(list(by))[column]]


def strip_level(series: pd.Series, key: str) -> pd.Series:
    """Names of series without the level of a factor: what a figure shows along that factor as one
    line.

    >>> strip_level(pd.Series(["packed, micro_batch=4, eos=True"]), "micro_batch").tolist()
    ['packed, eos=True']
    """
    return series.str.split(", ").map(
        lambda parts: ", ".join(part for part in parts if not part.startswith(f"{key}="))
    )


def split_caption(text: str, limit: int = SHORT) -> tuple[str, str]:
    """Return (the first sentences of a caption, at least one and at most `limit` letters; the
    remaining sentences).

    >>> split_caption("Dots are runs (Hoefler et al. 2015). Bars are medians. No interval.", 60)
    ('Dots are runs (Hoefler et al. 2015). Bars are medians.', 'No interval.')
    """
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z“])", text.strip())
    count = 1
    while count < len(sentences) and len(" ".join(sentences[: count + 1])) <= limit:
        count += 1
    return " ".join(sentences[:count]), " ".join(sentences[count:])
