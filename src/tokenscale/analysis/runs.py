"""One row of the table `runs`, from a run's settings, its record and its launcher; also of other
programs' runs.
"""

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tokenscale.analysis.run_record import read_settings
from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json, sha256_text
from tokenscale.costs.exchanges import most_exchanged_bytes
from tokenscale.costs.flops import Convention, flops_per_token, hardware_flops_per_token, parameters
from tokenscale.costs.memory import largest_memory
from tokenscale.costs.peaks import find_peak
from tokenscale.runs.records import provenance
from tokenscale.runs.records.external import COUNTS, check_facts
from tokenscale.settings.data import StorageSettings
from tokenscale.settings.experiments import flatten_cell, format_cell
from tokenscale.settings.extensions import show_extension
from tokenscale.settings.layout import DEGREES, LayoutSettings
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import decode, to_dict
from tokenscale.settings.run import (
    APPROACHES,
    OURS,
    READERS,
    BudgetSettings,
    RunSettings,
    parse_run_id,
    reads_parquet,
    start_step,
)

Row = dict[str, Any]

#: environment variables that say where a run is, or where it writes
_PLACE_VARIABLES = re.compile(
    "RANK$|LOCAL_RANK$|WORLD_SIZE$|MASTER_|SLURM_|CUDA_VISIBLE_DEVICES$|.*(FILE|DIR|PATH|IFNAME)$"
)
#: installed packages that may change times or numbers: collectives, linear algebra, kernels
_COMPUTING = re.compile(
    "nvidia-|triton|pytorch-triton|mkl|openblas|blis|onednn|intel-|tbb|rocm|flash-attn|xformers|transformer-engine"
)
#: convention, as a record names it → column
FLOPS = {
    "full": "flops_per_token",
    "causal": "flops_per_token_causal",
    "hardware": "flops_per_token_hardware",
}
NUMBER_FORMATS = ("bf16", "fp16", "tf32", "fp32", "fp8")

#: columns that are a field of the settings or of the layout
OF_LAYOUT = (
    *("world_size", "method", *DEGREES, "sharding", "copies", "compression"),
    *("schedule", "stages_per_rank"),
)
OF_SETTINGS = (
    *(
        "arm",
        "approach",
        "sequence_length",
        "global_batch",
        "micro_batch",
        "precision",
        "objective",
        "labels",
        "eos",
    ),
)
#: kinds of inputs whose manifests a record names by their hashes
ROLES = ("corpus", "tokenizer", "store", "validation_store")
#: what two runs of other programs must share to be compared: as `science` is for our own, whose
#: settings say more
SHARED = (
    "sequence_length",
    "global_batch",
    "steps_asked",
    "model",
    "corpus",
    "tokenizer",
    "precision",
)
#: column → (the fact's name in the record, its type)
FACTS = {
    **{name: (name, str) for name in ("approach", "model", "corpus", "tokenizer", "precision")},
    **{
        name: (name, int)
        for name in ("world_size", "sequence_length", "global_batch", "micro_batch", "seed")
    },
    "parameters": ("parameters", int),
    "steps_asked": ("steps", int),
    "flops_per_token_stated": ("flops_per_token", float),
    "mfu_stated": ("mfu", float),
}


def columns(record: Row, row: Row) -> Row:
    """Columns of the table `runs`; an optional fact of another type or below its least counts as
    not stated.

    Raises UserError for a required fact that is wrong.
    """
    stated = record["external"]
    check_facts({name: stated.get(name) for name in ("approach", *COUNTS)})
    found = {
        column: _convert_if_valid(stated.get(name), kind, above=-1 if name == "seed" else 0)
        for column, (name, kind) in FACTS.items()
    }
    found["science"] = (
        "external-" + sha256_text(canonical_json({name: found[name] for name in SHARED}))[:16]
    )
    shape = model(stated)
    length = found["sequence_length"]
    if shape is not None and length:
        costs = {
            convention.value: flops_per_token(shape, sequence_length=length, convention=convention)
            for convention in Convention
        }
        found |= {column: costs.get(name) for name, column in FLOPS.items()}
        found["parameters"] = found["parameters"] or parameters(shape)
    return (
        found
        | peak_columns(row, number=_convert_if_valid(stated.get("number_format"), kind=str))
        | {"external": True}
    )


def model(stated: Row | None) -> ModelSettings | None:
    """The model with its vocabulary that a run describes; None where it describes none that can be
    read.
    """
    if stated is None:
        return None
    try:
        shape = decode(ModelSettings, values=stated["shape"])
    except (KeyError, UserError, TypeError, AttributeError, ValueError):
        return None
    return shape if shape.vocabulary_size is not None and shape.transformers is None else None


