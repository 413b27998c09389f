"""Logs of an experiment's runs → typed Parquet. Equal logs give equal bytes: no clock, no absolute path enters."""

import math
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tokenscale.analysis import compliance, logs, tables
from tokenscale.costs.flops import parameters
from tokenscale.costs.memory import largest
from tokenscale.errors import UserError
from tokenscale.files import canonical_json, read_json, sha256_file, sha256_text, write_json
from tokenscale.records import provenance
from tokenscale.settings.data import StorageSettings
from tokenscale.settings.experiments import dotted
from tokenscale.settings.layout import DEGREES, LayoutSettings
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import from_dict, to_dict
from tokenscale.settings.run import APPROACHES, RunSettings

Row = dict[str, Any]


def ingest(experiment: Path, runs: Path, output: Path, benchmarks: list[Path] = ()) -> dict[str, int]:
    """Write every table of `tables.TABLES` as `<output>/<table>.parquet`, and `experiment.json`; returns row counts.

    A run without logs is listed as missing; a broken line goes to quarantine. Raises UserError only where the
    experiment's own table or a benchmark file cannot be read, or where the table lists two runs as the same repeat.
    """
    table = read_json(experiment, "experiment's run table", next=f"snakemake {experiment}")
    if not isinstance(table, dict) or not isinstance(table.get("runs"), list):
        raise UserError(
            "this is no run table of an experiment.", path=experiment, expected='an object with a list "runs"'
        )
    listed = sorted(table["runs"], key=lambda r: r["run_id"])
    twice = [run_id for run_id, n in Counter(r["run_id"] for r in listed).items() if n > 1]
    if twice:
        raise UserError("the run table lists a run twice.", path=experiment, run=", ".join(twice))
    benchmark_rows = [row for path in sorted(benchmarks, key=lambda p: p.name) for row in read_benchmark(path)]
    counts: Counter[str] = Counter()
    places: dict[tuple, str] = {}
    with ExitStack() as stack:
        add = {t: stack.enter_context(tables.writer(output / f"{t}.parquet", t)) for t in tables.TABLES}
        for entry in listed:
            rows = one_run(entry, table["experiment"], runs)
            _own_place(rows["runs"][0], places, experiment)
            for name, values in rows.items():
                add[name](values)
                counts[name] += len(values)
        add["benchmarks"](benchmark_rows)
    counts["benchmarks"] = len(benchmark_rows)
    said = ("experiment", "question", "scale", "factors", "left_out", "repeats", "note", "figures")
    write_json(output / "experiment.json", {"schema": 1, **{key: table.get(key) for key in said}})
    return {name: counts[name] for name in tables.TABLES}


def one_run(entry: Row, experiment: str, runs: Path) -> dict[str, list[Row]]:
    """All rows of one run, by table."""
    run_id = entry["run_id"]
    record, sealed, trouble = _record(runs / run_id / "run.json")
    read: dict[str, list[Row]] = {"steps": [], "spans": [], "events": []}
    quarantine: list[Row] = []
    attempts = set()
    if record is not None or trouble:
        for attempt, rank, directory in logs.attempts(runs / run_id):
            attempts.add(attempt)
            for kind, rows in read.items():
                lines = logs.read(directory / f"{kind}.jsonl", kind)
                place = {"run_id": run_id, "attempt": attempt, "rank": rank}
                rows += [{**place, **row} for row in lines.rows]
                file = (directory / f"{kind}.jsonl").relative_to(runs).as_posix()
                quarantine += [{"run_id": run_id, "file": file, **broken} for broken in lines.broken]
    steps, overlap = merge(read["steps"], read["events"])
    row = _run_row(entry, experiment, record)
    row |= grouping(row.get("approach"), entry.get("cell") or {})
    row |= _launches(runs / run_id)
    stops = [e["status"] for e in read["events"] if e["event"] == "run_stop"]
    if row["status"] == "running" and "nonfinite" in stops:
        row["status"] = "nonfinite"
    row |= {
        "status": "unreadable" if trouble else row["status"],
        "sealed": sealed,
        "attempts": len(attempts),
        "overlap_rows": overlap,
        "quarantined": len(quarantine),
        "quarantined_benign": sum(q["benign"] for q in quarantine),
        "steps_seen": compliance.complete_steps(steps),
    }
    times = [e["t_unix_s"] for e in read["events"] if e["t_unix_s"] is not None]
    if times:
        row |= {"started_unix_s": min(times), "stopped_unix_s": max(times)}
    if record is None and not trouble:
        row |= {
            "steps_seen": 0,
            "validity": "missing",
            "reasons": "not started, or its folder is elsewhere (no run.json)",
        }
    else:
        changed = _changed_logs(runs / run_id, record) if sealed else []
        row["validity"], row["reasons"] = compliance.check(row, read["steps"], steps, read["events"], changed, trouble)
    spans = sorted(read["spans"], key=lambda r: (r["attempt"], r["rank"], r["start_mono_s"] or 0.0))
    return {"runs": [row], "steps": steps, "spans": spans, "events": read["events"], "quarantine": quarantine}


