"""`convert`: our stores from and to the formats of others. What its tests share."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.peers import Peers
from tests.unit.conftest import T
from tokenscale.base.errors import UserError
from tokenscale.cli.convert import ConvertSettings, convert
from tokenscale.data.stores.foreign import id_files, reframe
from tokenscale.data.stores.manifest import open_store, read_store_manifest
from tokenscale.data.stores.parquet import TokenListStore
from tokenscale.settings.data import StoreSettings

FOREIGN = ["megatron", "nanogpt", "hf-datasets", "litdata", "mds"]
KNOWN = {"vocabulary_size": 100, "bos_id": 0, "eos_id": 1}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(reframe, "BLOCK_TOKENS", 50)
    monkeypatch.setattr(id_files, "BLOCK_TOKENS", 50)


def ours(lab, form="packed", eos=False):
    return lab.store(
        StoreSettings(form, **({"sequence_length": T} if form != "token-list" else {}), eos=eos)
    )


def run(source, target, **settings):
    said = []
    convert(ConvertSettings(**settings), Path(source), Path(target), said.append)
    return "\n".join(said)


def refused(source, target, **settings):
    """The message; nothing may lie at the target that did not before."""
    before = sorted(Path(target).parent.rglob("*"))
    with pytest.raises(UserError) as error:
        run(source, target, **settings)
    assert sorted(Path(target).parent.rglob("*")) == before
    return str(error.value)


def digest(store):
    return read_store_manifest(store)["ids_digest"]["value"]


def documents_of(store):
    manifest = open_store(store, StoreSettings("token-list"))
    return [
        d.tolist()
        for c in TokenListStore(store, manifest).chunks(0, manifest["documents"])
        for d in c.documents()
    ]


def write_megatron(prefix, documents, code=8, dtype="<u2", bounds=None):
    """By hand, from the layout that Megatron-LM documents."""
    lengths = [len(d) for d in documents]
    starts = np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize
    bounds = list(range(len(documents) + 1)) if bounds is None else bounds
    index = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + bytes([code])
    index += np.array([len(documents), len(bounds)], "<u8").tobytes()
    index += (
        np.array(lengths, "<i4").tobytes()
        + starts.astype("<i8").tobytes()
        + np.array(bounds, "<i8").tobytes()
    )
    prefix.with_name(prefix.name + ".idx").write_bytes(index)
    prefix.with_name(prefix.name + ".bin").write_bytes(
        np.concatenate([np.array(d, dtype) for d in documents]).tobytes()
    )
    return prefix


def write_hf(folder, **columns):
    """As `Dataset.save_to_disk` does it, in two files."""
    pytest.importorskip("datasets")
    folder.mkdir()
    table = pa.table(columns)
    half = table.num_rows // 2
    parts = [table.slice(0, half), table.slice(half)]
    names = [f"data-0000{n}-of-00002.arrow" for n in range(2)]
    for name, part in zip(names, parts, strict=True):
        with pa.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(part, max_chunksize=2)
    state = dict.fromkeys(["_fingerprint", "_format_columns", "_format_type", "_split"])
    state |= {
        "_data_files": [{"filename": n} for n in names],
        "_format_kwargs": {},
        "_output_all_columns": False,
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.fixture
def peers(tmp_path):
    """Python with litdata and streaming. Skips the test where pip cannot install them."""
    pytest.importorskip("torch")
    return Peers(tmp_path / "peers")
