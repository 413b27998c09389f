"""Predict an experiment's throughput at other world sizes by fitting the scaling model to its own runs."""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tokenscale.analysis.queries import connect, damage_reported
from tokenscale.analysis.scaling_model import (
    BUCKET_BYTES,
    COVERAGE,
    Fit,
    Links,
    Measurement,
    Pipeline,
    Prediction,
    Workload,
    describe_laws,
    find_obstacle,
    fit,
    predict,
)
from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import read_json
from tokenscale.costs.communication import Link

#: world sizes that are predicted by default: up to 256, the largest that the back-test covers for data parallelism
WORLD_SIZES = tuple(2**n for n in range(9))
#: steps of each attempt that do not count, as in the queries
WARMUP_STEPS = 3
#: columns that runs of one series must share
SHARED = (
    *("model", "parameters", "sequence_length", "micro_batch", "precision", "device", "tensor", "pipeline"),
    *("schedule", "stages_per_rank", "sharding", "copies"),
)
#: columns that must be at least 1 in every run
POSITIVE = ("parameters", "world_size", "global_batch", "tensor", "pipeline", "shard")
#: other columns that are read
OTHER = (
    "run_id",
    "series",
    "repeat",
    "method",
    "external",
    "oversubscribed",
    "device_kind",
    "threads_per_rank",
    "cores",
)
COLUMNS = dict.fromkeys((*SHARED, *POSITIVE, *OTHER, "node_names"))
#: factors that grow with the world size, so that each of its sizes is a series of its own
GROWING = ("global_batch", "layout.shard")


@dataclass(frozen=True)
class Projection:
    """Fit and predictions of one series, with useful tokens per step by world size, and notes for the reader.

    `reference` is the prediction at the smallest fitted world size.
    """

    series: str
    fit: Fit
    reference: Prediction
    predictions: tuple[Prediction, ...]
    tokens: dict[int, float]
    notes: tuple[str, ...]

    def throughput(self, prediction: Prediction) -> tuple[float, float, float]:
        """Return useful tokens/s of all ranks (predicted, lower end, upper end): tokens over the step times."""
        tokens = self.tokens[prediction.world_size]
        return tokens / prediction.step_s, tokens / prediction.high_s, tokens / prediction.low_s

    def efficiency(self, prediction: Prediction) -> float:
        """Return useful tokens/s per rank over those of `reference`."""
        per_rank = [self.throughput(p)[0] / p.world_size for p in (prediction, self.reference)]
        return per_rank[0] / per_rank[1]


def project(
    tables: Path,
    *,
    series: str | None = None,
    collectives: Sequence[Path] = (),
    world_sizes: Sequence[int] | None = None,
    ranks_per_node: int | None = None,
) -> list[Projection]:
    """Fit each series of an experiment's tables and predict.

    Raises UserError for an unknown series, a series with too few world sizes or other differences, runs whose ranks
    share cores, and requested world sizes to which the model does not apply. Without `world_sizes`, those of
    `WORLD_SIZES` to which it applies are predicted, and a note names the others.
    """
    runs = merge_scaling_series(_load_runs(Path(tables)))
    names = list(dict.fromkeys(runs["series"]))
    if series is not None and series not in names:
        raise unknown("series", series, names, tables=tables)
    sweeps = [_load_sweep(path) for path in collectives]
    groups = {name: runs[runs["series"] == name] for name in ([series] if series else names)}
    if series is None:  # among several series, one with a single world size is no mistake
        groups = {name: g for name, g in groups.items() if g["world_size"].nunique() > 1} or groups
        groups = {name: g for name, g in groups.items() if not g["external"].all()} or groups
    return [project_series(name, group, sweeps, world_sizes, ranks_per_node) for name, group in groups.items()]


