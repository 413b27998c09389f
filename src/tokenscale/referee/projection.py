"""Predict an experiment's throughput on more ranks by fitting the scaling model to its own runs of
weak scaling.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tokenscale.analysis.queries import connect, query
from tokenscale.base.errors import UserError, unknown
from tokenscale.base.wording import count
from tokenscale.referee.scaling_model import COVERAGE, REACH, Fit, Prediction, fit, predict

#: columns that runs of one series must share
SHARED = (
    *(
        "model",
        "sequence_length",
        "micro_batch",
        "precision",
        "device",
        "tensor",
        "pipeline",
        "schedule",
    ),
    *("stages_per_rank", "sharding", "copies"),
)
#: factors that grow with the world size, so that each of its sizes is a series of its own
GROWING = ("global_batch", "layout.shard")


@dataclass(frozen=True)
class Projection:
    """Fit and predictions of one series, useful tokens per step of one rank, and notes for the
    reader.
    """

    series: str
    fit: Fit
    predictions: tuple[Prediction, ...]
    tokens_per_rank: float
    notes: tuple[str, ...]

    def throughput(self, prediction: Prediction) -> tuple[float, float, float, float]:
        """Return useful tokens/s of all ranks: predicted, lower end, upper end, and if efficiency
        stays.
        """
        p = prediction
        tokens = self.tokens_per_rank * prediction.world_size
        return tokens / p.step_s, tokens / p.high_s, tokens / p.low_s, tokens / p.stays_s

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. `measure` is null for predictions, else the world size to measure
        first.
        """
        names = [
            f"useful_tokens_per_s{end}" for end in ("", "_low", "_high", "_if_efficiency_stays")
        ]
        predictions = [
            asdict(p) | dict(zip(names, self.throughput(p), strict=True)) for p in self.predictions
        ]
        return {"kind": "model", "band": COVERAGE} | asdict(self) | {"predictions": predictions}


def project(
    tables: Path,
    *,
    series: str | None = None,
    world_sizes: Sequence[int] | None = None,
    ranks_per_node: int | None = None,
) -> list[Projection]:
    """Fit each series of an experiment's tables and predict. See `project_series` for
    `world_sizes`.

    Raises UserError without runs, for an unknown series, and where `project_series` does.
    """
    with closing(connect(Path(tables))) as connection:
        runs = measured_runs(
            query("inventory", source=connection), throughput=query("throughput", source=connection)
        )
        [(experiment,)] = connection.execute("SELECT any_value(experiment) FROM runs").fetchall()
    if runs.empty:
        what = (
            "a prediction needs finished runs, and no valid run of these tables has steps after "
            "the warm-up."
        )
        raise UserError(what, tables=tables, next=f"snakemake {experiment or 'ddp_scaling_weak'}")
    groups = {name: runs[runs["series"] == name] for name in dict.fromkeys(runs["series"])}
    if series is not None:
        if series not in groups:
            raise unknown(
                "series",
                word=series,
                words=groups,
                tables=tables,
            )
        groups = {series: groups[series]}
    else:  # among several series, one with a single world size is no mistake
        groups = {name: g for name, g in groups.items() if not g["external"].all()} or groups
        groups = {name: g for name, g in groups.items() if g["world_size"].nunique() > 1} or groups
    return [
        project_series(
            name,
            runs=group,
            world_sizes=world_sizes,
            per_node=ranks_per_node,
        )
        for name, group in groups.items()
    ]


def measured_runs(inventory: pd.DataFrame, throughput: pd.DataFrame) -> pd.DataFrame:
    """Return the valid runs of the query `throughput`: columns of `inventory`, means of a step, and
    useful tokens/s.

    Series that differ in `GROWING` alone and have one world size each are one series if they keep
    the global batch or the rows per rank, and share the model in one way.
    """
    of_a_step = {"step_s": throughput["seconds"], "useful_tokens": throughput["useful_tokens"]}
    means = throughput.assign(
        **{name: values / throughput["steps"] for name, values in of_a_step.items()}
    )
    means = means[["run_id", "step_s", "useful_tokens", "useful_tokens_per_s"]]
    runs = inventory[inventory["validity"].isin(["valid", "suspect"])].merge(means, on="run_id")
    runs["external"] = runs["external"].fillna(False).astype(bool)
    parts = (name.split(", ") for name in runs["series"])
    without = [", ".join(part for part in of if part.split("=")[0] not in GROWING) for of in parts]
    for name, group in runs.groupby(pd.Series(without, index=runs.index, dtype=object)):
        sizes = group.groupby("series")["world_size"].nunique()
        one_method = (
            group.loc[group["world_size"] > 1, "method"].nunique() <= 1
            and not group["external"].any()
        )
        batches = group["global_batch"], group["global_batch"] / group["world_size"]
        if (
            len(sizes) > 1
            and sizes.max() == 1
            and one_method
            and min(values.nunique() for values in batches) == 1
        ):
            runs.loc[group.index, "series"] = name
    return runs.sort_values(["series", "world_size", "repeat", "run_id"])


