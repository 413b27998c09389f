"""Type, unit and plausible range of every field of every JSON record that a small built project holds.

A record has a row in FIELDS: file pattern → field → kind. A field whose name ends with a unit (`duration_s`,
`created_utc`, `bytes`) is also checked against that unit. A file or a field that nobody declared fails the test.
"""

import json
import re
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from tests.web import Server
from tests.workflow.conftest import Project, copy_of
from tokenscale.base.files import canonical_json, sha256_file, sha256_text, utc_now, write_json
from tokenscale.data.corpus.build import build as build_corpus
from tokenscale.data.corpus.download import fetch_corpus
from tokenscale.data.corpus.raw_text import RawText
from tokenscale.data.stores.manifest import open_store, read_store_manifest, write_sealed
from tokenscale.data.stores.padded import PaddedStore
from tokenscale.data.stores.write import write_store as write_store
from tokenscale.settings.data import CorpusSettings, SourceSettings, StoreSettings
from tokenscale.settings.options import from_dict
from tokenscale.settings.run import RunSettings

pytestmark = pytest.mark.workflow

# ------------------------------------------------------------------------------------------------------ kinds of values


def number(least: float, most: float, *types: type):
    """A check for numbers of these types (int by default) within the range. A bool is no number."""
    kinds = types or (int,)

    def check(value, when):
        return type(value) in kinds and least <= value <= most

    return check


def text(pattern: str = r"[^\x00]+"):
    """A check for strings that the pattern matches from end to end."""

    def check(value, when):
        return isinstance(value, str) and re.fullmatch(pattern, value, re.DOTALL) is not None

    return check


def one_of(*values):
    def check(value, when):
        return type(value) in {type(v) for v in values} and value in values

    return check


def maybe(check):
    """The same, or null."""
    return lambda value, when: value is None or check(value, when)


def unix_time(value, when):
    """Seconds since 1970, from the making of the project until the file was written."""
    return isinstance(value, float) and when.started_unix_s - 2 <= value <= when.written_unix_s + 2


def utc_time(value, when):
    """ISO 8601 in UTC, in the same range."""
    if not isinstance(value, str) or not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", value):
        return False
    return unix_time(datetime.fromisoformat(value).timestamp(), when)


def date(value, when):
    return value in {datetime.fromtimestamp(t, UTC).date().isoformat() for t in (when.started_unix_s, time.time())}


def version(value, when):
    return text(r"\d+(\.\d+)+[\w.+!-]*|\d+")(value, when)


def run_settings(value, when):
    return isinstance(RunSettings.from_json(json.dumps(value)), RunSettings)


def corpus_settings(value, when):
    return isinstance(from_dict(CorpusSettings, value), CorpusSettings)


count = number(0, 10**9)
size = number(0, 10**9)  # bytes: nothing of this project is larger than a gigabyte
seconds = number(0.0, 3600.0, float)  # nothing of it takes an hour
share = number(0.0, 1.0, float, int)
real = number(-1e30, 1e30, float, int)
flag = one_of(True, False)
string = text()
any_text = text(r"[^\x00]*")
name = text(r"[\w.=,'/ -]+")
sha256 = text(r"[0-9a-f]{64}")
short_hash = text(r"[0-9a-f]{16}")


def empty(value, when):
    return value in ({}, [])


def setting(value, when):
    return isinstance(value, (str, int, float))


#: what the end of a field's name says about its value, the longest ending first
UNITS = {
    "_unix_s": unix_time,
    "_utc": utc_time,
    "_date": date,
    "_s": seconds,
    "_j": number(0.0, 1e9, float),
    "sha256": sha256,
    "bytes": number(0, 1 << 50),
    "_share": share,
    "_mb": number(0, 10**9),
}

# -------------------------------------------------------------------------------------------------------------- records

SHARD = {"name": name, "rows": count, "bytes": size, "sha256": sha256}
FILE = {"name": name, "bytes": size, "sha256": sha256}
RECORDS_FILE = {"name": name, "bytes": size, "records": count}
VERSIONS = {"versions.*": version}
INSTALLED = {"installed.*": version}
HARDWARE = {
    "hardware.architecture": string,
    "hardware.cores": number(1, 4096),
    "hardware.cpu": string,
    "hardware.load_average_1min": number(0.0, 1e5, float),
    "hardware.memory_bytes": number(1 << 28, 1 << 45),
    "hardware.system": string,
}