def _convert_if_valid(value: Any, kind: type, above: int = 0) -> Any:
    fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(
        value, bool
    )
    return kind(value) if fits and (kind is str or above < value < math.inf) else None


def peak_columns(row: Row, number: str | None) -> Row:
    """FLOP/s that a device of the row can do at most in a number format, with its source; null on
    CPUs and of what no table knows.
    """
    peak = (
        find_peak(row["device"])
        if row["device_kind"] == "cuda" and number in NUMBER_FORMATS
        else None
    )
    flops = getattr(peak, number) if peak and number else None
    known = (flops * 1e12, peak.source) if peak and flops is not None else (None, None)
    return {"number_format": number, "peak_flops": known[0], "peak_source": known[1]}


def run_row(entry: Row, experiment: str, record: Row | None) -> Row:
    """The row of one run: of its line in the run table, and of `run.json` where that can be read;
    `ingest.one_run` adds what follows from the logs.
    """
    cell = flatten_cell(entry.get("cell") or {})
    row: Row = {name: entry.get(name) for name in ("run_id", "repeat", "position")}
    row |= {"experiment": experiment, "external": bool(entry.get("external")), "status": "missing"}
    row |= {"cell": format_cell(cell), "approach": cell.get("approach")}
    row["world_size"] = _world_size(cell)
    if record is None:
        return row | _list_settings(read_settings(entry.get("run")))
    design = _get_object(record, name=provenance.DESIGNS).get(experiment)
    row["design_sha256"] = design if isinstance(design, str) else None
    row |= _list_recorded(record)
    if isinstance(record.get("external"), dict):
        return row | columns(record, row)
    run = read_settings(record.get("run"))
    shape = find_shape(run, count=row["parameters"])
    row |= _list_settings(run) | _list_costs(
        record,
        run,
        shape=shape,
        row=row,
    )
    if shape is not None and run is not None:
        held = largest_memory(replace(run, model=shape), device=row["device_kind"])
        row |= {f"predicted_{part}_bytes": size for part, size in held.parts.items()}
        row["predicted_sent_bytes"] = most_exchanged_bytes(replace(run, model=shape))
    outcome = record.get("outcome") or {}
    row["tokens_before"] = outcome.get("begins_at_useful_tokens")
    if row.get("steps_asked") is not None:
        # Of a budget in tokens or seconds, the steps that it came to. What another run did before
        # it, whose checkpoint it began from, is in that run's logs.
        last = record.get("budget_steps", row["steps_asked"])
        if last is None:
            last = outcome.get("steps") or 0
        row["steps_asked"] = last - (outcome.get("begins_at") or 0)
        row["oversubscribed"] = oversubscribed(row)
    return row


def _world_size(cell: Row) -> int | None:
    """The world size by the degrees of a cell, for a run without settings to ask."""
    keys = [f"layout.{degree}" for degree in DEGREES]
    degrees = [cell[key] for key in keys if isinstance(cell.get(key), int)]
    return math.prod(degrees) if degrees else None


def _list_recorded(record: Row) -> Row:
    """Columns that `run.json` states, whatever program wrote it."""
    names = ("outcome", "hardware", "git", "environment")
    outcome, hardware, git, environment = (record.get(key) or {} for key in names)
    threads = (
        hardware.get("threads_per_rank")
        or hardware.get("threads")
        or environment.get("OMP_NUM_THREADS")
    )
    # a log of another trainer states none; an older record of ours says no more than the name
    device = hardware.get("device") or (None if "external" in record else "cpu")
    return {
        "status": outcome.get("status", "unknown"),
        "device": device,
        "device_kind": hardware.get("device_kind")
        or (device and ("cpu" if device.startswith("cpu") else "cuda")),
        **{name: hardware.get(name) for name in ("cpu", "cores")},
        "machine_memory_bytes": hardware.get("memory_bytes"),
        "threads_per_rank": int(threads)
        if threads is not None and str(threads).isdigit()
        else None,
        "parameters": record.get("parameters", outcome.get("parameters")),
        "code_digest": record.get("code_and_inputs") or record.get("digest"),
        "code": _encode_code(record),
        # over all ranks; null where nothing was to be compiled, or an older record lacks it
        **_pick_typed(
            _get_object(record, name="compilation"),
            kind=int,
            names=("blocks", "eager_blocks", "graph_breaks"),
        ),
        "load_average": _convert_number(hardware.get("load_average_1min")),
        **{name: _convert_number(record.get(name)) for name in ("text_lost", "text_unknown")},
        "text_cut": _text_cut(record),
        "document_mask": _get_object(record, name="run").get("document_mask") is True,
        "validation_attention": _validation_attention(record),
        **{f"git_{name}": git.get(name) for name in ("commit", "dirty")},
        "versions": canonical_json(_list_versions(record)),
        "environment": _encode_environment(record),
        "seal": record.get("seal"),
        # of the manifests that the run read, by which its rows of `stores` are found
        **{
            f"{role}_sha256": sha256
            for role, sha256 in _pick_typed(
                _get_object(record, name="inputs"), kind=str, names=ROLES
            ).items()
        },
    }


