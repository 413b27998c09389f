"""Attacks on what data may name: paths below a folder, a bucket's plan, an archive, a drawing.

Each is refused, or does what the name says within the folder; nothing outside of it changes. `python
-m tests.faults.test_attacks` prints the table.
"""

import gzip
import hashlib
import itertools
import json
import lzma
import os
import shutil
import sys
import tempfile
import unicodedata
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import gigatoken
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from xxhash import xxh3_64_intdigest

from tests.corpora import Lab
from tests.faults.test_drawings import MARK, POLICY, shown
from tokenscale.arms import studies
from tokenscale.base.bucket import Bucket
from tokenscale.base.errors import UserError
from tokenscale.base.files import create_inside, open_inside, sha256_file, sha256_text, write_sealed
from tokenscale.cli import cloud
from tokenscale.cli.main import translate_error
from tokenscale.data.batches.trace import find_origins
from tokenscale.data.corpus import download, files
from tokenscale.data.corpus.parts import build_part, merge_parts
from tokenscale.data.corpus.raw_text import RawText, write_text_records
from tokenscale.data.parts import part_folder
from tokenscale.data.stores.lengths import LengthsStore
from tokenscale.data.stores.manifest import open_records, read_store_manifest
from tokenscale.data.stores.packed import PackedStore
from tokenscale.data.stores.writing import merge_store, write_store
from tokenscale.data.tokenizers import backends
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.report import packed_logs, page, save, style
from tokenscale.settings.data import CorpusSettings, SourceSettings, StoreSettings
from tokenscale.train import checkpoint_models

PARTS = ("results", "tokens", "a", "é.json")
#: endings of Parquet files
TABLES = (".parquet", ".documents")
#: what is planted in the place of a part → how
PLANTS: dict[str, Callable[[Path, Path], None]] = {
    "link to a folder outside": lambda place, outside: place.symlink_to(outside),
    "relative link outside": lambda place, outside: place.symlink_to(
        os.path.relpath(outside, place.parent)
    ),
    "link to a file outside": lambda place, outside: place.symlink_to(outside / "kept"),
    "link to nothing outside": lambda place, outside: place.symlink_to(outside / "new"),
    "link to itself": lambda place, outside: place.symlink_to(place.name),
    "hard link to a file outside": lambda place, outside: os.link(outside / "kept", place),
    "link under the other normal form": lambda place, outside: place.with_name(
        unicodedata.normalize("NFD", place.name)
    ).symlink_to(outside),
    "link under the other case": lambda place, outside: place.with_name(
        place.name.upper()
    ).symlink_to(outside),
    "pipe": lambda place, outside: os.mkfifo(place),
    "device": lambda place, outside: place.symlink_to("/dev/null"),
    "folder": lambda place, outside: place.mkdir(),
}
#: what a name holds in the place of a part, or of the whole
NAMES = {
    "parent": "..",
    "parent twice": "../..",
    "here": ".",
    "nothing": "",
    "root": "/",
    "home": "~",
    "zero": "a\0b",
    "long": "n" * 300,
    "deep": "/".join("d" * 200 for _ in range(30)),
    "lone surrogate": "\ud800",
    "line": "a\nb",
    "escape": "\x1b[2J",
    "backslash": "..\\..\\x",
    "dot like": "\u2024\u2024",
    "variable": "$HOME",
    "right to left": "\u202egpj",
}


def list_path_attacks() -> Iterator[tuple[str, str, Callable[[Path, Path], None] | None]]:
    """Yield (title, name below the folder, what to plant)."""
    for at, (title, plant) in itertools.product(range(1, len(PARTS)), PLANTS.items()):
        parts = PARTS[: at + 1]

        def planted(root: Path, outside: Path, parts=parts, plant=plant) -> None:
            place = root.joinpath(*parts)
            place.parent.mkdir(parents=True, exist_ok=True)
            plant(place, outside)

        yield f"{title} as part {at}", "/".join(PARTS), planted
    for at, (title, word) in itertools.product(range(len(PARTS) + 1), NAMES.items()):
        yield f"{title} as part {at}", "/".join([*PARTS[:at], word, *PARTS[at:]]), None
    yield "absolute", "/".join(["", *PARTS]), None


