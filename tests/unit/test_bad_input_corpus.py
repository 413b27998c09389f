"""Files of text that are not what they should be: refused by name and row, and an earlier corpus
stays as it was.

Beside them those of test_sources.py. What is legal, and only large or odd, is read in bounded
memory.
"""

import gzip
import json
import os
import random
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.refusals import refused
from tests.web import Server
from tokenscale.base.errors import UserError
from tokenscale.cli import main as cli
from tokenscale.data.corpus import build as building
from tokenscale.data.corpus import download, read
from tokenscale.data.corpus.build import build
from tokenscale.data.corpus.download import fetch_corpus
from tokenscale.data.corpus.read import has_documents, read_texts
from tokenscale.settings.data import CorpusSettings, SourceSettings


def parquet(column, **more):
    return lambda path: pq.write_table(pa.table({"text": column, **more}), path)


def content(data: bytes):
    return lambda path: path.write_bytes(data)


def not_utf8(path) -> None:
    """Row 2 of a column of strings holds bytes that are none: Arrow writes them without a look."""
    offsets = np.array([0, 2, 4, 6], np.int32)
    strings = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(offsets), pa.py_buffer(b"okok\xff\xfe")]
    )
    pq.write_table(pa.table({"text": strings}), path)


def twice(path) -> None:
    pq.write_table(
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path
    )


