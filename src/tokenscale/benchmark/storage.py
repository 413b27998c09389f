"""Benchmark of token stores: bytes, and the time to write and read the same ids in each format.

The text is tokenized once and its ids are kept in memory. In each round every store is written by
the format's own writer, read back and compared, and read by the format's own reader; its files are
removed before the next store. The order changes between rounds. The same rounds also tokenize the
text: some documents at a time, as training on the fly does, and at once, as building a store does.
Seconds and bytes are recorded; the analysis computes rates, medians and break-even.
"""

import argparse
import dataclasses
import shutil
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tokenscale.base import page_cache, processes
from tokenscale.base.errors import UserError
from tokenscale.base.files import remove_tree, sha256_file, write_sealed
from tokenscale.benchmark.rounds import group_by, interleave
from tokenscale.data.corpus.raw_text import RawText
from tokenscale.data.order.permutation import permute
from tokenscale.data.stores.documents import IGNORED
from tokenscale.data.stores.manifest import load_reader, load_writer, open_store
from tokenscale.data.stores.text import HeldDocuments, TextDocuments, encode_chunk
from tokenscale.data.stores.writing import list_files
from tokenscale.data.tokenizers import backends
from tokenscale.data.tokenizers.base import Tokenizer, read_tokenizer_manifest
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.runs.records import provenance
from tokenscale.runs.records.provenance import find_versions
from tokenscale.settings.benchmarks import Engine, StorageBenchmarkSettings
from tokenscale.settings.data import StoreSettings
from tokenscale.settings.options import from_json
from tokenscale.settings.registry import FORMATS

VERSION = 1
ENGINES = get_args(Engine)
#: documents per call when a whole text is tokenized at once
BULK_DOCUMENTS = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    required: dict[str, Any] = {"required": True, "type": Path, "metavar": "FILE"}
    parser.add_argument(
        "--settings",
        default="{}",
        metavar="JSON",
        help="formats, dtypes, codecs, row_group_rows, …",
    )
    parser.add_argument("--corpus", **required, help="results/corpus/NAME/manifest.json")
    parser.add_argument("--tokenizer", **required, help="results/tokenizers/NAME/manifest.json")
    parser.add_argument("--output", **required, help="the JSON to write")


def run(arguments: argparse.Namespace) -> None:
    """Run the benchmark and print its table."""
    settings = from_json(StorageBenchmarkSettings, text=arguments.settings)
    print(
        format_table(
            measure(
                settings,
                corpus=arguments.corpus.parent,
                tokenizer=arguments.tokenizer.parent,
                output=arguments.output,
            )
        )
    )


class TokenizedText(HeldDocuments):
    """First documents of a corpus, tokenized."""

    def __init__(self, corpus: Path, tokenizer: Path, count: int | None):
        text = RawText(corpus)
        made = load_tokenizer(tokenizer)
        self.eos = self.pairs = text.pairs  # only pairs end with EOS
        self.engine = made.engine
        self.texts = pa.concat_arrays(
            list(text.columns(BULK_DOCUMENTS, 0, min(len(text), count or len(text))))
        )
        self.text_bytes = pc.sum(pc.binary_length(self.texts)).as_py()
        origin = TextDocuments(
            corpus_directory=corpus,
            tokenizer=made,
            split="train",
            eos=self.eos,
        ).origin
        super().__init__(
            encode_chunk(
                made,
                texts=self.texts,
                eos=self.eos,
                pairs=self.pairs,
            ),
            origin,
        )