def below(prefix: str, fields: dict) -> dict:
    return {f"{prefix}.{field}": kind for field, kind in fields.items()}


CORPUS = {
    "schema_version": one_of(2),
    "name": name,
    "source.kind": one_of("docstrings"),
    **below("source.packages.[]", {"name": name, "version": version, "licence": string}),
    **{f"cleaning.{option}": flag for option in ("collapse", "deduplicate", "nfc", "strip")},
    "cleaning.minimum_characters": count,
    "cleaning.maximum_characters": maybe(count),
    "cleaning.documents.*": count,
    "split_rule": string,
    "validation_share": share,
    "row_group_rows": number(1, 10**6),
    "splits.*.rows": count,
    "splits.*.utf8_bytes": size,
    "splits.*.text_sha256": sha256,
    "splits.*.characters.*": count,
    **below("splits.*.files.[]", SHARD),
}
DOWNLOADED = {
    field: kind for field, kind in CORPUS.items() if not field.startswith("source.")
} | {  # a corpus of downloaded files
    "source.kind": one_of("url"),
    **below("source.files.[]", FILE | {"from": text(r"https?://\S+")}),
}
BUILD = {
    "created_utc": utc_time,
    "duration_s": seconds,
    "machine": string,
    "python": text(r"3\.\d+\.\d+.*"),
    "tokenscale": version,
}
CORPUS_BUILD = BUILD | {
    "manifest_sha256": sha256,
    "platform": string,
    "pyarrow": version,
    "settings": corpus_settings,
}
STORE = {
    "schema_version": one_of(2),
    "self_sha256": sha256,
    "format": one_of("padded", "token-list", "packed"),
    "split": one_of("train", "validation"),
    "options.split": one_of("train", "validation"),
    "options.eos": flag,
    "options.sequence_length": number(1, 10**6),
    "options.row_group_rows": number(1, 10**6),
    "options.codec": one_of("snappy", "zstd"),
    "options.codec_level": number(1, 22),
    "options.dtype": one_of("int32", "int64"),
    "options.packing": one_of("best-fit"),
    "dtype": one_of("uint16", "uint32", "int32", "int64"),
    "sequence_length": number(1, 10**6),
    "tokenizer.name": name,
    "tokenizer.kind": name,
    "tokenizer.file_sha256": sha256,
    "vocabulary_size": number(2, 10**6),
    **{f"{which}_id": number(0, 10**6) for which in ("bos", "eos")},
    "padding.id": number(0, 10**6),
    "padding.side": one_of("right"),
    "document_rule": string,
    "special_token_policy": string,
    "corpus_manifest_sha256": sha256,
    "text_sha256": sha256,
    "ids_digest.algorithm": string,
    "ids_digest.value": sha256,
    **{counted: count for counted in ("rows", "documents", "documents_cut", "documents_split", "pieces", "places")},
    **{f"tokens_{which}": count for which in ("cut", "in_documents", "stored", "total", "useful")},
    "fill": share,
    "bits_per_token.order_0_entropy": number(0.0, 32.0, float),
    "bits_per_token.stored": number(0.0, 1e4, float),
    **below("files.[]", FILE | {"checked_by": name}),
    "records.dtype": one_of("uint16", "uint32"),
    **below("records.files.[]", RECORDS_FILE),
}
STORE_BUILD = BUILD | {"engine": text(r"\w+ [\d.]+"), "manifest": name, "numpy": version}
CODE = {"code.*": sha256, "digest": sha256, "layout_digest": sha256, "science_code": sha256, "inputs.*": sha256}
CODE |= {"launch.machine": string, "launch.share": number(1, 1), "launch.starter": string}
RUN = {
    "schema": one_of(1),
    "run_id": name,
    "run": run_settings,
    "attempt": number(0, 0),
    "budget_steps": count,
    **CODE,
    **VERSIONS,
    **INSTALLED,
    **HARDWARE,
    "hardware.device": string,
    "hardware.device_kind": one_of("cpu", "cuda"),
    "hardware.network": maybe(string),
    "hardware.links_gb_s": maybe(empty),  # no machine's file expects anything
    "hardware.nodes.[]": string,
    "hardware.threads_per_rank": number(1, 4096),
    "hardware.world_size": number(1, 2),
    "argv.[]": string,
    "compilation": maybe(empty),  # no run asks for compile
    "environment.*": any_text,
    "flops_per_token.*": number(1e3, 1e9, float),
    "git": empty,  # the project's copy is no clone
    "kernel": string,
    "micro_steps": number(1, 100),
    "number_format": one_of("fp32", "bf16", "fp16"),
    "optimizer": string,
    "parameters": number(1000, 10**6),
    "seal": sha256,
    "started_unix_s": unix_time,
    "outcome.begins_at": number(0, 0),
    "outcome.begins_at_useful_tokens": number(0, 0),
    "outcome.ended_unix_s": unix_time,
    "outcome.energy_j": maybe(number(0.0, 1e9, float)),
    "outcome.logs.*": sha256,
    "outcome.status": one_of("complete"),
    "outcome.steps": number(5, 5),
}
EXPERIMENT = {
    "schema": one_of(1),
    "experiment": name,
    "question": string,
    "scale": one_of("demo"),
    "note": any_text,
    "repeats": number(1, 100),
    "factors.**": setting,
    "figures.[]": name,
    "left_out": empty,
    "original": empty,
    "target_loss": maybe(real),
    "cell_repeats.*": number(1, 100),
    "primary": maybe(empty),
}
BENCHMARK = {
    "schema": one_of(3),
    "benchmark": one_of("data"),
    "corpus": name,
    "corpus_manifest_sha256": sha256,
    "tokenizer": name,
    "tokenizer_file_sha256": sha256,
    "token_file_bytes": size,
    "engine": name,
    "finished_unix_s": unix_time,
    "left_out": empty,
    "peers": empty,
    "limit.pool_bytes": size,
    "limit.what": string,
    "approaches.**": setting,
    **{f"checked.[].{part}": string for part in ("online", "offline")},
    "checked.[].identical_batches": number(1, 1000),
    "settings.engines.[]": name,
    "settings.workers": empty,
    **{f"settings.{setting}": number(1, 10**6) for setting in ("batches", "rounds", "rows", "sequence_length")},
    **HARDWARE,
    "hardware.core_used": maybe(number(0, 4096)),
    **VERSIONS,
    "records.[].arm": string,
    "records.[].cache": one_of("cold", "warm"),
    "records.[].engine": maybe(name),
    "records.[].workers": maybe(count),
    **{f"records.[].{counted}": count for counted in ("batches", "round", "total_tokens", "useful_tokens")},
    **{f"records.[].{timed}": seconds for timed in ("batch_s.[]", "median_batch_s", "open_s", "seconds")},
    "records.[].kept_share": share,
    "records.[].memory_bytes": maybe(size),
}
CLAIM = {
    **{field: string for field in ("claim", "document", "experiment", "id", "kind", "scale", "sentence", "unit")},
    **{field: any_text for field in ("figure", "reason", "refused", "remark", "study", "where")},
    **{field: real for field in ("bound", "high", "low", "margin", "number")},
    **{f"{field}.[]": real for field in ("published", "corrected")},
    "direction": one_of("below", "above", "equal"),
    "in_cells": one_of("all", "largest"),
    "n": count,
    "reproduced": maybe(flag),
    "run_ids.[]": name,
    "shown_in": maybe(string),
    "sql_sha256": sha256,
    "verdict": one_of("supported"),
    **{f"cells.[].{field}": real for field in ("high", "low", "number")},
    **{f"cells.[].{field}": share for field in ("p", "smallest_p", "corrected_p", "corrected_smallest_p")},
    **{f"cells.[].{field}": any_text for field in ("kind", "name", "reason", "verdict")},
    "cells.[].n": count,
    "cells.[].repeated": flag,
}
PROVENANCE = {
    "schema": one_of(1),
    "code.*": sha256,
    "git": empty,
    "order.[]": name,
    "packages.*": version,
    **INSTALLED,
    "tokenscale": version,
    "experiments.*.tables": sha256,
    "experiments.*.data_from": date,
    **{f"experiments.*.figures.*.{field}": sha256 for field in ("code", "data", "queries.*.sql")},
    "experiments.*.figures.*.queries.*.rows": short_hash,
    "experiments.*.runs.*.code_digest": sha256,
    "experiments.*.runs.*.seal": sha256,
    "experiments.*.runs.*.cores": number(1, 4096),
    "experiments.*.runs.*.manifests.*": sha256,
    "experiments.*.runs.*.packages.*": version,
    "experiments.*.runs.*.validity": one_of("valid"),
    **{f"experiments.*.runs.*.{field}": string for field in ("cpu", "device", "machine")},
}
CRATE = {  # RO-Crate, JSON-LD: its own vocabulary
    "@context.**": string,
    "@graph.[].datePublished": date,
    "@graph.[].**": setting,
}
FIELDS = {
    "corpus/*/manifest.json": CORPUS,
    "corpus/*/build.json": CORPUS_BUILD | below("manifest", CORPUS),
    "downloaded/manifest.json": DOWNLOADED,
    "downloaded/build.json": CORPUS_BUILD | below("manifest", DOWNLOADED),
    "downloads/*/manifest.json": {
        "schema_version": one_of(1),
        "kind": one_of("url"),
        **below("files.[]", FILE | {"from": text(r"https?://\S+")}),
    },
    "downloads/*/hashes.json": {"*": sha256},
    "tokenizers/*/manifest.json": {
        "schema_version": one_of(2),
        "name": name,
        "kind": one_of("bpe"),
        "special_token_policy": string,
        **below("file", FILE),
        **{f"{which}_id": number(0, 10**6) for which in ("bos", "eos", "pad")},
        "vocabulary_size": number(2, 10**6),
        "corpus_manifest_sha256": sha256,
    },
    "tokenizers/*/build.json": BUILD
    | {
        "manifest_sha256": sha256,
        "engines.*.exact": flag,
        "engines.*.texts": count,
        "engines.*.version": version,
    },
    "corpus/*/records/manifest.json": {
        "schema_version": one_of(1),
        "split": one_of("train"),
        "text_sha256": sha256,
        **below("files.[]", RECORDS_FILE),
    },
    "tokens/*/*/*/manifest.json": STORE,
    "tokens/*/*/*/build.json": STORE_BUILD,
    "runs/*/run.json": RUN,
    "runs/*/done.json": {field: RUN[field] for field in ("schema", "run_id", "attempt", "seal")}
    | {"status": one_of("complete"), "steps": number(5, 5)},
    "runs/*/status.json": {
        "state": one_of("complete"),
        "step": number(5, 5),
        "steps": number(5, 5),
        "t_unix_s": unix_time,
    },
    "runs/*/attempt=*/attempt.json": CODE,
    "benchmarks/data/*.json": BENCHMARK,
    "experiments/*/runs.json": EXPERIMENT
    | {
        "cells.[].*": setting,
        "runs.[].cell.*": setting,
        "runs.[].position": count,
        "runs.[].repeat": count,
        "runs.[].run": run_settings,
        "runs.[].run_id": name,
    },
    "tables/*/experiment.json": EXPERIMENT,
    "tables/*/manifest.json": {
        "columns": short_hash,
        **below("files.[]", {"name": name, "bytes": size, "sha256": sha256}),
    },
    "figures/*/*.json": {
        "schema": one_of(1),
        "figure": name,
        "queries.[]": name,
        **{field: string for field in ("alt", "caption", "finding", "title")},
        **{field: any_text for field in ("folded", "method")},
        "table.caption": string,
        "table.columns.[].[]": lambda value, when: string(value, when) or flag(value, when),
        "table.rows.[].[]": any_text,
    },
    # no figure of a study is measured at scale demo
    "report/claims.json": {"schema": one_of(1), "replication": empty, **below("claims.[]", CLAIM)},
    "report/provenance.json": PROVENANCE,
    "report/ro-crate-metadata.json": CRATE,
    "code/*/sources.json": {"files.*": sha256, "modules.[]": name},
}
#: JSON of formats that are not ours
FOREIGN = ("tokenizers/*/tokenizer.json",)

