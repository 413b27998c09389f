"""An experiment's own runs through the scaling model: what they would do at other world sizes. Always a model."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tokenscale.analysis.queries import connect, damage_reported
from tokenscale.analysis.scaling_model import (
    COVERAGE,
    Fit,
    Links,
    Pipeline,
    Point,
    Prediction,
    Work,
    constants,
    fit,
    predict,
    why_not,
)
from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import read_json
from tokenscale.costs.communication import Link

#: world sizes that are predicted unless others are asked for
WORLD_SIZES = tuple(2**n for n in range(11))
#: steps of each attempt that do not count, as in the queries
WARMUP_STEPS = 3
#: of DDP (its default, 25 MiB): the last one is complete when backward has ended
BUCKET_BYTES = 25 * 2**20
#: what runs of one series must share, but for the global batch of weak scaling
SHARED = (
    *("model", "parameters", "sequence_length", "micro_batch", "precision", "device", "tensor", "pipeline"),
    *("schedule", "stages_per_rank", "sharding", "copies"),
)
#: factors that grow with the world size, so that each of its sizes is a series of its own
GROWING = ("global_batch", "layout.shard")


@dataclass(frozen=True)
class Projection:
    """One series: its fit, what it predicts, useful tokens of a step by world size, and what one should know of it."""

    series: str
    fit: Fit
    predictions: tuple[Prediction, ...]
    tokens: dict[int, float]
    notes: tuple[str, ...]

    def rate(self, prediction: Prediction) -> tuple[float, float, float]:
        """Useful tokens/s (predicted, lower end, upper end) of all ranks."""
        tokens = self.tokens[prediction.world_size]
        return tokens / prediction.step_s, tokens / prediction.high_s, tokens / prediction.low_s

    def efficiency(self, prediction: Prediction) -> float:
        """Useful tokens/s of a rank over those at the smallest fitted world size, both as the model has them."""
        (base,) = predict(self.fit, self.fit.world_sizes[:1])
        first = self.tokens[base.world_size] / base.step_s / base.world_size
        return self.rate(prediction)[0] / prediction.world_size / first


def project(
    tables: Path,
    *,
    series: str | None = None,
    collectives: Sequence[Path] = (),
    world_sizes: Sequence[int] | None = None,
    ranks_per_node: int | None = None,
) -> list[Projection]:
    """Fit each series of an experiment's tables and predict.

    Raises UserError for a series that is not there, one that has too few world sizes or differs in more than them, and
    for a world size that was asked for and cannot be predicted. Without `world_sizes` those of `WORLD_SIZES` that can
    be predicted are; a note says what was left out.
    """
    runs = lines_of(_runs(Path(tables)))
    names = list(dict.fromkeys(runs["series"]))
    if series is not None and series not in names:
        raise unknown("series", series, names, tables=tables)
    sweeps = [_sweep(path) for path in collectives]
    wanted = names if series is None else [series]
    groups = {name: runs[runs["series"] == name] for name in wanted}
    if series is None:  # of many series, those of one world size are no mistake
        groups = {name: g for name, g in groups.items() if g["world_size"].nunique() > 1} or groups
        groups = {name: g for name, g in groups.items() if not g["external"].all()} or groups
    return [project_line(name, group, sweeps, world_sizes, ranks_per_node) for name, group in groups.items()]


def project_line(
    name: str, runs: pd.DataFrame, sweeps: list[dict[str, Any]], world_sizes: Sequence[int] | None, per_node: int | None
) -> Projection:
    """Fit one line of runs, by its name, and predict; None for the world sizes stands for those that can be told.

    `runs` are rows as `lines_of` gives them, one a run: mean seconds of a step and of waiting, useful tokens a step.
    """
    runs, notes = _own(name, runs)
    runs, added = _with_cores(name, runs)
    notes += added
    work, added = _work(name, runs, per_node)
    notes += added
    points = [
        Point(int(r.world_size), float(r.step_s), float(r.waited_s)) for r in runs.itertuples(index=False)
    ]  # fmt: skip
    found = fit(points, work, _links(sweeps, work, runs))
    sizes = list(world_sizes or WORLD_SIZES)
    if world_sizes is None:
        reasons = {n: reason for n in sizes if (reason := why_not(found, n)) is not None}
        sizes = [n for n in sizes if n not in reasons]
        for what in dict.fromkeys(reason.what for reason in reasons.values()):
            left = ", ".join(str(n) for n, reason in reasons.items() if reason.what == what)
            notes.append(f"not predicted: {left}: {what}")
    per_rank = float((runs["useful_tokens"] / runs["world_size"]).mean())
    whole = float(runs["useful_tokens"].mean())
    tokens = {n: whole if work.global_rows else per_rank * n for n in {*sizes, *found.world_sizes}}
    return Projection(name, found, tuple(predict(found, sizes)), tokens, tuple(notes))


def _runs(tables: Path) -> pd.DataFrame:
    """One row a run that counts: its columns, mean seconds of a step after warm-up, waiting, useful tokens a step."""
    with closing(connect(tables)) as connection, damage_reported(connection):
        runs = connection.execute("SELECT * FROM runs WHERE validity IN ('valid', 'suspect')").df()
        steps = connection.execute(
            "SELECT run_id, step_s, coalesce(data_wait_s, 0) AS data_wait_s, useful_tokens FROM steps_global "
            "WHERE step_s IS NOT NULL AND attempt_step >= ? ORDER BY run_id, step",
            [WARMUP_STEPS],
        ).df()
    means = steps.groupby("run_id")[["step_s", "data_wait_s", "useful_tokens"]].mean()
    found = runs.merge(means.rename(columns={"data_wait_s": "waited_s"}).reset_index(), on="run_id")
    if found.empty:
        raise UserError(
            f"no run of these tables has steps after the first {WARMUP_STEPS}.",
            tables=tables,
            next="run the experiment, then `python -m tokenscale ingest …`",
        )
    found["external"] = found["external"].fillna(False).astype(bool)
    return found.sort_values(["series", "world_size", "repeat", "run_id"])


def lines_of(runs: pd.DataFrame) -> pd.DataFrame:
    """With one name for series that differ in `GROWING` alone and have one world size each: a line of scaling, where
    the global batch or the rows of a rank stay and all ranks share the model in one way."""
    runs = runs.assign(line=[_without(name, GROWING) for name in runs["series"]])
    for line, group in runs.groupby("line"):
        sizes = group.groupby("series")["world_size"].nunique()
        alike = group.loc[group["world_size"] > 1, "method"].nunique() <= 1 and not group["external"].any()
        stays = group["global_batch"], group["global_batch"] / group["world_size"]
        if len(sizes) > 1 and sizes.max() == 1 and alike and min(values.nunique() for values in stays) == 1:
            runs.loc[group.index, "series"] = line
    return runs.drop(columns="line").sort_values(["series", "world_size", "repeat", "run_id"])


def _without(series: str, keys: Sequence[str]) -> str:
    return ", ".join(part for part in series.split(", ") if part.split("=")[0] not in keys)


def _own(name: str, runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Without runs of other programs, which do not say how their ranks share the model."""
    ours = runs[~runs["external"]]
    if ours.empty:
        raise UserError(
            "these runs are of another program: how their ranks share the model is not known.",
            series=name,
            next="name a series of runs of tokenscale",
        )
    others = len(runs) - len(ours)
    return ours, [f"left out: {others} run{'s' * (others > 1)} of other programs"] if others else []


