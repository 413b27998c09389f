"""Experiments: the runs that answer a question, and the state that a run resumes from. `config.py`
reads the YAML.
"""

import copy
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import canonical_json, sha256_text
from tokenscale.settings.benchmarks import (
    InferenceBenchmarkSettings,
    StorageBenchmarkSettings,
)
from tokenscale.settings.extensions import is_reference
from tokenscale.settings.layout import geometry
from tokenscale.settings.machine import Machine
from tokenscale.settings.options import (
    collect,
    decode,
    option,
    raise_errors,
    settings_class,
    to_dict,
)
from tokenscale.settings.registry import ALIASES, BATCHES, FIGURES
from tokenscale.settings.run import RunSettings, find_difference, state_path

STUDIES = {
    "000": "Pretokenization and DDP on Alps (ETH Zürich, 2025)",
    "001": "the same project at an earlier date",
    "002": "Distributed Training Pipeline for Language Models, an overview without results",
    "003": "Distributed training and parallelism for GPT-2 (LLM Systems, 2025)",
    "004": "Distributed LLM Trainer, a learning project",
}
#: compared approaches, as (approach, baseline): offline over online, and packed over both
COMPARISONS = (
    ("pretokenized-padded", "padded"),
    ("token-list", "padding-free"),
    ("packed", "padded"),
    ("packed", "padding-free"),
)

#: sections of settings that change what a loss is in: nats a token of which vocabulary, and of
#: which tokens
LOSS_UNITS = ("tokenizer", "objective", "labels", "eos")
#: primary comparisons of one experiment
MAX_PRIMARY = 3
#: random orders of a pair of blocks, of which the one with the most even successions is taken
DRAWN_ORDERS = 20
#: largest number of runs of one experiment: listing more would exhaust this machine's memory
MAX_RUNS = 100_000
#: scale of an experiment's own settings; other scales are overlays in its file
BASE_SCALE = "demo"
SCALES = (BASE_SCALE, "workstation", "alps", "study", "campaign")


@settings_class
class StorageBenchmark:
    """Benchmark of token stores (bytes, writing, reading), as part of an experiment."""

    corpus: str = option("docstrings", description="name of a corpus in config.yaml")
    tokenizer: str = option("tekken", description="name of a tokenizer in config.yaml")
    settings: StorageBenchmarkSettings = option(
        StorageBenchmarkSettings, description="storage formats and size of the measurement"
    )

    @property
    def id(self) -> str:
        """Name of the result file; experiments with equal settings share it."""
        return f"{self.corpus}-{self.tokenizer}-{sha256_text(canonical_json(to_dict(self)))[:8]}"


@settings_class
class LeftOut:
    """Combinations of levels that an experiment does not run, and why."""

    cells: dict[str, Any] = option(
        description="dotted key → level; cells with all of these levels are left out"
    )
    reason: str = option(description="reason, shown in the report")


@settings_class
class Canary:
    """Cell that is repeated throughout the campaign, to measure noise and drift."""

    cell: dict[str, Any] = option(
        description="dotted key → level; enough levels to identify one cell"
    )
    every: int = option(
        10,
        description="other runs between two runs of the canary; it also runs first and last",
        ge=1,
    )


@settings_class
class PrimaryComparison:
    """Two cells whose difference answers the question, in pairs of runs of one repeat."""

    of: dict[str, Any] = option(
        description="dotted key → level: what is compared, such as {approach: packed}"
    )
    over: dict[str, Any] = option(description="the same keys with the levels of the baseline")
    at: dict[str, Any] = option(
        dict, description="dotted key → level of further factors; enough to identify one cell each"
    )
    quantity: Literal["useful_tokens_per_s", "validation_loss"] = option(
        "useful_tokens_per_s",
        description="number that is compared: useful tokens per second, or the loss after the last step",
    )
    margin: float | None = option(
        None,
        description="with validation_loss: nats a useful token below which losses count as equal; "
        "none: no verdict `equivalent`. Rates have 1 %",
        gt=0,
    )


#: keys of a run table that state the design of an experiment: what may not be chosen afterwards
DESIGN = (
    *("question", "scale", "factors", "left_out", "repeats", "cell_repeats"),
    *("primary", "target_loss"),
)


