"""Find runs that may not be compared, because they differ in more than the factor under comparison.

In one source study the main trend, that reading tokens pays off with larger batches, came from one
run with another sequence length. All recorded facts of the table `runs` are compared here before a
figure is drawn.
"""

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import pandas as pd

from tokenscale.settings.experiments import LOSS_UNITS

#: column of `runs` → its name in a sentence: what runs of one comparison share, whatever is
#: compared
SETTINGS = (
    {"corpus": "corpus", "tokenizer": "tokenizer", "tokenizer_sha256": "content of the tokenizer"}
    | {
        name: name
        for name in ("model", "sequence_length", "global_batch", "micro_batch", "precision")
    }
    | {
        "base_seed": "seed",
        "positions": "positions trained on",
        "validation_store_sha256": "held-out rows",
    }
)
PLACES = {
    "machine": "machine",
    "device": "device",
    "cpu": "CPU",
    "share": "runs at once on its node",
}
#: the same of runs with as many ranks; of others see `report/captions.caution`
RANKS = {
    "world_size": "world size",
    "cores": "cores",
    "threads_per_rank": "threads a rank",
    "oversubscribed": "oversubscribed",
}
#: what is compared → keys of cells that are its levels
LEVELS = {
    "approach": ("approach", "storage"),
    "world_size": ("layout.data",),
    "layout": ("layout",),
}
#: environment variables that only several ranks read
COMMUNICATION = ("NCCL_", "TORCH_NCCL_", "FI_", "GLOO_")
#: what changes the number of ranks
RANKS_CHANGE = ("world_size", "layout")
#: section of a factor's key → columns that follow from it; of other factors the column of their
#: name
FOLLOWING = {
    "budget": ("positions",),
    "corpus": ("corpus", "tokenizer_sha256", "validation_store_sha256"),
    "tokenizer": ("tokenizer", "tokenizer_sha256", "validation_store_sha256"),
    "seed": ("base_seed",),
}
#: factors (or sections) that change the number of useful tokens in the held-out slice
VALIDATION_CHANGE = (
    "sequence_length",
    "objective",
    "labels",
    "eos",
    "validation",
    "corpus",
    "tokenizer",
    "mixture",
)
#: what is compared beside these: a fourth of the table's columns in all
OTHERS = [
    "run_id",
    "validity",
    "cell",
    "repeat",
    "seed",
    "node_names",
    "external",
    "science",
    "code_digest",
    "code",
    "versions",
    "environment",
    "steps_asked",
    "validation_tokens",
]


class Refusal(NamedTuple):
    """Runs that are not compared, `where` they stand, and what tells them apart beside the
    factor.
    """

    run_ids: tuple[str, ...]
    where: str
    differs: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """For a caption."""
        return f"Not compared: {self.where} ({'; '.join(self.differs)})."


def refusals(runs: pd.DataFrame, factor: str) -> list[Refusal]:
    """Rows of `runs` that no comparison along `factor` may use, with the reasons; nothing where all
    are like for like.

    `factor` is `approach`, `world_size` (of one layout), `layout`, or the dotted key of another
    factor. Runs that share all other levels of their cells are a group. Where its runs differ in
    more than the factor, the part with the most levels stays, if there are two of them or more;
    where two parts are as large, none does. What a run does not record is taken to be as with the
    others. Runs that are invalid or missing are not asked. Runs of other programs stand beside ours
    where approaches are compared, and are lines of their own else; their packages and seeds are
    theirs. What was found in equal rows is remembered: tables, figures and claims ask for the same.

    World sizes whose global batch grows with them (weak scaling) may differ in it, and in what
    follows from it. World sizes may differ in the runs at once on a node where the same number of
    GPUs of it was at work.
    """
    columns = [column for column in (*OTHERS, *SETTINGS, *PLACES, *RANKS) if column in runs]
    counted = runs.loc[runs["validity"].isin(["valid", "suspect"]), columns].reset_index(drop=True)
    key = (_digest(counted), factor)
    if key not in _found:
        _found[key] = _find(counted, factor)
    return list(_found[key])


#: (digest of rows, factor) → what was found
_found: dict[tuple[str, str], list[Refusal]] = {}


def _digest(rows: pd.DataFrame) -> str:
    """Return a hash of columns, types and values."""
    head = str(list(rows.dtypes.items())).encode()
    hashes = pd.util.hash_pandas_object(rows, index=False).to_numpy()
    return hashlib.sha256(head + hashes.tobytes()).hexdigest()


def _find(counted: pd.DataFrame, factor: str) -> list[Refusal]:
    counted = counted.assign(
        external=lambda r: r["external"].fillna(False).astype(bool) if "external" in r else False,
        base_seed=lambda r: (r["seed"] - r["repeat"]).where(~r["external"]),
        positions=lambda r: r["steps_asked"] * r["global_batch"] * r["sequence_length"],
    )
    rest = counted["cell"].map(lambda cell: _split(cell, factor)[1])
    apart = counted["external"] & (factor in RANKS_CHANGE)
    groups = counted.groupby([rest, apart], sort=False)
    return [
        refusal
        for (shared, _), group in groups
        for refusal in _of_group(group, rest=shared, factor=factor)
    ]


