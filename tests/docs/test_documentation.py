"""Every block of the documents runs, in a checkout of the whole project: `make docs-test`, and of
the longest documents `make long-test`.

`blocks.yaml` holds what stands for placeholders, what is made small or a dry run, and the blocks
that cannot run here. The blocks of a group of documents run in order, in one checkout.
"""

import gzip
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml
import zstandard

from tests import served
from tests.docs import blocks
from tests.docs.blocks import RUN, Block, Checkout, Failed, all_blocks, problems
from tests.once import once

PLAN = blocks.plan()
NOTHING = dict.fromkeys((*blocks.SUBSTITUTIONS, "programs", "environment", "files"), {}) | {
    "blocks": [],
    "listed": [],
}
#: most blocks that may be listed, as a share
LISTED = 0.1


def make_checkout(folder: Path) -> None:
    """Commit a copy of what git tracks here, with small experiments, and small files as the
    documents name them.
    """
    root = folder / "tokenscale"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=blocks.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, tracked.split("\0")):
        source = blocks.ROOT / name
        if source.is_symlink() or source.exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, root / name, follow_symlinks=False)
    for name, changes in PLAN["files"].items():
        path = root / name
        path.write_text(
            yaml.safe_dump(merged(yaml.safe_load(path.read_text()), changes), sort_keys=False)
        )
    write_texts(root)
    for command in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -q -m all"):
        subprocess.run(["git", *command.split()], cwd=root, check=True)


def write_texts(root: Path) -> None:
    """Write small files of text under the names that the documents use."""
    pick = random.Random(0)
    words = ["".join(pick.choices("abcdefghijklmnop", k=pick.randint(1, 8))) for _ in range(2000)]
    texts = [" ".join(pick.choices(words, k=pick.randint(20, 200))) for _ in range(1000)]
    lines = texts[:300]
    (root / "own").mkdir()
    (root / "data").mkdir()
    tables = {
        "own/part-0.parquet": ["body"],
        "data/part-0.parquet": ["body", "text"],
        "my.parquet": ["body", "text"],
    }
    for name, columns in (tables | {"de-en.parquet": ["de", "en"]}).items():
        pa.parquet.write_table(pa.table(dict.fromkeys(columns, texts)), root / name)
    pa.parquet.write_table(
        pa.table({"body": [f"more {text}" for text in texts[:200]]}), root / "own/part-1.parquet"
    )
    pa.parquet.write_table(pa.table({"body": texts[:20]}), root / "other.parquet")
    for name in ("stories.txt", "held-out.txt"):
        (root / name).write_text("<|endoftext|>".join(texts))
    for name in ("train.de.gz", "train.en.gz", "val.de", "val.en"):
        write_packed(root / name, lines)
    write_packed(root / "de-en.tsv.gz", [f"{i}\t{line}\t{line}" for i, line in enumerate(lines)])
    write_packed(
        root / "de-en.jsonl",
        [json.dumps({"translation": {"de": line, "en": line}}) for line in lines],
    )
    for name in ("a.jsonl.gz", "b.jsonl.zst"):
        write_packed(root / name, [json.dumps({"content": f"{name} {line}"}) for line in lines])


def write_packed(path: Path, lines: list[str]) -> None:
    """Write lines of text, compressed as the name says."""
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)
    path.write_bytes(pack("".join(f"{line}\n" for line in lines).encode()))


def merged(values: dict, changes: dict) -> dict:
    """Nested mappings, of which later ones win."""
    inner = {
        k: v for k, v in changes.items() if isinstance(v, dict) and isinstance(values.get(k), dict)
    }
    return values | changes | {k: merged(values[k], v) for k, v in inner.items()}


@pytest.fixture(scope="session")
def committed(tmp_path_factory) -> Path:
    return once(tmp_path_factory, "checkout", make_checkout) / "tokenscale"


def run_blocks(root: Path, names: list[str], languages: Collection[str] = ()) -> list[str]:
    """Run the blocks of documents in a checkout, of some languages or all; what fails."""
    checkout = Checkout(root, served.python(), PLAN)
    failures = []
    for block in (
        b
        for name in names
        for b in all_blocks()
        if b.document == name
        and b.language not in blocks.SHOWN
        and (not languages or b.language in languages)
    ):
        started = time.monotonic()
        try:
            outcome = checkout.run(block)
        except Failed as failure:
            outcome = "failed"
            failures.append(f"{block.place}: {failure}")
        print(f"{block.place}: {outcome}, {time.monotonic() - started:.1f} s", flush=True)
    return failures