PATHS = list(list_path_attacks())


def contents(folder: Path) -> dict[str, object]:
    """All that lies in a folder, with links as they are."""
    return {
        str(path.relative_to(folder)): path.readlink()
        if path.is_symlink()
        else path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
    }


def outcome(attack: Callable[[], object]) -> str:
    """`done`, or `refused`: by a message of ours, or an error of the system that has one."""
    try:
        attack()
    except (UserError, ValueError):
        return "refused"
    except OSError as error:
        assert translate_error(error) is not None, error
        return "refused"
    return "done"


def write_below(root: Path, name: str) -> None:
    with create_inside(root, name) as file:
        file.write(b"written")


def fetch_into(root: Path, name: str) -> None:
    """A worker that finds this name in the plan of a bucket."""

    class Local(Bucket):
        def __init__(self) -> None:
            self.address = "s3://bucket"
            self._root = ""
            self._system = SimpleNamespace(
                get_file=lambda key, path: Path(path).write_text("written")
            )

    facts = {"bytes": 7, "sha256": sha256_text("written")}
    before = os.getcwd()
    os.chdir(root)
    try:
        cloud.fetch_input(Local(), name=name, facts=facts)
    finally:
        os.chdir(before)


def unpack_into(root: Path, name: str) -> None:
    """`report rebuild` of an archive with a file of this name, into the folder of the plants."""
    archive = root.with_name("logs.json.xz")
    head = {"schema": 1, "experiments": [], "judged": {}, "files": {name: "written"}}
    archive.write_bytes(lzma.compress(json.dumps(head).encode()))
    packed_logs.restore(archive, root)


def download_into(root: Path, name: str) -> None:
    """A bucket with an object of this name."""

    def fetch(source: SourceSettings, name: str, part: Path, resumable: bool) -> bool:
        part.write_text("written")
        return True

    source = SourceSettings(kind="hub", repository="a/b", revision="c", files=("*",))
    corpus = CorpusSettings(name="x", source=source)
    kinds = {"hub": (lambda source, files, recorded: dict.fromkeys(files and [name], name), fetch)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "DOWNLOADS", kinds)
        download.fetch_corpus(corpus, root)


#: `results` itself may be a link of the user's, to another disk
ROOT_PARTS = {"name": 0, "plan of a bucket": 1, "archive": 0, "download": 0}
DOORS = {
    "name": write_below,
    "plan of a bucket": fetch_into,
    "archive": unpack_into,
    "download": download_into,
}


def attack_path(door: str, number: int, folder: Path) -> str:
    """Try one attack; AssertionError where anything outside of the folder changed."""
    _, name, plant = PATHS[number]
    root = folder / "root"
    outside = folder / "outside"
    for made in (root, outside):
        made.mkdir(parents=True)
    (outside / "kept").write_text("kept")
    if plant is not None:
        plant(root, outside)
    before = contents(outside)
    around = {path.name for path in folder.iterdir()} | {"logs.json.xz"}
    found = outcome(lambda: DOORS[door](root, name))
    assert contents(outside) == before, name
    assert {path.name for path in folder.iterdir()} <= around, name
    written = [
        path
        for path in root.rglob("*")
        if path.is_file() and path.suffix != ".part" and path.read_bytes() == b"written"
    ]
    assert all(path.resolve().is_relative_to(root.resolve()) for path in written), name
    assert bool(written) is (found == "done"), name
    return found


