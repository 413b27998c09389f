"""The data path alone: time a useful token, time a batch, and the time before the first batch, by
arm.
"""

import math

import pandas as pd

from tokenscale.report import captions, panels
from tokenscale.report.figure import Drawing, Figure
from tokenscale.report.style import (
    APPROACHES,
    GREY,
    dots,
    figure,
    format_ticks,
    jitter,
    no_data,
    number,
    order_series,
)
from tokenscale.report.table import Table, columns

_TIMES = {
    "us_per_useful_token": "µs / useful token",
    "ms_per_batch": "ms / batch",
    "open_s": "s to open",
}
#: at most so many arms are drawn
DRAWN = 8
#: first word of the arms that read as the source studies do
STUDIES = "studies'"
_TWINS = (("padded", "pretokenized-padded"), ("padding-free", "token-list"))


def drawn_arms(arms: pd.DataFrame) -> list[str]:
    """Return the arms that are drawn, at most `DRAWN`: of more, each approach as it trains and its
    fastest engine.

    `arms` are rows of `benchmark.sql`. Readers without an approach of their own fill what room is
    left.
    """
    names = list(dict.fromkeys(arms["arm"]))
    if len(names) <= DRAWN:
        return names
    approaches = [name for name in names if name in APPROACHES]
    warm = arms[arms["engine"].notna() & (arms["cache"] != "cold") & arms["workers"].isna()]
    fastest = []
    for approach in approaches:
        variants = (
            warm[warm["arm"].str.startswith(f"{approach}, ")]
            .groupby("arm")["us_per_useful_token"]
            .median()
        )
        fastest += [variants.idxmin()] if len(variants.dropna()) else []
    chosen = [*approaches, *fastest][:DRAWN]
    plain = [name for name in names if ", " not in name and name not in chosen]
    return [*chosen, *plain[: DRAWN - len(chosen)]]


