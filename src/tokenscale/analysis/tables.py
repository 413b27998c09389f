"""The typed tables between logs and report: names, columns, Parquet files with equal bytes for equal logs.

A folder of tables has a manifest with the SHA-256 of every file. `ingest` writes it last; every reader checks it.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    atomic,
    canonical_json,
    check_types,
    read_json,
    report_malformed,
    sha256_file,
    sha256_text,
    write_json,
)
from tokenscale.runs.records.events import FIELDS

MANIFEST = "manifest.json"
#: the experiment's description beside the tables
EXPERIMENT = "experiment.json"

#: SQL type → Arrow type
ARROW = {
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "DOUBLE": pa.float64(),
    "VARCHAR": pa.string(),
    "BOOLEAN": pa.bool_(),
}
#: Arrow type → encoding in the files, where a dictionary of the values would be as long as the column
ENCODINGS = {pa.float64(): "BYTE_STREAM_SPLIT", pa.int64(): "DELTA_BINARY_PACKED"}


def _typed(columns: str) -> dict[str, str]:
    """Names, then their type: `run_id folder VARCHAR, attempt INTEGER`."""
    return {name: kind for part in columns.split(", ") for *names, kind in [part.split()] for name in names}


_PLACE = _typed("run_id VARCHAR, attempt rank INTEGER")
_BLEU = _typed("bleu bleu_low bleu_high DOUBLE, bleu_sentences INTEGER, bleu_signature VARCHAR")

#: table → column → SQL type; this order is the order of the columns in the Parquet files
TABLES: dict[str, dict[str, str]] = {
    "runs": {
        **_typed("experiment run_id VARCHAR"),
        "external": "BOOLEAN",  # another program's run, which states its settings itself
        "cell": "VARCHAR",  # the factors and their levels, as text
        **_typed("repeat position INTEGER"),
        "arm": "VARCHAR",  # the trainer: tokenscale, or the name of an arm
        "approach": "VARCHAR",
        "series": "VARCHAR",  # the approach and the three below: what figures show as one line
        "factors": "VARCHAR",
        "storage": "VARCHAR",  # those of the Parquet store, where the approach reads one
        "layout": "VARCHAR",  # those of the layout, but the data-parallel degree
        **_typed("model VARCHAR, world_size INTEGER, method VARCHAR"),
        "pipeline": "INTEGER",  # the degrees, whose product is the world size
        **_typed("data shard tensor INTEGER"),
        "sharding": "VARCHAR",  # where shard is above 1: zero1, zero2, zero3
        "copies": "VARCHAR",  # what keeps copies alike, where data is above 1 and shard is not: ddp
        **_typed("schedule VARCHAR, stages_per_rank sequence_length global_batch micro_batch INTEGER"),
        **_typed("tokenizer corpus VARCHAR"),
        "mixture": "VARCHAR",  # JSON: corpus → its share of the sequences; null without a mixture, or if not known
        **_typed("precision VARCHAR, seed BIGINT, objective labels VARCHAR, eos BOOLEAN"),
        "science": "VARCHAR",  # digest of all settings but approach, storage, layout, micro-batch and resume_from
        "science_per_rank": "VARCHAR",  # the same without global batch, budget and repeat, for weak scaling
        "steps_asked": "BIGINT",
        "resumed_from": "VARCHAR",  # id of the run (or path of the state) that it goes on from; null: of none
        **_typed("resumed_at tokens_before BIGINT"),
        "status": "VARCHAR",  # of run.json; missing: listed, never started
        "validity": "VARCHAR",
        "reasons": "VARCHAR",  # in words, separated by "; "; so the next two
        "cautions": "VARCHAR",
        "unchecked": "VARCHAR",  # values that nothing at hand could be compared with
        **_typed("sealed BOOLEAN, attempts INTEGER"),
        "steps_seen": "BIGINT",  # steps with a row of every rank
        "overlap_rows": "BIGINT",  # rows of earlier attempts that a later one repeats
        **_typed("quarantined quarantined_benign BIGINT, device device_kind cpu VARCHAR, cores INTEGER"),
        "machine_memory_bytes": "BIGINT",
        "threads_per_rank": "INTEGER",
        "oversubscribed": "BOOLEAN",  # on a CPU: ranks × threads exceed the cores
        "blocks": "INTEGER",  # of all ranks, if the run asks for compile; null: it does not, or not recorded
        "eager_blocks": "INTEGER",  # of the blocks: ran outside of any graph
        "graph_breaks": "INTEGER",  # in all graphs of all ranks
        "load_average": "DOUBLE",  # of the machine of rank 0 when the run began, over a minute; null where not recorded
        "text_lost": "DOUBLE",  # largest share of a corpus' bytes that the tokenizer loses; null where not recorded
        "text_unknown": "DOUBLE",  # the same of its ids that are unknown
        "text_cut": "VARCHAR",  # JSON: corpus → share of its tokens behind the end of rows, as the run counted; or null
        "machine": "VARCHAR",  # the name in its file; so the next, of the newest attempt
        "share": "INTEGER",  # runs that had its nodes at the same time
        "node_names": "VARCHAR",
        "job_ids": "VARCHAR",  # of SLURM, of all attempts, parted by ", "; so their logs
        "slurm_logs": "VARCHAR",  # below the project's folder
        **_typed("queue_s DOUBLE, parameters BIGINT"),
        "predicted_parameters_bytes": "BIGINT",  # of the rank with the most (costs/memory.py); so the three below
        **_typed("predicted_gradients_bytes predicted_optimizer_bytes predicted_activations_bytes BIGINT"),
        # model FLOPs of a position's forward and backward pass (costs/flops.py): attention in full, or without what the
        # causal mask leaves out; with what backward computes again; and the first of them as the record states it
        **_typed("flops_per_token flops_per_token_causal flops_per_token_hardware DOUBLE"),
        "mfu_stated": "DOUBLE",  # as another program's run says it itself, a share of 1
        "flops_per_token_stated": "DOUBLE",
        "number_format": "VARCHAR",  # of matrix products: bf16, fp16, fp32, fp8
        "peak_flops": "DOUBLE",  # FLOP/s of one device in that format; null on a CPU and where nobody knows it
        "peak_source": "VARCHAR",
        "corpus_sha256": "VARCHAR",  # of the manifests that it read; null where it read none of the kind
        **_typed("tokenizer_sha256 store_sha256 validation_store_sha256 VARCHAR"),
        "validation_tokens": "BIGINT",  # useful tokens of the held-out slice; null without validation
        "code_digest": "VARCHAR",
        "code": "VARCHAR",  # canonical JSON: source file below the package → first 12 digits of its SHA-256
        **_typed("git_commit VARCHAR, git_dirty BOOLEAN, versions VARCHAR"),
        "environment": "VARCHAR",  # canonical JSON: variable → value, of those that may change times or numbers
        **_typed("started_unix_s stopped_unix_s DOUBLE, seal VARCHAR"),
        **_BLEU,  # of translations at the end (analysis/ingest.py); null without any
    },
    "bleu": {"run_id": "VARCHAR", "step": "BIGINT", **_BLEU},  # a row for each step after which a run translated
    "attempts": {  # superseded ones too, wherever they lie
        **_typed("run_id folder VARCHAR, attempt INTEGER"),
        "superseded": "BOOLEAN",  # made by other code or inputs than the run's record: never merged
        **_typed("digest VARCHAR, ranks INTEGER, first_step last_step step_rows BIGINT"),
        "merged_rows": "BIGINT",  # of these, those that no later attempt repeats
        **_typed("started_unix_s stopped_unix_s DOUBLE"),
    },
    "steps": {**_PLACE, "world_size": "INTEGER", "attempt_step": "BIGINT", **FIELDS["steps"]},
    "spans": {**_PLACE, **FIELDS["spans"]},
    "events": {**_PLACE, **FIELDS["events"]},
    "quarantine": {
        "run_id": "VARCHAR",
        "file": "VARCHAR",  # relative to the folder of runs
        **_typed("line BIGINT, reason text VARCHAR"),
        "benign": "BOOLEAN",  # a partial last line, as a killed process leaves it
    },
    "benchmarks": {
        **_typed("benchmark arm VARCHAR, round INTEGER, open_s DOUBLE"),
        "seconds": "DOUBLE",  # for all batches
        **_typed("batches useful_tokens total_tokens BIGINT, sequence_length rows INTEGER, tokenizer corpus VARCHAR"),
        "cache": "VARCHAR",  # warm, or cold: the files that the arm reads were dropped from the page cache before
        "engine": "VARCHAR",  # what tokenizes; null where tokens come from a store
        "workers": "INTEGER",  # of torch's DataLoader; null where none is between
        "left_out": "VARCHAR",  # why the arm did not run; null where it did
        **_typed("cpu VARCHAR, cores INTEGER"),
    },
    "storage_benchmarks": {  # a row a way to store and round; an engine that tokenizes the text instead has them, too
        "benchmark": "VARCHAR",
        "store": "VARCHAR",  # as its folder would be called; or "text" and the engine
        **_typed("format dtype codec VARCHAR, row_group_rows round INTEGER, engine VARCHAR, auto BOOLEAN"),
        **_typed("documents documents_cut text_bytes BIGINT"),
        "ids": "BIGINT",  # that are held, padding left out
        **_typed("useful_tokens BIGINT, vocabulary_size INTEGER"),
        "entropy_bits": "DOUBLE",  # of an id, by how often it occurs
        **_typed("stored_bytes rows BIGINT"),
        "write_s": "DOUBLE",  # from ids in memory, hashes and manifest included
        "sequential_s": "DOUBLE",  # opening, and all rows in order; of a text: tokenizing some documents at a time
        "shuffled_s": "DOUBLE",  # the same in random order, with the cache that trainings have
        "cold_s": "DOUBLE",  # in order, files dropped from the page cache; null where the machine keeps them
        "single_rows": "BIGINT",
        "single_rows_s": "DOUBLE",  # so many of them in random order, where no decoded row group is kept
        "bulk_s": "DOUBLE",  # of a text: tokenizing all documents at once
        "left_out": "VARCHAR",  # why the engine did not run, or why nothing is cold
        **_typed("tokenizer corpus VARCHAR, sequence_length INTEGER, cpu VARCHAR, cores INTEGER"),
    },
    "inference_benchmarks": {  # a row a stretch of positions: the prompt's, then those of new tokens
        "benchmark": "VARCHAR",
        "of_run": "VARCHAR",  # id of the run whose weights wrote; these rows are of a benchmark, not of that run's logs
        **_typed("model VARCHAR, model_step BIGINT, dtype VARCHAR, batch prompt_tokens new_tokens INTEGER"),
        **_typed("cached BOOLEAN, round INTEGER"),
        "part": "VARCHAR",  # prompt: until the first new token is known; decode: those behind it
        "position": "INTEGER",
        "tokens": "BIGINT",  # of each row: read for the prompt, written behind it
        "seconds": "DOUBLE",
        "rows_equal": "INTEGER",  # rows whose new tokens are those that the cache gave when nothing was timed
        "first_difference": "INTEGER",  # position of the first token that is another, of all rows; null where none is
        "cache_bytes": "BIGINT",  # of the cache's tensors; 0 without one
        **_typed("layers key_value_heads head_dimension number_bytes INTEGER"),
        "peak_bytes": "BIGINT",  # most that was allocated beside the weights; null where the device does not count
        "left_out": "VARCHAR",  # why there is no such cell; null where there is one
        **_typed("device cpu VARCHAR, cores threads INTEGER"),
    },
    "generations": {  # a row an answer to a prompt
        **_typed("benchmark of_run model VARCHAR, model_step BIGINT, number INTEGER, prompt VARCHAR"),
        **_typed("prompt_tokens INTEGER, temperature DOUBLE, top_k INTEGER, top_p DOUBLE, seed BIGINT, text VARCHAR"),
        "tokens": "INTEGER",
        "same_uncached": "BOOLEAN",  # without the cache it is the same, token by token
    },
    "certificates": {  # parity of two trainers on the same weights and batches, a row a compared pair of runs
        **_typed("run_id over VARCHAR"),
        "verdict": "VARCHAR",  # equal, equal to rounding, different; none: there is no certificate
        **_typed("reason VARCHAR, steps INTEGER, first_difference VARCHAR"),
        "cause": "VARCHAR",  # null where no tested hypothesis explains the difference
        "loss_difference": "DOUBLE",  # the largest of all steps, relative; so the floor
        **_typed("loss_floor DOUBLE, certificate_sha256 VARCHAR"),
    },
    "stores": {  # token stores that the runs read, or that hold what others of them tokenize while training
        **_typed("corpus tokenizer store format split VARCHAR"),
        "sequence_length": "INTEGER",  # null where the format has none
        **_typed("eos BOOLEAN, documents documents_cut BIGINT"),
        "useful_tokens": "BIGINT",  # labels that count, in one epoch; so the next two
        "total_tokens": "BIGINT",
        "padding_tokens": "BIGINT",  # the rest that is not useful: labels that are a BOS
        "ids": "BIGINT",  # that it holds, padding left out
        "document_tokens": "BIGINT",  # ids of its documents before any is cut; null where not recorded; so the next
        "cut_tokens": "BIGINT",  # ids behind the end of rows, which it does not hold
        "vocabulary_size": "INTEGER",
        "entropy_bits": "DOUBLE",  # of an id of its documents, by how often it occurs
        "stored_bytes": "BIGINT",
        "text_bytes": "BIGINT",  # UTF-8, of the documents; null where the corpus is not at hand
        # distinct held-out texts that the corpus' training text also holds; null where the corpus is not at hand
        "held_out_in_training": "BIGINT",
        "held_out_dropped": "BOOLEAN",  # whether they were dropped from the held-out text
        **_typed("manifest_sha256 corpus_sha256 engine VARCHAR"),
        "seconds": "DOUBLE",  # of the whole build; null where the record is lost or tells of a part
    },
}

Row = dict[str, Any]


def schema(table: str) -> pa.Schema:
    """The Arrow schema of a table."""
    return pa.schema([(name, ARROW[sql]) for name, sql in TABLES[table].items()])


def of_rows(table: str, rows: Iterable[Row]) -> pa.Table:
    """Rows as they are written: every column of the table, null where a row lacks it."""
    columns, rows = schema(table), list(rows)
    arrays = [pa.array([row.get(field.name) for row in rows], field.type) for field in columns]
    return pa.Table.from_arrays(arrays, schema=columns)


@contextmanager
def writer(path: Path, table: str) -> Iterator[Callable[[pa.Table], None]]:
    """A function that appends rows (one call, one row group); the file appears whole at the end."""
    columns = schema(table)
    # measured on steps: four times faster to write than dictionaries for everything, and a quarter smaller
    plain = {f.name: ENCODINGS[f.type] for f in columns if f.type in ENCODINGS}
    options = {"use_dictionary": [f.name for f in columns if f.name not in plain], "column_encoding": plain}
    with atomic(path) as temporary:
        with pq.ParquetWriter(temporary, columns, compression="zstd", compression_level=1, **options) as out:

            def add(rows: pa.Table) -> None:
                if len(rows):
                    out.write_table(rows, row_group_size=len(rows))

            yield add


def write(path: Path, table: str, rows: Iterable[Row]) -> None:
    """Write one table."""
    with writer(path, table) as add:
        add(of_rows(table, rows))


def column_digest() -> str:
    """Return 16 hex digits that stand for the names and types of all columns of this version."""
    return sha256_text(canonical_json({table: list(columns.items()) for table, columns in TABLES.items()}))[:16]


def file_names() -> list[str]:
    """Return the names of all files of a folder of tables, without the manifest."""
    return [*(f"{table}.parquet" for table in TABLES), EXPERIMENT]


def write_manifest(folder: Path) -> None:
    """Write the manifest of a folder whose files are complete; equal files give equal bytes."""
    files = [
        {"name": name, "bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
        for name in file_names()
    ]
    write_json(folder / MANIFEST, {"columns": column_digest(), "files": files})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder of tables: `columns`, and `files` with `name`, `bytes` and `sha256`.

    Raises UserError for a missing or damaged manifest, and for tables with the columns of another version.
    """
    path, next = folder / MANIFEST, restore_command(folder)
    if not path.is_file():
        if not any((folder / name).is_file() for name in file_names()):
            raise UserError("there are no tables in this folder.", path=folder, next=next)
        reason = "an older version of tokenscale wrote them, or ingest was interrupted"
        raise UserError("the tables have no manifest with their hashes.", path=path, reason=reason, next=next)
    manifest = read_json(path, "manifest of the tables", next)
    with report_malformed(path, "manifest of the tables", next):
        check_types(manifest, {"columns": str, "files": list})
        for file in manifest["files"]:
            check_types(file, {"name": str, "bytes": int, "sha256": str})
    if manifest["columns"] != column_digest():
        what, expected = "the tables have the columns of another version of tokenscale.", f"columns {column_digest()}"
        raise UserError(what, path=folder, found=f"columns {manifest['columns']}", expected=expected, next=next)
    if [file["name"] for file in manifest["files"]] != file_names():
        raise UserError("the manifest does not list the tables of this version.", path=path, next=next)
    return manifest


