"""Logs of an experiment's runs → typed Parquet. Equal logs give equal bytes: no clock, no absolute
path enters.
"""

import functools
import json
import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from tokenscale.analysis import clocks, run_values, stated_flops, steadiness, tables  # noqa: F401  # they register
from tokenscale.analysis.design import find_cautions
from tokenscale.analysis.expectations import Evidence, Steps, judge
from tokenscale.analysis.kept_tables import KeptTables, Tables
from tokenscale.analysis.logs import RunLog, merge, read_run
from tokenscale.analysis.rows import benchmark_rows, certificate_rows, store_rows
from tokenscale.analysis.runs import grouping, launches, read_settings, run_row
from tokenscale.analysis.siblings import Siblings, find_gaps
from tokenscale.base.errors import UserError
from tokenscale.base.facts import clear_unknown, list_unknown
from tokenscale.base.files import (
    check_file_name,
    check_types,
    read_json,
    read_record,
    report_malformed,
    sha256_file,
    write_json,
)
from tokenscale.runs.records import provenance
from tokenscale.settings.experiments import digest_design
from tokenscale.settings.manifests import list_manifests
from tokenscale.settings.registry import OBJECTIVES
from tokenscale.settings.run import RunSettings

#: samples of the bootstrap, each of as many sentences drawn with replacement (Koehn 2004)
SAMPLES = 1000


@dataclass(frozen=True)
class Bleu:
    """Corpus BLEU, 0 to 100, the ends of its 95 % interval over sentences, and sacrebleu's
    signature, without which the number says little: it names the tokenization, the smoothing, and
    the bootstrap with its seed.
    """

    score: float
    low: float
    high: float
    sentences: int
    signature: str

    def __str__(self) -> str:
        return (
            f"{self.score:.2f} ({self.low:.2f} to {self.high:.2f}, 95 % over {self.sentences:,} "
            "sentences)"
        )


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Bleu:
    """BLEU of hypotheses, each against its one reference; both as plain text, at least one. Equal
    texts, equal digits.

    The interval is sacrebleu's: mean of the bootstrap plus and minus half the width between its
    2.5th and 97.5th percentile. It says how far other sentences would move the score, and nothing
    of other trainings.
    """
    from sacrebleu.metrics import BLEU  # a tenth of a second, for those who translate

    metric = BLEU()
    found = metric.corpus_score(list(hypotheses), [list(references)], n_bootstrap=SAMPLES)
    signature = metric.get_signature().format()
    parsed = json.loads(found.format(is_json=True, width=6, signature=signature))
    # absent where nothing matches
    middle = parsed.get("confidence_mean", 0.0)
    half = parsed.get("confidence_var", 0.0)
    return Bleu(
        score=parsed["score"],
        low=max(0.0, middle - half),
        high=min(100.0, middle + half),
        sentences=len(references),
        signature=signature,
    )


Row = dict[str, Any]


def bleu_rows(events: list[Row]) -> list[Row]:
    """Rows of the table `bleu`, one for each step after which the run translated, in their order.
    Of a sentence that several attempts translated after the same step, the newest counts.
    """
    steps: dict[int, dict[int, Row]] = {}
    for event in sorted(events, key=lambda event: event.get("attempt") or 0):
        if event["event"] == "translation" and event["number"] is not None:
            steps.setdefault(event.get("step") or 0, {})[event["number"]] = event
    found = []
    for step, lines in sorted(steps.items()):
        texts = [
            (lines[number]["hypothesis"] or "", lines[number]["reference"] or "")
            for number in sorted(lines)
        ]
        score = bleu(*zip(*texts, strict=True))
        ends = {
            f"bleu_{name}": getattr(score, name)
            for name in ("low", "high", "sentences", "signature")
        }
        found.append({"step": step, "bleu": score.score, **ends})
    return found