@pytest.fixture(scope="session")
def built(committed, tmp_path_factory) -> Path:
    """The checkout with a demo, and `failures.json` of the blocks that built it. Nobody may change
    it.
    """

    def build(folder: Path) -> None:
        shutil.copytree(committed, folder / "tokenscale", symlinks=True)
        (folder / "failures.json").write_text(
            json.dumps(run_blocks(folder / "tokenscale", blocks.BUILDING))
        )

    return once(tmp_path_factory, "documents", build)


def test_the_blocks_that_build_the_demo_run(built):
    assert json.loads((built / "failures.json").read_text()) == []


@pytest.mark.parametrize(
    "group",
    [
        pytest.param(group, id=group[0], marks=pytest.mark.long if group in blocks.LONG else ())
        for group in blocks.GROUPS
    ],
)
def test_every_block_of_the_documents_runs(group, committed, tmp_path, request):
    source = (
        request.getfixturevalue("built") / "tokenscale" if group in blocks.NEED_DEMO else committed
    )
    shutil.copytree(source, tmp_path / "tokenscale", symlinks=True)
    failures = run_blocks(tmp_path / "tokenscale", group)
    assert not failures, f"{len(failures)} blocks fail\n\n" + "\n\n".join(failures)


def test_the_diffs_of_long_documents_fit_the_sources(committed, tmp_path):
    shutil.copytree(committed, tmp_path / "tokenscale", symlinks=True)
    names = [name for group in blocks.LONG for name in group]
    failures = run_blocks(tmp_path / "tokenscale", names, languages=["diff"])
    assert not failures, f"{len(failures)} blocks fail\n\n" + "\n\n".join(failures)


# -- which blocks there are, and that none is left out


def test_all_documents_are_run():
    assert sorted(blocks.DOCUMENTS) == sorted(
        {
            str(p.relative_to(blocks.ROOT))
            for glob in blocks.PATTERNS
            for p in blocks.ROOT.glob(glob)
        }
    )


def test_every_block_is_run_or_listed():
    assert problems(all_blocks(), PLAN) == []
    assert len(PLAN["listed"]) <= LISTED * len([b for b in all_blocks() if b.language in RUN])
    assert all(entry["reason"] for entry in PLAN["listed"])
    for block in (b for b in all_blocks() if b.language == "diff"):  # a registration is one entry
        assert (
            f"+++ b/{block.path}\n" in block.text
            and len(re.findall(r'^\+    "', block.text, re.MULTILINE)) == 1
        )


# -- of this suite: what it must find


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Text.\n\n    make run\n", "a.md:3: write a fenced block"),
        ("```text\nmake run\n```\n", "a.md:1: these are commands"),
        ("```yaml\nscale: demo\n```\n", "a.md:1: add the file"),
        ("```diff\n```\n", "a.md:1: name the file"),
        ("```console\n$ cd x && python a.py\n```\n", "a.md:1: name the program with its folder"),
        ("| a |\n|---|\n| `tokenscale plan demo` |\n", "a.md:3: name the program with its folder"),
    ],
)
def test_a_block_that_is_neither_run_nor_listed_is_found(text, expected):
    (found,) = problems(blocks.blocks_of("a.md", text), NOTHING)
    assert found.startswith(expected)


@pytest.mark.parametrize(
    "language, text, fails",
    [
        ("sh", "true", None),
        ("sh", "false | cat", "exit code 1"),
        ("console", "$ echo one two\none three", "one three"),
        ("console", "$ echo one two\none …", None),
        ("python", "raise KeyError('here')", "here"),
        ("diff", "--- a/one\n+++ b/one\n@@ -1 +1,2 @@\n line\n+more", None),
        ("diff", "--- a/one\n+++ b/one\n@@ -1 +1,2 @@\n other\n+more", "patch"),
        ("prose", ".venv/bin/tokenscale train --stepz 2", "unknown flag --stepz"),
        ("prose", "make nothing", "nothing"),
    ],
)
def test_a_block_that_fails_is_found(language, text, fails, tmp_path):
    root = tmp_path / "project"
    root.mkdir()
    for name, line in {"pyproject.toml": "", "one": "line\n"}.items():
        (root / name).write_text(line)
    checkout = Checkout(root, sys.executable, NOTHING)
    block = Block("a.md", 1, language, "one" if language == "diff" else None, f"{text}\n")
    if fails is None:
        assert checkout.run(block) == "executed"
    else:
        with pytest.raises(Failed, match=fails):
            checkout.run(block)