def repeated(path) -> None:
    """A few kB that say 200 MB of text: a dictionary of one entry."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 400, pa.int32()), ["a" * 500_000])
    pq.write_table(pa.table({"text": texts.cast(pa.string())}), path, compression="zstd")


def damaged(path) -> None:
    parquet([f"document {i}" for i in range(5000)])(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(data)


def footer_lies(path) -> None:
    parquet(["a"])(path)
    path.write_bytes(path.read_bytes()[:-8] + (2**32 - 1).to_bytes(4, "little") + b"PAR1")


DICTIONARY = zstandard.train_dictionary(512, [b'{"text": "%d"}' % number for number in range(999)])
#: file name, what writes it, what the message must hold beside the file
BAD = [
    ("a.parquet", content(b""), "0 bytes"),
    ("a.parquet", content(b"PAR1" + bytes(100) + b"PAR1"), "not readable Parquet"),
    ("a.parquet", footer_lies, "not readable Parquet"),
    ("a.parquet", content(b"<!doctype html><title>404</title>"), "<!doctype"),
    ("a.parquet", lambda path: pq.write_table(pa.table({"body": ["a"]}), path), "body"),
    ("a.xlsx", content(b"a,b\n"), ".parquet"),
    ("a.parquet", damaged, "row "),
    ("a.parquet", lambda path: pq.write_table(pa.table({}), path), "(none)"),
    ("a.parquet", parquet(pa.nulls(3)), "string"),
    ("a.parquet", parquet([["nested"]]), "list<element: string>"),
    ("a.parquet", parquet([{"inner": "x"}]), "struct<inner: string>"),
    ("a.parquet", parquet([b"bytes"]), "binary"),
    ("a.parquet", parquet([1.5]), "double"),
    ("a.parquet", not_utf8, "row    2"),
    ("a.parquet", twice, "several columns 'text'"),
    ("a.parquet", repeated, "unpacks to more than"),
    ("a.jsonl", content(b'{"text": "ok"}\n{"text": "\xff"}\n'), "byte"),
    ("a.jsonl", content(b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"), "line 1"),
    ("a.jsonl", content(b'{"text": "a"}\n{"text": "b", "n": ' + b"9" * 5000 + b"}\n"), "line 2"),
    ("a.jsonl", content(bytes(50)), "byte  0"),
    ("a.jsonl", content(b'{"text": "a"}\r{"text": "b"}\r'), "line 1"),
    ("a.jsonl", content(b'{"text": "a"}\n{"text": "b", "text": "c"}\n'), "line 2"),
    ("a.jsonl", content(b'{"text": "a", "meta": [{"url": 1, "\\u0075rl": 2}]}\n'), "line 1"),
    ("a.jsonl", content(b'{\n "text": "a"\n}\n'), "jq -c . >"),
    ("a.json", content(b'[{"text": "a"},\n {"text": "b"'), "jq -c '.[]' >"),
    ("a.json", content(b'[{"text": "a"}, {"text": 1}]'), "element"),
    ("a.json", content(b'[{"text": "a"}, {"text": "b", "text": "c"}]'), "'text' twice"),
    ("a.json", content(b'[{"text": "a"}]\n[{"text": "b"}]\n'), "array"),
    ("a.tsv", content(b"text\ten\nEins\tzwei\tone\n"), "line 2"),
    ("a.tsv", content(b"text\ten\n\nEins\tone\t\n"), "line 3"),
    ("a.tsv", content(b'text\ten\n"Eins\nzwei"\tone\n'), "line 2"),
    ("a.tsv", content(b"text\nEins\tone\n"), "line 2"),
    ("a.tsv", content(b"text\ten\rEins\tone\r"), "\\r"),
    ("a.tsv", content(b"text\ten\nEins\tone\n\xef\xbb\xbftext\ten\nZwei\ttwo\n"), "line 3"),
    ("a.tsv", content(b"text\ttext\nEins\tone\n"), "several columns 'text'"),
    ("a.tsv", content(b"text\ten\nEins\tone\ntext\ten\nZwei\ttwo\n"), "line 3"),
    ("a.csv", content(b'text,en\n"Eins,one\nZwei,two\n'), "line 3"),
    ("a.csv", content(b'text,en\n"Eins"x,one\n'), "line 2"),
    ("a.csv", content(b"text,en\nEins\n"), "line 2"),
    ("a.csv", content(b"text;en\nEins;one\n"), "has no column 'text'"),
    ("a.csv", content(b"text,en\nEins,one\ntext,en\nZwei,two\n"), "line 3"),
    ("a.csv", content(b"text,en\rEins,one\r"), "tr '\\r' '\\n'"),
    ("a.csv", content("text\nÄpfel\n".encode() + "Öl\n".encode("latin-1")), "byte"),
    ("a.csv", content("text\nÄpfel\n".encode("utf-16")), "byte"),
    ("a.txt", content("of Windows".encode("utf-16-le")), "byte  1"),
    ("a.jsonl", content(b'"text"\n'), "line 1"),
    ("a.jsonl", content(b'{"text": "a"}\n{"text": "b"\n'), "line 2"),
    ("a.jsonl", content(b'{"text": "a"}\n{"txet": "b"}\n'), "txet"),
    ("a.jsonl", content(b'{"text": 5}\n'), "int"),
    ("a.txt", content("é".encode("utf-16")), "byte"),
    ("a.txt", content(b"gut\n" * 9 + "schön".encode("latin-1")), "39"),
    (
        "a.txt.gz",
        content(gzip.compress(random.Random(0).randbytes(90_000).hex().encode())[:-5000]),
        "(unpacked)",
    ),
    ("a.txt.gz", content(b"no gzip"), "gzip"),
    ("a.txt.zst", content(b"no zstd"), "zstd"),
    ("a.txt.gz", content(b""), "0 bytes"),
    ("a.jsonl.zst", content(b""), "0 bytes"),
    (
        "a.jsonl.zst",
        content(zstandard.compress(b'{"text": "a"}\n') + zstandard.compress(b"{}")[:-2]),
        "not complete",
    ),
    (
        "a.jsonl.zst",
        content(zstandard.ZstdCompressor(dict_data=DICTIONARY).compress(b'{"text": "a"}\n')),
        "-D DICTION",
    ),
    ("a.jsonl.zst", content(gzip.compress(b'{"text": "a"}\n')), "rename"),
    ("a.jsonl.gz", content(b'{"text": "a"}\n'), "rename"),
    ("a.jsonl", content(gzip.compress(b'{"text": "a"}\n')), "rename"),
    ("a.tsv", content(zstandard.compress(b"text\nEins\n")), "rename"),
    ("a.txt.zst", content(zstandard.compress(b"a " * (40 << 20))), "unpacks to more than"),
    ("a.jsonl", lambda path: (path.unlink(missing_ok=True), os.mkfifo(path)), "not a regular file"),
    (
        "a.parquet",
        lambda path: (path.unlink(missing_ok=True), path.symlink_to("/dev/zero")),
        "not a regular file",
    ),
]


def command(path, output, **source):
    settings = {"name": "mine", "source": {"kind": "files", "files": [str(path)], **source}}
    return ["corpus", "--settings", json.dumps(settings), "--output", output / "manifest.json"]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("earlier")
    (folder / "good.txt").write_text("one\ntwo\nthree\n")
    assert (
        cli.main([*map(str, command(folder / "good.txt", folder / "corpus", separator="\n"))]) == 0
    )
    return folder / "corpus"


@pytest.mark.parametrize(("name", "write", "says"), BAD, ids=range(len(BAD)))
def test_a_bad_file_is_refused_by_name_and_place_and_the_earlier_corpus_stays(
    earlier, tmp_path, capsys, name, write, says
):
    write(tmp_path / name)
    told = refused(capsys, command(tmp_path / name, earlier, separator="\n"), untouched=earlier)
    assert str(tmp_path / name) in told and says in told


def zstd(text: bytes, window_log: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=window_log)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return frame.compress(text) + frame.flush()


A = b'{"text": "a"}\n'
B = b'{"text": "b", "score": NaN}\n'
BOM = b"\xef\xbb\xbf"
#: file name, bytes, texts
LEGAL = [
    *((f"a{log}.jsonl.zst", zstd(A + B, log), ["a", "b"]) for log in (27, 28, 31)),
    ("a.jsonl.zst", zstd(A, 28) + b"\x50\x2a\x4d\x18\x02\0\0\0xx" + zstd(B, 31), ["a", "b"]),
    ("a.json", b'[{"text": "a"}, {"text": "b"}]', ["a", "b"]),
    (
        "a.json",
        BOM + b'\r\n [\r\n{\r\n"text": "a"\r\n},\n{"text": null, "more": [[1]]}]\n',
        ["a", None],
    ),
    ("a.json.gz", gzip.compress(b'[\n{"text": "a"}\n]'), ["a"]),
    ("a.json", b"[]", []),
    ("a.jsonl", BOM + A + BOM + B, ["a", "b"]),
    ("a.tsv", BOM + b"text\ten\t\n\nEins\tone\t\r\nZwei\t\t", ["Eins", "Zwei"]),
    (
        "a.csv",
        BOM + b'id,text\r\n\r\n1,"two\r\nlines, ""quoted"""\r\n2,5" wide\r\n3,12\r\n4,',
        ['two\nlines, "quoted"', '5" wide', "12", ""],
    ),
    ("a.csv.gz", gzip.compress(b"text\n\na\n"), ["a"]),
    ("a.py", b"x = 1\n", ["x = 1\n"]),
]