class Swap:
    """Replace one folder or file before the n-th operation on files: by a link to the outside, or
    with `move`, by what lies there.

    Python reports each to audit hooks, which cannot be taken away: this one idles outside of the
    block.
    """

    current: "Swap | None" = None

    def __init__(self, place: Path, outside: Path, at: int, *, move: bool = False):
        self._move = move
        self._place = place
        self._outside = outside
        self._left = at
        self.done = False

    def __enter__(self) -> "Swap":
        if not hasattr(Swap, "hooked"):
            sys.addaudithook(lambda event, _: Swap.current and Swap.current.see(event))
            Swap.hooked = True
        Swap.current = self
        return self

    def __exit__(self, *_: object) -> None:
        Swap.current = None

    def see(self, event: str) -> None:
        if not event.startswith(("open", "os.", "shutil.", "tempfile.")):
            return
        self._left -= 1
        if self._left == 0:
            Swap.current = None
            self.done = True
            if os.path.lexists(self._place):
                self._place.rename(self._place.with_name(f"{self._place.name}-moved"))
            self._place.parent.mkdir(parents=True, exist_ok=True)
            if self._move:
                self._outside.rename(self._place)
            else:
                self._place.symlink_to(self._outside)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("made", [False, True], ids=["new folders", "old folders"])
def test_no_folder_that_becomes_a_link_meanwhile_leads_a_file_outside(door, made, tmp_path):
    """Each folder of the name is swapped before each operation on files."""
    swaps = 0
    name = "/".join(PARTS)
    for part in range(1 + ROOT_PARTS[door], len(PARTS)):
        for at in itertools.count(1):
            folder = tmp_path / f"{part}-{at}"
            root = folder / "root"
            outside = folder / "outside"
            for there in (root, outside / "/".join(PARTS[part:-1])):
                there.mkdir(parents=True)
            if made:
                root.joinpath(*PARTS[:-1]).mkdir(parents=True)
            before = contents(outside)
            with Swap(root.joinpath(*PARTS[:part]), outside, at) as swap:
                outcome(lambda root=root: DOORS[door](root, name))
            assert contents(outside) == before, (part, at)
            shutil.rmtree(folder)
            if not swap.done:
                break
            swaps += 1
    assert swaps >= 20


def reads_below(root: Path, name: str) -> bool:
    with open(open_inside(root, name), "rb") as file:
        return file.read() == b"written"


def is_not_fetched(root: Path, name: str) -> bool:
    fetch_into(root, name)
    return not any(path.read_bytes() == b"written" for path in list_files(root))


def replaces_folder(root: Path, name: str) -> bool:
    """A folder whose list says that the outside's file is ours, so that it is removed."""
    record = {"schema": 2, "files": {name: [sha256_text("written")]}}
    write_sealed(root / packed_logs.INDEX, record=record)
    made = root.with_name("made")
    (made / "other").parent.mkdir(exist_ok=True)
    (made / "other").write_text("new")
    packed_logs.put_in_place(made, root)
    return not any(path.read_bytes() == b"mine" for path in list_files(root))


def list_files(root: Path) -> list[Path]:
    """Files of a folder, not those behind links."""
    return [
        Path(folder, name)
        for folder, _, names in os.walk(root)
        for name in names
        if not Path(folder, name).is_symlink()
    ]


#: door → whether it took the file of the outside for the one of the name
READERS = {"name": reads_below, "plan of a bucket": is_not_fetched, "archive": replaces_folder}


@pytest.mark.parametrize("door", READERS)
def test_no_part_that_becomes_a_link_meanwhile_leads_a_reader_outside(door, tmp_path):
    """Each part of the name, the file's own too, is swapped before each operation on files."""
    swaps = 0
    name = "/".join(PARTS)
    for part in range(1 + ROOT_PARTS[door], len(PARTS) + 1):
        for at in itertools.count(1):
            folder = tmp_path / f"{part}-{at}"
            root = folder / "root"
            outside = folder / "outside"
            for there, content in ((root / name, b"mine"), (outside / name, b"written")):
                there.parent.mkdir(parents=True)
                there.write_bytes(content)
            with Swap(root.joinpath(*PARTS[:part]), outside.joinpath(*PARTS[:part]), at) as swap:
                read = []
                outcome(lambda root=root, read=read: read.append(READERS[door](root, name)))
            assert read != [True], (part, at)
            shutil.rmtree(folder)
            if not swap.done:
                break
            swaps += 1
    assert swaps >= len(PARTS)


def read_corpus(folder: Path) -> object:
    return [text for batch in RawText(folder).batches() for text in batch]


def read_documents(folder: Path) -> object:
    return [RawText(folder).text(number) for number in (0, 5)]


