"""Hugging Face data sets as `Dataset.save_to_disk` writes them.

A data set is a folder of Arrow IPC streams, `state.json` with their names, and `dataset_info.json`. It is read and
written with pyarrow alone. `datasets.load_from_disk` opens the written folders and takes the column types from the
Arrow schema.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from tokenscale.base.errors import UserError, unknown
from tokenscale.base.files import read_json, sha256_file, write_json
from tokenscale.data.stores.documents import Documents, Origin
from tokenscale.data.stores.foreign.reframe import ExportCounts, ExportFraming, ForeignReader, export_chunks
from tokenscale.data.stores.foreign.shards import replace_folder

NAME = "a Hugging Face data set"
KEEPS_BOS = True
COLUMNS = ("input_ids", "tokens")
MARKS = ("state.json", "dataset_info.json", "dataset_dict.json")
#: tokens per file, which gives the file size of `save_to_disk`
SHARD_TOKENS = 500_000_000 // 4
#: end marker of an Arrow IPC stream
END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def detect(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in MARKS)


def list_outputs(path: Path) -> list[Path]:
    return [path]


def record_path(path: Path) -> Path:
    return path / "tokenscale.json"


def notes(origin: Origin, ended: bool) -> list[str]:
    return []


class Reader(ForeignReader):
    """Reader of a data set. Raises UserError for another kind of folder, a broken file, and a column without ids."""

    def __init__(self, path: Path, *, column: str | None = None, **_: object):
        if (path / "dataset_dict.json").is_file():
            splits = read_json(path / "dataset_dict.json", "list of splits").get("splits", [])
            raise UserError(
                "the data set holds several splits.",
                folder=path,
                found=", ".join(splits),
                next="name the folder of one",
            )
        again = "save it again with Dataset.save_to_disk"
        state = read_json(path / "state.json", "state of the data set", again)
        try:
            self.files = [path / Path(file["filename"]).name for file in state["_data_files"]]
        except (KeyError, TypeError):
            raise UserError("state.json names no files.", file=path / "state.json", next=again) from None
        if state.get("_indices_data_files"):
            raise UserError(
                "the data set is a selection of rows, saved by an old version of datasets.", folder=path, next=again
            )
        self._again = again
        self._rows: list[int] = []
        self._schema: pa.Schema
        for file in self.files:
            with self._open_stream(file) as stream:
                if self._rows and stream.schema.names != self._schema.names:
                    found, expected = ", ".join(stream.schema.names), ", ".join(self._schema.names)
                    raise UserError(
                        "two files of the data set hold other columns.",
                        **{"file": file, "found": found, "expected": expected, "next": again},
                    )
                self._schema = stream.schema
                self._rows.append(sum(batch.num_rows for batch in stream))
        self._firsts = np.cumsum(self._rows)
        if not self.files or not sum(self._rows):
            raise UserError("the data set holds no rows.", folder=path, next="choose another")
        names = self._schema.names
        if column is not None and column not in names:
            raise unknown("column", column, names, flag="--column", folder=path)
        self.column = column or next((name for name in COLUMNS if name in names), None)
        if self.column is None:
            raise UserError(
                "the data set has no column of ids.",
                folder=path,
                found=", ".join(names),
                expected=" or ".join(COLUMNS),
                next="--column NAME; text has to be tokenized first: python -m tokenscale pretokenize --help",
            )
        kind = self._schema.field(self.column).type
        lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not lists or not pa.types.is_integer(kind.value_type):
            raise UserError(
                "the column holds no lists of ids.",
                folder=path,
                column=self.column,
                found=kind,
                expected="lists of integers",
                next="--column NAME",
            )
        self.dtype = str(kind.value_type)

    def __len__(self) -> int:
        return sum(self._rows)

    def chunks(self, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        row = 0
        for file, rows in zip(self.files, self._rows, strict=True):
            if first < row + rows and row < last:
                with self._open_stream(file) as stream:
                    at = row
                    for batch in stream:
                        a, b = max(first - at, 0), min(last - at, batch.num_rows)
                        at += batch.num_rows
                        if a < b:
                            yield from self._split_batch(batch.slice(a, b - a), file)
            row += rows

    def _split_batch(self, batch: pa.RecordBatch, file: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (ids, lengths) of 1,000 rows at a time, without tokens that the attention mask excludes."""
        for start in range(0, batch.num_rows, 1000):
            part = batch.slice(start, 1000)
            ids, lengths = self._decode(part.column(part.schema.get_field_index(self.column)), file)
            if "attention_mask" in part.schema.names:
                mask, mask_lengths = self._decode(part.column(part.schema.get_field_index("attention_mask")), file)
                if not np.array_equal(lengths, mask_lengths):
                    raise UserError("the attention mask has other lengths than the ids.", file=file, next=self._again)
                kept = np.concatenate(([0], np.cumsum(mask != 0)))
                ends = np.cumsum(lengths)
                self.padding_dropped += len(ids) - int(kept[-1])
                ids, lengths = ids[mask != 0], kept[ends] - kept[ends - lengths]
            yield ids, lengths

    def _decode(self, column: pa.Array, file: Path) -> tuple[np.ndarray, np.ndarray]:
        if column.null_count or (values := column.flatten()).null_count:
            raise UserError("a document of the data set is null.", file=file, next="filter such rows out")
        if pa.types.is_fixed_size_list(column.type):
            return values.to_numpy(), np.full(len(column), column.type.list_size, dtype=np.int64)
        return values.to_numpy(), np.diff(column.offsets.to_numpy()).astype(np.int64)

    @contextmanager
    def _open_stream(self, file: Path) -> Iterator[pa.RecordBatchStreamReader]:
        """Open the stream of a file. Raises UserError for a missing, truncated or broken file."""
        if not file.is_file():
            raise UserError("a file of the data set is missing.", file=file, next=self._again)
        with open(file, "rb") as end:
            end.seek(-min(len(END), file.stat().st_size), os.SEEK_END)
            if (found := end.read()) != END:  # a stream truncated between two batches reads without an error
                raise self._broken_file_error(file, f"{found.hex()} at its end, not {END.hex()}")
        try:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
                yield stream
        except (pa.ArrowInvalid, OSError) as error:
            raise self._broken_file_error(file, str(error).splitlines()[0]) from None

    def _broken_file_error(self, file: Path, found: str) -> UserError:
        what = "a file of the data set is not a complete Arrow stream."
        return UserError(
            what, file=file, found=found, expected="a stream, from its schema to its end", next=self._again
        )