def project_series(
    name: str,
    runs: pd.DataFrame,
    world_sizes: Sequence[int] | None = None,
    per_node: int | None = None,
    held_out: Sequence[int] = (),
) -> Projection:
    """Fit one series of `measured_runs` and predict `world_sizes`; by default the measured and
    held-out ones, and 2 to 16 times the largest measured one, as far as the model applies.

    Raises UserError for runs of other programs, runs whose ranks share cores, series that are no
    weak scaling or differ in more, and requested world sizes to which the model does not apply.
    """
    notes = []
    if excluded := int(runs["external"].sum()):
        notes.append(f"excluded: {count(excluded, 'run')} of other programs")
        runs = runs[~runs["external"]]
    if runs.empty:
        what = "runs of another program do not record how their ranks share the model."
        raise UserError(what, series=name, next="name a series of runs of tokenscale with --series")
    runs = _exclude_shared_cores(name, runs, notes=notes)
    _check_weak_scaling(name, runs)
    largest = runs.loc[runs["world_size"].idxmax()]
    per_replica = int(largest["tensor"] * largest["pipeline"])
    sharded = bool(
        largest["sharding"] == "zero3"
        and 1 < largest["shard"] == largest["world_size"] / per_replica
    )
    found = fit(
        [(int(n), float(s)) for n, s in zip(runs["world_size"], runs["step_s"], strict=True)],
        sharded,
    )
    named = runs.dropna(subset=["node_names"])  # where a launcher recorded the nodes
    on_nodes = named["world_size"] / named["node_names"].str.split(", ").str.len()
    per_node = per_node or (int(on_nodes.max()) if len(named) else 1)
    notes.append("weak scaling: rows per rank are constant")
    if sharded:
        notes.append(
            "weights are sharded over all ranks: published runs of this kind slow down without "
            "warning"
        )
    if per_node == 1:
        notes.append("one kind of link between all ranks; links between nodes may be slower")
    if largest["device_kind"] == "cpu":
        notes.append("CPU: each further rank is taken to have as many cores of its own")
    sizes = world_sizes or sorted(
        {*found.sizes, *held_out, *(found.sizes[-1] * 2**n for n in range(1, 5))}
    )
    obstacles = {
        n: obstacle
        for n in sizes
        if (
            obstacle := _find_obstacle(
                found,
                size=n,
                per_replica=per_replica,
                per_node=per_node,
            )
        )
    }
    if obstacles and world_sizes:
        raise next(iter(obstacles.values()))
    notes += dict.fromkeys(f"not predicted: {obstacle.what}" for obstacle in obstacles.values())
    tokens = float((runs["useful_tokens"] / runs["world_size"]).mean())
    return Projection(
        series=name,
        fit=found,
        predictions=tuple(predict(found, world_size=n) for n in sizes if n not in obstacles),
        tokens_per_rank=tokens,
        notes=tuple(notes),
    )


