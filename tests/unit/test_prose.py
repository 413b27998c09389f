"""Real text from what is installed: markup goes, repeats go, and the same tree gives the same file."""

import gzip
import random
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from benchmarks import prose

from tokenscale.base.errors import UserError

LICENCE = "This is the text that every package of this machine repeats, word for word. " * 4


def sentence(*words: object) -> str:
    """English that is long enough, and that no other words give."""
    name = "".join(chr(97 + int(c)) for word in words for c in f"{hash_of(word):06d}")
    return f"The {name} is one of the parts of the machine that can be read, and it is not like {name[::-1]}. "


def hash_of(word: object) -> int:
    return sum((i + 1) * 7919 * ord(c) for i, c in enumerate(str(word))) % 1_000_000


def text(*words: object) -> str:
    return "\n\n".join("".join(sentence(*words, i, k) for k in range(4)) for i in range(6))


@pytest.fixture
def roots(tmp_path, monkeypatch) -> prose.Roots:
    root = tmp_path / "machine"

    def put(name: str, content: str) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode()
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)

    def page(name: str) -> str:
        body = text(name).replace("\n\n", "\n.PP\n")
        return f'.TH {name} 1\n.\\" made up\n.SH NAME\n{name} \\- a part\n.SH DESCRIPTION\n{body}\n.PP\n{LICENCE}\n'

    put("man/man1/one.1.gz", page("one"))
    put("man/man3/two.3", page("two"))
    put("man/de/man1/one.1.gz", page("German, which is left out"))
    put("doc/part/README.gz", f"{text('readme')}\n\n{LICENCE}")
    put("doc/part/guide.html", f"<html><body><p>{text('guide')}</p><p>{LICENCE}</p></body></html>")
    put("doc/part/german.txt", "Die Größe der Datei wird in Bytes angegeben, und das ist auch gut so. " * 9)
    put("doc/part/broken.txt.gz", "")
    (root / "doc/part/broken.txt.gz").write_bytes(b"no gzip at all")
    (root / "doc/part/latin.txt").write_bytes("Größe".encode("latin-1"))
    put("doc/part/program.c", text("no text"))
    put("elsewhere/linked.txt", text("linked"))
    (root / "doc/part/linked.txt").symlink_to(root / "elsewhere/linked.txt")
    put("doc/part/paragraph.txt", sentence("paragraph") * 3)
    put("site/madeup/__init__.py", f'"""{text("package")}"""\n')
    put("site/madeup/part.py", f'def f():\n    """{text("function")}"""\n\n\ndef g():\n    """Short."""\n')
    put("site/madeup-1.0.dist-info/README.md", text("markdown"))
    monkeypatch.syspath_prepend(root / "site")
    return prose.Roots(manual=(root / "man",), documentation=(root / "doc",), environment=(root / "site",), packages=())


