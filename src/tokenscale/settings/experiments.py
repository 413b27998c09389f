"""Experiments: which runs answer a question. Plain dataclasses here; `config.py` reads and validates the YAML."""

import copy
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json, sha256_text
from tokenscale.settings.benchmark import DataBenchmarkSettings, StorageBenchmarkSettings
from tokenscale.settings.inference import InferenceBenchmarkSettings
from tokenscale.settings.options import STRICT, option, to_dict
from tokenscale.settings.run import RunSettings

STUDIES = {
    "000": "Pretokenization and DDP on Alps (ETH Zürich, 2025)",
    "001": "the same project at an earlier date",
    "002": "Distributed Training Pipeline for Language Models, an overview without results",
    "003": "Distributed training and parallelism for GPT-2 (LLM Systems, 2025)",
    "004": "Distributed LLM Trainer, a learning project",
}


#: what is compared, offline over online and ours over both: (approach, baseline)
COMPARISONS = (
    ("pretokenized-padded", "padded"),
    ("token-list", "padding-free"),
    ("packed", "padded"),
    ("packed", "padding-free"),
)

#: how names of other programs' runs begin, so that nobody takes one for ours
EXTERNAL = "external-"


@dataclass(frozen=True)
class DataBenchmark:
    """The isolated tokenise/read benchmark of an experiment."""

    __pydantic_config__ = STRICT

    corpus: str = option("docstrings", "name of a corpus in config.yaml")
    tokenizer: str = option("tekken", "name of a tokenizer in config.yaml")
    settings: DataBenchmarkSettings = option(DataBenchmarkSettings, "shape and size of the measurement")

    @property
    def id(self) -> str:
        """Name of the measurement's file, which does not depend on the experiment that asks for it."""
        return _id_of(self)


@dataclass(frozen=True)
class StorageBenchmark:
    """The benchmark of an experiment that writes and reads tokens in many ways."""

    __pydantic_config__ = STRICT

    corpus: str = option("docstrings", "name of a corpus in config.yaml")
    tokenizer: str = option("tekken", "name of a tokenizer in config.yaml")
    settings: StorageBenchmarkSettings = option(StorageBenchmarkSettings, "the ways to store, and how much")

    @property
    def id(self) -> str:
        """Name of the measurement's file, which does not depend on the experiment that asks for it."""
        return _id_of(self)


def _id_of(benchmark: DataBenchmark | StorageBenchmark) -> str:
    digest = sha256_text(canonical_json(to_dict(benchmark)))
    return f"{benchmark.corpus}-{benchmark.tokenizer}-{digest[:8]}"


@dataclass(frozen=True)
class LeftOut:
    """Combinations of levels that an experiment does not run, and why."""

    __pydantic_config__ = STRICT

    cells: dict[str, Any] = option(description="dotted key → level; cells that have all of these are left out")
    reason: str = option(description="why, for the report")


@dataclass(frozen=True)
class Canary:
    """One cell that is run again and again: its runs say what noise makes of equal settings, and what time does."""

    __pydantic_config__ = STRICT

    cell: dict[str, Any] = option(description="dotted key → level, as many as tell the one cell from the others")
    every: int = option(10, "other runs between two of its runs; one stands first and one last", ge=1, strict=True)


@dataclass(frozen=True)
class External:
    """Runs of another program that stand beside ours, from the logs that it wrote (runs/records/external.py)."""

    __pydantic_config__ = STRICT

    runs: str = option(description="their folders in results/runs: a name, or a pattern such as `external-trainer-*`")
    cell: dict[str, Any] = option(dict, "dotted key → level: their place among the factors, all of them repeats of it")


@dataclass(frozen=True)
class Original:
    """What the studies did whose question the experiment asks again, and what is put right."""

    __pydantic_config__ = STRICT

    studies: tuple[str, ...] = option(tuple, "their numbers, such as 000; empty where the question is our own")
    measured: str = option("", "what they measured, with their figures")
    wrong: str = option("", "what was wrong with it")
    ours: str = option("", "what ours measures, and why the numbers differ")