def project_series(
    name: str, runs: pd.DataFrame, sweeps: list[dict[str, Any]], world_sizes: Sequence[int] | None, per_node: int | None
) -> Projection:
    """Fit one series and predict; None for the world sizes stands for `WORLD_SIZES`.

    `runs` has one row per run, as `merge_scaling_series` returns them, with mean seconds of a step and of waiting for
    data, and useful tokens per step.
    """
    runs, notes = _exclude_other_programs(name, runs)
    runs, added = _exclude_shared_cores(name, runs)
    notes += added
    workload, added = _describe_workload(name, runs, per_node)
    notes += added
    measurements = [
        Measurement(int(r.world_size), float(r.step_s), float(r.data_wait_s)) for r in runs.itertuples(index=False)
    ]
    found = fit(measurements, workload, _measured_links(sweeps, workload, runs))
    sizes = list(world_sizes or WORLD_SIZES)
    if world_sizes is None:
        obstacles = {n: obstacle for n in sizes if (obstacle := find_obstacle(found, n)) is not None}
        sizes = [n for n in sizes if n not in obstacles]
        for what in dict.fromkeys(obstacle.what for obstacle in obstacles.values()):
            excluded = ", ".join(str(n) for n, obstacle in obstacles.items() if obstacle.what == what)
            notes.append(f"not predicted: {excluded}: {what}")
    per_rank = float((runs["useful_tokens"] / runs["world_size"]).mean())
    per_step = float(runs["useful_tokens"].mean())
    tokens = {n: per_step if workload.global_rows else per_rank * n for n in {*sizes, *found.world_sizes}}
    reference, *predictions = predict(found, [found.world_sizes[0], *sizes])
    return Projection(name, found, reference, tuple(predictions), tokens, tuple(notes))


# -- runs


def _load_runs(tables: Path) -> pd.DataFrame:
    """Return one row per valid run: its columns, and means per step after warm-up."""
    with closing(connect(tables)) as connection, damage_reported(connection):
        selected = ", ".join(COLUMNS)
        runs = connection.execute(f"SELECT {selected} FROM runs WHERE validity IN ('valid', 'suspect')").df()
        steps = connection.execute(
            "SELECT run_id, step_s, coalesce(data_wait_s, 0) AS data_wait_s, useful_tokens FROM steps_global "
            "WHERE step_s IS NOT NULL AND attempt_step >= ? ORDER BY run_id, step",
            [WARMUP_STEPS],
        ).df()
    means = steps.groupby("run_id")[["step_s", "data_wait_s", "useful_tokens"]].mean()
    found = runs.merge(means.reset_index(), on="run_id")
    if found.empty:
        raise UserError(
            f"no run of these tables has steps after the first {WARMUP_STEPS}.",
            tables=tables,
            next="run the experiment, then `python -m tokenscale ingest …`",
        )
    found["external"] = found["external"].fillna(False).astype(bool)
    return found.sort_values(["series", "world_size", "repeat", "run_id"])


def merge_scaling_series(runs: pd.DataFrame) -> pd.DataFrame:
    """Give one name to series that differ in `GROWING` alone and have one world size each.

    Merged series keep either the global batch or the rows per rank, and share the model in one way.
    """
    runs = runs.assign(merged=[_remove_factors(name, GROWING) for name in runs["series"]])
    for merged, group in runs.groupby("merged"):
        sizes = group.groupby("series")["world_size"].nunique()
        one_method = group.loc[group["world_size"] > 1, "method"].nunique() <= 1 and not group["external"].any()
        batches = group["global_batch"], group["global_batch"] / group["world_size"]
        if len(sizes) > 1 and sizes.max() == 1 and one_method and min(values.nunique() for values in batches) == 1:
            runs.loc[group.index, "series"] = merged
    return runs.drop(columns="merged").sort_values(["series", "world_size", "repeat", "run_id"])


def _remove_factors(series: str, keys: Sequence[str]) -> str:
    return ", ".join(part for part in series.split(", ") if part.split("=")[0] not in keys)