def _work(name: str, runs: pd.DataFrame, per_node: int | None) -> tuple[Work, list[str]]:
    """What a step of these runs is made of, and notes."""
    for column in SHARED:
        levels = runs[column].dropna().unique()
        if len(levels) > 1:
            raise UserError(
                f"runs of a series differ in {column}: their step times have no common law.",
                series=name,
                found=", ".join(map(str, levels)),
                next="make it a factor of the experiment, so that each level is a series of its own",
            )
    first = runs.iloc[0]
    if pd.isna(first["parameters"]):
        raise UserError(
            "how many parameters a model has is not in the records of these runs.",
            series=name,
            next="name experiments whose run.json records the model's parameters",
        )
    model_ranks = int(first["tensor"] * first["pipeline"])
    rows = _global_rows(name, runs, model_ranks)
    sharded = int(runs["shard"].max()) > 1
    notes = ["strong scaling: the global batch stays" if rows else "weak scaling: the rows of a rank stay"]
    if per_node is None:
        per_node = _ranks_per_node(runs)
    if per_node == 1:
        notes.append("one link for all ranks, as if each were a node: what lies between nodes may be slower")
    threads = _threads(runs)
    if len(set(threads.values())) > 1:
        by_size = ", ".join(f"{count} at {n}" for n, count in threads.items())
        notes.append(
            f"threads of a rank: {by_size}; computing is taken to be as much slower, and more ranks to have the last"
        )
    exchanged = float(first["parameters"]) / model_ranks * (2 if first["precision"] == "bf16-true" else 4)
    if sharded and first["sharding"] == "zero3":
        exchanged *= 1.5  # weights are gathered for each pass: half an all-reduce each, three in all
    pipelined = int(first["pipeline"]) > 1
    return Work(
        ranks_per_node=per_node,
        global_rows=rows,
        exchanged_bytes=exchanged,
        tail_bytes=0.0 if sharded else min(exchanged, float(BUCKET_BYTES)),
        messages=max(1, round(exchanged / BUCKET_BYTES)),
        latency="tree" if first["device_kind"] == "cuda" and not sharded else "ring",
        model_ranks=model_ranks,
        pipeline=Pipeline(
            int(first["pipeline"]), first["schedule"], int(first["micro_batch"]), int(first["stages_per_rank"])
        )
        if pipelined
        else None,
        threads=threads,
    ), notes


