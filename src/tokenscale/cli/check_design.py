"""Checks of an experiment's design, before it costs GPU hours. One pure function per check; none reads a file.

Levels: `refuse`, its result would be wrong; `warn`, it shows less than it seems to; `note`, something to know when
reading the result.
"""

import functools
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenscale.analysis.statistics import fewest_pairs
from tokenscale.base.files import canonical_json
from tokenscale.settings.experiments import (
    COMPARISONS,
    Experiment,
    Run,
    expand_cells,
    factor_keys,
    factor_level,
    flatten_cell,
    varied_keys,
)
from tokenscale.settings.machine import Machine
from tokenscale.settings.run import RunSettings, reads_parquet

Cell = dict[str, Any]
#: approaches whose rows are one document each, padded
PADDED = ("padded", "pretokenized-padded", "length-bucketed")
#: sections that are one choice, whatever settings it takes to make it
ONE_CHOICE = ("layout", "model", "resume_from")
#: budgets that say, with the tokens at hand, how often a text is read
COUNTED = ("steps", "epochs")
SCALING_FIGURES = ("scaling_throughput", "parallel_methods")


@dataclass(frozen=True)
class Problem:
    """One finding: its level (refuse, warn or note), what is wrong, the key of the experiment's file, the next step."""

    level: str
    what: str
    key: str
    next: str


@dataclass(frozen=True)
class CorpusSize:
    """Size of a corpus in a tokenizer's ids: documents, tokens, and the rows of each store that exists."""

    documents: int
    tokens: int
    rows: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Design:
    """An experiment at one scale, with what its checks need.

    `texts`: (corpus, tokenizer, eos) → its size. `gpus` and `cores` are those of this machine; None if the experiment
    is not meant for this machine.
    """

    experiment: Experiment
    runs: list[Run]
    texts: Mapping[tuple[str, str, bool], CorpusSize] = field(default_factory=dict)
    machine: Machine = field(default_factory=Machine)
    gpus: int | None = None
    cores: int | None = None

    @property
    def cells(self) -> list[Cell]:
        """Return factor → level of each cell."""
        return expand_cells(self.experiment)

    @property
    def settings(self) -> list[tuple[Cell, RunSettings]]:
        """Return one run's settings for each cell."""
        first = {canonical_json(run.cell): run.settings for run in reversed(self.runs)}
        return [(cell, first[canonical_json(cell)]) for cell in self.cells]

    @property
    def factors(self) -> list[str]:
        """Return the dotted keys with at least two levels among the cells that are run."""
        keys = varied_keys(self.experiment.factors)
        levels = {name: {canonical_json(cell[name]) for cell in self.cells} for name in keys}
        return [name for name, found in levels.items() if len(found) > 1]


def find_problems(design: Design) -> list[Problem]:
    """Run all checks and return their problems, refusals first."""
    found = [problem for check in CHECKS for problem in check(design)]
    return sorted(found, key=lambda problem: ("refuse", "warn", "note").index(problem.level))


def check_confounding(design: Design) -> list[Problem]:
    """Find factors that never vary alone, and cells that differ from every other cell in several factors.

    A global batch that grows with the world size is weak scaling and counts as one factor with it. Keys that the file
    changes together are one factor.
    """
    changing = [name for name in design.factors if name != "global_batch" or not is_weak_scaling(design)]
    names = [factor for factor in design.experiment.factors if set(factor_keys(factor)) & set(changing)]
    table = [{name: canonical_json(factor_level(cell, name)) for name in names} for cell in design.cells]
    apart = [(a, b, [n for n in names if a[n] != b[n]]) for a, b in itertools.combinations(table, 2)]
    alone = {different[0] for _, _, different in apart if len(different) == 1}
    found, reported = [], set(alone)
    for name in names:
        always = set.intersection(*(set(different) for _, _, different in apart if name in different))
        if len(always) > 1 and name not in reported:
            reported |= always
            others = _join(n for n in names if n in always and n != name)
            what = f"{name} never changes alone: {others} changes with it, so their effects cannot be separated"
            cure = "run cells that differ in one of them only (check left_out), or fix one"
            found.append(Problem("refuse", what, f"factors.{name}", cure))
    cure = "run cells that differ in one factor only, or leave out those that differ in several"
    key = "left_out" if design.experiment.left_out else "factors"
    for cell in table if not found else ():
        near = [different for a, b, different in apart if cell in (a, b)]
        if near and min(map(len, near)) > 1:
            reported |= set(names)
            level = ", ".join(f"{name}={json.loads(text)}" for name, text in cell.items())
            fewest = min(near, key=len)
            what = f"cell {level} differs from every other in {_join(fewest)} at once: no other cell is comparable"
            found.append(Problem("refuse", what, key, cure))
    found += [
        Problem("refuse", f"no two cells differ in {name} alone: its effect cannot be measured", key, cure)
        for name in names
        if name not in reported
    ]
    return found