def check(folder: Path, *names: str) -> None:
    """Compare the files with these names (by default all) with the manifest.

    Raises UserError for the first file that is missing, unreadable or not the one that ingest wrote.
    """
    for file in read_manifest(folder)["files"]:
        if not names or file["name"] in names:
            _check_file(folder / file["name"], file["bytes"], file["sha256"])


def _check_file(path: Path, size: int, sha256: str) -> None:
    next = restore_command(path.parent)
    try:
        found = sha256_file(path)
    except FileNotFoundError:
        raise UserError("a table is missing.", path=path, next=next) from None
    except PermissionError:
        raise UserError("a table may not be read by this user.", path=path, next=f"chmod u+r {path}") from None
    except OSError as error:
        remove = f"rm -r {path} && " if path.is_dir() else ""
        raise UserError("a table cannot be read.", path=path, reason=error.strerror, next=remove + next) from None
    if (found, path.stat().st_size) != (sha256, size):
        expected = f"sha256 {sha256}, {size:,} bytes  ({MANIFEST})"
        now = f"sha256 {found}, {path.stat().st_size:,} bytes"
        what = "a table has changed since ingest wrote it."
        raise UserError(what, path=path, expected=expected, found=now, next=next)


def read_experiment(folder: Path) -> dict[str, Any]:
    """Return the experiment's description that lies beside its tables. Raises UserError where `check` does."""
    check(folder, EXPERIMENT)
    return json.loads((folder / EXPERIMENT).read_text(encoding="utf-8"))