def read_origins(folder: Path) -> object:
    return find_origins(RawText(folder), [0, 1])


def read_packed(folder: Path) -> object:
    store = PackedStore(folder, read_store_manifest(folder))
    rows = np.arange(len(store))
    return store.stored(rows).tolist(), [store.list_pieces(row) for row in rows]


def read_chunks(folder: Path) -> object:
    store = PackedStore(folder, read_store_manifest(folder))
    return [chunk.ids.tolist() for chunk in store.chunks(0, 9)]


def read_lengths(folder: Path) -> object:
    return LengthsStore(folder, read_store_manifest(folder)).lengths_of(slice(None)).tolist()


def read_records(folder: Path) -> object:
    records = open_records(folder, read_store_manifest(folder))
    return records.lengths().tolist(), records.read(3).tolist()


def read_tokenizer(folder: Path) -> object:
    tokenizer = load_tokenizer(folder)
    ids, _ = tokenizer.encode(["a cab"])
    return ids.tolist(), tokenizer.decode(ids), tokenizer.unknown_id


def read_downloads(folder: Path) -> object:
    files.describe_downloads(DOWNLOADED, folder)
    return list(files.documents(DOWNLOADED, folder))


DOWNLOADED = SourceSettings(kind="url", files=("https://example.org/a",))
TEXTS = {
    "sub/a.jsonl": b'{"text": "mine"}\n',
    "b.txt.gz": gzip.compress(b"mine", 0, mtime=0),
    "c.txt": b"mine",
}


def write_downloads(lab: Lab, folder: Path) -> Path:
    entries = []
    for name, content in TEXTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        entries.append({"name": name, "bytes": len(content), "sha256": sha256})
    write_sealed(folder / "manifest.json", {"kind": "url", "files": entries})
    return folder


def read_study(folder: Path) -> object:
    return studies._read_table(folder).to_pylist()


def show_figure(folder: Path) -> object:
    return page.figure("square", folder, prefix="a")["svg"]


def write_figure(lab: Lab, folder: Path) -> Path:
    folder.mkdir()
    drawing = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 10 10"></svg>'
    files = {}
    for kind in save.KINDS[:-1]:
        path = folder / f"square.{kind}"
        path.write_text(drawing)
        if kind == "parquet":
            pq.write_table(pa.table({"x": [1, 2]}), path)
        files[kind] = sha256_file(path)
    write_sealed(folder / "square.json", record={"phone": drawing, "files": files})
    return folder


def with_records(lab: Lab, folder: Path) -> Path:
    shutil.copytree(lab.corpus, folder)
    write_text_records(folder)
    return folder


def parts_of(folder: Path) -> CorpusSettings:
    source = SourceSettings(kind="files", files=(str(folder.parent / "source*.jsonl"),))
    return CorpusSettings(name="parts", source=source, validation_share=0.3, parts=2)


def write_corpus_parts(lab: Lab, folder: Path) -> Path:
    for number in range(2):
        text = "\n".join(json.dumps({"text": f"{n} of {number}"}) for n in range(20))
        (folder.parent / f"source{number}.jsonl").write_text(text)
    for number in range(2):
        build_part(parts_of(folder), number, part_folder(folder, number))
    return folder


def write_store_parts(lab: Lab, folder: Path) -> Path:
    for number in range(2):
        write_store(
            LENGTHS, lab.corpus, lab.tokenizer, part_folder(folder, number), part=(number, 2)
        )
    (folder.parent / "corpus").symlink_to(lab.corpus)
    return folder


def merge_corpus(folder: Path) -> object:
    return merge_parts(parts_of(folder), folder)


def merge_lengths(folder: Path) -> object:
    return merge_store(LENGTHS, folder.parent / "corpus", folder, 2)


LENGTHS = StoreSettings.parse("lengths")
Maker = Callable[[Lab, Path], Path]


def store_of(name: str) -> Maker:
    return lambda lab, folder: lab.store(StoreSettings.parse(name))