def digest_design(table: Mapping[str, Any]) -> str:
    """Return the digest of the design that a run table states: question, cells, primary comparisons
    with quantities and margins, target, and the number of repeats, at which the runs stop.
    """
    return sha256_text(canonical_json({key: table.get(key) for key in DESIGN}))


@settings_class
class ResumeFrom:
    """Run of the same experiment and repeat, and the step after which another run resumes from
    it.
    """

    run: dict[str, Any] = option(
        description="dotted key → level; enough levels to identify the cell. Other factors have the same "
        "level as in "
        "this run. A run that was itself resumed is selected only with `resume_from` among the "
        "levels"
    )
    step: int = option(description="optimizer step after which that run keeps a resume state", ge=0)


@settings_class
class SourceStudy:
    """Source studies with the same question: their results, and what this experiment corrects."""

    studies: tuple[str, ...] = option(
        tuple, description="numbers of the studies, such as 000; empty for own questions"
    )
    measured: str = option("", description="what the studies measured, with their figures")
    wrong: str = option("", description="what was wrong with that measurement")
    ours: str = option("", description="what this experiment measures, and why the numbers differ")


@settings_class
class Experiment:
    """One file in config/experiments, with the overlay of the scale applied."""

    question: str = option(description="question that the experiment answers, in one sentence")
    note: str = option("", description="what a reader must know before trusting the result")
    original: SourceStudy = option(
        SourceStudy, description="results of the source studies, and what this experiment corrects"
    )
    runs: dict[str, Any] = option(dict, description="settings shared by all runs (see RunSettings)")
    factors: dict[str, list[Any]] = option(
        dict,
        description="dotted key of a run's setting → its levels. A level that is a mapping is merged over "
        "`runs`. Several keys, "
        "separated by commas, vary together: each level is then a list with one value per key",
    )
    left_out: tuple[LeftOut, ...] = option(
        tuple, description="combinations that are not run: `cells` (levels by key) and `reason`"
    )
    repeats: int = option(1, description="runs per cell; each has its own seed", ge=1)
    primary: tuple[PrimaryComparison, ...] | None = option(
        None,
        description="one to three comparisons that answer the question: only they get a verdict, corrected "
        "over them (Holm). `[]` "
        "for a question that counts and equalities answer; by default every pair of approaches "
        "is compared",
    )
    primary_repeats: int | None = option(
        None, description="runs per cell of a primary comparison, if more than `repeats`", ge=1
    )
    order_seed: int = option(
        0, description="seed of the randomised order in which runs start", ge=0
    )
    share_nodes: bool = option(
        False,
        description="on a cluster that charges whole nodes, runs that need less than a node stand on one side by "
        "side; their times are then those of runs in company, and the report says so",
    )
    canary: Canary | None = option(
        None,
        description="further repeats of one cell, spread over the campaign: noise floor and drift",
    )
    target_loss: float | None = option(
        None,
        description="validation loss (nats per useful token) for time to target, chosen before the runs; by "
        "default the highest "
        "final loss of any run",
        gt=0,
    )
    storage_benchmark: StorageBenchmark | None = option(
        None, description="also benchmark token stores: bytes, writing and reading"
    )
    inference_benchmark: InferenceBenchmarkSettings | None = option(
        None,
        description=(
            "also generate text with the trained models, and measure its speed with and without a "
            "key-value cache"
        ),
    )
    figures: tuple[str, ...] = option(tuple, description="figures of the experiment's page")
    scales: dict[str, dict[str, Any]] = option(
        dict,
        description="scale → overlay, merged over the rest of the file, which is scale demo; `{}` changes "
        "nothing, null removes a "
        "factor. The experiment is not run at a scale without an overlay",
    )

    @property
    def has_runs(self) -> bool:
        """False for an experiment with a benchmark, but without `runs` and `factors`."""
        return bool(self.runs or self.factors or self.storage_benchmark is None)

    def benchmark_files(self, name: str) -> list[str]:
        """Return the result files of the benchmarks. `name` of the experiment is the inference
        benchmark's name.
        """
        found = []
        if self.storage_benchmark is not None:
            found.append(f"results/benchmarks/storage/{self.storage_benchmark.id}.json")
        if self.inference_benchmark is not None:
            found.append(f"results/benchmarks/inference/{name}.json")
        return found