@dataclass(frozen=True)
class Experiment:
    """One file in config/experiments, after its scale's overlay."""

    __pydantic_config__ = STRICT

    question: str = option(description="what the experiment answers, one sentence")
    note: str = option("", "what a reader must know before trusting it")
    original: Original = option(Original, "what the source studies did, and what is put right")
    runs: dict[str, Any] = option(dict, "settings that all runs share (see RunSettings)")
    factors: dict[str, list[Any]] = option(
        dict,
        "dotted key of a run's setting → its levels; a level that is a mapping is merged over `runs`. Several keys, "
        "parted by commas, move together: each level is a list with a value for each",
    )
    left_out: tuple[LeftOut, ...] = option(
        tuple, "combinations that are not run: `cells` (dotted keys and their levels) and the `reason`"
    )
    repeats: int = option(1, "runs a cell; each has its own seed", ge=1, strict=True)
    order_seed: int = option(0, "of the randomised order in which runs are started", ge=0, strict=True)
    canary: Canary | None = option(
        None, "further repeats of one cell, spread over the order: the noise floor and the drift of the campaign"
    )
    external: tuple[External, ...] = option(tuple, "runs of other programs, shown beside ours and marked so")
    target_loss: float | None = option(
        None,
        "validation loss, in nats a useful token, whose time is measured, stated before there are runs; by default the "
        "highest that any run ended with",
        gt=0,
    )
    data_benchmark: DataBenchmark | None = option(None, "measure tokenising and reading alone, too")
    storage_benchmark: StorageBenchmark | None = option(None, "measure tokens at rest: bytes, writing and reading")
    inference_benchmark: InferenceBenchmarkSettings | None = option(
        None, "let the runs' models answer prompts: texts, and speed with a cache of keys and values and without"
    )
    figures: tuple[str, ...] = option(tuple, "figures of its page")
    scales: dict[str, dict[str, Any]] = option(
        dict,
        "scale → overlay, merged over the rest, which is scale demo; `{}` keeps the rest as it is. At a scale without "
        "an overlay the experiment is not run",
    )

    @property
    def benchmarks(self) -> dict[str, DataBenchmark | StorageBenchmark]:
        """Kind → the benchmark of that kind that it asks for, of a text. With one, and neither `runs` nor `factors`, it
        has no runs."""
        found = {"data": self.data_benchmark, "storage": self.storage_benchmark}
        return {kind: benchmark for kind, benchmark in found.items() if benchmark is not None}

    def benchmark_files(self, name: str) -> list[str]:
        """Files of its benchmarks; that of its models is called as the experiment is, `name`."""
        found = [f"results/benchmarks/{kind}/{benchmark.id}.json" for kind, benchmark in self.benchmarks.items()]
        return found + [f"results/benchmarks/inference/{name}.json"] * (self.inference_benchmark is not None)


@dataclass(frozen=True)
class Run:
    """A line of the run table: the settings, and where they stand in the design."""

    settings: RunSettings
    cell: dict[str, Any]
    repeat: int
    position: int

    @cached_property
    def run_id(self) -> str:
        """Identity of the run; the name of its folder."""
        return self.settings.identity