#: reader → who makes what it reads, and its result
CHECKED: dict[str, tuple[Maker, Callable[[Path], object]]] = {
    "corpus": (lambda lab, folder: lab.corpus, read_corpus),
    "records of a corpus": (with_records, read_documents),
    "origins": (lambda lab, folder: lab.corpus, read_origins),
    "packed": (store_of("packed-sequence_length=32"), read_packed),
    "documents of packed": (store_of("packed-sequence_length=32"), read_chunks),
    "lengths": (store_of("lengths"), read_lengths),
    "records of a store": (store_of("token-list"), read_records),
    "tokenizer": (lambda lab, folder: lab.tokenizer, read_tokenizer),
    "downloads": (write_downloads, read_downloads),
    "studies": (store_of("padded-sequence_length=32"), read_study),
    "figure": (write_figure, show_figure),
    "parts of a corpus": (write_corpus_parts, merge_corpus),
    "parts of a store": (write_store_parts, merge_lengths),
}
#: reader of many operations → every n-th is tried
EACH = {"parts of a corpus": 12}
#: no hash proves their files, only the checksums inside: another file of the same form is as good
UNPROVEN = ("records of a corpus", "records of a store", "studies")
#: files that readers read
READ = (*TABLES, *TEXTS, ".npy", ".bin", ".svg", "tokenizer.json")
#: how libraries open files, which Python does not see
OPENERS = ((pq, "ParquetFile"), (pq, "read_table"))


def write_twin(file: Path, twin: Path) -> None:
    """Write a file of the same size and form with other values."""
    content = bytearray(file.read_bytes())
    if file.suffix == ".bin" and file.name != "tokens.bin":
        write_twin_of_records(content, twin)
        return
    if file.suffix == ".svg":
        twin.write_bytes(content.replace(b"10 10", b"20 20"))
        return
    if file.suffix == ".gz":
        twin.write_bytes(gzip.compress(b"your", 0, mtime=0))
        return
    if file.suffix in (".jsonl", ".txt"):
        twin.write_bytes(content.replace(b"mine", b"your"))
        return
    if file.suffix == ".json":  # two letters exchange their ids
        twin.write_bytes(content.replace(b'"a":', b'"?":').replace(b'"b":', b'"a":'))
        return
    if file.suffix not in TABLES:
        for at in range(len(content) - 8, 128, -16 if file.name == "tokens.bin" else -len(content)):
            content[at] ^= 1
        twin.write_bytes(content)
        return
    right = pq.read_table(file)
    for at in range(4, len(content)):
        content[at] ^= 1
        twin.write_bytes(content)
        with suppress(Exception):  # most changes are no Parquet any more
            if pq.read_table(twin) != right:
                return
        content[at] ^= 1
    raise AssertionError(f"each change of {file} is noticed")


def write_twin_of_records(content: bytearray, twin: Path) -> None:
    """Write a file of records with other values, whose table fits them."""
    records = 1
    while int.from_bytes(content[-16 * records :][:8], "little"):  # the first row starts at 0
        records += 1
    table = np.frombuffer(content, "<u8", offset=len(content) - 16 * records).reshape(-1, 2)
    width = 2 if int(table[-1, 0]) * 2 <= len(content) - table.nbytes else 1
    values = np.frombuffer(content, f"<u{width}", count=int(table[-1, 0]))
    values ^= 1
    for row in range(records - 1):
        table[row, 1] = xxh3_64_intdigest(values[int(table[row, 0]) : int(table[row + 1, 0])], row)
    table[-1, 1] = 0
    table[-1, 1] = xxh3_64_intdigest(table)
    twin.write_bytes(content)


def seen(opening: Callable[..., object]) -> Callable[..., object]:
    """A function that tells of its call as Python does of its own."""

    def opened(*arguments: object, **options: object) -> object:
        if Swap.current is not None:
            Swap.current.see("open")
        return opening(*arguments, **options)

    return opened