class TokenizationBenchmark(Figure):
    title = "Data path alone: from stored text or tokens to ready batches"
    read = title + ". Median microseconds a useful token: {}."
    queries = ("benchmark",)
    columns = (
        "benchmark",
        "arm",
        "engine",
        "cache",
        "workers",
        "round",
        "us_per_useful_token",
        "ms_per_batch",
        "open_s",
        "not_useful_share",
    )
    main = "us_per_useful_token"
    by = ("arm",)

    def prepare(self) -> None:
        rows = self.first[self.first["left_out"].isna()]
        self.rows = rows.assign(repeat=rows["round"])
        self.refusals = ""
        limits = rows["is_limit"].astype(bool)
        self.limits = self.rows[limits]
        self.arms = self.rows[~limits]
        self.drawn = self.arms[self.arms["arm"].isin(drawn_arms(self.arms))]

    def finding(self) -> str:
        found = captions.median_extremes(
            self.drawn,
            column=self.main,
            unit=" µs",
            by=self.by,
        )
        return f"Reading alone, per useful token: {found}" if found else self.title

    def table(self) -> Table | None:
        """Return the medians of all arms but those of the source studies, which the data has."""
        medians = (
            self.rows.astype(dict.fromkeys(_TIMES, float)).groupby("arm")[list(_TIMES)].median()
        )
        rounds = self.rows.groupby("arm")["round"].nunique()
        every = order_series(self.rows["arm"])
        names = [name for name in every if not name.startswith(STUDIES)] or every
        caption = "Medians over repeats."
        if len(names) < len(every):
            caption += " The CSV also has the source studies' arms."
        rows = [
            [name, str(rounds[name]), *map(number, medians.reindex([name]).iloc[0])]
            for name in names
        ]
        heads = columns("arm", ">rounds", *(f">{label}" for label in _TIMES.values()))
        return Table(columns=heads, rows=rows, caption=caption) if rows else None

    def draw(self) -> Drawing:
        """Draw three panels, logarithmic, a row for each of `drawn_arms`: rounds as dots, copying
        as a line.
        """
        names = order_series(self.drawn["arm"])[::-1]
        made, axes_of = figure(len(_TIMES), height=1.6 + 0.36 * max(3, len(names)), sharey=True)
        for axes, (column, label) in zip(axes_of, _TIMES.items(), strict=True):
            axes.set_xlabel(f"{label}\n(log scale)")
            shown, limit = (rows[rows[column] > 0] for rows in (self.drawn, self.limits))
            if column == "open_s":
                limit = limit[:0]  # it opens nothing
            if shown.empty and limit.empty:
                no_data(axes, text="no data: 0 of 0 rounds")
                continue
            axes.set_xscale("log")
            for y, name in enumerate(names):
                values = shown.loc[shown["arm"] == name, column]
                axes.plot(values, [y + o for o in jitter(len(values))], **dots(name))
                if len(values):
                    axes.plot(
                        [values.median()] * 2,
                        [y - 0.32, y + 0.32],
                        color=dots(name)["color"],
                        linewidth=2,
                    )
            if len(limit):
                axes.axvline(
                    middle := limit[column].median(), color=GREY, linestyle=":", linewidth=1.8
                )
                look: dict = {
                    "transform": axes.get_xaxis_transform(),
                    "ha": "center",
                    "va": "bottom",
                    "fontsize": 9,
                }
                axes.text(middle, 1.01, "memcpy", **look)
            panels.name_rows(axes, texts=names)
            every = pd.concat([shown, limit])[column]
            axes.set_xlim(every.min() / 1.6, every.max() * 1.6)
            format_ticks(axes.xaxis, log=True)
        return made

    def caption(self) -> str:
        rows = self.rows
        if rows.empty:
            return (
                "The data path was not measured alone in this experiment: no benchmark file was "
                "given."
            )
        first = rows.iloc[0]
        n = int(rows.groupby("arm")["round"].nunique().max())
        runs = rows["run_id"].notna().any()
        one = "run" if runs else "round"
        of_arm = "run" if runs else "interleaved round"
        cold = (
            "; those called cold after their files were dropped from it"
            if (rows["cache"] == "cold").any()
            else ""
        )
        processes = "one process each" if runs else "one process"
        if rows["workers"].notna().any():
            processes += " but for the workers of a DataLoader"
        unnamed = rows[rows["engine"].notna() & rows["arm"].isin([online for online, _ in _TWINS])]
        engine = (
            f" (engine {unnamed['engine'].iloc[0]} where none is named)" if len(unnamed) else ""
        )
        text = (
            f"Reading without training: each dot is a {one}, each bar the median of an arm, the "
            "dotted line a copy of "
            f"ready batches in memory. {self.drawn['arm'].nunique()} of "
            f"{self.arms['arm'].nunique()} arms are drawn; "
            f"the CSV has all. Batches have {first['rows']} × {first['sequence_length']} tokens, "
            f"{int(rows['batches'].min())} or more a {one}, with "
            f"{captions.count(n, of_arm)} an arm "
            f"({rows['cache'].mode().get(0, 'unstated')} file cache{cold}, {processes}); corpus "
            f"{first['corpus']}, tokenizer "
            f"{first['tokenizer']}{engine}. Opening is timed once a run: online arms load the "
            "tokenizer, and Parquet "
            "arms (pretokenized-padded, token-list) decode a store that fits the cache in "
            "memory, so that their "
            "batches are copies of decoded rows. "
        )
        text += self._break_even() + captions.explain_left_out(
            self.first[self.first["left_out"].notna()], column="arm"
        )
        return text + captions.describe_spread(self.groups(), one=one, cell="an arm")

    def _break_even(self) -> str:
        """Return from which number of batches on an offline arm, with its opening, takes less time
        than its twin.

        By medians over the rounds of both; a pair is left out where the offline batches are not the
        faster.
        """
        found = []
        for twins in _TWINS:
            rows = self.arms[self.arms["arm"].isin(twins)].dropna(subset=["open_s", "ms_per_batch"])
            median = rows.groupby("arm")[["open_s", "ms_per_batch"]].median()
            if len(median) == 2:
                open_s, batch_ms = median.loc[twins[0]] - median.loc[twins[1]]
                if batch_ms > 0:
                    batches = max(1, math.floor(-open_s / (1e-3 * batch_ms)) + 1)
                    when = (
                        "the first batch"
                        if batches == 1
                        else f"{number(batches, digits=9)} batches"
                    )
                    found.append(f"{twins[1]} needs less time than {twins[0]} from {when} on")
        text = (
            f"Opening and batches together, {captions.listing(found)}; building the store is not "
            "counted. "
        )
        return text * bool(found)

    def numbers(self) -> str:
        return captions.describe_medians(self.drawn, column=self.main, by=self.by)