def merge(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """A deep copy of `base` with `overlay` over it: mappings merge, everything else replaces.

    >>> merge({"a": {"x": 1, "y": 2}, "b": [1]}, {"a": {"y": 3}, "b": [2]})
    {'a': {'x': 1, 'y': 3}, 'b': [2]}
    """
    result = copy.deepcopy(base)
    for key, value in overlay.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge(result[key], value) if both else copy.deepcopy(value)
    return result


def set_dotted(values: dict[str, Any], key: str, value: Any) -> None:
    """Set `a.b.c` in nested mappings; a level that names something (`model: llama-tiny`) becomes `{"preset": …}`.

    A mapping is merged over the mapping that is there.
    """
    *parents, last = key.split(".")
    for parent in parents:
        inner = values.get(parent, {})
        values[parent] = inner if isinstance(inner, dict) else {"preset": inner}
        values = values[parent]
    values[last] = merge({last: values.get(last)}, {last: value})[last]


def dotted(cell: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A cell with the settings of its mappings spelled out: what it is compared and named by.

    >>> dotted({"layout": {"data": 2, "tensor": 2}, "micro_batch": 4})
    {'layout.data': 2, 'layout.tensor': 2, 'micro_batch': 4}
    """
    result: dict[str, Any] = {}
    for key, value in cell.items():
        inner = isinstance(value, dict) and value
        result |= dotted(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return result


def matches(cell: dict[str, Any], levels: dict[str, Any]) -> bool:
    """Whether a cell has all of these levels.

    >>> matches({"layout": {"pipeline": 2, "schedule": "gpipe"}}, {"layout.schedule": "gpipe"})
    True
    """
    found = dotted(cell)
    return all(key in found and found[key] == value for key, value in dotted(levels).items())


def settings_of(factor: str) -> list[str]:
    """The dotted keys that a factor moves: one, or several that move together.

    >>> settings_of("layout.data, global_batch")
    ['layout.data', 'global_batch']
    """
    return [key.strip() for key in factor.split(",")]


def varied(factors: Iterable[str]) -> list[str]:
    """The dotted keys that the factors move, all of them."""
    return [key for factor in factors for key in settings_of(factor)]


def level_of(cell: dict[str, Any], factor: str) -> Any:
    """A factor's level in a cell as its file has it: a value, or the list of those that move together."""
    values = [cell[key] for key in settings_of(factor)]
    return values if len(values) > 1 else values[0]


def problem_of(factors: dict[str, list[Any]]) -> tuple[str, str, str] | None:
    """(factor, what is wrong, what it should be) of the first factor that cannot be expanded into cells."""
    seen: set[str] = set()
    for factor, levels in factors.items():
        keys = settings_of(factor)
        if not levels:
            return factor, "a factor has no levels.", "a list of one or more"
        if not all(keys):
            return factor, "a factor's name has an empty part.", "dotted keys, parted by single commas"
        for key in keys:
            if key in seen:
                return factor, f"{key} is in two factors, or twice in one.", "each setting once"
            seen.add(key)
        for level in levels if len(keys) > 1 else ():
            if not isinstance(level, list) or len(level) != len(keys):
                level_json = canonical_json(level)
                return factor, f"the level {level_json} is not one value for each key.", f"a list of {len(keys)} values"
    return None


def cells(experiment: Experiment) -> list[dict[str, Any]]:
    """Every combination of the factors' levels but those left out, in the order they are written.

    What moves together is taken apart here: a cell has plain dotted keys.
    """
    if experiment.benchmarks and not experiment.runs and not experiment.factors:
        return []
    choices = []
    for factor, levels in experiment.factors.items():
        keys = settings_of(factor)
        choices.append([dict(zip(keys, level if len(keys) > 1 else [level], strict=True)) for level in levels])
    product = [dict(pair for part in parts for pair in part.items()) for parts in itertools.product(*choices)]
    return [cell for cell in product if not any(matches(cell, left.cells) for left in experiment.left_out)]


def stated(experiment: Experiment, cell: dict[str, Any]) -> dict[str, Any]:
    """The settings of a cell's runs, in the words of the file."""
    values = merge(experiment.runs, {})
    for key, level in cell.items():
        set_dotted(values, key, level)
    return values


def factor_of(experiment: Experiment, key: str) -> list[str]:
    """The keys that move together with one; none where it is no factor."""
    return next((keys for keys in map(settings_of, experiment.factors) if key in keys), [])


def order(experiment: Experiment) -> list[tuple[dict[str, Any], int]]:
    """(cell, repeat) in the order of starting: blocks of one repeat, shuffled inside a block from `order_seed`.

    Blocks keep what drifts with time (a warm machine, a busy neighbour) apart from the factors. In a block, runs that
    go on from others' states come after these. Runs of the canary stand between them; their repeats follow those of
    the cells, `experiment.repeats` and up.
    """
    result = []
    for repeat in range(experiment.repeats):
        block = cells(experiment)
        random.Random(f"{experiment.order_seed}/{repeat}").shuffle(block)
        block.sort(key=lambda cell: _runs_before(cell.get("resume_from")))
        result += [(cell, repeat) for cell in block]
    if experiment.canary is None:
        return result
    cell, every = canary_cell(experiment), experiment.canary.every
    parts = [result[i : i + every] for i in range(0, len(result), every)]
    mixed = [(cell, experiment.repeats)]
    for number, part in enumerate(parts, 1):
        mixed += [*part, (cell, experiment.repeats + number)]
    return mixed


def _runs_before(level: Any) -> int:
    """How many runs there must be before one with this `resume_from`, each of which goes on from the one before.

    >>> _runs_before({"run": {"layout.data": 4, "resume_from": {"step": 8}}, "step": 16})
    2
    """
    named = level.get("run") if isinstance(level, dict) else None
    earlier = named.get("resume_from") if isinstance(named, dict) else None
    return isinstance(level, dict) + (_runs_before(earlier) if earlier is not None else 0)


def canary_cell(experiment: Experiment) -> dict[str, Any]:
    """The cell that the canary names. Raises UserError where it is none, or several."""
    found = [cell for cell in cells(experiment) if matches(cell, experiment.canary.cell)]
    if len(found) != 1:
        raise UserError(
            f"the canary is {'no cell' if not found else 'several cells'} of the experiment.",
            key="canary.cell",
            found=canonical_json(experiment.canary.cell),
            cells="\n".join(canonical_json(cell) for cell in found or cells(experiment)),
            next="name the levels of one cell",
        )
    return found[0]


#: the scale of an experiment's own settings; those of every other scale are overlays in its file
BASE = "demo"
SCALES = (BASE, "workstation", "alps")
