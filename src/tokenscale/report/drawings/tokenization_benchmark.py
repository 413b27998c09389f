"""The data path alone: time a useful token, time a batch, and the time before the first batch, by arm."""

import math

import matplotlib.figure
import pandas as pd

from tokenscale.report import captions, text_layout
from tokenscale.report.figure import Figure
from tokenscale.report.style import APPROACHES, GREY, dots, figure, jitter, no_data, number, ordered, plain, style
from tokenscale.report.table import Table

_TIMES = (
    ("us_per_useful_token", "µs / useful token\n(log scale)"),
    ("ms_per_batch", "ms / batch\n(log scale)"),
    ("open_s", "s to open\n(log scale)"),
)
#: at most so many arms are drawn
DRAWN = 8
_TWINS = (("padded", "pretokenized-padded"), ("padding-free", "token-list"))


def drawn_arms(arms: pd.DataFrame) -> list[str]:
    """Return the arms that are drawn, at most `DRAWN`: of more, each approach as it trains and its fastest engine.

    `arms` are rows of `benchmark.sql`. Readers without an approach of their own fill what room is left.
    """
    names = list(dict.fromkeys(arms["arm"]))
    if len(names) <= DRAWN:
        return names
    approaches = [name for name in names if name in APPROACHES]
    warm = arms[arms["engine"].notna() & (arms["cache"] != "cold") & arms["workers"].isna()]
    fastest = []
    for approach in approaches:
        variants = warm[warm["arm"].str.startswith(f"{approach}, ")].groupby("arm")["us_per_useful_token"].median()
        fastest += [variants.idxmin()] if len(variants.dropna()) else []
    chosen = [*approaches, *fastest][:DRAWN]
    plain = [name for name in names if ", " not in name and name not in chosen]
    return [*chosen, *plain[: DRAWN - len(chosen)]]


def _cache(benchmark: pd.DataFrame) -> str:
    """Whether files were in memory."""
    cold = "; those called cold after their files were dropped from it" if (benchmark["cache"] == "cold").any() else ""
    one = "one process" if benchmark["workers"].isna().all() else "one process but for the workers of a DataLoader"
    return f"{benchmark['cache'].mode().get(0, 'unstated')} file cache{cold}, {one}"


def _engine(benchmark: pd.DataFrame) -> str:
    """What tokenizes where an arm's name does not say it."""
    unnamed = benchmark[benchmark["engine"].notna() & benchmark["arm"].isin([online for online, _ in _TWINS])]
    return f" (engine {unnamed['engine'].iloc[0]} where none is named)" if len(unnamed) else ""


def _break_even(benchmark: pd.DataFrame) -> str:
    """From which number of batches on opening and batches of an offline arm take less than those of its online twin.

    By medians over rounds; a pair is left out where it cannot be told, or where the offline batches are the slower.
    """
    median = benchmark.groupby("arm")[["open_s", "ms_per_batch"]].median().dropna()
    found = []
    for online, offline in _TWINS:
        if online in median.index and offline in median.index:
            later_s = median.loc[offline, "open_s"] - median.loc[online, "open_s"]
            saved_s = 1e-3 * (median.loc[online, "ms_per_batch"] - median.loc[offline, "ms_per_batch"])
            if saved_s > 0:
                batches = max(1, math.floor(later_s / saved_s) + 1)
                when = "the first batch" if batches == 1 else f"{number(batches, 9)} batches"
                found.append(f"{offline} needs less time than {online} from {when} on")
    if not found:
        return ""
    return f"Opening and batches together, {captions.listing(found)}; building the store is not counted. "