def first_difference(path: Path, other: Path) -> str:
    """Name the first row and column in which a table differs from one made again; empty if all rows are equal.

    Files with equal rows differ in bytes where other releases of pyarrow wrote them. What was not checked (`unchecked`)
    is left out: stores and texts may have been at hand then, and not now.
    """
    try:
        found, again = (pq.read_table(file, use_threads=False) for file in (path, other))
    except (OSError, pa.ArrowException) as error:
        return f"it cannot be read: {str(error).splitlines()[0]}"
    if found.schema != again.schema:
        return "its columns are others"
    for column in (name for name in found.column_names if name != "unchecked"):
        pairs = enumerate(zip(found[column].to_pylist(), again[column].to_pylist(), strict=False))
        for row, (a, b) in pairs:
            if a != b and not (a != a and b != b):
                run = f" of {found['run_id'][row]}" if "run_id" in found.column_names else ""
                return f"row {row + 1:,}{run} has {column} {a!r} where the logs give {b!r}"
    return "" if len(found) == len(again) else f"{len(found):,} rows where the logs give {len(again):,}"


def restore_command(folder: Path) -> str:
    """Return the command that makes an experiment's tables again from its logs."""
    shown = Path(os.path.relpath(folder))
    if shown.parts[:-1] == ("results", "tables"):
        return f"snakemake -f {shown}/runs.parquet --cores 2"
    results = shown.parent.parent
    table = results / "experiments" / shown.name / "runs.json"
    return f"python -m tokenscale ingest --experiment {table} --runs {results / 'runs'} --output {shown}"