def test_bytes_of_a_file_name_that_are_not_utf8_are_recorded_as_hex_and_a_separator_may_be_nul(
    tmp_path,
):
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_bytes(A)
    source = SourceSettings("files", files=(str(tmp_path / "*.jsonl"),))
    build(CorpusSettings("c", source, validation_share=0), tmp_path)
    origins = [pq.read_table(shard)["origin"].to_pylist() for shard in tmp_path.rglob("*.parquet")]
    assert origins == [[r"\xff.jsonl::0"]]
    (tmp_path / "a.txt").write_bytes(b"one\0two\0")
    assert list(read_texts(tmp_path / "a.txt", SourceSettings(kind="files", separator="\0"))) == [
        "one",
        "two",
    ]


@pytest.mark.parametrize(("name", "data", "texts"), LEGAL, ids=range(len(LEGAL)))
def test_a_legal_file_is_read(tmp_path, name, data, texts):
    (tmp_path / name).write_bytes(data)
    assert list(read_texts(tmp_path / name, SourceSettings(kind="files"))) == texts
    assert has_documents(tmp_path / name, SourceSettings(kind="files")) == bool(texts)


def test_a_long_array_is_refused_with_the_command_that_converts_it(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "ARRAY_CHARACTERS", 100)
    path = tmp_path / "my texts.json"
    path.write_text(json.dumps([{"text": "a" * 50}] * 3))
    # of a plan, which reads no more than it must
    assert has_documents(path, SourceSettings(kind="files"))
    with pytest.raises(UserError, match="array") as error:
        list(read_texts(path, SourceSettings(kind="files")))
    assert (
        f"cat '{path}' | jq -c '.[]' > '{tmp_path / 'my texts-new.json'}'"
        in error.value.facts["next"]
    )


NOTHING = [
    ("a.parquet", parquet(pa.array([], pa.string())), "read 0"),
    ("a.parquet", parquet(pa.array([None] * 9, pa.string())), "no_text 9"),
    ("a.parquet", parquet([""] * 1_000_000), "too_short 1000000"),
    ("a.jsonl", content(b'{"text": null}\n' * 3), "no_text 3"),
    ("a.jsonl", content(b'{"text": "\\ud800"}\n' * 3), "not_unicode 3"),
]


@pytest.mark.parametrize(("name", "write", "says"), NOTHING, ids=[says for *_, says in NOTHING])
def test_a_file_without_one_document_says_what_became_of_its_rows(
    tmp_path, capsys, name, write, says
):
    write(tmp_path / name)
    assert says in refused(capsys, command(tmp_path / name, tmp_path / "c"))