#: tables beside `runs` that a run has rows in
OF_RUNS = tuple(
    name
    for name, columns in tables.TABLES.items()
    if "run_id" in columns and name not in ("runs", "certificates")
)
#: large tables, written one row group per run; the others are written at once
STREAMED = ("steps", "spans")
#: keys of the run table that the report reads from `experiment.json`
DESCRIBED = (
    *(
        "experiment",
        "question",
        "scale",
        "factors",
        "left_out",
        "repeats",
        "cell_repeats",
        "primary",
        "note",
    ),
    *("original", "target_loss", "figures"),
)
#: columns that are 0 where there is no log
COUNTED = ("steps_seen", "attempts", "overlap_rows", "quarantined", "quarantined_benign")
#: kinds of files beside the run table
KINDS = ("benchmarks", "stores", "corpora", "certificates")


def ingest(
    experiment: Path,
    runs: Path,
    output: Path,
    benchmarks: Sequence[Path] = (),
    *,
    stores: Sequence[Path] = (),
    corpora: Sequence[Path] = (),
    certificates: Sequence[Path] = (),
    kept: Path | None = None,
    threads: int = 1,
) -> dict[str, int]:
    """Write every table of `tables.TABLES` as `<output>/<table>.parquet`, `experiment.json`, and
    last the manifest with the SHA-256 of each file; return row counts. `experiment.json` names the
    inputs relative to the parent of `runs`.

    All logs are read on every call, or those of runs whose tables are not in the folder `kept`, which
    is this experiment's alone. A run without logs is listed as missing; a broken line goes to
    quarantine. Raises UserError only where the experiment's own table, a benchmark file or a
    manifest cannot be read, or where the table lists two runs as the same repeat.
    """
    again = f"snakemake -f {experiment}"
    table = read_record(
        experiment,
        what="run table",
        next=again,
        unsealed=True,
    )
    if not isinstance(table.get("runs"), list):
        expected = 'an object with a list "runs"'
        next_step = "tokenscale plan EXPERIMENT --output FILE"
        raise UserError(
            "this is no run table of an experiment.",
            path=experiment,
            expected=expected,
            next=next_step,
        )
    with report_malformed(experiment, what="experiment's run table", next=again):
        check_types(table, fields={"experiment": str})
        for entry in table["runs"]:
            check_file_name(entry["run_id"])
    listed = {entry["run_id"]: entry for entry in sorted(table["runs"], key=lambda r: r["run_id"])}
    if len(listed) < len(table["runs"]):
        twice = sorted(
            run_id for run_id, n in Counter(r["run_id"] for r in table["runs"]).items() if n > 1
        )
        next_step = "tokenscale plan EXPERIMENT --output FILE"
        raise UserError(
            "the run table lists a run twice.",
            path=experiment,
            run=", ".join(twice),
            next=next_step,
        )
    # refused before anything is written
    others = benchmark_rows(list(benchmarks)) | {
        "stores": store_rows(list(stores), corpora=list(corpora))
    }
    others["certificates"] = certificate_rows(certificates)

    manifests = {sha256_file(path): path for path in (*stores, *corpora)}

    def make(run_id: str) -> Tables:
        return one_run(
            listed[run_id],
            experiment=table["experiment"],
            runs=runs,
            manifests=manifests,
        )

    kept_tables = KeptTables(kept, runs, manifests) if kept is not None else None

    def read(run_id: str) -> Tables:
        if kept_tables is None:
            return make(run_id)
        entry = {**listed[run_id], "experiment": table["experiment"]}
        return kept_tables.read(entry, make=lambda: make(run_id))

    # Close the generator here. If it were collected while a thread starts, both would wait for each
    # other.
    with closing(_work_ahead(read, items=list(listed), threads=threads)) as runs_tables:
        counts, steps = _write_tables(
            output,
            runs=runs_tables,
            others=others,
            experiment=experiment,
            gaps=find_gaps(table, path=experiment, runs=runs),
        )
    if kept_tables is not None:
        kept_tables.remove_others(set(listed))
    files = zip(KINDS, (benchmarks, stores, corpora, certificates), strict=True)
    inputs: Row = {
        kind: sorted(os.path.relpath(path, runs.parent) for path in paths) for kind, paths in files
    }
    inputs["table"] = os.path.relpath(experiment, runs.parent)
    described = {key: table.get(key) for key in DESCRIBED} | {"inputs": inputs}
    described["design_sha256"] = digest_design(table)
    described["cautions"] = find_cautions(
        table,
        stores,
        corpora,
        steps=steps,
    )
    described["unknown"] = count_unknown([*_run_records(runs, listed), *stores, *corpora])
    write_json(output / tables.EXPERIMENT, value={"schema": 1, **described})
    tables.write_manifest(output)
    return counts