def rows(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def test_every_source_is_read_and_nothing_else(roots, tmp_path):
    facts = prose.build(tmp_path / "out.parquet", 1, roots, at_most=True)
    origins = {row["origin"].split("::")[0] for row in rows(tmp_path / "out.parquet")}
    assert origins == {
        "manual/man1/one.1.gz",
        "manual/man3/two.3",
        "documentation/doc/part/README.gz",
        "documentation/doc/part/guide.html",
        "documentation/doc/part/paragraph.txt",
        "environment/site/madeup-1.0.dist-info/README.md",
        "docstrings/madeup/__init__.py",
        "docstrings/madeup/part.py",
    }
    assert facts["bytes"] == sum(len(row["text"].encode()) for row in rows(tmp_path / "out.parquet"))
    assert sum(source["bytes"] for source in facts["sources"].values()) == facts["bytes"]
    assert set(facts["sources"]) == {"manual", "documentation", "environment", "docstrings"}
    assert "manual" in prose.table(facts)


def test_no_markup_is_left(roots):
    for found, origin in prose.documents(roots):
        assert not re.search(r"(?m)^\.|\\|<", found), origin


def test_a_repeated_paragraph_stays_once(roots):
    found = [p for document, _ in prose.documents(roots) for p in document.split("\n\n") if len(p) >= 200]
    assert sum(LICENCE.strip() == p.strip() for p in found) == 1
    assert len(set(found)) == len(found)


def test_the_same_tree_and_seed_give_the_same_file(roots, tmp_path):
    paths = [tmp_path / name for name in ("a.parquet", "b.parquet", "c.parquet")]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        prose.build(path, 1, roots, seed=seed, at_most=True)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert [row["origin"] for row in rows(paths[0])] != [row["origin"] for row in rows(paths[2])]


def test_it_stops_at_what_was_asked_for(roots, tmp_path):
    facts = prose.build(tmp_path / "out.parquet", 0.008, roots)
    longest = max(len(row["text"].encode()) for row in rows(tmp_path / "out.parquet"))
    assert 8000 <= facts["bytes"] < 8000 + longest
    taken = []
    for seed in range(4):
        prose.build(tmp_path / "out.parquet", 0.002, roots, seed=seed)
        taken.append({row["origin"].split("::")[0] for row in rows(tmp_path / "out.parquet")})
    assert not all(files == taken[0] for files in taken)  # any amount is a mixture that the seed draws


def test_the_file_is_zstd_in_row_groups_of_1000(tmp_path, monkeypatch):
    made = ((f"{sentence(i)} {i}", f"manual/{i}") for i in range(2500))
    monkeypatch.setattr(prose, "documents", lambda roots, seed: made)
    prose.build(tmp_path / "out.parquet", 100, at_most=True)
    metadata = pq.ParquetFile(tmp_path / "out.parquet").metadata
    assert [metadata.row_group(i).num_rows for i in range(3)] == [1000, 1000, 500]
    assert metadata.row_group(0).column(0).compression == "ZSTD"
    assert pq.read_schema(tmp_path / "out.parquet").names == ["text", "origin"]


def test_too_little_is_said(roots, tmp_path):
    with pytest.raises(UserError, match="less real text than 5 MB") as caught:
        prose.build(tmp_path / "out.parquet", 5, roots)
    assert "0.0 MB in" in caught.value.facts["found"] and "--at-most" in caught.value.facts["next"]
    assert not (tmp_path / "out.parquet").exists()


def test_it_exits_2_where_the_machine_holds_too_little(roots, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prose, "Roots", lambda: roots)
    command = ["--megabytes", "5", "--output", str(tmp_path / "out.parquet")]
    assert prose.main(command) == 2
    assert "less real text" in capsys.readouterr().err
    assert prose.main([*command, "--at-most"]) == 0
    assert "docstrings" in capsys.readouterr().out


def test_lengths_are_log_normal():
    """Of paragraphs much shorter than the lengths drawn."""
    draw = random.Random(0)
    pieces = list(prose.cut(["x" * 20] * 400_000, lambda: 2500 * draw.lognormvariate(0, 1.0)))
    logarithms = np.log([len(piece) for piece in pieces[:-1]])
    assert np.exp(np.median(logarithms)) == pytest.approx(2500, rel=0.1)
    assert np.std(logarithms) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(
    "roff, plain",
    [
        (r"\fBbold\fP and \f[I]more\f[] \(em \(aqx\(aq, 5\-6 \e n", "bold and more — 'x', 5-6 \\ n"),
        ('.BR ls (1),\n.B "two words"\n.IR file ...', "ls(1), two words file..."),
        (".de XX\nnot text\n..\ntext", "text"),
        (".if n \\{\\\nnot text\n.\\}\ntext", "text"),
        (".ie n not text\n.el not text\ntext", "text"),
        (".nf\nint  main\n  x;\n.fi\nThen\nfilled.", "int  main\n  x;\n\nThen filled."),
        (".TS\nl l.\na\tb\n.TE\ntext", "text"),
        ('.Sh NAME\n.Nm ls\n.Nd list\n.Pp\n.Op Fl a\nand\n.Ar file .', "NAME\n\nls list\n\n-a and file."),
        (r"\*(L"  # the opening quote of pod2man
         r'"quoted\*(R" \s-1SMALL\s0', '"quoted" SMALL'),
    ],
)  # fmt: skip
def test_roff(roff, plain):
    assert prose.plain_roff(roff) == plain
