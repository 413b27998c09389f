"""Checks of an experiment's design: by `check` before it costs GPU hours, by `ingest` for the
cautions of its report.

Levels: `refuse`, its result would be wrong; `warn`, it shows less than it seems to; `note`,
something to know when reading the result.
"""

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json
from tokenscale.base.wording import listing
from tokenscale.data.order.permutation import micro_steps
from tokenscale.referee.readings import PADDED, CorpusSize, Reading, Text, read_sizes, read_texts
from tokenscale.referee.statistics import fewest_pairs
from tokenscale.settings.experiments import (
    COMPARISONS,
    LOSS_UNITS,
    Experiment,
    LeftOut,
    Run,
    describe_primary,
    expand_cells,
    factor_keys,
    factor_level,
    flatten_cell,
    varied_keys,
)
from tokenscale.settings.machine import Machine
from tokenscale.settings.options import decode
from tokenscale.settings.run import RunSettings, reads_parquet

Cell = dict[str, Any]
CellReading = tuple[Cell, RunSettings, Reading]
#: levels of a cell as JSON, in the order of the factors
LevelRow = tuple[str, ...]
#: sections that are one choice, whatever settings it takes to make it
ONE_CHOICE = ("layout", "model", "resume_from")
#: budgets that say, with the tokens at hand, how often a text is read
COUNTED = ("steps", "epochs")
SCALING_FIGURES = ("scaling_throughput", "parallel_methods")
#: fewest held-out documents for a loss that represents other text
FEW_DOCUMENTS = 30
#: next steps of several findings
LESS_REPETITION = "fewer steps, or a larger corpus"
SINGLE_STEPS = "run cells that differ in one factor only, or leave out cells that differ in several"


@dataclass(frozen=True)
class Problem:
    """One finding: level, what is wrong, key of the experiment's file, next step; `mark` where
    losses are compared.
    """

    level: str
    what: str
    key: str
    next: str
    mark: str = ""


@dataclass(frozen=True)
class Design:
    """An experiment at one scale, with what its checks need.

    `steps`: cell as JSON → most steps that a run of it made, where that is known. `gpus` and
    `cores` are those of this machine; None if the experiment is not meant for this machine.
    """

    experiment: Experiment
    runs: list[Run]
    texts: Mapping[Text, CorpusSize] = field(default_factory=dict)
    machine: Machine = field(default_factory=Machine)
    gpus: int | None = None
    cores: int | None = None
    steps: Mapping[str, int] = field(default_factory=dict)

    @functools.cached_property
    def cells(self) -> list[Cell]:
        """Factor → level of each cell."""
        return expand_cells(self.experiment)

    @functools.cached_property
    def settings(self) -> list[tuple[Cell, RunSettings]]:
        """Return one run's settings for each cell."""
        first = {canonical_json(run.cell): run.settings for run in reversed(self.runs)}
        return [(cell, first[canonical_json(cell)]) for cell in self.cells]

    @functools.cached_property
    def readings(self) -> list[CellReading]:
        """Return how each cell reads each of its corpora."""
        steps = [self.steps.get(canonical_json(cell)) for cell in self.cells]
        cells = zip(self.settings, steps, strict=True)
        return [
            (cell, run, text)
            for (cell, run), n in cells
            for text in read_texts(run, self.texts, steps=n)
        ]

    @functools.cached_property
    def factors(self) -> list[str]:
        """Return the dotted keys with at least two levels among the cells that are run."""
        names = varied_keys(self.experiment.factors)
        return [
            name for name in names if len({canonical_json(cell[name]) for cell in self.cells}) > 1
        ]


def find_problems(
    design: Design, checks: Sequence[Callable[[Design], Iterable[Problem]]] = ()
) -> list[Problem]:
    """Run all checks, or these, and return their problems, refusals first."""
    found = (problem for check in checks or (*OF_RESULTS, *BEFOREHAND) for problem in check(design))
    return sorted(found, key=lambda problem: ("refuse", "warn", "note").index(problem.level))


