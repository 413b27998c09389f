"""Hugging Face data sets as `Dataset.save_to_disk` writes them, read and written with the package
`datasets`.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tokenscale.base.errors import UserError, first_line, unknown
from tokenscale.base.files import read_json, report_malformed, sha256_file
from tokenscale.data.corpus.refusals import damaged
from tokenscale.data.corpus.stream import import_datasets
from tokenscale.data.stores.documents import Documents
from tokenscale.data.stores.foreign.reframe import (
    ExportCounts,
    ExportFraming,
    ForeignFolder,
    export_chunks,
)
from tokenscale.data.stores.foreign.shards import replace_folder

COLUMNS = ("input_ids", "tokens")
MARKS = ("state.json", "dataset_info.json", "dataset_dict.json")
#: mean tokens per written file, 500 MB as `save_to_disk` has
SHARD_TOKENS = 500_000_000 // 4
#: end of an Arrow IPC stream
END = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class HfDatasets(ForeignFolder):
    """Reader of a data set. Raises UserError for another kind of folder, a broken file, and a
    column without ids.
    """

    NAME = "a Hugging Face data set"

    @staticmethod
    def detect(path: Path) -> bool:
        return path.is_dir() and any((path / name).is_file() for name in MARKS)

    def __init__(self, path: Path, *, column: str | None = None, **_: object):
        if (path / "dataset_dict.json").is_file():
            splits = read_json(path / "dataset_dict.json", what="list of splits").get("splits", [])
            what = "the data set holds several splits."
            found = ", ".join(splits)
            raise UserError(what, folder=path, found=found, next="name the folder of one")
        datasets = import_datasets(path)
        again = "save it again with Dataset.save_to_disk"
        read_json(path / "dataset_info.json", what="description of the data set", next=again)
        state = read_json(path / "state.json", what="state of the data set", next=again)
        with report_malformed(path / "state.json", what="state of the data set", next=again):
            self.files = [path / Path(file["filename"]).name for file in state["_data_files"]]
        for file in self.files:
            # the library takes a stream that was cut between two batches for a whole one
            size = file.stat().st_size if file.is_file() else 0
            end = (
                np.fromfile(file, np.uint8, offset=max(0, size - len(END))).tobytes()
                if size
                else b""
            )
            if end != END:
                raise damaged(
                    file,
                    what="arrow",
                    found=f"0x{end.hex()} at the end of {size:,} bytes",
                    expected=f"0x{END.hex()}",
                )
        try:
            self._data = datasets.load_from_disk(str(path)).with_format("arrow")
        except Exception as error:  # errors of the library have no common base but Exception
            raise damaged(
                path, what="arrow", found=f"{type(error).__name__}: {first_line(error)}"
            ) from None
        if not len(self._data):
            raise UserError("the data set holds no rows.", folder=path, next="choose another")
        names = self._data.column_names
        if column is not None and column not in names:
            raise unknown(
                "column",
                word=column,
                words=names,
                flag="--column",
                folder=path,
            )
        self.column = column or next((name for name in COLUMNS if name in names), None)
        if self.column is None:
            raise damaged(
                path,
                what="ids",
                found=", ".join(names),
                expected=" or ".join(COLUMNS),
            )
        kind = self._data.features.arrow_schema.field(self.column).type
        lists = (
            pa.types.is_list(kind)
            or pa.types.is_large_list(kind)
            or pa.types.is_fixed_size_list(kind)
        )
        if not lists or not pa.types.is_integer(kind.value_type):
            raise damaged(
                path,
                what="no ids",
                found=kind,
                expected="lists of integers",
                name=self.column,
            )
        self.dtype = str(kind.value_type)
        self._folder = path

    def __len__(self) -> int:
        return len(self._data)

    def find_file(self, document: int) -> Path:
        return self._folder

    def chunks(self, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (ids, lengths) of 1,000 rows at a time, without tokens that the attention mask
        excludes.
        """
        for table in self._data.select(range(first, last)).iter(1000):
            try:
                table.validate(full=True)  # offsets of lists may lead out of the file
            except pa.ArrowException as error:
                raise damaged(self._folder, what="arrow", found=first_line(error)) from None
            ids, lengths = self._decode(table.column(self.column))
            if "attention_mask" in table.column_names:
                mask, mask_lengths = self._decode(table.column("attention_mask"))
                if not np.array_equal(lengths, mask_lengths):
                    raise damaged(self._folder, what="mask")
                kept = np.concatenate(([0], np.cumsum(mask != 0)))
                ends = np.cumsum(lengths)
                self.padding_dropped += len(ids) - int(kept[-1])
                ids = ids[mask != 0]
                lengths = kept[ends] - kept[ends - lengths]
            yield ids, lengths

    def _decode(self, column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
        lists = column.combine_chunks()
        values = lists.flatten()
        if lists.null_count or values.null_count:
            raise damaged(self._folder, what="null", name=self.column)
        return values.to_numpy(), pc.list_value_length(lists).to_numpy().astype(np.int64)

    @staticmethod
    def write(
        documents: Documents, path: Path, rule: ExportFraming, count: ExportCounts
    ) -> dict[Path, str]:
        """Write the folder: one column `input_ids`, one document per row. Returns file →
        SHA-256.
        """
        datasets = import_datasets(path)
        schema = pa.schema([pa.field("input_ids", pa.list_(pa.int32()))])
        with replace_folder(path) as folder:
            whole = folder / "stream/whole.arrow"
            whole.parent.mkdir()
            with pa.ipc.new_stream(str(whole), schema) as stream:
                for chunk in export_chunks(documents, rule, count=count):
                    offsets = np.concatenate(([0], np.cumsum(chunk.lengths))).astype(np.int32)
                    lists = pa.ListArray.from_arrays(
                        pa.array(offsets), pa.array(chunk.ids.astype(np.int32))
                    )
                    stream.write_batch(pa.record_batch([lists], schema=schema))
            documents.confirm()
            shards = min(len(documents), 1 + count.tokens // SHARD_TOKENS)
            table = datasets.table.MemoryMappedTable.from_file(str(whole))
            datasets.Dataset(table, fingerprint=sha256_file(whole)[:16]).save_to_disk(
                str(folder), num_shards=shards
            )
            shutil.rmtree(whole.parent)
            names = sorted(file.name for file in folder.glob("data-*.arrow"))
        return {path / name: sha256_file(path / name) for name in names}