def _list_costs(record: Row, run: RunSettings | None, shape: ModelSettings | None, row: Row) -> Row:
    """FLOPs of a token, and the device's peak. Counted from the settings, so that a wrapped module
    cannot change them; of a shape that only its library knows, and of others' runs, those that the
    record states.
    """
    stated = {
        k: flops
        for k, n in _get_object(record, name="flops_per_token").items()
        if (flops := _convert_number(n)) is not None
    }
    counted = {}
    if run is not None and shape is not None:
        costs = functools.partial(
            flops_per_token, shape, run.sequence_length, objective=run.objective
        )
        counted = {convention.value: costs(convention) for convention in Convention}
        again = run.activation_checkpointing
        length = run.sequence_length
        counted["hardware"] = hardware_flops_per_token(
            shape,
            sequence_length=length,
            convention=Convention.FULL,
            checkpointing=again,
            objective=run.objective,
        )
    number = record.get("number_format") or (None if run is None else run.number_format)
    return {
        **{column: counted.get(name, stated.get(name)) for name, column in FLOPS.items()},
        "flops_per_token_stated": stated.get("full"),
        **peak_columns(row, number),
    }


def _get_object(record: Row, name: str) -> Row:
    found = record.get(name)
    return found if isinstance(found, dict) else {}


def _pick_typed(found: Row, kind: type, names: Iterable[str]) -> Row:
    return {name: found.get(name) if type(found.get(name)) is kind else None for name in names}


def _list_versions(record: Row) -> Row:
    """Return package → version: the packages that the trainer names, the installed libraries that
    compute (BLAS, NCCL), and the operating system as `system`.
    """
    hardware = _get_object(record, name="hardware")
    system = " ".join(filter(None, map(hardware.get, ("system", "architecture"))))
    return {
        **_get_object(record, name="versions"),
        **{
            name: version
            for name, version in _get_object(record, name="installed").items()
            if _COMPUTING.match(name)
        },
        **({"system": system} if system else {}),
    }


def _encode_code(record: Row) -> str | None:
    """Return the hashes of the source files that a run imports, as JSON; None where they were not
    recorded.
    """
    files = _get_object(record, name="code")
    return (
        canonical_json({str(name): str(sha256)[:12] for name, sha256 in files.items()})
        if files
        else None
    )


def _validation_attention(record: Row) -> str | None:
    """Return what attention in validation was limited to; None where no run of ours validated.
    Records of earlier versions do not state it: validation then had the attention of training.
    """
    run = _get_object(record, name="run")
    if not run or _get_object(run, name="validation").get("rows") == 0:
        return None
    stated = record.get("validation_attention")
    if isinstance(stated, str):
        return stated
    return "inside documents" if run.get("document_mask") is True else "over whole rows"


def _text_cut(record: Row) -> str | None:
    """Return the share of each corpus's tokens that a run's rows cut, as JSON; None where it was
    not counted.
    """
    shares = {
        corpus: _convert_number(share)
        for corpus, share in _get_object(record, name="text_cut").items()
    }
    known = {
        corpus: share for corpus, share in shares.items() if share is not None and 0 <= share <= 1
    }
    return canonical_json(known) if known else None


def _encode_environment(record: Row) -> str | None:
    """Return the environment variables of a run that may change its times or numbers, as JSON; not
    which run it is.
    """
    if not isinstance(record.get("environment"), dict):
        return None
    found = record["environment"].items()
    return canonical_json({str(k): str(v) for k, v in found if not _PLACE_VARIABLES.match(str(k))})


def _convert_number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def find_shape(run: RunSettings | None, count: int | None) -> ModelSettings | None:
    """The model with its vocabulary, which a record does not name but gives away: by the number of
    its parameters. None of settings that do not fit together.
    """
    if run is None or run.problems():
        return None
    model = run.model.with_positions(run.sequence_length)
    if model.transformers is not None or not isinstance(count, int):
        return None
    if model.vocabulary_size is not None:
        return model
    none, one = (parameters(model.with_vocabulary(size)) for size in (0, 1))
    size, left = divmod(count - none, one - none)
    return model.with_vocabulary(size) if size > 0 and not left else None