def find_cautions(
    table: Mapping[str, Any],
    stores: Sequence[Path],
    corpora: Sequence[Path],
    steps: Mapping[str, int],
) -> list[dict[str, str]]:
    """Return `level`, `what` and `mark` of what `check` refuses or warns of and no table of results
    says by itself.

    `table` is the run table; `stores` and `corpora` are manifests; `steps` is run id → its steps. A
    table whose settings this version cannot read gives none.
    """
    try:
        runs: list[Run] = []
        made: dict[str, int] = {}
        for entry in (entry for entry in table["runs"] if not entry.get("external")):
            runs.append(
                Run(
                    settings=decode(RunSettings, values=entry["run"]),
                    cell=entry["cell"],
                    repeat=entry["repeat"],
                    position=entry["position"],
                )
            )
            cell = canonical_json(entry["cell"])
            made[cell] = max(made.get(cell, 0), steps.get(entry["run_id"], 0))
        left_out = tuple(LeftOut(**left) for left in table.get("left_out") or ())
        more = {
            "factors": table["factors"],
            "left_out": left_out,
            "figures": tuple(table.get("figures") or ()),
        }
        experiment = Experiment(question=table["question"], note=table.get("note") or "", **more)
        sizes = read_sizes((run.settings for run in runs), stores, corpora=corpora)
        design = Design(
            experiment=experiment,
            runs=runs,
            texts=sizes,
            steps=made,
        )
        # a LookupError where a cell lacks its factors or its run
        _ = design.settings
        _ = design.factors
    except (UserError, LookupError, TypeError, ValueError, AttributeError):
        return []
    found = find_problems(design, checks=OF_RESULTS)
    return [{"level": p.level, "what": p.what, "mark": p.mark} for p in found if p.level != "note"]


def check_confounding(design: Design) -> list[Problem]:
    """Find factors that never vary alone, and cells that differ from every other cell in several
    factors.

    A global batch that grows with the world size is weak scaling and counts as one factor with it.
    Keys that the file changes together are one factor.
    """
    names = _list_changing_factors(design)
    rows = [
        tuple(canonical_json(factor_level(cell, factor=name)) for name in names)
        for cell in design.cells
    ]
    alone = _find_keys_that_change_alone(names, rows)
    together = _group_factors_together(names, rows, alone=alone)
    key = "left_out" if design.experiment.left_out else "factors"
    found = [_never_alone(name, others) for name, others in together.items()]
    if not found and (lonely := _find_lonely_cells(names, rows, key=key)):
        return lonely
    explained = alone.union(*together.values(), together)
    return found + [
        Problem(
            level="refuse",
            what=f"no two cells differ in {name} alone: its effect cannot be measured",
            key=key,
            next=SINGLE_STEPS,
        )
        for name in names
        if name not in explained
    ]


def _list_changing_factors(design: Design) -> list[str]:
    """Return the factors with several levels; in weak scaling, the global batch is none."""
    changing = set(design.factors)
    if is_weak_scaling(design):
        changing -= {"global_batch"}
    return [factor for factor in design.experiment.factors if changing & set(factor_keys(factor))]


def _find_keys_that_change_alone(names: list[str], rows: list[LevelRow]) -> set[str]:
    """Return the names in which two rows differ that are otherwise equal."""
    distinct = set(rows)
    return {
        name
        for column, name in enumerate(names)
        if len({_without(row, columns=(column,)) for row in distinct}) < len(distinct)
    }


def _without(row: LevelRow, columns: tuple[int, ...]) -> LevelRow:
    return tuple(level for column, level in enumerate(row) if column not in columns)


def _group_factors_together(
    names: list[str], rows: list[LevelRow], alone: set[str]
) -> dict[str, list[str]]:
    """Return factor → the others that change wherever it does: of each group that is not `alone`,
    its first factor.
    """
    levels = dict(zip(names, zip(*rows, strict=True), strict=True))
    explained = set(alone)
    groups = {}
    for name in names:
        if name in explained:
            continue
        # another factor changes wherever this one does if its level determines this one's
        others = [
            other
            for other in names
            if other != name
            and len(set(zip(levels[other], levels[name], strict=True))) == len(set(levels[other]))
        ]
        if others:
            explained |= {name, *others}
            groups[name] = others
    return groups


def _never_alone(name: str, others: list[str]) -> Problem:
    what = (
        f"factor {name} never changes alone: {listing(others)} changes with it, so their effects "
        "cannot be separated"
    )
    return Problem(
        level="refuse",
        what=what,
        key=f"factors.{name}",
        next="run cells that differ in one of them only (check left_out), or fix one",
    )


def _find_lonely_cells(names: list[str], rows: list[LevelRow], key: str) -> list[Problem]:
    """Find cells that differ from every other cell in several factors."""
    found = []
    nearest = _find_nearest_differences(rows, width=len(names))
    for row in rows:
        columns = nearest.get(row, ())
        if len(columns) < 2:
            continue
        level = ", ".join(
            f"{name}={json.loads(text)}" for name, text in zip(names, row, strict=True)
        )
        fewest = [names[column] for column in columns]
        what = (
            f"cell {level} differs from every other in {listing(fewest)} at once: no other cell is "
            "comparable"
        )
        found.append(
            Problem(
                level="refuse",
                what=what,
                key=key,
                next=SINGLE_STEPS,
            )
        )
    return found