def _with_cores(name: str, runs: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Without runs whose ranks wanted more cores than there are: their steps show that, and no link."""
    crowded = runs["oversubscribed"].fillna(False).astype(bool)
    if not crowded.any():
        return runs, []
    sizes = ", ".join(str(n) for n in sorted(runs.loc[crowded, "world_size"].unique()))
    left = runs[~crowded]
    if left["world_size"].nunique() < 2:
        raise UserError(
            "fewer than two world sizes are left without those whose ranks wanted more cores than there are.",
            series=name,
            left_out=f"world size {sizes}",
            next="fewer threads a rank, or a machine with more cores",
        )
    return left, [f"left out: world size {sizes}: ranks wanted more cores than there are"]


def _threads(runs: pd.DataFrame) -> dict[int, int]:
    """World size → threads of a rank of runs on CPUs, where all of them say."""
    if (runs["device_kind"] != "cpu").any() or runs["threads_per_rank"].isna().any():
        return {}
    return {int(n): int(t) for n, t in runs.groupby("world_size")["threads_per_rank"].first().items()}


def _global_rows(name: str, runs: pd.DataFrame, model_ranks: int) -> int | None:
    """Rows of the global batch in strong scaling; None in weak scaling."""
    if runs["global_batch"].nunique() == 1:
        return int(runs["global_batch"].iloc[0])
    if (runs["global_batch"] * model_ranks / runs["world_size"]).nunique() == 1:
        return None
    pairs = runs[["world_size", "global_batch"]].drop_duplicates()
    raise UserError(
        "neither the global batch nor the rows of a rank stay as the world size grows.",
        series=name,
        found=", ".join(f"{b} rows at {n}" for n, b in pairs.itertuples(index=False)),
        next="keep one of them",
    )


def _ranks_per_node(runs: pd.DataFrame) -> int:
    """Of the run with most ranks on a node, where a launcher says the nodes; 1 where none does."""
    named = runs.dropna(subset=["node_names"])
    if named.empty:
        return 1
    nodes = named["node_names"].str.split(", ").str.len()
    return int((named["world_size"] / nodes).max())


def _sweep(path: Path) -> dict[str, Any]:
    """A file of `benchmark collectives` that has an all-reduce: what the model takes of it."""
    again = "python -m tokenscale benchmark collectives --output sweep.json"
    try:
        result = read_json(path, "sweep of collectives", again)
        if result["benchmark"] != "collectives":
            raise KeyError("benchmark")
        fitted = result["fits"]["all_reduce"]
        link = Link(float(fitted["alpha_s"]), float(fitted["beta_s_per_byte"]), result["latency"])
        return {name: result[name] for name in ("backend", "device", "nodes")} | {"link": link}
    except (KeyError, TypeError, ValueError, IsADirectoryError):
        raise UserError("this is no sweep of all-reduce.", path=path, next=again) from None


def _links(sweeps: list[dict[str, Any]], work: Work, runs: pd.DataFrame) -> Links:
    """A sweep on one node is the link inside nodes, one over several that between them; where each rank counts as a
    node, every sweep is the one between."""
    found: dict[str, Link] = {}
    backend = "nccl" if runs["device_kind"].iloc[0] == "cuda" else "gloo"
    for sweep in sweeps:
        if sweep["backend"] != backend:
            raise UserError(
                "the sweep and the runs used different backends.",
                sweep=f"{sweep['backend']} on {sweep['device']}",
                runs=f"{backend} on {runs['device'].iloc[0]}",
                next="repeat `benchmark collectives` where the runs were",
            )
        leg = "between" if sweep["nodes"] > 1 or work.ranks_per_node == 1 else "inside"
        if leg in found:
            raise UserError(f"two sweeps measure the same link ({leg} nodes).", next="give one of them")
        found[leg] = sweep["link"]
    return Links(**found)


def words(projection: Projection) -> str:
    """A projection as plain text: what was fitted, what could not be, and the table."""
    found = projection.fit
    sizes = ", ".join(map(str, found.world_sizes))
    lines = [
        f"{projection.series}: a model, not a measurement",
        f"  fitted to {len(found.points)} runs at world sizes {sizes}; noise of a run {found.noise_from}",
        f"  constants: {constants(found)}",
        *(f"  left out: {term}: {why}" for term, why in found.left_out.items()),
        *(
            f"  link {leg} nodes, from a sweep: {_describe_link(link)}"
            for leg, link in vars(found.links).items()
            if link
        ),
        *(f"  note: {note}" for note in projection.notes),
        f"  band: {100 * COVERAGE:g} % of further runs, over {1 + len(found.others)} sets of terms that fit",
        f"  {'ranks':>6} {'step s':>10} {'band':>21} {'useful tokens/s':>16} {'band':>23} {'efficiency':>10}",
    ]
    for p in projection.predictions:
        rate, low, high = projection.rate(p)
        kind = " fitted" if p.world_size in found.world_sizes else ""
        lines.append(
            f"  {p.world_size:>6} {p.step_s:>10.4g} {f'{p.low_s:.4g}-{p.high_s:.4g}':>21} {rate:>16,.0f} "
            f"{f'{low:,.0f}-{high:,.0f}':>23} {projection.efficiency(p):>10.3f}{kind}"
        )
    return "\n".join(lines)


def _describe_link(link: Link) -> str:
    return f"{link.alpha_s * 1e6:.1f} us a hop ({link.latency}), {link.beta_s_per_byte * 1e9:.3g} ns a byte"


def facts(projection: Projection) -> dict[str, Any]:
    """A projection as JSON values."""
    found = projection.fit
    return {
        "kind": "model",
        "series": projection.series,
        "fitted_world_sizes": found.world_sizes,
        "runs": len(found.points),
        "constants": found.constants,
        "left_out": found.left_out,
        "residuals": list(found.residuals),
        "links": {leg: link and asdict(link) for leg, link in vars(found.links).items()},
        "noise": found.noise,
        "noise_from": found.noise_from,
        "other_terms": [list(terms) for terms in found.others],
        "band": COVERAGE,
        "notes": list(projection.notes),
        "predictions": [
            {
                **{"world_size": p.world_size, "step_s": p.step_s, "low_s": p.low_s, "high_s": p.high_s},
                **{"parts_s": p.parts_s, "useful_tokens_per_s": projection.rate(p)[0]},
                "efficiency": projection.efficiency(p),
            }
            for p in projection.predictions
        ],
    }