def check_compound_levels(design: Design) -> list[Problem]:
    """Find levels that are mappings or lists and change several settings at once."""
    found = []
    for factor in design.experiment.factors:
        moved = [key for key in factor_keys(factor) if key in design.factors]
        if is_weak_scaling(design):
            moved = [key for key in moved if key != "global_batch"]
        levels = [{key: canonical_json(cell[key]) for key in moved} for cell in design.cells]
        apart = [[key for key in moved if a[key] != b[key]] for a, b in itertools.combinations(levels, 2)]
        together = [key for key in moved if [key] not in apart]
        if len(together) > 1:
            what = f"levels change {_join(together)} together, so their effects cannot be separated"
            cure = f"add levels that differ in {together[-1]} alone, or say in the note what is compared"
            found.append(Problem("warn", what, f"factors.{factor}", cure))
    for name in design.factors:
        if name.split(".")[0] in ONE_CHOICE or not any(isinstance(c[name], dict) for c in design.cells):
            continue
        values = [asdict(functools.reduce(getattr, name.split("."), settings)) for _, settings in design.settings]
        moved = [key for key in values[0] if len({canonical_json(v[key]) for v in values}) > 1]
        if len(moved) > 1:
            found.append(
                Problem(
                    "warn",
                    f"levels of {name} change {_join(moved)} together, so their effects cannot be separated",
                    f"factors.{name}",
                    f"make {name}.{moved[0]} a factor of its own, or say in the question what is compared",
                )
            )
    return found


def is_weak_scaling(design: Design) -> bool:
    """Return whether the global batch grows in proportion to the world size (weak scaling)."""
    found = {(s.layout.world_size, s.global_batch) for _, s in design.settings}
    return len({batch for _, batch in found}) > 1 and len({batch / world for world, batch in found}) == 1


