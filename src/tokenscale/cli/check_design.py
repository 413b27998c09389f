"""What is wrong with an experiment's design, before a GPU hour is spent. Pure: one function a check, no files.

`refuse`: what it would show is wrong. `warn`: it shows less than it seems to. `note`: good to know when reading it.
"""

import functools
import itertools
import json
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
    """One finding: refuse, warn or note; what; the key of the experiment's file; and what to do next."""

    level: str
    what: str
    key: str
    next: str


@dataclass(frozen=True)
class Text:
    """What is known of a corpus in a tokenizer's ids: documents, tokens, and rows of the stores that are there."""

    documents: int
    tokens: int
    rows: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Design:
    """An experiment at one scale. `texts`: (corpus, tokenizer, eos) → what is known of it. `gpus` and `cores` are those
    of this machine; None where the experiment is not meant for this machine."""

    experiment: Experiment
    runs: list[Run]
    texts: Mapping[tuple[str, str, bool], Text] = field(default_factory=dict)
    machine: Machine = field(default_factory=Machine)
    gpus: int | None = None
    cores: int | None = None

    @property
    def cells(self) -> list[Cell]:
        """Factor → level of each cell."""
        return expand_cells(self.experiment)

    @property
    def settings(self) -> list[tuple[Cell, RunSettings]]:
        """One run's settings for each cell."""
        first = {canonical_json(run.cell): run.settings for run in reversed(self.runs)}
        return [(cell, first[canonical_json(cell)]) for cell in self.cells]

    @property
    def factors(self) -> list[str]:
        """Dotted keys with two levels or more among the cells that are run."""
        keys = varied_keys(self.experiment.factors)
        levels = {name: {canonical_json(cell[name]) for cell in self.cells} for name in keys}
        return [name for name, found in levels.items() if len(found) > 1]


def problems(design: Design) -> list[Problem]:
    """All checks, what is refused first."""
    found = [problem for check in CHECKS for problem in check(design)]
    return sorted(found, key=lambda problem: ("refuse", "warn", "note").index(problem.level))


def together(design: Design) -> list[Problem]:
    """Factors of which no two cells differ alone, and cells that differ from every other cell in several factors.

    A global batch that grows with the world size is weak scaling and counts as one factor with it; keys that the file
    moves together are one.
    """
    changing = [name for name in design.factors if name != "global_batch" or not weak(design)]
    names = [factor for factor in design.experiment.factors if set(factor_keys(factor)) & set(changing)]
    table = [{name: canonical_json(factor_level(cell, name)) for name in names} for cell in design.cells]
    apart = [(a, b, [n for n in names if a[n] != b[n]]) for a, b in itertools.combinations(table, 2)]
    alone = {different[0] for _, _, different in apart if len(different) == 1}
    found, reported = [], set(alone)
    for name in names:
        always = set.intersection(*(set(different) for _, _, different in apart if name in different))
        if len(always) > 1 and name not in reported:
            reported |= always
            others = _and(n for n in names if n in always and n != name)
            what = f"{name} never changes alone: {others} changes with it, and the effect is of both"
            cure = "run cells that differ in one of them only (does left_out leave them out?), or fix one"
            found.append(Problem("refuse", what, f"factors.{name}", cure))
    cure = "run cells that differ in one factor only, or leave out those that differ in several"
    key = "left_out" if design.experiment.left_out else "factors"
    for cell in table if not found else ():
        near = [different for a, b, different in apart if cell in (a, b)]
        if near and min(map(len, near)) > 1:
            reported |= set(names)
            level = ", ".join(f"{name}={json.loads(text)}" for name, text in cell.items())
            what = f"cell {level} differs from every other in {_and(min(near, key=len))} at once: it compares with none"
            found.append(Problem("refuse", what, key, cure))
    found += [
        Problem("refuse", f"no two cells differ in {name} alone: it compares with nothing", key, cure)
        for name in names
        if name not in reported
    ]
    return found