# ------------------------------------------------------------------------------------------------------------ the check


def complaints(record, fields: dict, when) -> list[str]:
    """What is wrong with a record: `field = value: why`."""
    patterns = {tuple(field.split(".")): kind for field, kind in fields.items()}
    found: list[str] = []

    def visit(value, path: tuple[str, ...]):
        shown = f"{'.'.join(path)} = {json.dumps(value)[:80]}"
        # a name before `*` before `**`
        fitting = sorted((p for p in patterns if fits(p, path)), key=lambda p: ("**" in p, p.count("*")))
        opened = fitting and fitting[0][-1] == "**" and isinstance(value, (dict, list)) and value
        if fitting and not opened:
            kinds = [patterns[fitting[0]], *units(path[-1], value)]
            found.extend(f"{shown}: wrong type, unit or range" for kind in kinds if not kind(value, when))
        elif isinstance(value, (dict, list)) and path_begins(patterns, path):
            for key, item in value.items() if isinstance(value, dict) else (("[]", item) for item in value):
                visit(item, (*path, key))
        else:
            found.append(f"{shown}: not declared")

    def units(last: str, value) -> list:
        ending = unit_of(last)
        return [] if ending is None or value is None or isinstance(value, (dict, list)) else [UNITS[ending]]

    for key, value in record.items():
        visit(value, (key,))
    return found