def _run_records(runs: Path, run_ids: Iterable[str]) -> Iterator[Path]:
    for run_id in run_ids:
        yield runs / run_id / "run.json"


def count_unknown(records: Iterable[Path]) -> list[Row]:
    """Count the facts that could not be had when these records were written, by name and reason."""
    found: Counter[tuple[str, str]] = Counter()
    for path in records:
        with suppress(UserError):  # no record, or a broken one, which its run's validity says
            found.update(set(list_unknown(read_json(path))))
    return [
        {"fact": fact, "why": why, "records": number}
        for (fact, why), number in sorted(found.items())
    ]


@dataclass(frozen=True)
class TableInputs:
    """What an experiment's tables are made of beside the logs of its runs, as paths below the
    folder of results.

    `table` is the run table, which holds the resolved settings of every run; by default the one of
    the workflow.
    """

    experiment: str
    benchmarks: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()  # manifests; so the next
    corpora: tuple[str, ...] = ()
    certificates: tuple[str, ...] = ()
    table: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", self.table or f"experiments/{self.experiment}/runs.json")

    def names(self) -> tuple[str, ...]:
        """Return the paths of all inputs."""
        return (self.table, *self.benchmarks, *self.stores, *self.corpora, *self.certificates)

    def ingest(self, results: Path, output: Path) -> None:
        """Write the tables of the logs and files below `results` to the folder `output`."""
        files: dict[str, Any] = {
            kind: [results / name for name in getattr(self, kind)] for kind in KINDS
        }
        ingest(
            results / self.table,
            runs=results / "runs",
            output=output,
            threads=2,
            **files,
        )


def read_inputs(folder: Path) -> TableInputs:
    """Return the inputs of which `ingest` made an experiment's tables."""
    with report_malformed(
        folder / tables.EXPERIMENT,
        what="experiment's description",
        next=tables.restore_command(folder),
    ):
        return TableInputs(folder.name, **tables.read_experiment(folder).get("inputs", {}))


def _write_tables(
    output: Path,
    runs: Iterator[tuple[str, Tables]],
    others: dict[str, list[Row]],
    experiment: Path,
    gaps: list[str],
) -> tuple[dict[str, int], dict[str, int]]:
    """Write the tables of all runs and the others; return row counts, and run id → steps behind its
    end.
    """
    counts: Counter[str] = Counter()
    places: dict[tuple, str] = {}
    siblings = Siblings(gaps)
    small: dict[str, list[pa.Table]] = {
        name: [tables.schema(name).empty_table()] for name in tables.TABLES
    }
    with ExitStack() as stack:
        add = {
            name: stack.enter_context(tables.writer(output / f"{name}.parquet", table=name))
            for name in tables.TABLES
        }
        for run_id, found in runs:
            siblings.add(run_id, found["steps"], found["events"])
            (row,) = found["runs"].select(["series", "world_size", "repeat"]).to_pylist()
            # all is grouped by series, world size and repeat: two runs there would count as one, or
            # as two repeats
            other = places.setdefault((row["series"], row["world_size"], row["repeat"]), run_id)
            if other != run_id:
                cell = f"{row['series']}, world size {row['world_size']}, repeat {row['repeat']}"
                named = {"path": experiment, "cell": cell, "runs": f"{other}, {run_id}"}
                next_step = "name what tells them apart as a factor, or as repeats"
                raise UserError(
                    "two runs of the table are the same repeat of the same cell.",
                    **named,
                    next=next_step,
                )
            for name, rows in found.items():
                counts[name] += len(rows)
                if name not in STREAMED:
                    small[name].append(rows)
                elif len(rows):
                    add[name](rows)
        runs_rows = pa.concat_tables(small["runs"]).to_pylist()
        small["runs"] = [
            tables.of_rows("runs", rows=siblings.judge(runs_rows, stores=others["stores"]))
        ]
        for name, rows in others.items():
            small[name].append(tables.of_rows(name, rows))
            counts[name] = len(rows)
        for name in tables.TABLES:
            if name not in STREAMED:
                add[name](pa.concat_tables(small[name]).combine_chunks())
    steps = {
        row["run_id"]: (row["steps_seen"] or 0) + (row["resumed_at"] or 0) for row in runs_rows
    }
    return {name: counts[name] for name in tables.TABLES}, steps


