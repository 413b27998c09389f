"""Stores out of archives: the same manifests, one rule a store, and nothing trained again."""

import json
import shutil

import pytest

from tests.workflow.conftest import Project, copy_of

pytestmark = [pytest.mark.experiment, pytest.mark.slow(11), pytest.mark.workflow]

UNPACK = ("--config", "unpack_from_archive=true")


@pytest.fixture(scope="module")
def unpacked(built, tmp_path_factory) -> Project:
    """The built project once its configuration says so, tokens only."""
    project = copy_of(built, tmp_path_factory.mktemp("unpacked"))
    project.snakemake("--cores", "2", "tokens", *UNPACK)
    return project


def tokens(project):
    """Store → its manifest and its files' content."""
    found = {}
    for path in sorted(project.root.glob("results/tokens/*/*/*/manifest.json")):
        names = [file["name"] for file in json.loads(path.read_text())["files"]]
        found[path.parent.name] = [(path.parent / name).read_bytes() for name in ["manifest.json", *names]]
    return found


def test_each_store_has_one_rule_by_the_configuration(fresh):
    planned = fresh.planned("tokens")
    # two packed stores, of two splits, from an archive each; the others from the text
    assert "unpack" not in planned and fresh.planned("tokens", *UNPACK) == planned | {"unpack": 2}
    built = {"build_corpus": 1, "build_tokenizer": 1}
    assert fresh.planned("results/tokens/small/bpe/archive-level=small/manifest.json") == built | {"pretokenize": 1}


def test_stores_out_of_archives_are_the_same_and_train_nothing_again(built, unpacked):
    before, after = tokens(built), tokens(unpacked)
    assert {name for name in after if name not in before} == {"archive", "archive-split=validation"}
    assert {name: files for name, files in after.items() if name in before} == before
    builds = unpacked.root.glob("results/tokens/small/bpe/packed*/build.json")
    assert [json.loads(path.read_text())["engine"] for path in builds] == ["archive", "archive"]
    assert unpacked.planned("all", *UNPACK) == {}


@pytest.mark.parametrize(
    "file, expected", [("unpack.py", {"unpack": 2}), ("archive.py", {"pretokenize": 2, "unpack": 2})]
)
def test_an_edit_makes_again_what_it_is_the_code_of(unpacked, file, expected):
    path = unpacked.root / "src/tokenscale/data/stores" / file
    before = path.read_bytes()
    path.write_bytes(before + b"\n")
    assert unpacked.planned("tokens", *UNPACK) == expected
    path.write_bytes(before)
    assert unpacked.planned("tokens", *UNPACK) == {}


def test_an_archive_is_all_that_a_purged_store_needs(unpacked, tmp_path):
    project = copy_of(unpacked, tmp_path)
    before = tokens(project)
    for name in ("corpus", "tokenizers"):
        shutil.rmtree(project.root / "results" / name)
    store = "results/tokens/small/bpe/packed-sequence_length=32"
    (project.root / store / "tokens.bin").unlink()
    assert project.planned("-f", f"{store}/manifest.json", *UNPACK) == {"unpack": 1}
    project.snakemake("--cores", "2", "-f", f"{store}/manifest.json", *UNPACK)
    assert tokens(project) == before


def test_an_archive_that_was_copied_here_alone_is_enough(fresh):
    """Its folder, without Snakemake's memory of it, and nothing that it was made of."""
    folder = fresh.root / "results/tokens/small/bpe"
    (folder / "archive").mkdir(parents=True)
    (folder / "archive/manifest.json").write_text("{}")
    store = "results/tokens/small/bpe/packed-sequence_length=32/manifest.json"
    assert fresh.planned(store, *UNPACK) == {"unpack": 1}