def several_at_once(design: Design) -> list[Problem]:
    """Levels that are mappings or lists and move several settings."""
    found = []
    for factor in design.experiment.factors:
        moved = [key for key in factor_keys(factor) if key in design.factors]
        if weak(design):
            moved = [key for key in moved if key != "global_batch"]
        levels = [{key: canonical_json(cell[key]) for key in moved} for cell in design.cells]
        apart = [[key for key in moved if a[key] != b[key]] for a, b in itertools.combinations(levels, 2)]
        together = [key for key in moved if [key] not in apart]
        if len(together) > 1:
            what = f"levels change {_and(together)} together: an effect is of all of them"
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
                    f"levels of {name} change {_and(moved)} together: an effect is of all of them",
                    f"factors.{name}",
                    f"make {name}.{moved[0]} a factor of its own, or say in the question what is compared",
                )
            )
    return found


def weak(design: Design) -> bool:
    """Does the global batch grow with the world size, by as many rows a rank?"""
    found = {(s.layout.world_size, s.global_batch) for _, s in design.settings}
    return len({batch for _, batch in found}) > 1 and len({batch / world for world, batch in found}) == 1


def kind_of_scaling(design: Design) -> list[Problem]:
    """World sizes change more than the number of ranks: the global batch, or the rows of a pass."""
    sizes = {s.layout.world_size for _, s in design.settings}
    if len(sizes) < 2:
        return []
    text = f"{design.experiment.question} {design.experiment.note}".lower()
    if weak(design):
        if "weak" in text:
            return []
        what = "the global batch grows with the world size (weak scaling), and neither question nor note says so"
        key = next((f for f in design.experiment.factors if "global_batch" in factor_keys(f)), "global_batch")
        return [Problem("warn", what, f"factors.{key}", "say “weak scaling” in the question or the note")]
    passes = {}
    for cell, s in design.settings:
        rest = canonical_json({k: v for k, v in cell.items() if not _of_layout(k)})
        rows = min(s.micro_batch, -(-s.global_batch // s.layout.data_parallel_size))
        passes.setdefault(rest, set()).add(rows)
    shrinking = [rows for rows in passes.values() if len(rows) > 1]
    if not shrinking:
        return []
    rows = max(shrinking, key=len)
    what = (
        f"strong scaling: the global batch is fixed, and a forward pass of a rank has {max(rows)} rows at the smallest "
        f"world size and {min(rows)} at the largest, which are slower a row"
    )
    return [Problem("note", what, "runs.micro_batch", f"micro_batch: {min(rows)} makes every pass alike")]


def base(design: Design) -> list[Problem]:
    """Something to compare with: the smallest world size of every line, the baselines of approaches and schedules."""
    return [*_base_of_scaling(design), *_baselines(design), *_naive(design)]


def _base_of_scaling(design: Design) -> list[Problem]:
    lines: dict[str, set[int]] = {}
    for cell, s in design.settings:
        rest = {k: v for k, v in cell.items() if not _of_layout(k) and k != "global_batch"}
        lines.setdefault(canonical_json(rest), set()).add(s.layout.world_size)
    if all(len(sizes) == 1 for sizes in lines.values()) or not set(SCALING_FIGURES) & set(design.experiment.figures):
        return []
    smallest = {min(sizes) for sizes in lines.values()}
    key = next((f"factors.{name}" for name in design.experiment.factors if _of_layout(name)), "factors")
    if len(smallest) > 1:
        what = f"lines begin at world sizes {_and(map(str, sorted(smallest)))}: their efficiencies have different bases"
        return [Problem("refuse", what, key, f"run every line at world size {min(smallest)}")]
    if min(smallest) > 1:
        what = f"no cell at world size 1: efficiency T(N) / (N × T(1)) has no base, {min(smallest)} is the smallest"
        return [
            Problem("warn", what, key, "add world size 1; where the model does not fit one device, say so in the note")
        ]
    return []


def _baselines(design: Design) -> list[Problem]:
    if "approach" not in design.factors:
        return []
    there = {cell["approach"] for cell in design.cells}
    found = []
    for approach in sorted(there & {approach for approach, _ in COMPARISONS}):
        bases = [baseline for of, baseline in COMPARISONS if of == approach]
        if not there & set(bases):
            what = f"{approach} has no baseline: {' or '.join(bases)} is what it is compared with"
            found.append(Problem("warn", what, "factors.approach", f"add {bases[0]}"))
    return found


def _naive(design: Design) -> list[Problem]:
    if "pipeline_bubble" not in design.experiment.figures:
        return []
    without = sorted(
        {s.layout.pipeline for _, s in design.settings if s.layout.pipeline > 1}
        - {s.layout.pipeline for _, s in design.settings if s.layout.schedule == "naive"}
    )
    if not without:
        return []
    what = (
        f"pipelines of {_and(map(str, without))} ranks have no schedule naive, which the others' speed is relative to"
    )
    return [Problem("warn", what, "factors.layout", "add {pipeline: N, schedule: naive}")]


def budgets(design: Design) -> list[Problem]:
    """Cells that are compared train on as much, by the measure that counts."""
    every = [(cell, s) for cell, s in design.settings]
    kinds = sorted({s.budget.kind for _, s in every})
    if len(kinds) > 1:
        what = f"cells end by different budgets: {_and(kinds)}"
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
        what = f"equal steps are unequal tokens: {low:,} to {high:,} positions, as {_and(moved)} changes"
        cure = "compare speeds, or losses by tokens; budget: {useful_tokens: …} gives all as many"
        found.append(Problem("warn", what, "runs.budget.steps", cure))
    approaches = {s.approach for _, s in every}
    if kinds == ["steps"] and approaches & set(PADDED) and approaches - set(PADDED):
        what = "equal steps are equal positions, of which padded rows fill fewer: approaches differ in useful tokens"
        cure = "read losses by useful tokens, never by step; budget: {useful_tokens: …} gives all as many"
        found.append(Problem("note", what, "runs.budget.steps", cure))
    return found


def repeated_data(design: Design) -> list[Problem]:
    """Text that is read more than once in some cells and not in others."""
    epochs = [(cell, epochs_of(s, design.texts)) for cell, s in design.settings]
    unknown = [s for _, s in design.settings if epochs_of(s, design.texts) is None]
    found = []
    if built := sorted({f"{s.corpus.name}/{s.tokenizer.name}" for s in unknown if s.budget.kind in COUNTED}):
        what = f"whether data are repeated is not known before the tokens of {_and(built)} are built"
        found.append(Problem("note", what, "runs.corpus", "snakemake tokens, then check again"))
    if kinds := sorted({s.budget.kind for s in unknown} - set(COUNTED)):
        what = f"a budget in {_and(kinds)} does not say beforehand whether data are repeated"
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
        all(_of_layout(k) or k == "global_batch" for k in a if a[k] != b[k]) for a, _ in again for b, _ in once
    )
    named = sorted({_line(cell) for cell, _ in again})
    what = f"some cells read their text up to {most:.2g} times and others less than once: {_and(named)} repeat it"
    if across:
        return [*found, Problem("refuse", f"{what}, at the larger world sizes", "runs.budget", cure)]
    return [*found, Problem("warn", f"{what}; their training loss is of text seen before", "runs.budget", cure)]


def epochs_of(run: RunSettings, texts: Mapping[tuple[str, str, bool], Text]) -> float | None:
    """Passes over its text that a run makes; None where the budget or the tokens do not say it.

    Padded rows hold a document each; streams and packed rows hold as many tokens as they have positions (of packed rows
    that are not built yet: that they are full).
    """
    if run.budget.kind == "epochs":
        return run.budget.epochs
    text = texts.get((run.corpus.name, run.tokenizer.name, run.eos))
    if text is None or run.budget.kind != "steps":
        return None
    rows = text.documents if run.approach in PADDED else text.tokens / run.sequence_length
    if run.approach == "packed" and run.store is not None:
        rows = text.rows.get(run.store.directory, rows)
    return run.budget.steps * run.global_batch / rows if rows else None


def repeats(design: Design) -> list[Problem]:
    """Enough of them for any verdict."""
    family = max(1, sum(_pairs(design).values()))
    needed, given = fewest_pairs(family), design.experiment.repeats
    if given >= needed or len(design.cells) < 2:
        return []
    of = f"{family} comparisons, corrected after Holm, need" if family > 1 else "one comparison needs"
    times = f"{given} repeat{'s' * (given > 1)}"
    what = f"{times} of a cell can end in no verdict but “too few runs”: {of} at least {needed}"
    return [Problem("warn", what, "repeats", f"repeats: {needed}, or claim nothing of small differences")]


def _pairs(design: Design) -> dict[tuple[str, str], int]:
    """Comparison → groups of cells that have both sides: the family of `report/paired_comparisons.py`.

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


def validation(design: Design) -> list[Problem]:
    """Held-out documents are held out.

    A split by the text's own hash cannot put one text on both sides. Files of the source's own for validation can: what
    also stands in its training files is dropped where duplicates are.
    """
    found = []
    for corpus in {s.corpus.name: s.corpus for _, s in design.settings if s.validation.rows}.values():
        own = corpus.source.validation_files
        if own and set(own) & set(corpus.source.files):
            what = (
                f"corpus {corpus.name}: {_and(sorted(set(own) & set(corpus.source.files)))} is trained and validated on"
            )
            found.append(Problem("refuse", what, f"corpora.{corpus.name}.source.validation_files", "name other files"))
        elif own and not corpus.cleaning.deduplicate:
            what = f"corpus {corpus.name}: validation documents that also stand in its training files are trained on"
            cure = f"corpora.{corpus.name}.cleaning.deduplicate: true"
            found.append(Problem("refuse", what, f"corpora.{corpus.name}.cleaning.deduplicate", cure))
        elif not corpus.source.has_own_validation and corpus.validation_share == 0:
            what = f"corpus {corpus.name} holds nothing out, and runs validate on rows of it"
            cure = "validation_share above 0, or runs.validation.rows: 0"
            found.append(Problem("refuse", what, f"corpora.{corpus.name}.validation_share", cure))
    return found


def devices(design: Design) -> list[Problem]:
    """World sizes against what is here, and runs that fill a node beside runs that do not."""
    sizes = {s.layout.world_size for _, s in design.settings}
    node = design.machine.gpus_per_node
    if node is not None:
        part = sorted(n for n in sizes if n < node)
        if not part or max(sizes) < node:
            return []
        what = (
            f"runs at world size {_and(map(str, part))} leave GPUs of a node of {node} idle, larger ones fill theirs: "
            "memory, power and cores of the node are not shared alike"
        )
        return [
            Problem("note", what, "factors.layout", "start them one at a time (share 1), and say so beside efficiency")
        ]
    if design.gpus is None:
        return []
    auto = {s.layout.world_size for _, s in design.settings if s.device == "auto"}
    found = []
    if design.gpus and auto and max(auto) > design.gpus:
        what = f"{max(auto)} ranks want a GPU each, and {design.gpus} {'is' if design.gpus == 1 else 'are'} here"
        found.append(Problem("refuse", what, "factors.layout", "fewer ranks, or --machine FILE for the one it runs on"))
    if auto and not design.gpus:
        what = "there is no GPU here: its runs would compute on this machine's CPU"
        found.append(
            Problem("warn", what, "runs.device", "--machine FILE or --profile NAME for the machine it runs on")
        )
    on_cpu = {s.layout.world_size for _, s in design.settings if s.device == "cpu"}
    if design.cores and on_cpu and max(on_cpu) > design.cores:
        what = f"{max(on_cpu)} ranks on {design.cores} cores are oversubscribed: that checks correctness, not speed"
        found.append(Problem("warn", what, "factors.layout", f"read no scaling from above {design.cores} ranks"))
    elif len(on_cpu) > 1:
        what = "ranks share the cores that one process has to itself: their speed is no scaling measurement"
        found.append(
            Problem("note", what, "factors.layout", "--cores 1 gives every rank one thread, the single one too")
        )
    return found


CHECKS = (together, several_at_once, kind_of_scaling, base, budgets, repeated_data, repeats, validation, devices)


def _of_layout(key: str) -> bool:
    return key.split(".")[0] == "layout"


def _line(cell: Cell) -> str:
    """A cell without its layout, in words."""
    named = [f"{k}={v}" for k, v in cell.items() if not _of_layout(k)]
    return ", ".join(named).replace("approach=", "") or "all"


def _and(words: Iterable[str]) -> str:
    *most, last = list(words)
    return f"{', '.join(most)} and {last}" if most else last