def _work_ahead(
    work: Callable[[str], Tables], items: list[str], threads: int
) -> Generator[tuple[str, Tables], None, None]:
    """Yield (item, result of `work`) in order, computed on this number of threads. At most twice
    as many results are in memory.
    """
    with ThreadPoolExecutor(max(threads, 1)) as pool:
        waiting: deque[tuple[str, Future]] = deque()
        try:
            for item in [*items, None]:
                if item is not None:
                    waiting.append((item, pool.submit(work, item)))
                while len(waiting) > (0 if item is None else 2 * threads):
                    first, future = waiting.popleft()
                    yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def one_run(
    entry: Row, experiment: str, runs: Path, manifests: Mapping[str, Path] | None = None
) -> Tables:
    """All rows of one run, by table. A record of other hands may hold anything: what no row can be
    made of counts as one that cannot be read, and says why. `manifests`: SHA-256 → manifest of a
    store or corpus.
    """
    found = _read_run_record(runs / entry["run_id"] / "run.json")
    rows = functools.partial(_build_run_rows, entry, experiment, runs, manifests or {})
    try:
        return rows(found)
    except (
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
        AttributeError,
        UserError,
    ) as error:
        if found[0] is None:
            raise
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return rows((None, False, f"run.json does not hold what this version writes ({reason})"))


def _build_run_rows(
    entry: Row,
    experiment: str,
    runs: Path,
    manifests: Mapping[str, Path],
    found: tuple[Row | None, bool, str | None],
) -> Tables:
    (record, sealed, trouble) = found
    run_id = entry["run_id"]
    folder = runs / run_id
    row = run_row(entry, experiment, record)
    row |= grouping(row.get("approach"), cell=entry.get("cell") or {})
    if row["external"]:
        row["series"] += " (external)"  # what every figure and table calls it
    row |= launches(folder)
    if record is None and not trouble:
        return _describe_missing_run(row)
    record = record or {}
    log = read_run(folder, run_id, digest=record.get("digest"))
    steps = merge(log.steps, log.events)
    whole = Steps(steps)
    row["status"] = "unreadable" if trouble else _find_status(row["status"], log.events)
    row |= {"sealed": sealed} | _summarize_log(log, whole)
    translated = [{"run_id": run_id, **score} for score in bleu_rows(log.events)] if sealed else []
    row |= _find_last_bleu(translated)
    run = None if row["external"] else read_settings(record.get("run"))
    planned = read_settings(entry.get("run"))
    changed = tuple(log.changed(record)) if sealed else ()
    known = (row, record, run, Steps(log.steps), whole, log.events, log.spans)
    evidence = Evidence(*known, planned, trouble, changed, copies=tuple(log.copies()))
    if run is not None and sealed:
        evidence = _count_again(
            evidence,
            run,
            manifests,
            project=runs.absolute().parents[1],
        )
    row = judge(evidence).add_to(row)
    others = {
        "attempts": log.attempts(steps),
        "events": log.events,
        "bleu": translated,
        "quarantine": log.quarantine,
    }
    made = {name: tables.of_rows(name, rows) for name, rows in ({"runs": [row]} | others).items()}
    return made | {"steps": steps, "spans": log.spans}


def _summarize_log(log: RunLog, whole: Steps) -> Row:
    """Columns of `runs` that the logs alone give; `whole` are the merged steps."""
    return {
        "attempts": len(log.merged),
        "overlap_rows": len(log.steps) - len(whole),
        "quarantined": len(log.quarantine),
        "quarantined_benign": sum(q["benign"] for q in log.quarantine),
        "steps_seen": int(whole.whole().sum()) if len(whole) else 0,
        "validation_tokens": log.validation_tokens(),
        **log.lasted(),
    }


def _find_last_bleu(translated: list[Row]) -> Row:
    """Columns of the newest score of translations; none without one."""
    if not translated:
        return {}
    return {column: value for column, value in translated[-1].items() if column.startswith("bleu")}