@pytest.mark.parametrize(
    ("name", "move"),
    [
        # a door is the same for both: one of them is part of the gate
        pytest.param(
            name,
            move,
            id=f"{name}-{swapped}",
            marks=pytest.mark.long if place % 2 == move and name not in UNPROVEN else (),
        )
        for place, name in enumerate(CHECKED)
        for move, swapped in ((False, "a link"), (True, "another file"))
        if not (move and name in UNPROVEN)
    ],
)
def test_what_is_read_is_the_file_that_was_checked(name, move, lab, tmp_path, monkeypatch):
    """Each file is swapped before each operation on files, also before a library opens one."""
    for module, opener in OPENERS:
        monkeypatch.setattr(module, opener, seen(getattr(module, opener)))
    monkeypatch.setattr("tokenscale.data.stores.documents.GROUP_DOCUMENTS", 10)
    make, read = CHECKED[name]
    whole = make(lab, tmp_path / "whole")
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    expected = read(folder)
    swaps = 0
    for file in sorted(whole.rglob("*")):
        if not str(file).endswith(READ):
            continue
        write_twin(file, tmp_path / "twin")
        for at in itertools.count(1, EACH.get(name, 1)):
            shutil.rmtree(folder)
            shutil.copytree(whole, folder)
            outside = tmp_path / "outside"
            shutil.copyfile(tmp_path / "twin", outside)
            place = folder / file.relative_to(whole)
            found = [expected]
            with Swap(place, outside, at, move=move) as swap, suppress(UserError):
                found = [read(folder)]
            assert found == [expected], (file.name, at)
            if not swap.done:
                break
            swaps += 1
    assert swaps >= 2