#: column of `runs` → what losses of one unit share
OF_ONE_UNIT = {
    "tokenizer_sha256": "vocabularies",
    "validation_store_sha256": "held-out rows",
    "validation_attention": "attention to held-out rows",
}


def find_unlike_units(runs: pd.DataFrame, factor: str) -> str:
    """Return why losses that `factor` tells apart have no common unit; "" where they have one."""
    section = factor.split(".", maxsplit=1)[0]
    unlike = [section] if section in LOSS_UNITS else []
    for column, name in OF_ONE_UNIT.items():
        if column in runs and runs[column].dropna().nunique() > 1:
            unlike.append(name)
    return f"losses over unlike {' and '.join(unlike)} have no common unit" if unlike else ""


def refused(found: Iterable[Refusal]) -> set[str]:
    """Ids of all runs that are refused."""
    return {run_id for refusal in found for run_id in refusal.run_ids}


def sentences(found: Iterable[Refusal]) -> str:
    """All of them, for a caption; empty where there are none."""
    return " ".join(refusal.sentence for refusal in found)


def _of_group(group: pd.DataFrame, rest: str, factor: str) -> list[Refusal]:
    outside = group["external"].map({True: " (external)", False: ""})
    own = group["cell"].map(
        lambda cell: _split(cell, factor)[0].removeprefix("approach=") or "(one level)"
    )
    levels = own + outside
    alike = _filled(_facts(group, factor))
    stays, left = _parted(alike, levels)
    found = []
    if left:
        where = ", ".join(dict.fromkeys(levels[left])) + (f" at {rest}" if rest else "")
        found.append(
            Refusal(
                run_ids=tuple(group.loc[left, "run_id"]),
                where=where,
                differs=_differences(alike, stays, levels=levels),
            )
        )
    return found + _digests(group.loc[stays], factor)


def _wanted(group: pd.DataFrame, factor: str) -> dict[str, str]:
    section = factor.split(".", maxsplit=1)[0]
    free = () if factor in LEVELS else FOLLOWING.get(section, (section,))
    ours = group[~group["external"]]
    same_science = (ours.groupby("repeat")["science"].nunique() <= 1).all()
    if factor in RANKS_CHANGE and _weak(group):
        free = ("global_batch", "positions")
    elif factor in LEVELS and same_science and ours["positions"].nunique() > 1:
        # an equal budget of tokens or seconds is a number of steps for each approach
        free = ("positions",)
    if factor in RANKS_CHANGE and _nodes_are_as_busy(group):
        free += ("share",)
    wanted = {**SETTINGS, **PLACES, **({} if factor in RANKS_CHANGE else RANKS)}
    return {
        column: name for column, name in wanted.items() if column in group and column not in free
    }


def _weak(group: pd.DataFrame) -> bool:
    rows = group["global_batch"] / group["world_size"]
    return group["global_batch"].nunique() > 1 and rows.nunique() == 1


def _nodes_are_as_busy(group: pd.DataFrame) -> bool:
    """Whether all runs had nodes with as many ranks at work, of theirs and of others."""
    if "share" not in group or "node_names" not in group or group["node_names"].isna().all():
        return False
    nodes = group["node_names"].str.split(", ").str.len()
    return (group["world_size"] / nodes * group["share"]).nunique(dropna=False) == 1


def _facts(group: pd.DataFrame, factor: str) -> dict[Any, dict[str, Any]]:
    """Index → name → value of the facts that a row states: columns, versions of packages,
    environment variables (of threads only where all have as many ranks, of communication only where
    there is any), hashes of the source files that it imports, and the tokens that it validated on
    (which differ between repeats where labels are drawn).
    """
    wanted = _wanted(group, factor)
    found = {}
    for row in group.itertuples():
        stated = {name: getattr(row, column) for column, name in wanted.items()}
        if not row.external:
            stated |= _own_facts(row, factor)
        found[row.Index] = {name: value for name, value in stated.items() if not pd.isna(value)}
    environments = _environments(group)
    for name in sorted({name for _, set_ in environments.values() for name in set_}):
        if factor in RANKS_CHANGE and name.endswith("_NUM_THREADS"):
            continue
        for i, (ranks, set_) in environments.items():
            if ranks > 1 or not name.startswith(COMMUNICATION):
                found[i][f"environment variable {name}"] = set_.get(name, "not set")
    return found


def _environments(group: pd.DataFrame) -> dict[Any, tuple[int, dict[str, Any]]]:
    """Index → (world size, environment variables) of the rows of our own runs that state them."""
    return {
        row.Index: (row.world_size, _decoded(row, column="environment"))
        for row in group.itertuples()
        if not row.external and isinstance(getattr(row, "environment", None), str)
    }