def write(documents: Documents, path: Path, rule: ExportFraming, count: ExportCounts) -> dict[Path, str]:
    """Write the folder: one column `input_ids`, one document per row. Returns file → SHA-256."""
    with replace_folder(path) as folder:
        shards = _write_shards(documents, folder, rule, count)
        documents.confirm()
        names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
        for shard, name in zip(shards, names, strict=True):
            shard.rename(folder / name)
        hashes = {name: sha256_file(folder / name) for name in names}
        write_json(folder / "dataset_info.json", {"citation": "", "description": "", "homepage": "", "license": ""})
        state = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": next(iter(hashes.values()))[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        write_json(folder / "state.json", state)
    return {path / name: sha256 for name, sha256 in hashes.items()}


def _write_shards(documents: Documents, folder: Path, rule: ExportFraming, count: ExportCounts) -> list[Path]:
    schema = pa.schema([pa.field("input_ids", pa.list_(pa.int32()))])
    paths: list[Path] = []
    stream, room = None, 0
    try:
        for chunk in export_chunks(documents, rule, count):
            if room <= 0:
                if stream is not None:
                    stream.close()
                paths.append(folder / f"{len(paths)}.arrow")
                stream, room = pa.ipc.new_stream(str(paths[-1]), schema), SHARD_TOKENS
            offsets = np.concatenate(([0], np.cumsum(chunk.lengths))).astype(np.int32)
            lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(chunk.ids.astype(np.int32)))
            stream.write_batch(pa.record_batch([lists], schema=schema))
            room -= len(chunk.ids)
    finally:
        if stream is not None:
            stream.close()
    return paths