@pytest.mark.parametrize("name", ["a.txt", "a.parquet"])
def test_long_documents_are_held_a_few_at_a_time(tmp_path, monkeypatch, name):
    monkeypatch.setattr(building, "GROUP_BYTES", 500_000)
    monkeypatch.setattr(read, "BATCH_BYTES", 500_000)
    monkeypatch.setattr(read, "CHUNK_BYTES", 100_000)
    texts = [f"{i} " + "x y " * 50_000 for i in range(80)]
    if name == "a.txt":
        (tmp_path / name).write_text("|".join(texts))
    else:
        parquet(texts)(tmp_path / name)
    source = SourceSettings(
        kind="files", files=(str(tmp_path / name),), separator="|" if name == "a.txt" else None
    )
    del texts
    tracemalloc.start()
    try:
        manifest = build(CorpusSettings(source=source, validation_share=0), tmp_path / "c")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert manifest["splits"]["train"]["rows"] == 80 and peak < 5e6, peak  # of 16 MB


def test_a_document_beyond_the_limit_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "LONGEST_CHARACTERS", 1000)
    monkeypatch.setattr(read, "CHUNK_BYTES", 100)
    parquet(["a", "x" * 1200])(tmp_path / "a.parquet")
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n{"text": "' + "x" * 1200 + '"}\n')
    for path in tmp_path.iterdir():
        with pytest.raises(UserError, match="too long") as error:
            list(read_texts(path, SourceSettings(kind="files")))
        assert (
            error.value.facts["file"] == str(path)
            and "1,000 characters" in error.value.facts["expected"]
        )


#: last part of an address → name of its file
NAMES = {
    "..%2F..%2Foutside.txt": "outside.txt",
    "..%5C..%5Coutside.txt": "outside.txt",
    "..": "file",
    "%2e%2e": "file",
    "%00a%0Ab.txt": "ab.txt",
    ".lock": "lock",
    "manifest.json": "files-manifest.json",
    "hashes.json": "files-hashes.json",
    "x" * 300 + ".txt": "x" * 196 + ".txt",
}


@pytest.mark.parametrize(("last", "local"), NAMES.items())
def test_an_address_names_a_file_inside_of_its_folder(tmp_path, last, local):
    with Server() as web:
        # clients leave dots out of a path
        web.files |= dict.fromkeys([f"/{last}", "/", "/.."], b"text")
        settings = CorpusSettings(
            name="web", source=SourceSettings(kind="url", files=(f"{web.address}/{last}",))
        )
        manifest = fetch_corpus(settings, tmp_path / "d")
    assert [file["name"] for file in manifest["files"]] == [local]
    assert {p.name for p in (tmp_path / "d").iterdir()} == {
        local,
        ".lock",
        "hashes.json",
        "manifest.json",
    }
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside", "a\0b"])
def test_a_list_of_the_hub_that_leaves_the_folder_is_refused(tmp_path, monkeypatch, name):
    listing = (lambda *_, **__: {name: name}, lambda *_, **__: pytest.fail("nothing is fetched"))
    monkeypatch.setitem(download.DOWNLOADS, "hub", listing)
    source = SourceSettings(kind="hub", repository="a/b", revision="0" * 40, files=("*",))
    with pytest.raises(UserError, match="outside"):
        fetch_corpus(CorpusSettings(name="web", source=source), tmp_path / "d")


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "javascript:alert(1)"]
)
def test_a_server_that_leads_to_another_scheme_is_refused_at_once(tmp_path, monkeypatch, target):
    monkeypatch.setattr(download, "sleep", lambda seconds: pytest.fail("no later try mends this"))
    with Server() as web:
        web.redirects["/a.txt"] = target
        settings = CorpusSettings(
            name="web", source=SourceSettings(kind="url", files=(f"{web.address}/a.txt",))
        )
        with pytest.raises(UserError) as error:
            fetch_corpus(settings, tmp_path / "d")
    assert (
        f"{web.address}/a.txt" in str(error.value) and not (tmp_path / "d/manifest.json").exists()
    )


def test_no_damaged_byte_of_a_footer_gives_fewer_documents(tmp_path):
    texts = [f"text {number} " * (number % 5 + 1) for number in range(300)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path, row_group_size=100)
    data = path.read_bytes()
    source = SourceSettings(kind="files", files=(str(path),))
    footer = int.from_bytes(data[-8:-4], "little") + 8
    refused = 0
    for place in range(len(data) - footer, len(data)):
        for value in {0, data[place] ^ 64} - {data[place]}:
            path.write_bytes(data[:place] + bytes([value]) + data[place + 1 :])
            try:
                assert has_documents(path, source) and list(read_texts(path, source)) == texts, (
                    place,
                    value,
                )
            except UserError:
                refused += 1
    assert refused > footer // 2