def describe_repeats(experiment: Experiment) -> str:
    """Return the repeats of the cells in words.

    >>> describe_repeats(Experiment("?", repeats=3))
    '3'
    """
    more = experiment.primary_repeats or 1
    if not experiment.primary or more <= experiment.repeats:
        return str(experiment.repeats)
    return f"{experiment.repeats}, {more} in primary comparisons"


@dataclass(frozen=True)
class Run:
    """Row of the run table: the settings, and their position in the design."""

    settings: RunSettings
    cell: dict[str, Any]
    repeat: int
    position: int
    share_nodes: bool = False

    @cached_property
    def run_id(self) -> str:
        return self.settings.identity

    def count_places(self, machine: Machine) -> int:
        """Return how many such runs stand on a node at once: 1 where a run does not share nodes,
        fills one, or asks for its GPUs alone.
        """
        if not self.share_nodes or not machine.exclusive or machine.gpus_per_node is None:
            return 1
        shape = geometry(self.settings.layout.world_size, gpus_per_node=machine.gpus_per_node)
        return machine.gpus_per_node // shape.ranks_per_node if shape.nodes == 1 else 1


def merge_settings(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """Return a deep copy of `base` with `overlay` applied: mappings are merged, other values
    replaced.
    """
    result = copy.deepcopy(base)
    for key, value in overlay.items():
        mergeable = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = (
            merge_settings(result[key], overlay=value) if mergeable else copy.deepcopy(value)
        )
    return result


def set_dotted(values: dict[str, Any], key: str, value: object) -> None:
    """Set `a.b.c` in nested mappings, merging mappings. A parent that is a name becomes `{"preset":
    name}`.
    """
    *parents, last = key.split(".")
    for parent in parents:
        inner = values.get(parent, {})
        values[parent] = inner if isinstance(inner, dict) else {"preset": inner}
        values = values[parent]
    values[last] = merge_settings({last: values.get(last)}, overlay={last: value})[last]


def flatten_cell(cell: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a cell with the settings of nested mappings as dotted keys.

    >>> flatten_cell({"layout": {"data": 2, "tensor": 2}, "micro_batch": 4})
    {'layout.data': 2, 'layout.tensor': 2, 'micro_batch': 4}
    """
    result: dict[str, Any] = {}
    for key, value in cell.items():
        inner = isinstance(value, dict) and value
        result |= (
            flatten_cell(value, prefix=f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
        )
    return result


def matches(cell: dict[str, Any], levels: dict[str, Any]) -> bool:
    """Whether a cell has all of these levels."""
    flat = flatten_cell(cell)
    return all(key in flat and flat[key] == value for key, value in flatten_cell(levels).items())


def factor_keys(factor: str) -> list[str]:
    """Return the dotted keys that a factor varies: one, or several that vary together.

    >>> factor_keys("layout.data, global_batch")
    ['layout.data', 'global_batch']
    """
    return [key.strip() for key in factor.split(",")]


def varied_keys(factors: Iterable[str]) -> list[str]:
    return [key for factor in factors for key in factor_keys(factor)]


def factor_level(cell: dict[str, Any], factor: str) -> Any:
    """Return a factor's level in a cell: a value, or the list of values of keys that vary
    together.
    """
    values = [cell[key] for key in factor_keys(factor)]
    return values if len(values) > 1 else values[0]


def find_factor_errors(factors: dict[str, list[Any]]) -> Iterator[tuple[str, str]]:
    """Yield (key, what is wrong) for each factor that cannot be expanded into cells."""
    seen: set[str] = set()
    for factor, levels in factors.items():
        keys = factor_keys(factor)
        where = f"factors.{factor}"
        if not levels:
            yield where, "the factor has no levels"
        if not all(keys):
            yield where, "a factor's name has an empty part: separate dotted keys by single commas"
        for key in keys:
            if key in seen:
                yield where, f"{key} appears twice among the factors"
            seen.add(key)
        for level in levels if len(keys) > 1 else ():
            if not isinstance(level, list) or len(level) != len(keys):
                yield (
                    where,
                    (
                        f"the level {canonical_json(level)} is not a list of {len(keys)} values, "
                        "one "
                        "per key"
                    ),
                )


def _list_levels(experiment: Experiment, key: str) -> list[str]:
    """Return the levels of a key that are text, once each, in the order of the file."""
    cells = expand_cells(replace(experiment, left_out=()))
    levels = [cell[key] for cell in cells if isinstance(cell.get(key), str)]
    return list(dict.fromkeys(levels))


def find_errors(
    experiment: Experiment, **known: Mapping[str, Any]
) -> Iterator[UserError | tuple[str, str]]:
    """Yield the errors of a design whose factors can be expanded. `known` are each `corpus` and
    `tokenizer`.
    """
    factors = experiment.factors
    repeats = max(experiment.repeats, experiment.primary_repeats or 1)
    if (requested := repeats * math.prod(map(len, factors.values()))) > MAX_RUNS:
        text = (
            f"too many runs: {requested:,}, at most {MAX_RUNS:,}. Use fewer levels or repeats, "
            "or more experiments"
        )
        yield "factors, repeats", text
        return  # cells cannot be listed
    if "seed" in varied_keys(factors) and experiment.repeats > 1:
        yield "factors.seed", "seed 0, repeat 1 equals seed 1, repeat 0: use repeats alone"
    used: list[tuple[str, Iterable[str], Iterable[str], str]]
    used = [("study", experiment.original.studies, STUDIES, "original.studies")]
    figures = [name for name in experiment.figures if not is_reference(name)]
    used += [("figure", figures, (*FIGURES, *ALIASES), "figures")]
    # a misspelt level would be found where `primary` or `left_out` names it
    used.append(("approach", _list_levels(experiment, key="approach"), BATCHES, "factors.approach"))
    if (benchmark := experiment.storage_benchmark) is not None:
        used += [
            (w, (getattr(benchmark, w),), names, f"storage_benchmark.{w}")
            for w, names in known.items()
        ]
    for word, found, names, key in used:
        yield from (
            unknown(
                word,
                word=name,
                words=names,
                key=key,
            )
            for name in found
            if name not in names
        )
    every = expand_cells(replace(experiment, left_out=()))
    for number, left in enumerate(experiment.left_out):
        if not left.cells or not any(matches(cell, levels=left.cells) for cell in every):
            yield (
                f"left_out.{number}.cells",
                f"no cell of the experiment has {canonical_json(left.cells)}: remove it",
            )
    if every and not expand_cells(experiment):
        yield "left_out", "every cell is left out"
    yield from _find_primary_errors(experiment)
    if experiment.canary is not None:
        errors: list[UserError] = []
        with collect(errors):
            find_cell(experiment, levels=experiment.canary.cell, key="canary.cell")
        yield from errors


def expand_cells(experiment: Experiment) -> list[dict[str, Any]]:
    """Return all combinations of levels that are not left out, in the order of the file, with plain
    dotted keys.
    """
    if not experiment.has_runs:
        return []
    choices = []
    for factor, levels in experiment.factors.items():
        keys = factor_keys(factor)
        choices.append(
            [dict(zip(keys, level if len(keys) > 1 else [level], strict=True)) for level in levels]
        )
    product = [
        dict(pair for part in parts for pair in part.items())
        for parts in itertools.product(*choices)
    ]
    return [
        cell
        for cell in product
        if not any(matches(cell, levels=left.cells) for left in experiment.left_out)
    ]


def cell_values(experiment: Experiment, cell: dict[str, Any]) -> dict[str, Any]:
    """Return the values of `runs` with the levels of a cell applied."""
    values = merge_settings(experiment.runs, overlay={})
    for key, level in cell.items():
        set_dotted(values, key, value=level)
    return values


def format_cell(cell: dict[str, Any]) -> str:
    """Return a cell as text, as the table `runs` names it, in the order of the keys: a file of JSON
    has no other.
    """
    levels = sorted(flatten_cell(cell).items())
    return ", ".join(f"{key}={v if isinstance(v, str) else canonical_json(v)}" for key, v in levels)


def find_cell(
    experiment: Experiment,
    levels: dict[str, Any],
    key: str,
    fits: Callable[[dict[str, Any]], bool] = lambda cell: True,
) -> dict[str, Any]:
    """Return the fitting cell with exactly these levels, else the only one that has them; or raise
    UserError.
    """
    found = [cell for cell in expand_cells(experiment) if matches(cell, levels) and fits(cell)]
    found = [cell for cell in found if flatten_cell(cell) == flatten_cell(levels)] or found
    if len(found) != 1:
        what = f"these levels match {'several cells' if found else 'no cell'} of the experiment."
        cells = "\n".join(map(canonical_json, found or expand_cells(experiment)))
        following = "give the levels of exactly one cell"
        raise UserError(what, key=key, found=canonical_json(levels), cells=cells, next=following)
    return found[0]


def _find_primary_errors(experiment: Experiment) -> Iterator[UserError | tuple[str, str]]:
    if len(experiment.primary or ()) > MAX_PRIMARY:
        yield (
            "primary",
            (
                "each comparison raises the number of repeats that all need: keep at most "
                f"{MAX_PRIMARY}"
            ),
        )
    if experiment.primary_repeats is not None and not experiment.primary:
        yield (
            "primary_repeats",
            "needs primary comparisons: name them under `primary`, or raise `repeats`",
        )
    try:
        described = describe_primary(experiment) or []
    except UserError as error:
        yield error
        return
    for number, comparison in enumerate(described):
        if comparison in described[:number]:
            yield f"primary.{number}", "this primary comparison is listed twice"


def describe_primary(experiment: Experiment) -> list[dict[str, Any]] | None:
    """Return each primary comparison as JSON values for the run table; None if the experiment
    declares none.

    `of` and `over` name cells, `names` are their levels where they differ, `at` the levels that
    they share. `factor` is what is compared, as `referee/comparability.py` names it. Raises
    UserError for levels that name no two cells which differ in one factor.
    """
    if experiment.primary is None:
        return None
    described = []
    for number, comparison in enumerate(experiment.primary):
        key = f"primary.{number}"
        sides = {"of": comparison.of, "over": comparison.over}
        cells = [
            find_cell(experiment, levels=comparison.at | levels, key=f"{key}.{side}")
            for side, levels in sides.items()
        ]
        if comparison.margin is not None and comparison.quantity != "validation_loss":
            what = "only a comparison of losses has a margin of its own; that of rates is 1 %."
            next_step = "remove `margin`, or set `quantity: validation_loss`"
            found = f"{comparison.margin:g}"
            raise UserError(what, key=f"{key}.margin", found=found, next=next_step)
        of, over = map(flatten_cell, cells)
        if of == over:
            what = "a primary comparison compares a cell with itself."
            next_step = "give `of` and `over` different levels"
            raise UserError(what, key=key, found=canonical_json(cells[0]), next=next_step)
        differing = [key for key in of | over if of.get(key) != over.get(key)]
        described.append(
            {
                "of": format_cell(of),
                "over": format_cell(over),
                "names": [
                    format_cell({k: cell[k] for k in differing if k in cell}) for cell in (of, over)
                ],
                "at": format_cell({k: level for k, level in of.items() if k not in differing}),
                "factor": _compared_factor(differing, key),
                "quantity": comparison.quantity,
                "margin": comparison.margin,
            }
        )
    return described


def _compared_factor(differing: list[str], key: str) -> str:
    """Return what cells compare that differ in these dotted keys. A global batch may grow with the
    world size.
    """
    sections = {name.split(".")[0] for name in differing}
    if set(differing) in ({"layout.data"}, {"layout.data", "global_batch"}):
        return "world_size"
    if len(sections) == 1:
        return differing[0] if len(differing) == 1 and sections != {"layout"} else sections.pop()
    what = "the cells of a primary comparison differ in several factors."
    found = ", ".join(differing)
    next_step = "name the other levels under `at`, or choose other cells"
    raise UserError(
        what, key=key, found=found, expected="two cells that differ in one factor", next=next_step
    )


def count_repeats(experiment: Experiment) -> dict[str, int]:
    """Return the name of each cell → its number of runs, without those of the canary."""
    primary = {
        comparison[side]
        for comparison in describe_primary(experiment) or ()
        for side in ("of", "over")
    }
    more = max(experiment.repeats, experiment.primary_repeats or 1)
    names = map(format_cell, expand_cells(experiment))
    return {name: more if name in primary else experiment.repeats for name in names}


def order_runs(experiment: Experiment) -> list[tuple[dict[str, Any], int]]:
    """Return (cell, repeat) in the order of starting: one block per repeat, shuffled from
    `order_seed`.

    Blocks keep drift over time (a warm machine, a busy neighbour) from being confounded with the
    factors. Every other block has the reverse order of the one before it, so that drift changes
    sides between pairs of cells (ABBA); the last of an odd number of blocks has no counterpart. Of
    `DRAWN_ORDERS` shuffles the one is taken with which each cell is followed most evenly by all
    cells, itself included, so that what a run leaves to the next (heat, caches) meets all cells
    alike (serially balanced sequences, Finney & Outhwaite 1956). Cells with more repeats than others
    stand side by side. Within a block, a run that resumes from another run's state follows it.
    Canary runs are interleaved; their repeats are numbered after those of all cells. The first run
    of all is a canary then, and all others follow one that is counted.
    """
    cells = expand_cells(experiment)
    by_name = count_repeats(experiment)
    repeats = [by_name[format_cell(cell)] for cell in cells]
    predecessors = [_count_predecessors(cell.get("resume_from")) for cell in cells]
    most = max(repeats, default=0)
    canary = None
    if experiment.canary is not None:
        levels = experiment.canary.cell
        number = cells.index(find_cell(experiment, levels=levels, key="canary.cell"))
        canary = number, experiment.canary.every
    #: (number of a cell, repeat)
    order: list[tuple[int, int]] = []
    for first in range(0, most, 2):
        chance = random.Random(f"{experiment.order_seed}/{first // 2}")
        drawn = [
            _draw_blocks(
                repeats,
                predecessors=predecessors,
                first=first,
                chance=chance,
            )
            for _ in range(DRAWN_ORDERS)
        ]
        imbalances = [
            _measure_imbalance(_interleave([*order, *runs], canary, most), len(cells), most)
            for runs in drawn
        ]
        order += drawn[imbalances.index(min(imbalances))]
    return [(cells[number], repeat) for number, repeat in _interleave(order, canary, most)]


def _interleave(
    runs: Sequence[tuple[int, int]], canary: tuple[int, int] | None, repeat: int
) -> list[tuple[int, int]]:
    """Return (number of a cell, repeat) of runs with those of the canary, a cell and the number of
    other runs between two of its runs; its first repeat is `repeat`.
    """
    if canary is None:
        return [*runs]
    cell, every = canary
    found = [(cell, repeat)]
    for number, begin in enumerate(range(0, len(runs), every), repeat + 1):
        found += [*runs[begin : begin + every], (cell, number)]
    return found


def _measure_imbalance(runs: Sequence[tuple[int, int]], cells: int, repeats: int) -> float:
    """Return the sum of squares by which the numbers of runs of each cell behind a cell differ from
    their mean, over all cells; `runs` are (number of a cell, repeat). Those from `repeats` on are of
    the canary, and count as predecessors alone.
    """
    pairs = [(one, cell) for (one, _), (cell, k) in itertools.pairwise(runs) if k < repeats]
    behind = Counter(one for one, _ in pairs)
    squares = [sum(n * n for n in found.values()) for found in (Counter(pairs), behind)]
    return squares[0] - squares[1] / cells


def _draw_blocks(
    repeats: Sequence[int], predecessors: Sequence[int], first: int, chance: random.Random
) -> list[tuple[int, int]]:
    """Return (number of a cell, repeat) of the block of the repeat `first`, in random order, and of
    the next one, in reverse. `repeats` and `predecessors` are those of each cell.
    """
    most = max(repeats)
    units = [
        [cell for cell, of in enumerate(repeats) if of == most],
        *([cell] for cell, of in enumerate(repeats) if of < most),
    ]
    chance.shuffle(units[0])
    chance.shuffle(units)
    cells = [cell for unit in units for cell in unit]
    found = []
    for repeat, block in ((first, cells), (first + 1, cells[::-1])):
        left = [cell for cell in block if repeat < repeats[cell]]
        left.sort(key=lambda cell: predecessors[cell])
        found += [(cell, repeat) for cell in left]
    return found


def _count_predecessors(level: object) -> int:
    """Count the runs that must come before one with this `resume_from`, each resuming from its
    predecessor.

    >>> _count_predecessors({"run": {"layout.data": 4, "resume_from": {"step": 8}}, "step": 16})
    2
    """
    run = level.get("run") if isinstance(level, dict) else None
    earlier = run.get("resume_from") if isinstance(run, dict) else None
    return isinstance(level, dict) + (_count_predecessors(earlier) if earlier is not None else 0)


def resolve_settings(
    experiment: Experiment,
    cell: dict[str, Any],
    build: Callable[[dict[str, Any]], RunSettings],
    file: str,
    resumed_by: tuple[dict[str, Any], ...] = (),
) -> RunSettings:
    """Return the settings of a cell's run. `build` turns an experiment's values into settings.

    `resumed_by` are the cells that resume from this one. Raises UserError if the run to resume from
    is not in the experiment, keeps no state after that step, or has incompatible settings.
    """
    values = cell_values(experiment, cell)
    key = "runs.resume_from"
    if not isinstance(values.get("resume_from"), dict):
        return build(values)
    wanted: ResumeFrom = decode(
        ResumeFrom,
        values=values["resume_from"],
        file=file,
        key=key,
    )
    errors: list[Any] = []
    with collect(errors):
        other = _find_cell(experiment, cell, run=wanted.run)
        if other in resumed_by:
            errors = [
                (
                    f"{key}.run",
                    (
                        "runs resume from each other in a circle: let one start anew: resume_from: "
                        "null"
                    ),
                )
            ]
    raise_errors(errors, file=file)
    theirs = resolve_settings(
        experiment,
        cell=other,
        build=build,
        file=file,
        resumed_by=(*resumed_by, cell),
    )
    mine = replace(
        build(values | {"resume_from": None}),
        resume_from=state_path(theirs.identity, step=wanted.step),
    )
    raise_errors(_find_state_errors(theirs, mine, step=wanted.step), file=file)
    return mine


def _find_cell(experiment: Experiment, cell: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    given = flatten_cell(run)
    ignored = next(
        (keys for keys in map(factor_keys, experiment.factors) if "resume_from" in keys), []
    )
    same = {
        key: level
        for key, level in cell.items()
        if key not in ignored
        and not any(name == key or name.startswith(f"{key}.") for name in given)
    }
    # `matches` expects mappings, not null, so `resume_from: null` is handled here
    levels = {key: level for key, level in run.items() if (key, level) != ("resume_from", None)}
    resumed = any(key.split(".")[0] == "resume_from" for key in levels)

    def fits(other: dict[str, Any]) -> bool:
        from_scratch = cell_values(experiment, cell=other).get("resume_from") is None
        return (
            other != cell
            and all(other[k] == v for k, v in same.items())
            and (resumed or from_scratch)
        )

    return find_cell(
        experiment,
        levels,
        key="runs.resume_from.run",
        fits=fits,
    )


def list_kept_steps(run: RunSettings) -> list[int]:
    """Return the steps whose resume states remain after a run without interruption; empty if
    unknown.
    """
    policy = run.checkpoints
    budget = run.budget
    if not policy.keep_resume_state or budget.kind != "steps" or policy.each_epoch:
        return []
    written = {0} if policy.at_start else set()
    written |= {*range(policy.every, budget.steps, policy.every)} if policy.every else set()
    return sorted(written | {budget.steps})[-policy.keep_last :]


def _find_state_errors(
    theirs: RunSettings, mine: RunSettings, step: int
) -> Iterator[tuple[str, str]]:
    steps = list_kept_steps(theirs)
    key = "runs.resume_from"
    run = theirs.identity
    if step not in steps:
        needs = "needs a budget in steps, and checkpoints.keep_resume_state without each_epoch"
        kept = (
            f"keeps those of {', '.join(map(str, steps))}: change its checkpoints"
            if steps
            else needs
        )
        yield f"{key}.step", f"{run} keeps no state after this step: it {kept}"
    elif mine.budget.kind == "steps" and step >= mine.budget.steps:
        yield (
            f"{key}.step",
            f"no steps are left after this step: budget.steps = {mine.budget.steps}",
        )
    if (other := find_difference(theirs, mine)) is not None:
        setting, there, here = other
        text = f"{run} has another {setting}, {there}, than this run, {here}"
        yield f"{key}.run", f"{text}: only layout, budget and evaluation may differ"