def test_a_library_gets_the_file_that_was_opened(tmp_path, monkeypatch):
    """It opens files by paths, and would wait for a pipe in the place of one."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(64)}, path)
    load_file = checkpoint_models.load_file

    def swap(name: str) -> dict[str, torch.Tensor]:
        path.rename(tmp_path / "moved")
        save_file({"a": torch.zeros(64)}, path)
        return load_file(name)

    monkeypatch.setattr(checkpoint_models, "load_file", swap)
    found = checkpoint_models._read_files(tmp_path, hint="")
    assert found["a"].tolist() == list(range(64))


def test_a_library_gets_the_ranks_that_were_checked(tmp_path, monkeypatch):
    """It opens them by a path, too."""
    lines = [f"{b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
    path = tmp_path / "ranks.tiktoken"
    path.write_text("".join(lines))
    listed = {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
    manifest = {"kind": "tekken", "control_ids": 1000, "file": listed}
    read = gigatoken.Tokenizer.from_tiktoken

    def swap(name: str, pretokenizer: str) -> object:
        path.rename(tmp_path / "moved")
        path.write_text("".join(lines[::-1]))
        return read(name, pretokenizer=pretokenizer)

    monkeypatch.setattr(gigatoken.Tokenizer, "from_tiktoken", swap)
    opened = backends.open_engine("gigatoken", tmp_path, manifest)
    assert opened.encode(["a"])[0].tolist() == [1000 + ord("a")]


@pytest.mark.parametrize("door", DOORS)
def test_no_name_leads_out_of_its_folder(door, tmp_path):
    for number in range(len(PATHS)):
        attack_path(door, number, tmp_path / str(number))
        shutil.rmtree(tmp_path / str(number))


def test_only_inputs_of_runs_are_fetched(tmp_path):
    for name in (
        "Makefile",
        ".git/hooks/pre-commit",
        "results/runs/x/run.json",
        "results",
        "src/x",
    ):
        with pytest.raises(UserError, match="no input of runs"):
            fetch_into(tmp_path, name)
    assert contents(tmp_path) == {}


# --- drawings

ELEMENTS = (
    *("script", "foreignObject", "iframe", "object", "embed", "a", "animate", "set", "style"),
    *("meta", "base", "form", "input", "video", "audio", "filter", "mask", "symbol", "switch"),
    *("handler", "link", "math", "title", "desc", "animateTransform", "feImage", "view"),
)
ATTRIBUTES = {
    **dict.fromkeys(
        ("onload", "onclick", "onfocus", "ONERROR", "onbegin"), f"document.title='{MARK}'"
    ),
    "xml:base": "https://example.org/",
    "tabindex": "0",
    "class": "badge",
    "filter": "url(https://example.org/x)",
    "externalResourcesRequired": "true",
    "xlink:show": "new",
    "srcdoc": "<b>",
    "background": "https://example.org/x.png",
}
STYLES = (
    *("fill:url(https://example.org/x)", "fill: URL( 'https://example.org/x' )"),
    *("fill:u\\72l(https://example.org/x)", "background:image-set('https://example.org/x' 1x)"),
    *("@import 'https://example.org/x'", "behavior:url(x.htc)", "background:src('x')"),
)
LINKS = (
    "javascript:document.title",
    "https://example.org",
    "//example.org",
    "x.svg#a",
    "data:text/html,x",
)
LINKS += ("data:image/svg+xml;base64,PHN2Zy8+", " javascript:x", "JavaScript:x")
WHOLE = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 9 9">{}</svg>'


def list_drawings() -> Iterator[str]:
    """Yield drawings none of which a page may take."""
    for name in ELEMENTS:
        yield f"<{name}>document.title = '{MARK}'</{name}>"
        # HTML knows no namespaces: the name must be the whole name
        yield f"<x:{name} xmlns:x='http://www.w3.org/1999/xhtml'>x</x:{name}>"
    for key, value in ATTRIBUTES.items():
        yield f'<g {key}="{value.replace("<", "&lt;")}"><path d="M0 0"/></g>'
    for value in STYLES:
        yield f'<path d="M0 0" style="{value}"/>'
    for (name, key), value in itertools.product(
        [("use", "href"), ("use", "xlink:href"), ("image", "xlink:href")], LINKS
    ):
        yield f'<{name} {key}="{value}"/>'
    yield from (
        "</svg><meta http-equiv='refresh' content='0;url=x'/><svg>",
        "<!DOCTYPE x>",
        "<?x?>",
    )
    yield from ("<![CDATA[<script>]]>", "<!ENTITY a 'x'>", "&nbsp;", "<g", "<g></path>", "\0")


#: what a page takes, and no browser acts on
HARMLESS = (
    f"<text>&lt;script&gt;document.title = '{MARK}'&lt;/script&gt;</text>",
    f"<text>]]&gt;&lt;img src=x onerror=&quot;document.title='{MARK}'&quot;&gt;</text>",
    f"<g id=\"a'onload='document.title=1'\"><path d=\"'/&gt;&lt;script&gt;{MARK}\"/></g>",
    '<path d="M0 0" style="fill:url(#a)" clip-path="url(#b)"/>',
    '<image xlink:href="data:image/png;base64,AAAA" width="1" height="1"/>',
    f'<text style="font-family:&quot;&gt;&lt;script&gt;{MARK}&quot;">x</text>',
)


@pytest.mark.parametrize("kind", ["a", "b"])
def test_no_page_takes_a_drawing_with_what_a_browser_acts_on(kind):
    seen = Counter()
    for content in list_drawings():
        drawing = WHOLE.format(content if kind == "a" else f"<g><g>{content}</g></g>")
        stripped = "<title>" in content or "<style>" in content  # taken away before
        try:
            text = style.inline(drawing, "p", css_class="wide")
        except ValueError:
            seen["refused"] += 1
            continue
        assert stripped and MARK not in text, content
    assert seen["refused"] > 90


def test_a_browser_acts_on_nothing_of_the_drawings_that_a_page_takes(tmp_path):
    if shutil.which("chromium") is None:
        pytest.skip("no browser")
    taken = [
        style.inline(WHOLE.format(content), f"p{n}", "wide") for n, content in enumerate(HARMLESS)
    ]
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><html><title>whole</title>{''.join(taken)}</html>")
    assert POLICY.search(page.read_text()) is None, "nothing else protects it"
    assert shown(page, tmp_path / "browser") == "whole"


def print_table() -> None:
    for door in DOORS:
        counts: Counter[str] = Counter()
        for number in range(len(PATHS)):
            with tempfile.TemporaryDirectory() as folder:
                counts[attack_path(door, number, Path(folder) / "x")] += 1
        print(f"{door:<20} {len(PATHS):>5} tried  {dict(counts)}")
    print(f"{'drawing':<20} {len(list(list_drawings())):>5} tried")


if __name__ == "__main__":
    print_table()