def _list_settings(run: RunSettings | None) -> Row:
    if run is None:
        return {}
    return {
        **{name: getattr(run.layout, name) for name in OF_LAYOUT},
        **{name: getattr(run, name) for name in OF_SETTINGS},
        **{name: getattr(run, name).name for name in ("model", "tokenizer", "corpus")},
        "engine": run.engine if run.online else None,
        **(vars(run.reader) if run.arm in READERS else {}),
        "mixture": _encode_mixture(run),
        "seed": run.effective_seed,
        "science": science(run),
        "science_per_rank": _science(
            replace(run, global_batch=1, budget=BudgetSettings(), repeat=0)
        ),
        "steps_asked": run.budget.steps,
        "resumed_from": None
        if run.resume_from is None
        else parse_run_id(run.resume_from) or run.resume_from,
        "resumed_at": None if run.resume_from is None else start_step(run),
    }


def _encode_mixture(run: RunSettings) -> str | None:
    """Return the corpora of a run's mixture with their shares of its sequences, as JSON; None if
    they are not known.
    """
    if run.mixture is None:
        return None
    if run.budget.kind != "steps" and len(run.mixture.stages) > 1:
        return None  # the settings do not determine the length of the last stage
    shares = run.mixture.shares(run.budget.steps * run.global_batch, run.sequence_length)
    return canonical_json({name: round(share, 6) for name, share in shares.items()})


def grouping(approach: str | None, cell: Row) -> Row:
    """What runs are grouped by beside world size and repeat: the approach and the other factors of
    their cell.

    Factors of the Parquet store belong to approaches that read one; all other approaches have no
    `storage`. A run that goes on from another one says so in words, and one that does not has no
    such factor; nor has a reader of warm files, or without a DataLoader.

    >>> cell = {"approach": "token-list", "layout.data": 2, "storage.dtype": "int64", "sequence_length": 512}
    >>> grouping("token-list", cell)["series"]
    'token-list, sequence_length=512, storage.dtype=int64'
    >>> grouping("padding-free", cell)
    {'series': 'padding-free, sequence_length=512', 'factors': 'sequence_length=512', 'storage': '', 'layout': ''}
    >>> grouping("packed", {"arm": "reader", "reader.cold": False, "reader.workers": 0})["series"]
    'packed, arm=reader, reader.workers=0'
    """
    parts: dict[str, list[str]] = {"factors": [], "storage": [], "layout": []}
    if cell.get("resume_from"):
        parts["factors"].append(f"resumed ({_describe_predecessors(cell['resume_from'])})")
    for key, value in flatten_cell(
        {key: level for key, level in cell.items() if key != "resume_from"}
    ).items():
        part = key.split(".")[0] if key.startswith(("storage.", "layout.")) else "factors"
        plain = key.startswith("reader.") and (value is None or value is False)
        if key not in ("approach", "layout.data") and not plain:
            parts[part].append(f"{key}={_text(show_extension(value))}")
    if approach in APPROACHES and not reads_parquet(approach):
        parts["storage"] = []
    named = {part: ", ".join(texts) for part, texts in parts.items()}
    approach = show_extension(approach)
    return {"series": ", ".join([approach or "(unknown)", *filter(None, named.values())]), **named}


def _describe_predecessors(level: object) -> str:
    """What was there before a run of a cell with this `resume_from`.

    >>> earlier = {"run": {"layout.data": 1}, "step": 8}
    >>> run = {"layout": {"data": 4}, "resume_from": earlier}
    >>> _describe_predecessors({"run": run, "step": 16})
    'data=1 to step 8; data=4 to step 16'
    """
    if not isinstance(level, dict):
        return str(level)
    named = dict(level.get("run") or {})
    earlier = named.pop("resume_from", None)
    words = [
        f"{key.removeprefix('layout.')}={_text(value)}"
        for key, value in flatten_cell(named).items()
    ]
    return (f"{_describe_predecessors(earlier)}; " if earlier else "") + " ".join(
        [*words, f"to step {level.get('step')}"]
    )


def science(run: RunSettings) -> str:
    """Digest of what two runs must share to be compared across approaches and world sizes.

    Approach, storage, layout and micro-batch are left out: they may change the speed, never the
    data of a pair. So is the state that a run goes on from: it is to compute what a run that was
    never interrupted computes.
    """
    return _science(replace(run, resume_from=None))


def _science(run: RunSettings) -> str:
    shared = replace(
        run,
        arm=OURS,
        approach="packed",
        storage=StorageSettings(),
        layout=LayoutSettings(),
        micro_batch=1,
    )
    return sha256_text(canonical_json(to_dict(shared, science_only=True)))[:16]


def oversubscribed(row: Row) -> bool:
    """Whether the ranks of a CPU run want more cores than there are. Unknown threads count as all
    cores a rank.
    """
    if row["device_kind"] != "cpu" or not row["cores"] or row["world_size"] == 1:
        return False
    return row["world_size"] * (row["threads_per_rank"] or row["cores"]) > row["cores"]


def _text(value: object) -> str:
    return value if isinstance(value, str) else canonical_json(value)