def _find_nearest_differences(rows: list[LevelRow], width: int) -> dict[LevelRow, tuple[int, ...]]:
    """Return each row → the columns in which it differs from its nearest other row; of several as
    near, from the first.

    Rows that are equal without some columns differ in these alone. Few columns are tried before
    many, so that rows with a neighbour in every factor need one pass for each of the factors.
    """
    found: dict[LevelRow, tuple[int, ...]] = {}
    for count in range(1, width + 1):
        left = [row for row in rows if row not in found]
        if not left:
            break
        nearest: dict[LevelRow, int] = {}
        for columns in itertools.combinations(range(width), count):
            equal_elsewhere: dict[LevelRow, list[int]] = {}
            for number, row in enumerate(rows):
                equal_elsewhere.setdefault(_without(row, columns), []).append(number)
            for row in left:
                numbers = equal_elsewhere[_without(row, columns)]
                other = next((n for n in numbers if rows[n] != row), len(rows))
                if other < nearest.get(row, len(rows)):
                    nearest[row] = other
                    found[row] = columns
    return found


def check_compound_levels(design: Design) -> Iterator[Problem]:
    """Find levels that are mappings or lists and change several settings at once."""
    for factor in design.experiment.factors:
        together = _list_inseparable_keys(design, factor)
        if len(together) > 1:
            what = (
                f"levels change {listing(together)} together, so their effects cannot be separated"
            )
            cure = (
                f"add levels that differ in {together[-1]} alone, or say in the note what is "
                "compared"
            )
            yield Problem(
                level="warn",
                what=what,
                key=f"factors.{factor}",
                next=cure,
            )
    for name in design.factors:
        moved = _list_moved_settings(design, name)
        if len(moved) > 1:
            what = (
                f"levels of {name} change {listing(moved)} together, so their effects cannot be "
                "separated"
            )
            cure = (
                f"make {name}.{moved[0]} a factor of its own, or say in the question what is "
                "compared"
            )
            yield Problem(
                level="warn",
                what=what,
                key=f"factors.{name}",
                next=cure,
            )


def _list_inseparable_keys(design: Design, factor: str) -> list[str]:
    """Return the keys of a factor of which no two of its levels differ in that key alone."""
    weak = is_weak_scaling(design)
    moved = [
        k for k in factor_keys(factor) if k in design.factors and not (weak and k == "global_batch")
    ]
    rows = [tuple(canonical_json(cell[key]) for key in moved) for cell in design.cells]
    alone = _find_keys_that_change_alone(moved, rows)
    return [key for key in moved if key not in alone]


def _list_moved_settings(design: Design, name: str) -> list[str]:
    """Return the settings that differ among the levels of a factor, where one is a mapping; none of
    what is one choice.
    """
    section = name.split(".", maxsplit=1)[0]
    if section in ONE_CHOICE or not any(isinstance(cell[name], dict) for cell in design.cells):
        return []
    values = [
        asdict(functools.reduce(getattr, name.split("."), settings))
        for _, settings in design.settings
    ]
    return [key for key in values[0] if len({canonical_json(v[key]) for v in values}) > 1]


def is_weak_scaling(design: Design) -> bool:
    """Return whether the global batch grows in proportion to the world size (weak scaling)."""
    found = {(s.layout.world_size, s.global_batch) for _, s in design.settings}
    return (
        len({batch for _, batch in found}) > 1
        and len({batch / world for world, batch in found}) == 1
    )