def _exclude_other_programs(name: str, runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the runs of tokenscale, and notes: other programs do not record how their ranks share the model."""
    ours = runs[~runs["external"]]
    if ours.empty:
        raise UserError(
            "runs of another program do not record how their ranks share the model.",
            series=name,
            next="name a series of runs of tokenscale",
        )
    others = len(runs) - len(ours)
    return ours, [f"excluded: {others} run{'s' * (others > 1)} of other programs"] if others else []


def _exclude_shared_cores(name: str, runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the runs whose ranks have cores of their own, and notes.

    On a CPU, ranks share cores if ranks x threads exceed the recorded cores (`oversubscribed`), or if the cores of one
    machine are divided, so that a rank has fewer threads at larger world sizes. Such step times measure the machine's
    cores, not how training scales.
    """
    unknown_cores = (runs["device_kind"] == "cpu") & (runs["world_size"] > 1) & runs["cores"].isna()
    shared = runs["oversubscribed"].fillna(False).astype(bool) | unknown_cores
    left = runs[~shared]
    notes = []
    if shared.any():
        sizes = ", ".join(str(n) for n in sorted(runs.loc[shared, "world_size"].unique()))
        notes.append(f"excluded: world size {sizes}: ranks x threads exceed the cores, or the cores are not recorded")
    on_cpu = bool((runs["device_kind"] == "cpu").any())
    divided = on_cpu and left["threads_per_rank"].nunique(dropna=False) > 1
    if (shared.any() and left["world_size"].nunique() < 2) or divided:
        pairs = runs[["world_size", "threads_per_rank", "cores"]].drop_duplicates().itertuples(index=False)
        raise UserError(
            "ranks of these runs share the cores of one machine: their step times do not show how training scales.",
            series=name,
            found="\n".join(
                f"{n} rank{'s' * (n > 1)}: {_count(threads)} threads each, {_count(cores)} cores"
                for n, threads, cores in pairs
            ),
            expected="at least two world sizes with equal threads per rank, and at most as many threads as cores",
            next="run on GPUs or on a machine with more cores, with `cores_per_rank` in its machine file",
        )
    return left, notes


def _count(value: float | None) -> str:
    return "unknown" if pd.isna(value) else str(int(value))


# -- workload and links


def _describe_workload(name: str, runs: pd.DataFrame, per_node: int | None) -> tuple[Workload, list[str]]:
    """Return the work and communication of a step of these runs, and notes."""
    for column in POSITIVE:
        values = pd.to_numeric(runs[column]).fillna(0)
        if (values < 1).any():
            raise UserError(
                f"the records of these runs do not contain a valid value of `{column}`.",
                series=name,
                runs=", ".join(runs.loc[values < 1, "run_id"]),
                expected="a number of at least 1",
                next="exclude these runs, or repeat them with this version",
            )
    for column in SHARED:
        levels = runs[column].dropna().unique()
        if len(levels) > 1:
            raise UserError(
                f"runs of a series differ in {column}, so that no common law describes their step times.",
                series=name,
                found=", ".join(map(str, levels)),
                next="make it a factor of the experiment, so that each level is a series of its own",
            )
    first = runs.iloc[0]
    ranks_per_replica = int(first["tensor"] * first["pipeline"])
    rows = _constant_global_rows(name, runs, ranks_per_replica)
    sharded = int(runs["shard"].max()) > 1
    notes = ["strong scaling: the global batch is constant" if rows else "weak scaling: rows per rank are constant"]
    if per_node is None:
        per_node = _ranks_per_node(runs)
    if per_node == 1:
        notes.append("one kind of link between all ranks; links between nodes may be slower")
    if first["device_kind"] == "cpu":
        notes.append("CPU: each further rank is taken to have as many cores of its own")
    communicated = float(first["parameters"]) / ranks_per_replica * (2 if first["precision"] == "bf16-true" else 4)
    if sharded and first["sharding"] == "zero3":
        communicated *= 1.5  # forward and backward each gather the weights: three halves of an all-reduce
    pipeline = None
    if int(first["pipeline"]) > 1:
        stages, micro_batch = int(first["pipeline"]), int(first["micro_batch"])
        pipeline = Pipeline(stages, first["schedule"], micro_batch, int(first["stages_per_rank"]))
    return Workload(
        ranks_per_node=per_node,
        global_rows=rows,
        communicated_bytes=communicated,
        tail_bytes=0.0 if sharded else min(communicated, float(BUCKET_BYTES)),
        messages=max(1, round(communicated / BUCKET_BYTES)),
        ranks_per_replica=ranks_per_replica,
        pipeline=pipeline,
    ), notes


def _constant_global_rows(name: str, runs: pd.DataFrame, ranks_per_replica: int) -> int | None:
    """Return the rows of the global batch in strong scaling; None in weak scaling."""
    if runs["global_batch"].nunique() == 1:
        return int(runs["global_batch"].iloc[0])
    if (runs["global_batch"] * ranks_per_replica / runs["world_size"]).nunique() == 1:
        return None
    pairs = runs[["world_size", "global_batch"]].drop_duplicates()
    raise UserError(
        "neither the global batch nor the rows per rank are constant over the world sizes.",
        series=name,
        found=", ".join(f"{b} rows at {n}" for n, b in pairs.itertuples(index=False)),
        next="keep one of them constant",
    )


def _ranks_per_node(runs: pd.DataFrame) -> int:
    """Return the largest number of ranks on a node if a launcher recorded the nodes, else 1."""
    named = runs.dropna(subset=["node_names"])
    if named.empty:
        return 1
    nodes = named["node_names"].str.split(", ").str.len()
    return int((named["world_size"] / nodes).max())


def _load_sweep(path: Path) -> dict[str, Any]:
    """Return backend, device, nodes and link of a file of `benchmark collectives` that contains an all-reduce."""
    again = "python -m tokenscale benchmark collectives --output sweep.json"
    try:
        result = read_json(path, "sweep of collectives", again)
        if result["benchmark"] != "collectives":
            raise KeyError("benchmark")
        fitted = result["fits"]["all_reduce"]
        link = Link(float(fitted["alpha_s"]), float(fitted["beta_s_per_byte"]), result["latency"])
        if link.latency not in ("ring", "tree") or not all(
            0 <= value < math.inf for value in (link.alpha_s, link.beta_s_per_byte)
        ):
            raise ValueError("latency")
        return {name: result[name] for name in ("backend", "device", "nodes")} | {"link": link}
    except (KeyError, TypeError, ValueError, IsADirectoryError):
        raise UserError(
            "this file is not a valid sweep of all-reduce.",
            path=path,
            expected="`fits.all_reduce` with alpha_s and beta_s_per_byte of at least 0",
            next=again,
        ) from None


def _measured_links(sweeps: list[dict[str, Any]], workload: Workload, runs: pd.DataFrame) -> Links:
    """Return the links of the sweeps: one node measures the link within nodes, several nodes that between them.

    If each rank counts as a node, every sweep measures the link between nodes.
    """
    found: dict[str, Link] = {}
    backend = "nccl" if runs["device_kind"].iloc[0] == "cuda" else "gloo"
    for sweep in sweeps:
        if sweep["backend"] != backend:
            raise UserError(
                "the sweep and the runs used different backends.",
                sweep=f"{sweep['backend']} on {sweep['device']}",
                runs=f"{backend} on {runs['device'].iloc[0]}",
                next="repeat `benchmark collectives` on the machine of the runs",
            )
        level = "inter_node" if sweep["nodes"] > 1 or workload.ranks_per_node == 1 else "intra_node"
        if level in found:
            raise UserError(f"two sweeps measure the same link ({level}).", next="remove one of them")
        found[level] = sweep["link"]
    return Links(**found)


# -- output


def format_projection(projection: Projection) -> str:
    """Return a projection as plain text: what was fitted, the notes, and the table of predictions."""
    found = projection.fit
    sizes = ", ".join(map(str, found.world_sizes))
    lines = [
        f"{projection.series}: a model, not a measurement",
        f"  fitted to {len(found.measurements)} runs at world sizes {sizes}; noise of a run {found.noise_source}",
        f"  laws, with their weights: {describe_laws(found)}",
        *(f"  link {level}, from a sweep: {_describe_link(link)}" for level, link in vars(found.links).items() if link),
        *(f"  note: {note}" for note in projection.notes),
        f"  band: {100 * COVERAGE:g} % of further runs; contention beyond {found.world_sizes[-1]} ranks included",
        f"  {'ranks':>6} {'step s':>10} {'band':>21} {'useful tokens/s':>16} {'band':>23} {'efficiency':>10}",
    ]
    for p in projection.predictions:
        if p.measure is not None:
            lines.append(f"  {p.world_size:>6} {_explain_unpredictable(found, p)}")
            continue
        rate, low, high = projection.throughput(p)
        fitted = " fitted" if p.world_size in found.world_sizes else ""
        lines.append(
            f"  {p.world_size:>6} {p.step_s:>10.4g} {f'{p.low_s:.4g}-{p.high_s:.4g}':>21} {rate:>16,.0f} "
            f"{f'{low:,.0f}-{high:,.0f}':>23} {projection.efficiency(p):>10.3f}{fitted}"
        )
    return "\n".join(lines)


def _explain_unpredictable(found: Fit, prediction: Prediction) -> str:
    if prediction.measure == found.world_sizes[-1]:
        return f"cannot be predicted from these runs: they vary too much; repeat the runs at {prediction.measure}"
    return f"cannot be predicted from these sizes; measure {prediction.measure}"


def _describe_link(link: Link) -> str:
    return f"{link.alpha_s * 1e6:.1f} us per hop ({link.latency}), {link.beta_s_per_byte * 1e9:.3g} ns per byte"


def projection_to_json(projection: Projection) -> dict[str, Any]:
    """Return a projection as JSON values. `measure` is null for predictions, else the world size to measure first."""
    found = projection.fit
    return {
        "kind": "model",
        "series": projection.series,
        "fitted_world_sizes": found.world_sizes,
        "runs": len(found.measurements),
        "candidates": [asdict(candidate) for candidate in found.candidates],
        "links": {level: link and asdict(link) for level, link in vars(found.links).items()},
        "noise": found.noise,
        "noise_source": found.noise_source,
        "band": COVERAGE,
        "notes": list(projection.notes),
        "predictions": [
            asdict(p) | {"useful_tokens_per_s": projection.throughput(p)[0], "efficiency": projection.efficiency(p)}
            for p in projection.predictions
        ],
    }