def check_scaling(design: Design) -> list[Problem]:
    """Find world sizes that change more than the number of ranks: the global batch, or the rows of a forward pass."""
    sizes = {s.layout.world_size for _, s in design.settings}
    if len(sizes) < 2:
        return []
    text = f"{design.experiment.question} {design.experiment.note}".lower()
    if is_weak_scaling(design):
        if "weak" in text:
            return []
        what = (
            "the global batch grows with the world size (weak scaling), but neither the question nor the note says so"
        )
        key = next((f for f in design.experiment.factors if "global_batch" in factor_keys(f)), "global_batch")
        return [Problem("warn", what, f"factors.{key}", "say “weak scaling” in the question or the note")]
    passes: dict[str, set[int]] = {}
    for cell, s in design.settings:
        rest = canonical_json({k: v for k, v in cell.items() if not _is_layout_key(k)})
        of_pass = min(s.micro_batch, -(-s.global_batch // s.layout.data_parallel_size))
        passes.setdefault(rest, set()).add(of_pass)
    shrinking = [rows for rows in passes.values() if len(rows) > 1]
    if not shrinking:
        return []
    rows = max(shrinking, key=len)
    what = (
        f"strong scaling: the global batch is fixed, and a forward pass of a rank has {max(rows)} rows at the smallest "
        f"world size and {min(rows)} at the largest, and small passes take longer per row"
    )
    return [
        Problem("note", what, "runs.micro_batch", f"micro_batch: {min(rows)} gives every pass the same number of rows")
    ]


def check_bases(design: Design) -> list[Problem]:
    """Find comparisons without a base: the smallest world size of a line, the baseline of an approach or a schedule."""
    return [*_check_scaling_base(design), *_check_approach_baselines(design), *_check_naive_schedule(design)]


def _check_scaling_base(design: Design) -> list[Problem]:
    lines: dict[str, set[int]] = {}
    for cell, s in design.settings:
        rest = {k: v for k, v in cell.items() if not _is_layout_key(k) and k != "global_batch"}
        lines.setdefault(canonical_json(rest), set()).add(s.layout.world_size)
    smallest = {min(sizes) for sizes in lines.values() if len(sizes) > 1}  # a single size has no efficiency
    if not smallest or not set(SCALING_FIGURES) & set(design.experiment.figures):
        return []
    key = next((f"factors.{name}" for name in design.experiment.factors if _is_layout_key(name)), "factors")
    if len(smallest) > 1:
        begins = _join(map(str, sorted(smallest)))
        what = f"lines begin at different world sizes, {begins}, so their efficiencies have different bases"
        return [Problem("refuse", what, key, f"run every line at world size {min(smallest)}")]
    if min(smallest) > 1:
        what = f"no cell at world size 1, the base of efficiency T(N) / (N × T(1)); the smallest is {min(smallest)}"
        return [
            Problem("warn", what, key, "add world size 1; where the model does not fit one device, say so in the note")
        ]
    return []


def _check_approach_baselines(design: Design) -> list[Problem]:
    if "approach" not in design.factors:
        return []
    there = {cell["approach"] for cell in design.cells}
    found = []
    for approach in sorted(there & {approach for approach, _ in COMPARISONS}):
        bases = [baseline for of, baseline in COMPARISONS if of == approach]
        if not there & set(bases):
            what = f"{approach} has no baseline: it is compared with {' or '.join(bases)}"
            found.append(Problem("warn", what, "factors.approach", f"add {bases[0]}"))
    return found


def _check_naive_schedule(design: Design) -> list[Problem]:
    if "pipeline_bubble" not in design.experiment.figures:
        return []
    without = sorted(
        {s.layout.pipeline for _, s in design.settings if s.layout.pipeline > 1}
        - {s.layout.pipeline for _, s in design.settings if s.layout.schedule == "naive"}
    )
    if not without:
        return []
    what = (
        f"pipelines of {_join(map(str, without))} ranks have no cell with schedule naive, the reference for their speed"
    )
    return [Problem("warn", what, "factors.layout", "add {pipeline: N, schedule: naive}")]


def check_budgets(design: Design) -> list[Problem]:
    """Find compared cells that train on different amounts of data."""
    every = [(cell, s) for cell, s in design.settings]
    kinds = sorted({s.budget.kind for _, s in every})
    if len(kinds) > 1:
        what = f"cells have budgets of different kinds: {_join(kinds)}"
        return [Problem("refuse", what, "factors.budget", "give all cells a budget of one kind")]
    found = []
    positions = {}
    if kinds == ["steps"]:
        for cell, s in every:
            rest = canonical_json({k: v for k, v in cell.items() if not k.startswith("budget")})
            positions[rest] = s.budget.steps * s.global_batch * s.sequence_length
    if len(set(positions.values())) > 1:
        moved = [n for n in design.factors if n in ("global_batch", "sequence_length")] or ["its factors"]
        low, high = min(positions.values()), max(positions.values())
        what = f"equal steps do not mean equal tokens: {low:,} to {high:,} positions, because {_join(moved)} changes"
        cure = "compare speeds, or losses by tokens; budget: {useful_tokens: …} gives every cell the same number"
        found.append(Problem("warn", what, "runs.budget.steps", cure))
    approaches = {s.approach for _, s in every}
    if kinds == ["steps"] and approaches & set(PADDED) and approaches - set(PADDED):
        what = (
            "equal steps mean equal positions, but padded rows fill fewer of them: approaches differ in useful tokens"
        )
        cure = (
            "compare losses at equal useful tokens, not at equal steps; "
            "budget: {useful_tokens: …} gives every cell the same number"
        )
        found.append(Problem("note", what, "runs.budget.steps", cure))
    return found


def check_repeated_data(design: Design) -> list[Problem]:
    """Find text that is read more than once in some cells and not in others."""
    settings = [(cell, s) for cell, s in design.settings if s.mixture is None]  # mixtures: check_mixtures
    epochs = [(cell, count_epochs(s, design.texts)) for cell, s in settings]
    unknown = [s for _, s in settings if count_epochs(s, design.texts) is None]
    found = []
    if built := sorted({f"{s.corpus.name}/{s.tokenizer.name}" for s in unknown if s.budget.kind in COUNTED}):
        what = f"whether data are repeated is not known before the tokens of {_join(built)} are built"
        found.append(Problem("note", what, "runs.corpus", "snakemake tokens, then check again"))
    if kinds := sorted({s.budget.kind for s in unknown} - set(COUNTED)):
        what = f"with a budget in {_join(kinds)}, it is not known beforehand whether data are repeated"
        found.append(
            Problem("note", what, "runs.budget", "read `epochs` of analysis/sql/epochs.sql once runs are there")
        )
    known = {canonical_json(cell): (cell, e) for cell, e in epochs if e is not None}
    again = [(cell, e) for cell, e in known.values() if e > 1]
    once = [(cell, e) for cell, e in known.values() if e <= 1]
    if not again:
        return found
    most = max(e for _, e in again)
    cure = "fewer steps, or a larger corpus"
    if not once:
        least = f"{min(e for _, e in again):.2g}"
        what = f"every run reads its text {f'{least} to ' * (least != f'{most:.2g}')}{most:.2g} times"
        return [*found, Problem("note", what, "runs.budget", cure)]
    across = any(
        all(_is_layout_key(k) or k == "global_batch" for k in a if a[k] != b[k]) for a, _ in again for b, _ in once
    )
    named = sorted({_format_cell(cell) for cell, _ in again})
    what = f"some cells read their text up to {most:.2g} times and others less than once: {_join(named)} repeat it"
    if across:
        return [*found, Problem("refuse", f"{what}, at the larger world sizes", "runs.budget", cure)]
    return [*found, Problem("warn", f"{what}; their training loss includes text seen before", "runs.budget", cure)]


def count_epochs(run: RunSettings, texts: Mapping[tuple[str, str, bool], CorpusSize]) -> float | None:
    """Return how many passes over its text a run makes; None where the budget or the tokens do not determine it.

    A padded row holds one document. Rows of streams and packed rows hold as many tokens as positions; packed rows that
    are not built yet are assumed to be full.
    """
    if run.budget.kind == "epochs":
        return run.budget.epochs
    rows = _count_rows(run, run.corpus.name, texts)
    if rows is None or run.budget.kind != "steps":
        return None
    return run.budget.steps * run.global_batch / rows if rows else None


def _count_rows(run: RunSettings, corpus: str, texts: Mapping[tuple[str, str, bool], CorpusSize]) -> float | None:
    """Return the sequences of one pass over a corpus, or None if its size is not known."""
    text = texts.get((corpus, run.tokenizer.name, run.eos))
    if text is None:
        return None
    rows = text.documents if run.approach in PADDED else text.tokens / run.sequence_length
    if run.approach == "packed" and run.store is not None:
        rows = text.rows.get(run.store.directory, rows)
    return rows


def check_mixtures(design: Design) -> list[Problem]:
    """Find mixtures that need more text of a source than there is, and stages that no run reaches."""
    found: dict[tuple[str, str], tuple[float, Problem]] = {}
    for _, run in design.settings:
        mixture, name = run.mixture, run.corpus.name
        if mixture is None or run.budget.kind != "steps":
            continue
        sequences = run.budget.steps * run.global_batch
        shares = mixture.shares(sequences, run.sequence_length)
        for source in mixture.trained_sources:
            rows, limit = _count_rows(run, source.corpus.name, design.texts), source.maximum_repetitions
            passes = shares[source.corpus.name] * sequences / rows if rows else 0
            if limit is not None and passes > limit:
                what = f"mixture {name} reads {source.corpus.name} {passes:.3g} times, and may {limit:g} times"
                cure = f"raise mixtures.{name}.maximum_repetitions, lower the weight, or train fewer steps"
                most = found.get((name, source.corpus.name), (0.0, None))
                problem = Problem("refuse", what, "runs.budget", cure)
                found[name, source.corpus.name] = max(most, (passes, problem), key=lambda pair: pair[0])
        stages = sum(start < sequences for start in mixture.stage_starts(run.sequence_length))
        if stages < len(mixture.stages):
            what = f"the run ends in stage {stages} of the {len(mixture.stages)} stages of mixture {name}"
            cure = f"shorter stages in mixtures.{name}, or more steps"
            fewest = found.get((name, ""), (math.inf, None))
            found[name, ""] = min(
                fewest, (stages, Problem("warn", what, "runs.budget", cure)), key=lambda pair: pair[0]
            )
    return [problem for _, problem in found.values()]


def check_repeats(design: Design) -> list[Problem]:
    """Find too few repeats for any verdict, of the primary comparisons or of all pairs of approaches."""
    experiment = design.experiment
    if len(design.cells) < 2 or experiment.primary == ():
        return []
    if experiment.primary is None:
        family, given = max(1, sum(_count_comparisons(design).values())), experiment.repeats
        key, next_step = "repeats", "name one to three comparisons under `primary`, with primary_repeats: {}"
    else:
        family, given = len(experiment.primary), max(experiment.repeats, experiment.primary_repeats or 1)
        key, next_step = "primary_repeats", "primary_repeats: {}"
    needed = fewest_pairs(family)
    if given >= needed:
        return []
    of = f"{family} comparisons, corrected after Holm, need" if family > 1 else "one comparison needs"
    times = f"{given} repeat{'s' * (given > 1)}"
    what = f"with {times} of a cell every verdict is “too few runs”: {of} at least {needed}"
    next_step = next_step.format(fewest_pairs(1) if experiment.primary is None else needed)
    return [Problem("warn", what, key, f"{next_step}; or `primary: []` where counts and equalities answer")]


def _count_comparisons(design: Design) -> dict[tuple[str, str], int]:
    """Count, for each comparison, the groups of cells that have both sides: the family of
    `report/paired_comparisons.py`.

    World sizes of data parallelism are one group; options of the Parquet store are those of an approach that reads one,
    and its baseline has none.
    """
    groups: dict[str, set[tuple[str, str]]] = {}
    for cell in design.cells if "approach" in design.factors else ():
        approach = cell["approach"]
        rest = {k: v for k, v in flatten_cell(cell).items() if k not in ("approach", "layout.data")}
        stored = {k: rest.pop(k) for k in list(rest) if k.startswith("storage.")}
        parquet = reads_parquet(approach)
        groups.setdefault(approach, set()).add((canonical_json(rest), canonical_json(stored if parquet else {})))
    return {
        (of, over): sum((rest, "{}") in groups.get(over, ()) for rest, _ in groups.get(of, ()))
        for of, over in COMPARISONS
    }


def check_validation(design: Design) -> list[Problem]:
    """Find validation documents that are also trained on.

    A split by the text's hash cannot put one text on both sides. Separate validation files can: documents that also
    occur in the training files are dropped only with deduplication.
    """
    found = []
    for corpus in {c.name: c for _, s in design.settings if s.validation.rows for c in s.corpora}.values():
        own = corpus.source.validation_files
        if shared := sorted(set(own or ()) & set(corpus.source.files or ())):
            what = f"corpus {corpus.name}: {_join(shared)} is used for training and for validation"
            found.append(Problem("refuse", what, f"corpora.{corpus.name}.source.validation_files", "name other files"))
        elif corpus.source.has_own_validation and not corpus.cleaning.deduplicate:
            what = f"corpus {corpus.name}: validation documents that also occur in its training text are trained on"
            cure = f"corpora.{corpus.name}.cleaning.deduplicate: true"
            found.append(Problem("refuse", what, f"corpora.{corpus.name}.cleaning.deduplicate", cure))
        elif not corpus.source.has_own_validation and corpus.validation_share == 0:
            what = f"corpus {corpus.name} holds out no documents, but runs validate on it"
            cure = "validation_share above 0, or runs.validation.rows: 0"
            found.append(Problem("refuse", what, f"corpora.{corpus.name}.validation_share", cure))
    return found


def check_devices(design: Design) -> list[Problem]:
    """Find world sizes that do not fit this machine, and runs that fill a node beside runs that do not."""
    sizes = {s.layout.world_size for _, s in design.settings}
    node = design.machine.gpus_per_node
    if node is not None:
        part = sorted(n for n in sizes if n < node)
        if not part or max(sizes) < node:
            return []
        what = (
            f"runs at world size {_join(map(str, part))} leave GPUs of a {node}-GPU node idle, "
            "while larger runs fill it: their ranks have a larger share of its memory, power and cores"
        )
        return [
            Problem(
                "note",
                what,
                "factors.layout",
                "start them one at a time (share 1), and say so where efficiency is shown",
            )
        ]
    if design.gpus is None:
        return []
    auto = {s.layout.world_size for _, s in design.settings if s.device == "auto"}
    found = []
    if design.gpus and auto and max(auto) > design.gpus:
        what = f"{max(auto)} ranks need a GPU each, but this machine has {design.gpus}"
        found.append(Problem("refuse", what, "factors.layout", "fewer ranks, or --machine FILE for the one it runs on"))
    if auto and not design.gpus:
        what = "this machine has no GPU: the runs would use its CPU"
        found.append(
            Problem("warn", what, "runs.device", "--machine FILE or --profile NAME for the machine it runs on")
        )
    on_cpu = {s.layout.world_size for _, s in design.settings if s.device == "cpu"}
    if design.cores and on_cpu and max(on_cpu) > design.cores:
        what = f"{max(on_cpu)} ranks oversubscribe {design.cores} cores: such runs test correctness, not speed"
        found.append(Problem("warn", what, "factors.layout", f"do not measure scaling above {design.cores} ranks"))
    elif len(on_cpu) > 1:
        what = "several ranks share the cores that a single rank has to itself: their speeds do not measure scaling"
        found.append(
            Problem("note", what, "factors.layout", "--cores 1 gives every rank one thread, also in a run of one rank")
        )
    return found


def check_number_formats(design: Design) -> list[Problem]:
    """Find updates that bf16 loses: its numbers are 2**-8 of their size apart, and the half of it is rounded away."""
    found = {}
    for _, run in design.settings:
        if run.precision != "bf16-true":
            continue
        optimizer, weight = run.optimizer, run.model.initial_deviation
        if optimizer.moments == "weights" and 1 - optimizer.beta2 < 2**-9:
            what = f"bf16-true with beta2 {optimizer.beta2}: a second moment in bf16 never decays"
            found[what] = Problem("warn", what, "runs.optimizer.moments", "optimizer.moments: fp32")
        if optimizer.learning_rate < weight * 2**-9:
            what = f"bf16-true with a peak rate of {optimizer.learning_rate:g}: updates of weights above "
            what += f"{optimizer.learning_rate * 2**9:.2g} (initial deviation {weight:g}) are mostly rounded away"
            found[what] = Problem("warn", what, "runs.precision", "precision: bf16, which keeps fp32 weights")
    return list(found.values())


CHECKS = (
    check_confounding,
    check_compound_levels,
    check_scaling,
    check_bases,
    check_budgets,
    check_repeated_data,
    check_mixtures,
    check_repeats,
    check_validation,
    check_devices,
    check_number_formats,
)


def _is_layout_key(key: str) -> bool:
    return key.split(".")[0] == "layout"


def _format_cell(cell: Cell) -> str:
    """Describe a cell by its factors, without its layout."""
    named = [f"{k}={v}" for k, v in cell.items() if not _is_layout_key(k)]
    return ", ".join(named).replace("approach=", "") or "all"


def _join(words: Iterable[str]) -> str:
    *most, last = list(words)
    return f"{', '.join(most)} and {last}" if most else last