def measure(
    settings: StorageBenchmarkSettings,
    corpus: Path,
    tokenizer: Path,
    output: Path,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Run the benchmark and write its one JSON file; returns what was written.

    Stores are written below `folder` (by default next to the output) and removed. Raises UserError
    for a store that does not return the written ids.
    """
    tokenized = TokenizedText(corpus=corpus, tokenizer=tokenizer, count=settings.documents)
    found, left_out = list_engines(settings.engines, tokenizer, auto=tokenized.engine)
    folder = folder or output.parent / f".{output.stem}.stores"
    measurements: list[StoreSettings | str] = [
        *settings.stores,
        *dict.fromkeys([tokenized.engine, *found]),
    ]
    cores = processes.available_cores()
    records = []
    try:
        with processes.pin_to_cores({min(cores)} if cores else set()):
            for number, measurement in interleave(measurements, rounds=settings.rounds):
                if isinstance(measurement, StoreSettings):
                    store = dataclasses.replace(measurement, eos=tokenized.eos)
                    record = _measure_store(
                        store,
                        tokenized,
                        folder=folder,
                        settings=settings,
                    )
                else:
                    record = _measure_online(
                        measurement,
                        tokenized,
                        tokenizer=tokenizer,
                        rows=settings.rows,
                    )
                records.append({"round": number, **record})
    finally:
        remove_tree(folder)
    result = {
        "schema": VERSION,
        "benchmark": "storage",
        "settings": {
            k: list(v) if isinstance(v, tuple) else v
            for k, v in dataclasses.asdict(settings).items()
        },
        "corpus": RawText(corpus, verify=False).manifest["name"],
        "corpus_manifest_sha256": sha256_file(corpus / "manifest.json"),
        "tokenizer": tokenized.origin.tokenizer["name"],
        "tokenizer_file_sha256": tokenized.origin.tokenizer["file_sha256"],
        "engine": tokenized.engine,
        "documents": len(tokenized),
        "text_bytes": tokenized.text_bytes,
        "vocabulary_size": tokenized.origin.vocabulary_size,
        "left_out": {f"text, {engine}": why for engine, why in left_out.items()},
        "hardware": {**provenance.describe_machine(), "core_used": min(cores) if cores else None},
        "versions": find_versions(),
        "finished_unix_s": time.time(),
        "records": records,
    }
    write_sealed(output, record=result)
    return result


def _measure_store(
    store: StoreSettings, tokenized: TokenizedText, folder: Path, settings: StorageBenchmarkSettings
) -> dict[str, Any]:
    """Measure one store: write, compare, read in order and shuffled, warm and cold, and by single
    rows.
    """
    where = folder / store.directory
    remove_tree(where)
    start = time.perf_counter()
    manifest = load_writer(store.format)(store, tokenized, where)
    write_s = time.perf_counter() - start
    check_store(store, where, tokenized=tokenized)
    manifest = open_store(where, expected=store)
    order = np.arange(manifest.get("rows", manifest["documents"]))
    shuffled = permute(order, n=len(order), seed=0)
    seconds: dict[str, float | None] = {
        "write_s": write_s,
        "sequential_s": _time_read(
            store,
            where,
            manifest=manifest,
            order=order,
            rows=settings.rows,
        ),
        "shuffled_s": _time_read(
            store,
            where,
            manifest=manifest,
            order=shuffled,
            rows=settings.rows,
        ),
    }
    single = shuffled[: settings.single_rows]
    parquet = "codec" in FORMATS[store.format].options
    read_singly = partial(_time_read, store, rows=1) if not parquet else _time_row_groups
    seconds["single_rows_s"] = read_singly(where=where, manifest=manifest, order=single)
    kept = page_cache.drop_page_cache(where / file["name"] for file in list_files(manifest))
    why = page_cache.explain_warm_cache(kept)
    seconds["cold_s"] = (
        None
        if why
        else _time_read(
            store,
            where,
            manifest=manifest,
            order=order,
            rows=settings.rows,
        )
    )
    shutil.rmtree(where)
    codec = store.codec + (f"-{store.codec_level}" if store.codec == "zstd" else "")
    return {
        "store": store.directory,
        "format": store.format,
        "dtype": manifest.get("dtype"),
        "codec": codec if parquet else None,
        "row_group_rows": store.row_group_rows if parquet else None,
        "stored_bytes": sum(file["bytes"] for file in manifest["files"]),
        "rows": len(order),
        "single_rows": len(single),
        "ids": manifest["tokens_stored"],
        "useful_tokens": manifest["tokens_useful"],
        "documents_cut": manifest["documents_cut"],
        "entropy_bits": manifest["bits_per_token"]["order_0_entropy"],
        "not_cold": why,
        **seconds,
    }


def _time_row_groups(where: Path, manifest: dict[str, Any], order: np.ndarray) -> float:
    """Return the seconds to read single rows from Parquet shards, as other programs do: each costs
    its row group.
    """
    files = [pq.ParquetFile(where / file["name"], pre_buffer=False) for file in manifest["files"]]
    groups = [(file, group) for file in files for group in range(file.num_row_groups)]
    ends = np.cumsum([file.metadata.row_group(group).num_rows for file, group in groups])
    start = time.perf_counter()
    for number in np.searchsorted(ends, order, side="right").tolist():
        file, group = groups[number]
        file.read_row_group(group, use_threads=False)
    return time.perf_counter() - start


def _time_read(
    store: StoreSettings, where: Path, manifest: dict[str, Any], order: np.ndarray, rows: int
) -> float:
    """Return the seconds to open a store's reader and read `order`, `rows` rows at a time.

    Checking the manifest's hashes is not included, since a run does it once.
    """
    start = time.perf_counter()
    reader = load_reader(store.format)(where, manifest)
    for first in range(0, len(order), rows):
        indices = order[first : first + rows]
        if FORMATS[store.format].streamed:
            for i in indices.tolist():
                reader.document(i)
        else:
            reader.rows(indices)
    return time.perf_counter() - start


def check_store(store: StoreSettings, where: Path, tokenized: TokenizedText) -> None:
    """Compare a store's content with the written ids. Raises UserError for a difference."""
    manifest = open_store(where, expected=store)
    reader = load_reader(store.format)(where, manifest)
    if store.format == "padded":
        width = store.sequence_length + 1
        pad_id = tokenized.origin.pad_id
        for i, document in enumerate(tokenized.chunk.documents()):
            (tokens,), (labels,) = reader.rows(np.array([i]))
            own = document[:width].tolist()
            rest = max(0, width - len(document))
            padded = own + [pad_id] * rest
            expected_tokens = padded[:-1]
            expected_labels = own[1:] + [IGNORED] * rest
            found_row = (tokens.tolist(), labels.tolist())
            if found_row != (expected_tokens, expected_labels):
                raise _difference_error(store, what=f"row {i}")
        return
    found = list(reader.chunks(0, manifest["documents"]))
    for name in ("ids", "lengths"):
        values = np.concatenate([getattr(chunk, name) for chunk in found])
        if not np.array_equal(values, getattr(tokenized.chunk, name)):
            raise _difference_error(store, what=f"the documents' {name}")


def _difference_error(store: StoreSettings, what: str) -> UserError:
    next_step = "report a bug"
    return UserError(
        "a store does not return the written ids.",
        store=store.directory,
        differs=what,
        next=next_step,
    )


def _measure_online(
    engine: str, tokenized: TokenizedText, tokenizer: Path, rows: int
) -> dict[str, Any]:
    """Measure tokenizing the text with one engine: `sequential_s` for `rows` documents at a time,
    `bulk_s` for all.

    Each measurement has a new, warmed-up tokenizer that has not seen the text, since engines cache
    words.
    """
    made = _load_warm_tokenizer(tokenizer, engine)
    start = time.perf_counter()
    for first in range(0, len(tokenized), rows):
        encode_chunk(
            made,
            texts=tokenized.texts.slice(first, rows).to_pylist(),
            eos=tokenized.eos,
            pairs=tokenized.pairs,
        )
    sequential_s = time.perf_counter() - start
    made = _load_warm_tokenizer(tokenizer, engine)
    start = time.perf_counter()
    whole = encode_chunk(
        made,
        texts=tokenized.texts,
        eos=tokenized.eos,
        pairs=tokenized.pairs,
    )
    bulk_s = time.perf_counter() - start
    useful = len(whole.ids) - len(whole.lengths)
    facts = {
        "store": f"text, {engine}",
        "format": "text",
        "engine": engine,
        "auto": engine == tokenized.engine,
    }
    counts = {"rows": len(tokenized), "ids": len(whole.ids), "useful_tokens": useful}
    return {**facts, **counts, "sequential_s": sequential_s, "bulk_s": bulk_s}


def _load_warm_tokenizer(folder: Path, engine: str) -> Tokenizer:
    """Load a tokenizer and warm it up on single texts and on many texts."""
    made = load_tokenizer(folder, engine=engine if engine in ENGINES else "auto")
    for texts in (["1"], pa.array(["1"] * BULK_DOCUMENTS)):
        made.encode(texts)
    return made


def format_table(result: dict[str, Any]) -> str:
    """Format a line per store, the smallest first, then the engines on the fly; medians over
    rounds.
    """
    by_store = group_by(result["records"], "store")
    width = max(map(len, by_store))
    lines = [
        f"{result['settings']['rounds']} rounds, {result['documents']:,} documents, one core, "
        "engine "
        f"{result['engine']}; us per useful token, ms per row",
        f"{'store':<{width}} {'bytes/token':>11} {'x entropy':>9} {'write us':>9} {'read us':>9} "
        f"{'shuffled':>9} "
        f"{'cold':>9} {'ms a row':>9}",
    ]
    stores = {name: records for name, records in by_store.items() if records[0]["format"] != "text"}
    for name, records in sorted(stores.items(), key=lambda item: item[1][0]["stored_bytes"]):
        first = records[0]
        size = first["stored_bytes"] / first["ids"]
        entropy = first["entropy_bits"] / 8
        times = [
            _format_us(records, key) for key in ("write_s", "sequential_s", "shuffled_s", "cold_s")
        ]
        times.append(
            _format_median(
                records, key="single_rows_s", unit=1e3 / max(1, first["single_rows"] or 1)
            )
        )
        lines.append(
            f"{name:<{width}} {size:>11.2f} {size / entropy:>9.2f} "
            + " ".join(f"{t:>9}" for t in times)
        )
    for name, records in by_store.items():
        if name not in stores:
            online = _format_us(records, key="sequential_s")
            bulk = _format_us(records, key="bulk_s")
            lines.append(f"{name:<{width}} on the fly {online} us, at once {bulk}")
    lines += [f"left out: {name}: {reason}" for name, reason in result["left_out"].items()]
    warm = sorted({record["not_cold"] for record in result["records"] if record.get("not_cold")})
    lines += [f"not cold: {reason}" for reason in warm]
    return "\n".join(lines)


def _format_us(records: list[dict[str, Any]], key: str) -> str:
    return _format_median(records, key, unit=1e6 / records[0]["useful_tokens"])


def _format_median(records: list[dict[str, Any]], key: str, unit: float) -> str:
    values = [record[key] for record in records if record[key] is not None]
    return f"{np.median(values) * unit:.3f}" if values else "–"


def list_engines(
    requested: Iterable[Engine], tokenizer: Path, auto: str
) -> tuple[list[Engine], dict[str, str]]:
    """Return (usable requested engines, other engines → reason).

    An engine is unusable if it is not installed, not exact on the hostile texts, or already used by
    `auto`.
    """
    found: list[Engine] = []
    left_out: dict[str, str] = {}
    for engine in requested:
        if (reason := _explain_unusable(engine, folder=tokenizer, auto=auto)) is None:
            found.append(engine)
        else:
            left_out[engine] = reason
    return found, left_out


def _explain_unusable(engine: str, folder: Path, auto: str) -> str | None:
    """Return why an engine cannot be measured, or None."""
    if read_tokenizer_manifest(folder)["kind"] == "numbers":
        return "no engine reads the tokenizer kind numbers"
    if engine == auto:
        return "auto already uses this engine"
    try:
        # not of the kind numbers, which is excluded above
        tokenizer: Any = load_tokenizer(folder, engine)
    except UserError as error:
        return error.facts.get("reason") or error.what
    differs = tokenizer.difference(backends.make_fuzz_texts())
    return None if differs is None else "its ids are not those of the reference"