def unit_of(field: str) -> str | None:
    """The ending in UNITS that a field's name has."""
    return next((ending for ending in UNITS if field.endswith(ending)), None)


def fits(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    if pattern[-1] == "**":
        return len(path) >= len(pattern) and fits(pattern[:-1], path[: len(pattern) - 1])
    return len(pattern) == len(path) and all(p in ("*", k) for p, k in zip(pattern, path, strict=True))


def path_begins(patterns, path: tuple[str, ...]) -> bool:
    return any(
        len(p) > len(path) and fits(p[: len(path)], path) or p[-1] == "**" and len(path) >= len(p) for p in patterns
    )


def times_of(project: Project, file: Path):
    """When the project was made, and when the file was written."""
    started = (project.root / "config/config.yaml").stat().st_mtime
    return SimpleNamespace(started_unix_s=started, written_unix_s=file.stat().st_mtime)


@pytest.fixture(scope="module")
def complete(built, tmp_path_factory) -> Project:
    """The built project, and what its experiments do not need: a download and its corpus."""
    project = copy_of(built, tmp_path_factory.mktemp("complete"))
    results = project.root / "results"
    with Server() as web:
        web.files["/stories.txt"] = b"\n".join(b"Story %d: once upon a time." % i for i in range(50))
        source = SourceSettings(kind="url", files=(f"{web.address}/stories.txt",), separator="\n")
        settings = CorpusSettings(name="web", source=source, validation_share=0.2)
        fetch_corpus(settings, results / "downloads/web")
        build_corpus(settings, results / "downloaded", downloads=results / "downloads/web")
    return project


@pytest.mark.parametrize("pattern", FIELDS)
def test_each_field_has_its_type_its_unit_and_a_plausible_value(complete, pattern):
    files = sorted((complete.root / "results").glob(pattern))
    assert files, "no such file in a built project"
    found = {}
    for file in files:
        wrong = complaints(json.loads(file.read_text()), FIELDS[pattern], times_of(complete, file))
        if wrong:
            found[str(file.relative_to(complete.root))] = wrong
    assert found == {}
    if pattern.endswith("manifest.json"):  # equal on a rebuild: no time is in it
        assert not [field for field in FIELDS[pattern] if field.endswith(("_s", "_utc", "date", "created"))]


def test_each_record_is_declared(complete):
    results = complete.root / "results"
    declared = {path for pattern in (*FIELDS, *FOREIGN) for path in results.glob(pattern)}
    found = {path for path in results.rglob("*.json") if not path.name.startswith(".")}
    assert sorted(found - declared) == []


def test_each_column_of_the_tables_holds_its_unit(complete):
    """Columns by the end of their names. `_mono_s` counts from a boot and is compared with itself alone."""
    found, units = {}, set()
    for file in sorted((complete.root / "results/tables").glob("*/*.parquet")):
        when, table = times_of(complete, file), pq.read_table(file)
        for column in table.column_names:
            ending = unit_of(column)
            if ending is None or column.endswith("_mono_s"):
                continue
            values = [value for value in table[column].to_pylist() if value is not None]
            wrong = [value for value in values if not UNITS[ending](value, when)]
            found |= {f"{file.name}: {column}": wrong[:3]} if wrong else {}
            units |= {ending} if values else set()
    assert found == {} and {"_unix_s", "_s", "bytes"} <= units


def test_metadata_of_parquet_stores_hold_no_time(complete):
    """A file's own metadata: what the store is, and nothing that a rebuild would change."""
    files = sorted((complete.root / "results/tokens").rglob("*.parquet"))
    assert len(files) >= 4
    for file in files:
        metadata = {k.decode(): v.decode() for k, v in pq.read_schema(file).metadata.items()}
        assert metadata == {
            "tokenizer": "bpe",
            "format": json.loads((file.parent / "manifest.json").read_text())["format"],
        }


def test_a_rebuilt_store_is_equal_and_its_record_has_the_new_time(complete, tmp_path):
    results = complete.root / "results"
    for store in (StoreSettings("padded", sequence_length=32), StoreSettings("packed", sequence_length=32)):
        before, again = results / "tokens/small/bpe" / store.directory, tmp_path / store.directory
        write_store(store, results / "corpus/small", results / "tokenizers/bpe", again)
        names = {path.name for path in before.iterdir()} - {".lock"}
        assert names == {path.name for path in again.iterdir()} - {".lock"}
        for each in names - {"build.json"}:
            assert (before / each).read_bytes() == (again / each).read_bytes()
        first, second = (json.loads((path / "build.json").read_text())["created_utc"] for path in (before, again))
        assert first <= second <= utc_now()


WRONG = {
    "seconds since boot": {"created_utc": 973.571146459},
    "a local time": {"created_utc": "2026-11-22T20:31:02"},
    "a time to come": {"created_utc": "2100-01-01T00:00:00Z"},
    "the birth of Unix": {"created_utc": "1970-01-01T00:16:13Z"},
    "milliseconds": {"duration_s": 9_000_000.0},
    "a number as text": {"duration_s": "0.4"},
    "a new field": {"built_unix_s": 1795379540.0},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_the_check_finds(complete, change):
    file = next((complete.root / "results").glob("tokens/*/*/*/build.json"))
    record, when = json.loads(file.read_text()), times_of(complete, file)
    assert complaints(record, STORE_BUILD, when) == []
    assert complaints(record | change, STORE_BUILD, when) != []


def test_a_project_built_before_is_read(complete, tmp_path):
    """Stores, corpora and records of builds with the fields that they had before."""
    results = complete.root / "results"
    corpus, padded = (tmp_path / kind for kind in ("corpus", "padded"))
    shutil.copytree(results / "corpus/small", corpus)
    manifest, build = (
        json.loads((corpus / "manifest.json").read_text()),
        json.loads((corpus / "build.json").read_text()),
    )
    manifest["source_date"] = "undated"
    write_json(corpus / "manifest.json", manifest)
    before = {field: value for field, value in build.items() if field != "created_utc"} | {"built_unix_s": 973.5}
    before |= {"manifest": manifest, "manifest_sha256": sha256_text(canonical_json(manifest))}
    write_json(corpus / "build.json", before)
    assert len(RawText(corpus)) == manifest["splits"]["train"]["rows"]

    store = StoreSettings("padded", sequence_length=32)
    shutil.copytree(results / "tokens/small/bpe" / store.directory, padded)
    manifest, (file,) = read_store_manifest(padded), padded.glob("*.parquet")
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata(table.schema.metadata | {b"created": b"undated"}), file)
    described = manifest["files"][0] | {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
    write_sealed(padded / "manifest.json", manifest | {"files": [described]})
    rows = PaddedStore(padded, open_store(padded, store))
    assert rows.manifest["rows"] == table.num_rows