def _own_place(row: Row, places: dict[tuple, str], experiment: Path) -> None:
    """Everything is grouped by series, world size and repeat: two runs there would count as one, or as two repeats."""
    place = (row["series"], row["world_size"], row["repeat"])
    other = places.setdefault(place, row["run_id"])
    if other != row["run_id"]:
        raise UserError(
            "two runs of the table are the same repeat of the same cell.",
            path=experiment,
            cell=f"{row['series']}, world size {row['world_size']}, repeat {row['repeat']}",
            runs=f"{other}, {row['run_id']}",
            next="name what tells them apart as a factor, or as repeats",
        )


def merge(rows: list[Row], events: list[Row]) -> tuple[list[Row], int]:
    """(one row a step and rank, number of rows left out). The latest attempt wins per step, for all ranks together.

    Ranks of two attempts never mix in one step: a resumed run may have another world size. Adds the `world_size`
    that the attempt observed and `attempt_step`, the place of the step in its attempt (for the warm-up rule).
    """
    world: dict[int, int] = {}
    for event in events:
        if event["event"] == "run_start" and event["world_size"] is not None:
            world[event["attempt"]] = max(world.get(event["attempt"], 0), event["world_size"])
    first: dict[int, int] = {}
    latest: dict[int, int] = {}
    for row in rows:
        attempt, step = row["attempt"], row["step"]
        first[attempt] = min(first.get(attempt, step), step)
        latest[step] = max(latest.get(step, attempt), attempt)
    kept = {(row["step"], row["rank"]): row for row in rows if row["attempt"] == latest[row["step"]]}
    ranks = {a: len({r["rank"] for r in rows if r["attempt"] == a}) for a in first}
    merged = [
        {
            **row,
            "world_size": world.get(row["attempt"], ranks[row["attempt"]]),
            "attempt_step": step - first[row["attempt"]],
        }
        for (step, _), row in sorted(kept.items())
    ]
    return merged, len(rows) - len(merged)


def _record(path: Path) -> tuple[Row | None, bool, str | None]:
    """(run.json or None, is it sealed and untouched, what is wrong with it)."""
    if not path.is_file():
        return None, False, None
    try:
        record = read_json(path, "run record")
        if not isinstance(record, dict):
            return None, False, "run.json is no object"
        return record, provenance.sealed(path) is not None, None
    except (UserError, ValueError):
        return None, False, "run.json is not readable JSON"


def _changed_logs(directory: Path, record: Row) -> list[str]:
    """Log files that are not those whose hashes were sealed into run.json."""
    logged = (record.get("outcome") or {}).get("logs") or {}
    return sorted(n for n, h in logged.items() if not (directory / n).is_file() or sha256_file(directory / n) != h)