def check_scaling(design: Design) -> Iterator[Problem]:
    """Find world sizes that change more than the number of ranks: the global batch, or the rows of
    a forward pass; and those among which the batch cannot be divided evenly.
    """
    sizes = {s.layout.world_size for _, s in design.settings}
    of_ranks = {(s.global_batch, s.layout.data_parallel_size) for _, s in design.settings}
    if uneven := sorted(
        (-(-batch // n) * n / batch, batch, n) for batch, n in of_ranks if batch % n
    ):
        _, batch, n = uneven[-1]
        what = f"a batch of {batch} sequences does not divide among {n} data-parallel ranks: "
        what += f"those with {batch // n} wait for those with {-(-batch // n)}"
        yield Problem(
            level="warn",
            what=what,
            key="runs.global_batch",
            next=f"global_batch: {-(-batch // n) * n}",
        )
    if len(sizes) < 2:
        return
    text = f"{design.experiment.question} {design.experiment.note}".lower()
    if is_weak_scaling(design):
        if "weak" not in text:
            what = (
                "the global batch grows with the world size (weak scaling), but neither question "
                "nor note says so"
            )
            key = next(
                (f for f in design.experiment.factors if "global_batch" in factor_keys(f)),
                "global_batch",
            )
            yield Problem(
                level="warn",
                what=what,
                key=f"factors.{key}",
                next="say “weak scaling” in the question or the note",
            )
        return
    passes: dict[str, set[int]] = {}
    for cell, s in design.settings:
        rest = canonical_json({k: v for k, v in cell.items() if not _is_layout_key(k)})
        of_pass = min(s.micro_batch, -(-s.global_batch // s.layout.data_parallel_size))
        passes.setdefault(rest, set()).add(of_pass)
    rows = max(passes.values(), key=len)
    if len(rows) > 1:
        what = (
            "strong scaling: the global batch is fixed, and a forward pass of a rank has "
            f"{max(rows)} rows at the "
        )
        what += (
            f"smallest world size and {min(rows)} at the largest, and small passes take longer "
            "per row"
        )
        cure = f"micro_batch: {min(rows)} gives every pass the same number of rows"
        yield Problem(
            level="note",
            what=what,
            key="runs.micro_batch",
            next=cure,
        )


def check_bases(design: Design) -> Iterator[Problem]:
    """Find comparisons without a base: the smallest world size of a line, the baseline of an
    approach or a schedule.
    """
    yield from _check_smallest_sizes(design)
    yield from _check_baselines(design)
    piped = [s.layout for _, s in design.settings if s.layout.pipeline > 1]
    without = {layout.pipeline for layout in piped} - {
        of.pipeline for of in piped if of.schedule == "naive"
    }
    if without and "pipeline_bubble" in design.experiment.figures:
        what = (
            f"pipelines of {listing(sorted(without))} ranks have no cell with schedule naive, "
            "the reference for "
        )
        yield Problem(
            level="warn",
            what=f"{what}their speed",
            key="factors.layout",
            next="add {pipeline: N, schedule: naive}",
        )


def _check_smallest_sizes(design: Design) -> Iterator[Problem]:
    """Find lines whose efficiency has no base at world size 1, or each another one."""
    if not set(SCALING_FIGURES) & set(design.experiment.figures):
        return
    lines: dict[str, set[int]] = {}
    for cell, s in design.settings:
        rest = {k: v for k, v in cell.items() if not _is_layout_key(k) and k != "global_batch"}
        lines.setdefault(canonical_json(rest), set()).add(s.layout.world_size)
    # a single size has no efficiency
    smallest = {min(sizes) for sizes in lines.values() if len(sizes) > 1}
    key = next(
        (f"factors.{name}" for name in design.experiment.factors if _is_layout_key(name)), "factors"
    )
    if len(smallest) > 1:
        begins = listing(sorted(smallest))
        what = (
            f"lines begin at different world sizes, {begins}, so their efficiencies have "
            "different bases"
        )
        yield Problem(
            level="refuse",
            what=what,
            key=key,
            next=f"run every line at world size {min(smallest)}",
        )
    elif smallest and min(smallest) > 1:
        what = (
            "no cell at world size 1, the base of efficiency T(N) / (N × T(1)); the "
            f"smallest is {min(smallest)}"
        )
        cure = "add world size 1; where the model does not fit one device, say so in the note"
        yield Problem(
            level="warn",
            what=what,
            key=key,
            next=cure,
        )


def _check_baselines(design: Design) -> Iterator[Problem]:
    """Find approaches without any approach that they are compared with."""
    there = {cell["approach"] for cell in design.cells} if "approach" in design.factors else set()
    for approach in sorted(there & {approach for approach, _ in COMPARISONS}):
        bases = [baseline for of, baseline in COMPARISONS if of == approach]
        if not there & set(bases):
            what = f"approach {approach} has no baseline: it is compared with {' or '.join(bases)}"
            yield Problem(
                level="warn",
                what=what,
                key="factors.approach",
                next=f"add {bases[0]}",
            )


def check_budgets(design: Design) -> Iterator[Problem]:
    """Find compared cells that train on different amounts of data."""
    kinds = sorted({s.budget.kind for _, s in design.settings})
    if len(kinds) > 1:
        what = f"cells have budgets of different kinds: {listing(kinds)}"
        yield Problem(
            level="refuse",
            what=what,
            key="factors.budget",
            next="give all cells a budget of one kind",
        )
    if kinds != ["steps"]:
        return
    equal = "budget: {useful_tokens: …} gives every cell the same number"
    positions = {}
    for cell, s in design.settings:
        rest = canonical_json({k: v for k, v in cell.items() if not k.startswith("budget")})
        positions[rest] = s.budget.steps * s.global_batch * s.sequence_length
    low = min(positions.values())
    high = max(positions.values())
    if low < high:
        moved = [n for n in design.factors if n in ("global_batch", "sequence_length")]
        changed = f", because {listing(moved)} changes" if moved else ""
        what = f"equal steps do not mean equal tokens: {low:,} to {high:,} positions{changed}"
        yield Problem(
            level="warn",
            what=what,
            key="runs.budget.steps",
            next=f"compare speeds, or losses by tokens; {equal}",
        )
    approaches = {s.approach for _, s in design.settings}
    if approaches & set(PADDED) and approaches - set(PADDED):
        what = (
            "equal steps mean equal positions, but padded rows fill fewer of them: approaches "
            "differ in useful tokens"
        )
        cure = f"the report compares losses at equal compute and after equal seconds; {equal}"
        yield Problem(
            level="note",
            what=what,
            key="runs.budget.steps",
            next=cure,
        )


def _times(numbers: Sequence[float]) -> str:
    """The least and the largest: `2`, or `1.5 to 2`."""
    ends = (f"{float(f'{end(numbers):.2g}'):g}" for end in (min, max))
    return " to ".join(dict.fromkeys(ends))


def check_repeated_data(design: Design) -> Iterator[Problem]:
    """Find text that is read more than once, by all cells or by some of them, and batches that are
    larger than it.
    """
    yield from _find_unknown_passes(design)
    known = [(cell, run, text) for cell, run, text in design.readings if text.passes is not None]
    again = [
        (cell, run, text) for cell, run, text in known if _passes(text) > 1 and not text.is_refused
    ]
    if any(run.mixture for _, run, _ in again):
        yield _repeated_mixtures(known, again)
    elif again and len(again) == len(known):
        yield _repeated_by_all(again, cells=len(design.readings))
    elif again:
        once = [cell for cell, _, text in known if _passes(text) <= 1]
        yield _repeated_by_some(again, once)
    yield from _find_large_batches(design)


def _passes(text: Reading) -> float:
    """Return how often a text is read, where that is known."""
    assert text.passes is not None
    return text.passes


def _find_unknown_passes(design: Design) -> Iterator[Problem]:
    """Find runs of which it is not known beforehand how often they read their text."""
    unknown = [run for _, run, text in design.readings if text.passes is None]
    if built := sorted(
        {f"{run.corpus.name}/{run.tokenizer.name}" for run in unknown if run.budget.kind in COUNTED}
    ):
        what = (
            f"whether data are repeated is not known before the tokens of {listing(built)} are "
            "built"
        )
        yield Problem(
            level="note",
            what=what,
            key="runs.corpus",
            next="snakemake tokens, then check again",
        )
    if kinds := sorted({run.budget.kind for run in unknown} - set(COUNTED)):
        what = (
            f"with a budget in {listing(kinds)}, it is not known beforehand whether data are "
            "repeated"
        )
        yield Problem(
            level="note",
            what=what,
            key="runs.budget",
            next="read the cautions of the report once runs are there",
        )


def _repeated_mixtures(known: list[CellReading], again: list[CellReading]) -> Problem:
    """Say how often mixtures read each source of which some cell reads the text `again`."""
    passes_of = {
        name: [_passes(text) for *_, text in known if text.corpus == name]
        for name in sorted({text.corpus for *_, text in again})
    }
    texts = listing(f"{name} {_times(passes)} times" for name, passes in passes_of.items())
    return Problem(
        level="warn",
        what=f"mixtures read their text more than once: {texts}",
        key="runs.budget",
        next=LESS_REPETITION,
        mark=f"read {texts}",
    )


def _repeated_by_all(again: list[CellReading], cells: int) -> Problem:
    """Say how often all cells of which it is known read their text."""
    passes = _times([_passes(text) for *_, text in again])
    who = "every run reads its"
    if len(again) < cells:
        who = f"runs of {len(again)} of {cells} cells read their"
    return Problem(
        level="warn",
        what=f"{who} text {passes} times, so training losses are of text seen before",
        key="runs.budget",
        next=LESS_REPETITION,
        mark=f"text read {passes} times",
    )


def _repeated_by_some(again: list[CellReading], once: list[Cell]) -> Problem:
    """Say which cells read their text `again` while others do not; at the larger world sizes alone,
    that is taken for an effect of scale.
    """
    others = {_format_without_scale(cell) for cell in once}
    scaled = any(_format_without_scale(cell) in others for cell, *_ in again)
    most = f"{max(_passes(text) for *_, text in again):.2g}"
    named = listing(sorted({_name_without_layout(cell) for cell, *_ in again}))
    what = (
        f"some cells read their text up to {most} times and others less than once: {named} "
        "repeat it"
    )
    if scaled:
        what += ", at the larger world sizes"
    else:
        what += "; their training loss includes text seen before"
    return Problem(
        level="refuse" if scaled else "warn",
        what=what,
        key="runs.budget",
        next=LESS_REPETITION,
        mark=f"text read up to {most} times",
    )


def _format_without_scale(cell: Cell) -> str:
    """Return the levels of a cell that are neither its layout nor its global batch, as JSON."""
    return canonical_json(
        {k: v for k, v in cell.items() if not _is_layout_key(k) and k != "global_batch"}
    )


def _name_without_layout(cell: Cell) -> str:
    """Return the levels of a cell that are none of its layout; `all` without any."""
    levels = ", ".join(f"{key}={level}" for key, level in cell.items() if not _is_layout_key(key))
    return levels.replace("approach=", "") or "all"


def _find_large_batches(design: Design) -> Iterator[Problem]:
    """Find batches that are larger than their text."""
    batches = [
        (text.share * run.global_batch, text.rows)
        for _, run, text in design.readings
        if text.share and text.rows
    ]
    if small := [(batch, rows) for batch, rows in batches if rows < batch]:
        what = f"a batch of {max(small)[0]:g} sequences is larger than its text, which has "
        what += f"{_times([rows for _, rows in small])} rows: a step repeats it"
        yield Problem(
            level="warn",
            what=what,
            key="runs.global_batch",
            next="a smaller global_batch, or a larger corpus",
        )


def check_held_out(design: Design) -> Iterator[Problem]:
    """Find held-out text that is smaller than the requested validation, or too small to represent
    other text.
    """
    found = {}
    for _, run in design.settings:
        store = run.validation_store
        if store is None:
            continue
        for corpus in run.corpora:
            text = design.texts.get((corpus.name, run.tokenizer.name, run.eos), CorpusSize())
            requested = run.validation.rows
            rows = text.rows.get(store.directory, requested)
            if text.held_out and (text.held_out < FEW_DOCUMENTS or rows < requested):
                of = f" in {rows} of the {requested} rows requested" if rows < requested else ""
                found[corpus.name] = (f"{text.held_out} document{'s' * (text.held_out > 1)}", of)
    if found:
        texts = listing(f"{documents} of {name}{of}" for name, (documents, of) in found.items())
        cure = "a larger corpus, or a larger validation_share"
        what = f"validation losses are of few held-out texts: {texts}"
        mark = f"held-out text: {texts}"
        yield Problem(
            level="warn",
            what=what,
            key="runs.corpus",
            next=cure,
            mark=mark,
        )


def check_mixtures(design: Design) -> Iterator[Problem]:
    """Find mixtures that need more text of a source than there is, and stages that no run
    reaches.
    """
    mixed = [
        (run, text)
        for _, run, text in design.readings
        if run.mixture is not None and text.sequences
    ]
    most = {
        (run.corpus.name, text.corpus): text
        for run, text in sorted(mixed, key=lambda pair: pair[1].passes or 0)
    }
    for (name, corpus), text in most.items():
        if text.is_refused:
            what = (
                f"mixture {name} reads {corpus} {text.passes:.3g} times, and may {text.limit:g} "
                "times"
            )
            cure = (
                f"raise mixtures.{name}.maximum_repetitions, lower the weight, or train fewer steps"
            )
            yield Problem(
                level="refuse",
                what=what,
                key="runs.budget",
                next=cure,
            )
    ends: dict[str, tuple[int, int]] = {}
    for run, text in mixed:
        assert run.mixture is not None  # as of all of `mixed`
        starts = run.mixture.stage_starts(run.sequence_length)
        reached = (sum(start < text.sequences for start in starts), len(starts))
        ends[run.corpus.name] = min(ends.get(run.corpus.name, reached), reached)
    for name, (last, of) in ends.items():
        if last < of:
            what = f"the run ends in stage {last} of the {of} stages of mixture {name}"
            yield Problem(
                level="warn",
                what=what,
                key="runs.budget",
                next=f"shorter stages in mixtures.{name}, or more steps",
            )


def check_repeats(design: Design) -> Iterator[Problem]:
    """Find too few repeats for any verdict, of the primary comparisons or of all pairs of
    approaches.
    """
    experiment = design.experiment
    if len(design.cells) < 2 or experiment.primary == ():
        return
    if experiment.primary is None:
        family = max(1, sum(_count_comparisons(design).values()))
        given = experiment.repeats
        key = "repeats"
        next_step = "name one to three comparisons under `primary`, with primary_repeats: {}"
    else:
        family = len(experiment.primary)
        given = max(experiment.repeats, experiment.primary_repeats or 1)
        key = "primary_repeats"
        next_step = "primary_repeats: {}"
    needed = fewest_pairs(family)
    if given < needed:
        of = (
            f"{family} comparisons, corrected after Holm, need"
            if family > 1
            else "one comparison needs"
        )
        times = f"{given} repeat{'s' * (given > 1)}"
        what = f"with {times} of a cell every verdict is “too few runs”: {of} at least {needed}"
        next_step = next_step.format(fewest_pairs(1) if experiment.primary is None else needed)
        yield Problem(
            level="warn",
            what=what,
            key=key,
            next=f"{next_step}; or `primary: []` where counts and equalities answer",
        )


def _count_comparisons(design: Design) -> dict[tuple[str, str], int]:
    """Count, for each comparison, the groups of cells that have both sides
    (`report/paired_comparisons.py`).

    World sizes of data parallelism are one group; options of the Parquet store are those of an
    approach that reads one.
    """
    groups: dict[str, set[tuple[str, str]]] = {}
    for cell in design.cells if "approach" in design.factors else ():
        approach = cell["approach"]
        rest = {k: v for k, v in flatten_cell(cell).items() if k not in ("approach", "layout.data")}
        stored = {k: rest.pop(k) for k in list(rest) if k.startswith("storage.")}
        parquet = reads_parquet(approach)
        groups.setdefault(approach, set()).add(
            (canonical_json(rest), canonical_json(stored if parquet else {}))
        )
    return {
        (of, over): sum((rest, "{}") in groups.get(over, ()) for rest, _ in groups.get(of, ()))
        for of, over in COMPARISONS
    }


def check_loss_units(design: Design) -> Iterator[Problem]:
    """Find primary comparisons of losses that have no common unit: nats a token of unlike
    vocabularies, or of unlike tokens.
    """
    for number, comparison in enumerate(describe_primary(design.experiment) or ()):
        section = comparison["factor"].split(".", maxsplit=1)[0]
        if comparison["quantity"] == "validation_loss" and section in LOSS_UNITS:
            yield Problem(
                level="refuse",
                what=f"losses over unlike levels of {section} have no common unit",
                key=f"primary.{number}.quantity",
                next="useful_tokens_per_s; or compare bits_per_byte, which the tables have",
            )


def check_validation(design: Design) -> Iterator[Problem]:
    """Find validation documents that are also trained on, and targets that no validation can reach.

    A split by the text's hash cannot put one text on both sides. Separate validation files can:
    documents that also occur in the training files are dropped only with deduplication.
    """
    without = [cell for cell, s in design.settings if not s.validation.rows]
    if design.experiment.target_loss is not None and without:
        what = (
            f"target_loss is a validation loss, but {len(without)} of {len(design.settings)} "
            "cells do not validate"
        )
        yield Problem(
            level="refuse",
            what=what,
            key="runs.validation.rows",
            next="validation.rows above 0, or no target_loss",
        )
    for corpus in {
        c.name: c for _, s in design.settings if s.validation.rows for c in s.corpora
    }.values():
        own = corpus.source.validation_files
        key = f"corpora.{corpus.name}"
        if shared := sorted(set(own or ()) & set(corpus.source.files or ())):
            what = (
                f"corpus {corpus.name}: {listing(shared)} is used for training and for validation"
            )
            yield Problem(
                level="refuse",
                what=what,
                key=f"{key}.source.validation_files",
                next="name other files",
            )
        elif corpus.source.has_own_validation and not corpus.cleaning.deduplicate:
            what = (
                f"corpus {corpus.name}: validation documents that also occur in its training "
                "text are trained on"
            )
            key += ".cleaning.deduplicate"
            yield Problem(
                level="refuse",
                what=what,
                key=key,
                next=f"{key}: true",
            )
        elif not corpus.source.has_own_validation and corpus.validation_share == 0:
            what = f"corpus {corpus.name} holds out no documents, but runs validate on it"
            cure = "validation_share above 0, or runs.validation.rows: 0"
            yield Problem(
                level="refuse",
                what=what,
                key=f"{key}.validation_share",
                next=cure,
            )


def check_devices(design: Design) -> Iterator[Problem]:
    """Find world sizes that do not fit this machine, and runs that fill a node beside runs that do
    not.
    """
    if design.machine.gpus_per_node is not None:
        yield from _check_nodes(design, gpus=design.machine.gpus_per_node)
        return
    if design.gpus is None:
        return
    auto = {s.layout.world_size for _, s in design.settings if s.device == "auto"}
    if design.gpus and auto and max(auto) > design.gpus:
        what = f"{max(auto)} ranks need a GPU each, but this machine has {design.gpus}"
        yield Problem(
            level="refuse",
            what=what,
            key="factors.layout",
            next="fewer ranks, or --machine FILE for the one it runs on",
        )
    if auto and not design.gpus:
        what = "this machine has no GPU: the runs would use its CPU"
        yield Problem(
            level="warn",
            what=what,
            key="runs.device",
            next="--machine FILE or --profile NAME for the machine it runs on",
        )
    yield from _check_cores(design)


def _check_nodes(design: Design, gpus: int) -> Iterator[Problem]:
    """Find runs on a part of a node beside runs that fill one."""
    sizes = {s.layout.world_size for _, s in design.settings}
    part = sorted(n for n in sizes if n < gpus)
    if part and max(sizes) >= gpus:
        what = f"runs at world size {listing(part)} leave GPUs of a {gpus}-GPU node idle, "
        what += (
            "while larger runs fill it: their ranks have a larger share of its memory, power "
            "and cores"
        )
        cure = "start them one at a time (share 1), and say so where efficiency is shown"
        yield Problem(
            level="note",
            what=what,
            key="factors.layout",
            next=cure,
        )


def _check_cores(design: Design) -> Iterator[Problem]:
    """Find world sizes on CPUs that have fewer cores than ranks, or share them."""
    on_cpu = {s.layout.world_size for _, s in design.settings if s.device == "cpu"}
    if design.cores and on_cpu and max(on_cpu) > design.cores:
        what = (
            f"{max(on_cpu)} ranks oversubscribe {design.cores} cores: such runs test "
            "correctness, not speed"
        )
        yield Problem(
            level="warn",
            what=what,
            key="factors.layout",
            next=f"do not measure scaling above {design.cores} ranks",
        )
    elif len(on_cpu) > 1:
        what = (
            "several ranks share the cores that a single rank has to itself: their speeds do not "
            "measure scaling"
        )
        cure = "--cores 1 gives every rank one thread, also in a run of one rank"
        yield Problem(
            level="note",
            what=what,
            key="factors.layout",
            next=cure,
        )


def check_number_formats(design: Design) -> Iterator[Problem]:
    """Find updates and sums of gradients that bf16 loses: its numbers are 2**-8 of their size apart,
    and the half of it is rounded away.
    """
    found = {}
    most_passes = 1
    for _, run in design.settings:
        if run.precision != "bf16-true":
            continue
        if run.layout.accumulation_format == "stored":
            passes = micro_steps(
                run.global_batch,
                world_size=run.layout.data_parallel_size,
                micro_batch=run.micro_batch,
            )
            most_passes = max(most_passes, passes)
        optimizer = run.optimizer
        weight = run.model.initial_deviation
        if optimizer.moments == "weights" and 1 - optimizer.beta2 < 2**-9:
            what = (
                f"with bf16-true and beta2 {optimizer.beta2} a second moment in bf16 never decays"
            )
            found[what] = Problem(
                level="warn",
                what=what,
                key="runs.optimizer.moments",
                next="optimizer.moments: fp32",
            )
        if optimizer.learning_rate < weight * 2**-9:
            what = (
                f"with bf16-true and a peak rate of {optimizer.learning_rate:g}, updates of "
                "weights above "
            )
            what += (
                f"{optimizer.learning_rate * 2**9:.2g} (initial deviation {weight:g}) are mostly "
                "rounded away"
            )
            found[what] = Problem(
                level="warn",
                what=what,
                key="runs.precision",
                next="precision: bf16, which keeps fp32 weights",
            )
    if most_passes > 1:
        yield Problem(
            level="warn",
            what=f"with bf16-true gradients of {most_passes} micro-steps are added in bf16",
            key="runs.micro_batch",
            next="layout.accumulation_format: fp32, one micro-step, or precision: bf16",
        )
    yield from found.values()


#: checks whose findings stay true of the results; the most important first
OF_RESULTS = (
    *(
        check_confounding,
        check_repeated_data,
        check_held_out,
        check_number_formats,
        check_budgets,
        check_mixtures,
    ),
    *(check_compound_levels, check_scaling, check_bases),
)
#: those that the tables of results answer themselves: verdicts, counts of shared texts, devices
BEFOREHAND = (check_repeats, check_loss_units, check_validation, check_devices)


def _is_layout_key(key: str) -> bool:
    return key.split(".", maxsplit=1)[0] == "layout"
