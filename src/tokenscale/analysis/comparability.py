"""Find runs that may not be compared, because they differ in more than the factor under comparison.

In one source study the main trend, that reading tokens pays off with larger batches, came from one run with another
sequence length. All recorded facts of the table `runs` are compared here before a figure is drawn.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

#: column of `runs` → its name in a sentence: what runs of one comparison share, whatever is compared
SETTINGS = {
    "corpus": "corpus",
    "tokenizer": "tokenizer",
    "tokenizer_sha256": "content of the tokenizer",
    "model": "model",
    "sequence_length": "sequence_length",
    "global_batch": "global_batch",
    "micro_batch": "micro_batch",
    "precision": "precision",
    "base_seed": "seed",
    "positions": "positions trained on",
    "validation_store_sha256": "held-out rows",
}
PLACES = {"machine": "machine", "device": "device", "cpu": "CPU", "share": "runs at once on its node"}
#: the same of runs with as many ranks; of others see `report/words.caution`
RANKS = {
    "world_size": "world size",
    "cores": "cores",
    "threads_per_rank": "threads a rank",
    "oversubscribed": "oversubscribed",
}
#: what is compared → keys of cells that are its levels
LEVELS = {"approach": ("approach", "storage"), "world_size": ("layout.data",), "layout": ("layout",)}
#: what changes the number of ranks
RANKS_CHANGE = ("world_size", "layout")
#: section of a factor's key → columns that follow from it; of other factors the column of their name
FOLLOWING = {
    "budget": ("positions",),
    "corpus": ("corpus", "tokenizer_sha256", "validation_store_sha256"),
    "tokenizer": ("tokenizer", "tokenizer_sha256", "validation_store_sha256"),
    "seed": ("base_seed",),
}
#: factors (or sections) that change the number of useful tokens in the held-out slice
VALIDATION_CHANGE = ("sequence_length", "objective", "labels", "eos", "validation", "corpus", "tokenizer", "mixture")
#: the columns that are compared, a fourth of the table's
COMPARED = (
    *("run_id", "validity", "cell", "repeat", "seed", "external", "science", "code_digest", "code", "versions"),
    *("steps_asked", "validation_tokens"),
    *SETTINGS,
    *PLACES,
    *RANKS,
)


@dataclass(frozen=True)
class Refusal:
    """Runs that are not compared, `where` they stand, and what tells them apart beside the factor."""

    run_ids: tuple[str, ...]
    where: str
    differs: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """For a caption."""
        return f"Not compared: {self.where} ({'; '.join(self.differs)})."


def compared_columns(runs: pd.DataFrame) -> pd.DataFrame:
    """The columns of `runs` that `refusals` looks at."""
    return runs[[column for column in dict.fromkeys(COMPARED) if column in runs]]


def refusals(runs: pd.DataFrame, factor: str) -> list[Refusal]:
    """Rows of `runs` that no comparison along `factor` may use, with the reasons; nothing where all are like for like.

    `factor` is `approach`, `world_size` (of one layout), `layout`, or the dotted key of another factor. Runs that share
    all other levels of their cells are a group. Where its runs differ in more than the factor, the part with the most
    levels stays, if there are two of them or more; where two parts are as large, none does. What a run does not record
    is taken to be as with the others. Runs that are invalid or missing are not asked. Runs of other programs stand
    beside ours where approaches are compared, and are lines of their own else; their packages and seeds are theirs.

    World sizes whose global batch grows with them (weak scaling) may differ in it, and in what follows from it.
    """
    runs = compared_columns(runs)
    counted = runs[runs["validity"].isin(["valid", "suspect"])].assign(
        external=lambda r: r["external"].fillna(False).astype(bool) if "external" in r else False,
        base_seed=lambda r: (r["seed"] - r["repeat"]).where(~r["external"]),
        positions=lambda r: r["steps_asked"] * r["global_batch"] * r["sequence_length"],
    )
    counted = counted.reset_index(drop=True)
    found = []
    rest = counted["cell"].map(lambda cell: _split(cell, factor)[1])
    apart = counted["external"] & (factor in RANKS_CHANGE)
    for (shared, _), group in counted.groupby([rest, apart], sort=False):
        found += _of_group(group, shared, factor)
    return found


def refused(found: Iterable[Refusal]) -> set[str]:
    """Ids of all runs that are refused."""
    return {run_id for refusal in found for run_id in refusal.run_ids}


def sentences(found: Iterable[Refusal]) -> str:
    """All of them, for a caption; empty where there are none."""
    return " ".join(refusal.sentence for refusal in found)


def _of_group(group: pd.DataFrame, rest: str, factor: str) -> list[Refusal]:
    levels = group["cell"].map(lambda cell: _level(cell, factor)) + group["external"].map({True: " (external)"}).fillna(
        ""
    )
    wanted, section = _wanted(group, factor), factor.split(".")[0]
    same_slice = section not in VALIDATION_CHANGE
    alike = _filled({row.Index: _facts(row, wanted, same_slice=same_slice) for row in group.itertuples()})
    stays, others = _parted(alike, levels)
    found = []
    if others:
        left = [i for part in others for i in part]
        where = ", ".join(dict.fromkeys(levels[left])) + (f" at {rest}" if rest else "")
        differs = _against(alike, stays, left) if stays else _each(alike, levels)
        found.append(Refusal(tuple(group.loc[left, "run_id"]), where, differs))
    return found + _digests(group.loc[stays], factor)


def _wanted(group: pd.DataFrame, factor: str) -> dict[str, str]:
    """The columns to hold against each other, with their names."""
    section = factor.split(".")[0]
    free = () if factor in LEVELS else FOLLOWING.get(section, (section,))
    if factor in RANKS_CHANGE and _weak(group):
        free = ("global_batch", "positions")
    elif factor in LEVELS and _own_steps(group[~group["external"]]):
        free = ("positions",)
    wanted = {**SETTINGS, **PLACES, **({} if factor in RANKS_CHANGE else RANKS)}
    return {column: name for column, name in wanted.items() if column in group and column not in free}


def _weak(group: pd.DataFrame) -> bool:
    """Does the global batch grow with the world size?"""
    rows = group["global_batch"] / group["world_size"]
    return group["global_batch"].nunique() > 1 and rows.nunique() == 1


def _own_steps(ours: pd.DataFrame) -> bool:
    """Do runs of equal settings train on unequal positions? An equal budget of tokens or seconds is a number of steps
    for each approach."""
    equal = (ours.groupby("repeat")["science"].nunique() <= 1).all()
    return bool(equal and ours["positions"].nunique() > 1)


def _facts(row: Any, wanted: Mapping[str, str], *, same_slice: bool) -> dict[str, Any]:
    """Return name → value of the facts that a row states.

    Among them are versions of packages, the hashes of the run's own source files (runs that import different files
    share the facts of those that both import), and with `same_slice` the tokens that it validated on, which may differ
    between repeats where labels are drawn.
    """
    stated = {name: getattr(row, column) for column, name in wanted.items()}
    if not row.external:
        packages = json.loads(row.versions) if isinstance(row.versions, str) else {}
        packages.pop("tokenscale", None)
        code = getattr(row, "code", None)
        files = json.loads(code) if isinstance(code, str) else {}
        stated |= packages | {f"source file {name}": sha256 for name, sha256 in files.items()}
        if same_slice:
            stated[f"useful tokens validated on in repeat {row.repeat}"] = getattr(row, "validation_tokens", None)
    return {name: value for name, value in stated.items() if not pd.isna(value)}


def _filled(facts: dict[Any, dict[str, Any]]) -> dict[Any, tuple[tuple[str, Any], ...]]:
    """Index → all facts that not all runs share; what a run does not state is as most of the others have it."""
    names = dict.fromkeys(name for stated in facts.values() for name in stated)
    values = {name: [stated[name] for stated in facts.values() if name in stated] for name in names}
    varied = {name: max(v, key=v.count) for name, v in values.items() if len(set(v)) > 1}
    return {i: tuple((name, stated.get(name, most)) for name, most in varied.items()) for i, stated in facts.items()}


def _parted(alike: dict[Any, Any], levels: pd.Series) -> tuple[list, list[list]]:
    """(the part that stays, empty where none does, and the other parts), each a list of indices."""
    parts: dict[Any, list] = {}
    for i, facts in alike.items():
        parts.setdefault(facts, []).append(i)
    least = min(2, levels.nunique())
    first, *others = sorted(parts.values(), key=lambda part: _size(levels, part), reverse=True)
    if not others or (_size(levels, first) > _size(levels, others[0]) and levels[first].nunique() >= least):
        return first, others
    return [], [first, *others]


def _size(levels: pd.Series, part: list) -> tuple[int, int]:
    return levels[part].nunique(), len(part)


def _against(alike: dict[Any, Any], stays: list, left: list) -> tuple[str, ...]:
    """What tells runs from those that stay: `sequence_length 4096 vs 2048`."""
    found = []
    for name, value in alike[stays[0]]:
        other = dict.fromkeys(_text(dict(alike[i])[name]) for i in left)
        other.pop(_text(value), None)
        if other:
            found.append(f"{name} {', '.join(other)} vs {_text(value)}")
    return tuple(found)


def _each(alike: dict[Any, Any], levels: pd.Series) -> tuple[str, ...]:
    """What tells all from each other: `sequence_length 4096 (padding-free) vs 2048 (token-list)`."""
    values: dict[str, dict[str, dict[str, None]]] = {}
    for i, facts in alike.items():
        for name, value in facts:
            values.setdefault(name, {}).setdefault(_text(value), {})[levels[i]] = None
    sides = {name: [f"{value} ({', '.join(of)})" for value, of in found.items()] for name, found in values.items()}
    return tuple(f"{name} {' vs '.join(differing)}" for name, differing in sides.items())


def _digests(group: pd.DataFrame, factor: str) -> list[Refusal]:
    """Runs that agree in all columns but not in the digest of their settings, or of their code and inputs."""
    found = []
    if factor in LEVELS and not (factor in RANKS_CHANGE and _weak(group)):
        for (repeat, _), runs in group.groupby(["repeat", "external"]):
            if runs["science"].nunique() > 1:
                where = f"{', '.join(dict.fromkeys(runs['cell']))}, repeat {repeat}"
                found.append(Refusal(tuple(runs["run_id"]), where, ("settings that the table of runs does not name",)))
    for (cell, _), runs in group.groupby(["cell", "external"]):
        if runs["code_digest"].nunique() > 1:
            found.append(Refusal(tuple(runs["run_id"]), cell, ("its repeats are of different code or inputs",)))
    return found


def _split(cell: str, factor: str) -> tuple[str, str]:
    """(the levels of the factor, the others) of a cell's text."""
    keys = LEVELS.get(factor, (factor,))
    parts = [part for part in (cell or "").split(", ") if part]
    own = [part for part in parts if part.startswith(tuple(f"{key}{end}" for key in keys for end in "=."))]
    return ", ".join(own), ", ".join(part for part in parts if part not in own)


def _level(cell: str, factor: str) -> str:
    """A level in words: an approach by its name alone."""
    return _split(cell, factor)[0].removeprefix("approach=") or "(one level)"


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value > 99_999 else str(value)
    return text[:12] if len(text) == 64 else text  # a digest
