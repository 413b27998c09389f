"""Logs of an experiment's runs → typed Parquet. Equal logs give equal bytes: no clock, no absolute path enters."""

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tokenscale.analysis import compliance, logs, tables
from tokenscale.analysis.runs import grouping, launches, run_row
from tokenscale.errors import UserError
from tokenscale.files import read_json, sha256_file, write_json
from tokenscale.records import provenance

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
    row = run_row(entry, experiment, record)
    row |= grouping(row.get("approach"), entry.get("cell") or {})
    row |= launches(runs / run_id)
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