def _run_row(entry: Row, experiment: str, record: Row | None) -> Row:
    cell = dotted(entry.get("cell") or {})
    row: Row = {
        "experiment": experiment,
        "run_id": entry["run_id"],
        "cell": ", ".join(f"{k}={_text(v)}" for k, v in cell.items()),
        "repeat": entry.get("repeat"),
        "position": entry.get("position"),
        "approach": cell.get("approach"),
        "world_size": _world_size(cell),
        "status": "missing",
    }
    if record is None:
        return row | _settings(entry.get("run"))
    outcome, hardware, git = (record.get(key) or {} for key in ("outcome", "hardware", "git"))
    row |= {
        "status": outcome.get("status", "unknown"),
        "device": hardware.get("device") or "cpu",
        "device_kind": _device_kind(hardware),
        "cpu": hardware.get("cpu"),
        "cores": hardware.get("cores"),
        "threads_per_rank": _threads(record),
        "parameters": record.get("parameters", outcome.get("parameters")),
        "code_digest": record.get("digest"),
        "git_commit": git.get("commit"),
        "git_dirty": git.get("dirty"),
        "versions": canonical_json(record.get("versions") or {}),
        "seal": record.get("seal"),
    }
    row |= _settings(record.get("run")) | _predicted(record.get("run"), row)
    if row.get("steps_asked") is not None:
        row["steps_asked"] = _steps_asked(row["steps_asked"], record)
        row["oversubscribed"] = oversubscribed(row)
    return row


def _launches(run: Path) -> Row:
    """Where the attempts of a run were, from what the launcher left for each; nothing of runs without one."""
    found = [attempt["launch"] for attempt in logs.launched(run) if isinstance(attempt.get("launch"), dict)]
    jobs = [launch["job"] for launch in found if isinstance(launch.get("job"), dict)]
    if not found:
        return {}
    waited = [job["queue_s"] for job in jobs if job.get("queue_s") is not None]
    return {
        "machine": found[-1].get("machine"),
        "share": found[-1].get("share"),
        "node_names": ", ".join(found[-1].get("job", {}).get("nodes", [])) or None,
        "job_ids": ", ".join(str(job.get("id")) for job in jobs) or None,
        "slurm_logs": ", ".join(job["log"] for job in jobs if job.get("log")) or None,
        "queue_s": sum(waited) if waited else None,
    }


def _world_size(cell: Row) -> int | None:
    """Of a cell whose run has no settings to ask: the product of the degrees that it varies; None where none is."""
    degrees = [cell[key] for key in (f"layout.{degree}" for degree in DEGREES) if isinstance(cell.get(key), int)]
    return math.prod(degrees) if degrees else None


def _steps_asked(stated: int, record: Row) -> int:
    """Steps that the run's own logs must hold. Of a budget in tokens or seconds, those that it came to; what another
    run did before it, whose checkpoint it began from, is in that run's logs."""
    outcome = record.get("outcome") or {}
    if "budget_steps" in record:
        stated = record["budget_steps"] if record["budget_steps"] is not None else outcome.get("steps") or 0
    return stated - (outcome.get("begins_at") or 0)


def _run(values: Row | None) -> RunSettings | None:
    """A run's settings; None where they cannot be read."""
    try:
        return None if values is None else from_dict(RunSettings, values)
    except (UserError, TypeError, AttributeError, ValueError):
        return None


def _predicted(values: Row | None, row: Row) -> Row:
    """Columns of the memory that a run should need; none where its settings cannot say."""
    run = _run(values)
    if run is None or run.problems() or (shape := _shape(run, row["parameters"])) is None:
        return {}
    held = largest(replace(run, model=shape), row["device_kind"])
    return {f"predicted_{part}_bytes": size for part, size in asdict(held).items()}


def _shape(run: RunSettings, count: int | None) -> ModelSettings | None:
    """The model with its vocabulary, which a record does not name but gives away: by the number of its parameters."""
    model = run.model.with_positions(run.sequence_length)
    if model.transformers is not None or not isinstance(count, int):
        return None
    if model.vocabulary_size is not None:
        return model
    none, one = (parameters(model.with_vocabulary(size)) for size in (0, 1))
    size, left = divmod(count - none, one - none)
    return model.with_vocabulary(size) if size > 0 and not left else None