def _own_facts(row: Any, factor: str) -> dict[str, Any]:
    """Name → value of the facts that only rows of our own runs state."""
    versions = _decoded(row, column="versions")
    stated = {name: value for name, value in versions.items() if name != "tokenscale"}
    for name, sha256 in _decoded(row, column="code").items():
        stated[f"source file {name}"] = sha256
    if factor.split(".", maxsplit=1)[0] not in VALIDATION_CHANGE:
        stated[f"useful tokens validated on in repeat {row.repeat}"] = getattr(
            row, "validation_tokens", None
        )
    return stated


def _decoded(row: object, column: str) -> dict[str, Any]:
    text = getattr(row, column, None)
    return _parse(text) if isinstance(text, str) else {}


#: most runs state the same versions, variables and source files
_parse = functools.lru_cache(maxsize=256)(json.loads)


def _filled(facts: dict[Any, dict[str, Any]]) -> dict[Any, tuple[tuple[str, Any], ...]]:
    """Index → all facts that not all runs share; what a run does not state is as most of the others
    have it.
    """
    values: dict[str, list] = {}
    for stated in facts.values():
        for name, value in stated.items():
            values.setdefault(name, []).append(value)
    counts = {name: Counter(stated) for name, stated in values.items()}
    varied = {name: n.most_common(1)[0][0] for name, n in counts.items() if len(n) > 1}
    return {
        i: tuple((name, stated.get(name, most)) for name, most in varied.items())
        for i, stated in facts.items()
    }


def _parted(alike: dict[Any, Any], levels: pd.Series) -> tuple[list, list]:
    """(indices of the part that stays, empty where none does, and of the others)."""
    parts: dict[Any, list] = {}
    for i, facts in alike.items():
        parts.setdefault(facts, []).append(i)
    sizes = {facts: (levels[part].nunique(), len(part)) for facts, part in parts.items()}
    first, *others = sorted(parts, key=lambda facts: sizes[facts], reverse=True)
    alone = not others or (
        sizes[first] > sizes[others[0]] and sizes[first][0] >= min(2, levels.nunique())
    )
    stays = parts[first] if alone else []
    left_out = others if alone else [first, *others]
    return stays, [index for facts in left_out for index in parts[facts]]


def _differences(alike: dict[Any, Any], stays: list, levels: pd.Series) -> tuple[str, ...]:
    """Facts that differ between the left-out and the kept runs: `sequence_length 4096 vs 2048`. If
    none are kept, facts that differ between all: `sequence_length 4096 (padding-free) vs 2048
    (token-list)`.
    """
    values: dict[str, dict[str, dict[str, None]]] = {}
    for i, facts in alike.items():
        for name, value in facts:
            values.setdefault(name, {}).setdefault(_text(value), {})[levels[i]] = None
    found = []
    kept = {name: _text(value) for name, value in alike[stays[0]]} if stays else {}
    for name, of in values.items():
        if not stays:
            found.append(
                f"{name} "
                + " vs ".join(f"{value} ({', '.join(where)})" for value, where in of.items())
            )
        elif others := [value for value in of if value != kept[name]]:
            found.append(f"{name} {', '.join(others)} vs {kept[name]}")
    return tuple(found)


def _digests(group: pd.DataFrame, factor: str) -> list[Refusal]:
    """Runs that agree in all columns but not in the digest of their settings, or of their code and
    inputs.
    """
    found = []
    if factor in LEVELS and not (factor in RANKS_CHANGE and _weak(group)):
        for (repeat, _), runs in _varied(group, column="science", by=["repeat", "external"]):
            where = f"{', '.join(dict.fromkeys(runs['cell']))}, repeat {repeat}"
            found.append(
                Refusal(
                    run_ids=tuple(runs["run_id"]),
                    where=where,
                    differs=("settings that the table of runs does not name",),
                )
            )
    for (cell, _), runs in _varied(group, column="code_digest", by=["cell", "external"]):
        found.append(
            Refusal(
                run_ids=tuple(runs["run_id"]),
                where=cell,
                differs=("its repeats are of different code or inputs",),
            )
        )
    return found


def _varied(rows: pd.DataFrame, column: str, by: list[str]) -> Iterable[tuple[Any, pd.DataFrame]]:
    """The groups of rows with several values in a column."""
    several = rows.groupby(by)[column].transform("nunique") > 1
    return rows[several].groupby(by)


def _split(cell: str, factor: str) -> tuple[str, str]:
    """(the levels of the factor, the others) of a cell's text."""
    keys = LEVELS.get(factor, (factor,))
    parts = [part for part in (cell or "").split(", ") if part]
    own = [
        part
        for part in parts
        if part.startswith(tuple(f"{key}{end}" for key in keys for end in "=."))
    ]
    return ", ".join(own), ", ".join(part for part in parts if part not in own)


def _text(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = (
        f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool) and value > 99_999
        else str(value)
    )
    return text[:12] if len(text) == 64 else text  # a digest