class TokenizationBenchmark(Figure):
    title = "Data path alone: from stored text or tokens to ready batches"
    queries = ("benchmark",)
    columns = (
        *("benchmark", "arm", "engine", "cache", "workers", "round", "us_per_useful_token", "ms_per_batch", "open_s"),
        "not_useful_share",
    )
    benchmark: pd.DataFrame

    def prepare(self) -> None:
        """Leave out rows without a measurement."""
        self.rows = self.benchmark[self.benchmark["left_out"].isna()]
        self.arms = self.rows[~self.rows["is_limit"].astype(bool)]

    def finding(self) -> str:
        """Return the fastest and the slowest of the drawn arms."""
        drawn = self.arms[self.arms["arm"].isin(drawn_arms(self.arms))]
        medians = drawn.groupby("arm")["us_per_useful_token"].median().dropna()
        return f"Reading alone, per useful token: {captions.extremes(medians, ' µs')}" if len(medians) else self.title

    def table(self) -> Table | None:
        """Return the medians of all arms."""
        columns = [
            ("arm", False),
            ("rounds", True),
            ("µs / useful token", True),
            ("ms / batch", True),
            ("s to open", True),
        ]
        measures = [column for column, _ in _TIMES]
        rows = []
        for name in ordered(self.rows["arm"]):
            here = self.rows[self.rows["arm"] == name]
            medians = here[measures].astype(float).median()
            rows.append([name, str(here["round"].nunique()), *(number(medians[column]) for column in measures)])
        return Table(columns, rows, "Medians over rounds.") if rows else None

    def draw(self) -> matplotlib.figure.Figure:
        """Draw three panels, logarithmic, a row for each of `drawn_arms`: rounds as dots, the limit of copying as a "
        "line."""
        names = ordered(drawn_arms(self.arms))[::-1]
        bounds = self.rows["is_limit"].astype(bool)
        with style():
            made, panels = figure(len(_TIMES), height=1.6 + 0.36 * max(3, len(names)), sharey=True)
            for axes, (column, label) in zip(panels, _TIMES, strict=True):
                axes.set_xlabel(label)
                shown = self.rows[(self.rows[column] > 0) & (bounds | self.rows["arm"].isin(names))]
                shown = shown[~shown["is_limit"].astype(bool)] if column == "open_s" else shown  # which opens nothing
                if shown.empty:
                    no_data(axes, "no data: 0 of 0 rounds")
                    continue
                axes.set_xscale("log")
                for y, name in enumerate(names):
                    values = shown.loc[shown["arm"] == name, column]
                    axes.plot(values, [y + o for o in jitter(len(values))], **dots(name))
                    if len(values):
                        axes.plot([values.median()] * 2, [y - 0.32, y + 0.32], color=dots(name)["color"], linewidth=2)
                bound = shown.loc[shown["is_limit"].astype(bool), column]
                if len(bound):
                    axes.axvline(bound.median(), color=GREY, linestyle=":", linewidth=1.8)
                    axes.text(
                        bound.median(),
                        1.01,
                        "memcpy",
                        transform=axes.get_xaxis_transform(),
                        ha="center",
                        va="bottom",
                        fontsize=9,
                    )
                axes.set_yticks(range(len(names)), text_layout.names(names))
                axes.set_ylim(-0.6, len(names) - 0.4)
                axes.set_xlim(shown[column].min() / 1.6, shown[column].max() * 1.6)
                axes.grid(False, axis="y")
                plain(axes.xaxis, log=True)
            return made

    def caption(self) -> str:
        """Return shape of the batches, rounds, the limit, and how far the arms lie apart."""
        benchmark = self.rows
        if benchmark.empty:
            return "The data path was not measured alone in this experiment: no benchmark file was given."
        first = benchmark.iloc[0]
        rounds = benchmark.groupby("arm")["round"].nunique()
        n = int(rounds.max())
        shown, every = len(drawn_arms(self.arms)), self.arms["arm"].nunique()
        text = (
            "Reading without training: each dot is a round, each bar the median of an arm, the dotted line a copy of "
            f"ready batches in memory. {shown} of {every} arms are drawn; the table has all. "
            f"Batches have {first['rows']} × {first['sequence_length']} tokens, {int(benchmark['batches'].min())} "
            f"or more a round, with {n} interleaved round{'s' * (n != 1)} an arm ({_cache(benchmark)}); "
            f"corpus {first['corpus']}, tokenizer {first['tokenizer']}{_engine(benchmark)}. Opening is timed once a "
            "run: online arms load the tokenizer, and Parquet arms (pretokenized-padded, token-list) decode a store "
            "that fits the cache in memory, so that their batches are copies of decoded rows. "
        )
        text += _break_even(benchmark)
        text += captions.reasons(self.benchmark[self.benchmark["left_out"].notna()], "arm")
        groups = [g for _, g in benchmark.groupby("arm")["us_per_useful_token"] if g.notna().all()]
        return text + captions.kinds(groups, "round", "an arm")

    def alt(self) -> str:
        """Return the medians, read aloud."""
        medians = self.rows.groupby("arm")["us_per_useful_token"].median()
        texts = [f"{arm} {number(medians[arm])}" for arm in ordered(self.rows["arm"])]
        opened = self.rows[~self.rows["is_limit"].astype(bool)].groupby("arm")["open_s"].median()
        opening = [f"{arm} {number(opened[arm])}" for arm in ordered(opened.index)]
        return (
            "Dot plot on logarithmic axes. Median microseconds a useful token: "
            f"{captions.listing(texts) or 'no data'}. Median seconds to open: {captions.listing(opening) or 'no data'}."
        )