def _exclude_shared_cores(name: str, runs: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Return the runs whose ranks have cores of their own, and note the others: ranks x threads
    exceed the recorded cores (`oversubscribed`), or cores are divided, so that a rank has fewer
    threads at larger world sizes.
    """
    unknown_cores = (runs["device_kind"] == "cpu") & (runs["world_size"] > 1) & runs["cores"].isna()
    shared = runs["oversubscribed"].fillna(False).astype(bool) | unknown_cores
    left = runs[~shared]
    divided = (runs["device_kind"] == "cpu").any() and left["threads_per_rank"].nunique(
        dropna=False
    ) > 1
    if (shared.any() and left["world_size"].nunique() < 2) or divided:
        pairs = runs[["world_size", "threads_per_rank", "cores"]].drop_duplicates()
        words = "{}: {} each, {}"
        nouns = ("rank", "thread", "core")
        found = "\n".join(
            words.format(*map(_count, row, nouns)) for row in pairs.itertuples(index=False)
        )
        what = (
            "ranks of these runs share the cores of one machine: their step times do not show "
            "how training scales."
        )
        expected = (
            "at least two world sizes with equal threads per rank, and at most as many threads "
            "as cores"
        )
        next_step = (
            "run on GPUs or on a machine with more cores, with `cores_per_rank` in its machine file"
        )
        raise UserError(what, series=name, found=found, expected=expected, next=next_step)
    if shared.any():
        sizes = ", ".join(map(str, sorted(runs.loc[shared, "world_size"].unique())))
        notes.append(
            f"excluded: world size {sizes}: ranks x threads exceed the cores, or the cores are "
            "not recorded"
        )
    return left


def _count(value: float | None, noun: str) -> str:
    if value is None or pd.isna(value):
        return f"unknown {noun}s"
    return count(int(value), noun)


def _check_weak_scaling(name: str, runs: pd.DataFrame) -> None:
    """Raise UserError if the runs are no series of weak scaling. One world size is left to
    `fit`.
    """
    for column in ("global_batch", "tensor", "pipeline", "shard"):
        if (missing := pd.to_numeric(runs[column]).fillna(0) < 1).any():
            what = f"the records of these runs do not contain a valid value of `{column}`."
            where = {
                "runs": ", ".join(runs.loc[missing, "run_id"]),
                "expected": "a number of at least 1",
            }
            next_step = "exclude these runs, or repeat them with this version"
            raise UserError(what, series=name, **where, next=next_step)
    for column in SHARED:
        levels = runs[column].dropna().unique()
        if len(levels) > 1:
            what = (
                f"runs of a series differ in {column}, so that one line does not describe their "
                "step times."
            )
            next_step = (
                "make it a factor of the experiment, so that each level is a series of its own"
            )
            raise UserError(what, series=name, found=", ".join(map(str, levels)), next=next_step)
    if (runs["global_batch"] / runs["world_size"]).nunique() > 1:
        pairs = runs[["world_size", "global_batch"]].drop_duplicates()
        what = "neither the rows per rank nor the global batch are constant over the world sizes."
        if runs["global_batch"].nunique() == 1:
            what = (
                "strong scaling (a constant global batch) cannot be predicted: no published "
                "series tests a model of it."
            )
        found = ", ".join(f"{b} rows at {n}" for n, b in pairs.itertuples(index=False))
        expected = "weak scaling: a global batch in proportion to the ranks"
        next_step = (
            f"measure {2 * runs['world_size'].max()}, or run weak scaling: snakemake "
            "ddp_scaling_weak"
        )
        raise UserError(what, series=name, found=found, expected=expected, next=next_step)


def _find_obstacle(found: Fit, size: int, per_replica: int, per_node: int) -> UserError | None:
    smallest = found.sizes[0]
    largest = found.sizes[-1]
    requested = f"world size {size}"
    if size < smallest:
        what = "a world size below the smallest measured one cannot be predicted."
        next_step = f"measure {size}, or predict {smallest} ranks or more"
        return UserError(what, requested=requested, expected=f"at least {smallest}", next=next_step)
    units = {
        "share one copy of the model": per_replica,
        "fill a node": per_node if size > per_node else 1,
    }
    for why, unit in units.items():
        if size % unit:
            what = f"a world size is not a multiple of the ranks that {why}."
            next_step = f"--world-sizes {size // unit * unit + unit}"
            return UserError(
                what, requested=requested, expected=f"a multiple of {unit}", next=next_step
            )
    if size > per_node >= largest:
        what = (
            "cannot be predicted from these sizes: no measured run uses two nodes; measure "
            f"{2 * per_node}."
        )
        requested = f"{requested} on nodes of {per_node} ranks"
        measured = ", ".join(map(str, found.world_sizes))
        next_step = (
            f"measure {2 * per_node}: add it to the experiment's factors (`layout.data`), and "
            "run again"
        )
        return UserError(what, requested=requested, measured=measured, next=next_step)
    return None


def format_projection(projection: Projection) -> str:
    """Return a projection as plain text: what it rests on, and the table of predictions."""
    found = projection.fit
    lines = [
        f"{projection.series}: a model, not a measurement",
        f"  rests on {len(found.sizes)} runs at world sizes "
        f"{', '.join(map(str, found.world_sizes))}; noise of a run "
        f"{found.noise_source}",
        f"  step = {found.start_s:.4g} s + {found.slope_s:.4g} s x log2(ranks / {found.sizes[0]})",
        *(f"  note: {note}" for note in projection.notes),
        f"  band: {100 * COVERAGE:g} % of further runs; predicted to at most "
        f"{2 ** REACH[found.fully_sharded]} times {found.sizes[-1]} ranks (docs/parallelism.md)",
        (
            f"  {'ranks':>6} {'step s':>10} {'band':>21} {'useful tokens/s':>16} {'band':>23} "
            f"{'if efficiency stays':>19}"
        ),
    ]
    for p in projection.predictions:
        if p.measure in found.world_sizes:
            text = f"cannot be predicted: the runs vary too much; repeat the runs at {p.measure}"
        elif p.measure:
            text = f"cannot be predicted from these sizes; measure {p.measure}"
        else:
            rate, low, high, stays = projection.throughput(p)
            text = f"{p.step_s:>10.4g} {f'{p.low_s:.4g}-{p.high_s:.4g}':>21} {rate:>16,.0f} "
            text += f"{f'{low:,.0f}-{high:,.0f}':>23} {stays:>19,.0f}"
            if p.world_size in found.world_sizes:
                text += " measured"
        lines.append(f"  {p.world_size:>6} {text}")
    return "\n".join(lines)