def _describe_missing_run(row: Row) -> Tables:
    """The row of a run without a record, and no rows of the other tables."""
    row |= {
        "validity": "missing",
        "reasons": "not started, or its folder is elsewhere (no run.json)",
        "sealed": False,
    }
    row |= dict.fromkeys(COUNTED, 0)
    return {
        "runs": tables.of_rows("runs", rows=[row]),
        **{t: tables.schema(t).empty_table() for t in OF_RUNS},
    }


def _find_status(recorded: str, events: list[Row]) -> str:
    """Return the record's status; `nonfinite` for a run that stopped at a loss that is no number
    before its record was sealed.
    """
    stopped = [event["status"] for event in events if event["event"] == "run_stop"]
    return "nonfinite" if recorded == "running" and "nonfinite" in stopped else recorded


def _count_again(
    evidence: Evidence, run: RunSettings, manifests: Mapping[str, Path], project: Path
) -> Evidence:
    """Return the evidence with counts of the run's inputs, as far as they are at hand with the
    hashes that it read: in `manifests`, or where the workflow writes them below `project`.
    """
    changes = "data/batches/objectives.py"
    objectives = Path(__file__).parents[1] / "data/batches/objectives.py"
    if OBJECTIVES[run.objective].special_ids and (evidence.get("code") or {}).get(
        changes
    ) != sha256_file(objectives):
        reason = "the run chose labels by another version of the code"
        return replace(evidence, counted=reason, held_out=reason)
    found: dict[str, Path] = {}
    reasons: dict[str, str] = {}
    for role, name in list_manifests(run).items():
        what = role.replace("_", " ").replace("validation", "held-out")
        recorded = evidence.get(f"inputs.{role}")
        path = manifests.get(recorded, project / name)
        if not path.is_file():
            reasons[role] = f"the {what} is not at hand"
        elif recorded != sha256_file(path):
            reasons[role] = f"the {what} at hand is not the one that the run read"
        else:
            found[role] = path.parent if role == "tokenizer" else path
    store = found.get("store")
    size = None
    if store is not None and run.mixture is None and not OBJECTIVES[run.objective].special_ids:
        size = read_json(store, what="manifest of the token store").get("vocabulary_size")

    def attempt(role: str, count: Callable[[Any, Any], Any]) -> Any:
        needed = [role] if role != "store" or run.store is not None else []
        needed += ["corpus", "tokenizer"] if role == "store" and run.online else []
        needed += ["tokenizer"] * OBJECTIVES[run.objective].special_ids
        missing = [reasons[name] for name in needed if name in reasons]
        try:
            # with packages that a report does without
            from tokenscale.data.batches import batch, recount

            get = found.get
            inputs = batch.Inputs(
                corpus=get("corpus"),
                tokenizer=get("tokenizer"),
                store=get("store"),
                validation_store=get("validation_store"),
            )
            return missing[0] if missing else count(recount, inputs)
        except (UserError, ImportError, OSError) as error:
            return (
                "the inputs were not read again: "
                f"{str(error).splitlines()[0].removeprefix('tokenscale: ')}"
            )

    numbers = evidence.steps.numbers
    counted = "the logs hold no step"
    if len(numbers):
        counted = attempt(
            "store",
            lambda r, inputs: r.recount_steps(run, inputs, int(numbers[0]), int(numbers[-1]) + 1),
        )
    size = size if isinstance(counted, str) else counted.vocabulary_size
    rows = run.validation.rows
    held_out = (
        attempt("validation_store", lambda r, inputs: r.recount_held_out(run, inputs, 1 << 31))
        if rows
        else {}
    )
    return replace(evidence, counted=counted, held_out=held_out, vocabulary_size=size)


def _read_run_record(path: Path) -> tuple[Row | None, bool, str | None]:
    """Return (run.json or None, whether its seal is valid, what is wrong with it)."""
    if not path.is_file():
        return None, False, None
    try:
        record = read_json(path, what="run record")
        if not isinstance(record, dict):
            return None, False, "run.json is no object"
        return clear_unknown(record), provenance.read_sealed(path) is not None, None
    except (UserError, ValueError):
        return None, False, "run.json is not readable JSON"