def _settings(values: Row | None) -> Row:
    """Columns that follow from a run's settings; none where they cannot be read."""
    run = _run(values)
    if run is None:
        return {}
    return {
        "approach": run.approach,
        "model": run.model.name,
        "world_size": run.layout.world_size,
        "method": run.layout.method,
        **{name: getattr(run.layout, name) for name in (*DEGREES, "sharding", "schedule", "stages_per_rank")},
        "sequence_length": run.sequence_length,
        "global_batch": run.global_batch,
        "micro_batch": run.micro_batch,
        "tokenizer": run.tokenizer.name,
        "corpus": run.corpus.name,
        "precision": run.precision,
        "seed": run.effective_seed,
        "science": science(run),
        "steps_asked": run.budget.steps,
    }


def grouping(approach: str | None, cell: Row) -> Row:
    """What runs are grouped by beside world size and repeat: the approach and the other factors of their cell.

    Factors of the Parquet store belong to approaches that read one; all other approaches have no `storage`.

    >>> cell = {"approach": "token-list", "layout.data": 2, "storage.dtype": "int64", "sequence_length": 512}
    >>> grouping("token-list", cell)["series"]
    'token-list, sequence_length=512, storage.dtype=int64'
    >>> grouping("padding-free", cell)
    {'series': 'padding-free, sequence_length=512', 'factors': 'sequence_length=512', 'storage': '', 'layout': ''}
    """
    parts: dict[str, list[str]] = {"factors": [], "storage": [], "layout": []}
    for key, value in dotted(cell).items():
        part = key.split(".")[0] if key.startswith(("storage.", "layout.")) else "factors"
        if key not in ("approach", "layout.data"):
            parts[part].append(f"{key}={_text(value)}")
    if approach in APPROACHES and APPROACHES[approach] not in ("padded", "token-list"):
        parts["storage"] = []
    named = {part: ", ".join(texts) for part, texts in parts.items()}
    return {"series": ", ".join([approach or "(unknown)", *filter(None, named.values())]), **named}


def science(run: RunSettings) -> str:
    """Digest of what two runs must share to be compared across approaches and world sizes.

    Approach, storage, layout and micro-batch are left out: they may change the speed, never the data of a pair.
    """
    shared = replace(run, approach="packed", storage=StorageSettings(), layout=LayoutSettings(), micro_batch=1)
    return sha256_text(canonical_json(to_dict(shared, science_only=True)))[:16]


def oversubscribed(row: Row) -> bool:
    """Do the ranks of a CPU run want more cores than there are? Unknown threads count as all cores a rank."""
    if row["device_kind"] != "cpu" or not row["cores"] or row["world_size"] == 1:
        return False
    return row["world_size"] * (row["threads_per_rank"] or row["cores"]) > row["cores"]


def _device_kind(hardware: Row) -> str:
    """`cpu` or `cuda`; an older record says only the device's name."""
    return hardware.get("device_kind") or ("cpu" if (hardware.get("device") or "cpu").startswith("cpu") else "cuda")


def _threads(record: Row) -> int | None:
    stated = (record.get("hardware") or {}).get("threads_per_rank") or (record.get("hardware") or {}).get("threads")
    stated = stated or (record.get("environment") or {}).get("OMP_NUM_THREADS")
    return int(stated) if str(stated).isdigit() else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value)


def read_benchmark(path: Path) -> list[Row]:
    """The rows of one `results/benchmarks/data/<name>.json`."""
    content = read_json(path, "benchmark file", next=f"snakemake {path}")
    try:
        settings, hardware = content["settings"], content.get("hardware") or {}
        common = {
            "benchmark": path.stem,
            "sequence_length": settings.get("sequence_length"),
            "rows": settings.get("rows"),
            "tokenizer": content.get("tokenizer"),
            "corpus": content.get("corpus"),
            "cache": content.get("cache"),
            "cpu": hardware.get("cpu"),
            "cores": hardware.get("cores"),
        }
        keys = ("arm", "round", "open_s", "seconds", "batches", "useful_tokens", "total_tokens")
        rows = [{**common, **{key: record[key] for key in keys}} for record in content["records"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError("this is no data benchmark.", path=path, missing=error, next="write it anew") from None
    return sorted(rows, key=lambda r: (r["arm"], r["round"]))
