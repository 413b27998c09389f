"""Evidence: logs are kept in an archive, from which tables, claims and report are made again."""

import itertools
import json
import lzma
import os
import random
import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests import golden, logs
from tests.experiments.test_report import visible_words
from tests.logs import tabulate
from tests.once import once
from tests.unit.test_sql_epochs import write_store
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, sha256_text, write_json
from tokenscale.cli.main import main
from tokenscale.report import build
from tokenscale.report.build import rebuild
from tokenscale.report.packed_logs import (
    INDEX,
    JUDGED,
    TableInputs,
    check_replaceable,
    pack,
    put_in_place,
    restore,
)

pytestmark = pytest.mark.slow(20)

ROOT = Path(__file__).parents[2]
COPIED = {"workflow": ROOT / "workflow/Snakefile", "citation": ROOT / "CITATION.cff"}
LEDGER = ROOT / "config/replication.yaml"
EVIDENCE = {path.parent.name for path in ROOT.glob("evidence/*/claims.json")}
#: the folder that the README's command rebuilds; the others are long tests
README_EXAMPLE = "cpu-2-cores-2026-11-24"
INPUTS = TableInputs(
    "demo",
    ("benchmarks/data/bench.json",),
    ("tokens/web/bpe/packed/manifest.json",),
    ("corpus/web/manifest.json",),
)


def ingest_again(results):
    inputs = {
        kind: [results / name for name in getattr(INPUTS, kind)]
        for kind in ("benchmarks", "stores", "corpora")
    }
    tabulate(results / INPUTS.table, results / "runs", results / "tables/demo", **inputs)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Results of four resumed runs, one with a damaged log, a benchmark and a store. Nobody may
    change them.
    """

    def make(results):
        runs = [logs.settings(a, repeat=r, steps=8) for a in ("padded", "packed") for r in range(2)]
        for run in runs:
            folder = logs.write_run(
                results / "runs", run, attempts=[{"stop": 6, "stopped": False}, {"start": 4}]
            )
        with open(folder / "attempt=00/rank=00000/steps.jsonl", "ab") as log:
            log.write(b"\xff\xfe no text\n")
        logs.write_table(results / INPUTS.table, runs, figures=["padding_share"])
        logs.write_benchmark(results / INPUTS.benchmarks[0])
        write_store(results / "tokens/web/bpe/packed", build={"duration_s": 2.0, "engine": "bpe"})
        write_json(results / INPUTS.corpora[0], {"splits": {}})
        ingest_again(results)
        (results / "runs" / runs[0].identity / "status.json").write_text("{}")

    return once(tmp_path_factory, "evidence", make)


@pytest.fixture
def results(made, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "results"))


@pytest.fixture(scope="module")
def archive(made, tmp_path_factory):
    """Its logs, packed. Nobody may change them."""
    path = tmp_path_factory.mktemp("packed") / "logs.json.xz"
    assert pack(["demo"], made / "tables", path) == 4
    return path


def test_tables_claims_and_report_come_again_from_the_archive_alone(
    made, archive, tmp_path, capsys
):
    output = tmp_path / "build"
    stale = tmp_path / "earlier"
    write_json(stale / "stores/old/stale.json", {})
    put_in_place(stale, output)
    rebuild(archive, output, LEDGER, **COPIED)
    assert not (output / "stores").exists()
    for path in (made / "tables/demo").iterdir():
        assert (output / "tables/demo" / path.name).read_bytes() == path.read_bytes(), path.name
    expected = build.judge(LEDGER, made / "tables", ["demo"], tmp_path / "expected")
    assert (output / "report/claims.json").read_bytes() == expected.read_bytes()
    assert main(["verify", str(output / "report")]) == 0
    assert capsys.readouterr().out.count(": agrees\n") == 4


def test_equal_logs_give_equal_archives(archive, results, tmp_path):
    for path in results.rglob("*"):
        os.utime(path, (1e9, 1e9))
        path.chmod(0o700)
    pack(["demo"], results / "tables", tmp_path / "b.json.xz")
    assert archive.read_bytes() == (tmp_path / "b.json.xz").read_bytes()
    names = [*json.loads(lzma.decompress(archive.read_bytes()))["files"]]
    assert names == sorted(names)
    assert not [name for name in names if name.startswith(("/", "tables")) or "status" in name]


def again(results, tmp_path):
    """Ingest results again, pack their logs and restore them; the two folders of tables."""
    ingest_again(results)
    pack(["demo"], results / "tables", tmp_path / "logs.json.xz")
    restore(tmp_path / "logs.json.xz", tmp_path / "build")
    return results / "tables/demo", tmp_path / "build/tables/demo"


def test_runs_that_have_not_ended_are_packed_as_they_are(results, tmp_path):
    first, second, third = (run["run_id"] for run in read_json(results / INPUTS.table)["runs"][:3])
    path = results / "runs" / first / "run.json"
    write_json(path, {key: value for key, value in read_json(path).items() if key != "seal"})
    shutil.rmtree(results / "runs" / second)
    (results / "runs" / third / "run.json").write_text("{")
    tables, restored = again(results, tmp_path)
    assert (restored / "manifest.json").read_bytes() == (tables / "manifest.json").read_bytes()


def words(folder):
    """Run → validity, reasons, cautions and values that were not checked."""
    rows = pq.read_table(folder / "validity.parquet", columns=["run_id", *JUDGED]).to_pylist()
    return {row.pop("run_id"): row for row in rows}


def test_what_token_stores_showed_is_packed_and_can_only_add_to_what_logs_say(results, tmp_path):
    tables, restored = again(results, tmp_path)
    said = words(tables)
    run = next(run for run, row in said.items() if row["reasons"])
    more = said[run] | {
        "reasons": f"{said[run]['reasons']}; more",
        "validity": "invalid",
    }
    recounted = "; ".join(
        reason for reason in more["unchecked"].split("; ") if "not at hand" not in reason
    )
    assert recounted
    for packed, expected in (
        (more, more),
        (said[run] | {"validity": "valid"}, said[run]),
        (more | {"validity": "valid"}, more | {"validity": said[run]["validity"]}),
        (more | {"reasons": "more"}, more | {"reasons": f"more; {said[run]['reasons']}"}),
        (more | {"validity": "missing"}, said[run]),
        (more | {"unchecked": ""}, more | {"unchecked": recounted}),
        (said[run] | {"validity": "valid", "reasons": ""}, said[run]),
        ({"validity": "valid"}, said[run]),
    ):
        content = json.loads(lzma.decompress((tmp_path / "logs.json.xz").read_bytes()))
        content["judged"]["demo"][run] = packed
        archive_of(tmp_path / "edited.xz", content)
        restore(tmp_path / "edited.xz", tmp_path / "build")
        assert words(restored) == said | {run: expected}


def test_an_input_that_is_missing_elsewhere_or_names_a_folder_of_this_machine_is_refused(
    results, tmp_path
):
    manifest = results / INPUTS.corpora[0]
    write_json(manifest, {"splits": {}, "source": f"{Path.cwd()}/texts.parquet"})
    with pytest.raises(UserError, match="names a folder of this machine"):
        pack(["demo"], results / "tables", tmp_path / "logs.json.xz")
    manifest.unlink()
    with pytest.raises(UserError, match="is missing"):
        pack(["demo"], results / "tables", tmp_path / "logs.json.xz")
    outside = [logs.write_benchmark(tmp_path / "o.json")]
    tabulate(results / INPUTS.table, results / "runs", results / "tables/demo", outside)
    with pytest.raises(UserError, match="outside of the folder of results"):
        pack(["demo"], results / "tables", tmp_path / "logs.json.xz")
    assert not (tmp_path / "logs.json.xz").exists()


def archive_of(path, content):
    content = (
        {"schema": 1, "experiments": [], "files": {}} | content
        if isinstance(content, dict)
        else content
    )
    path.write_bytes(lzma.compress(json.dumps(content).encode()))


def holding(**content):
    """Damage: an archive that holds this."""
    return lambda path: archive_of(path, content)


DAMAGES = {
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "a web page": lambda path: path.write_text("<html>" * 99),
    "judgements that are no text": holding(judged={"demo": {"run": {"reasons": 5}}}),
    "a judgement that is a number": holding(judged={"demo": {"run": 5}}),
    "more than it may unpack to": holding(files={"a": "x" * (80 << 20)}),
    **{
        f"the path {path!r}": holding(files={path: "x"})
        for path in ("../outside", "/outside", "a/../b", "a\0b")
    },
    **{
        f"the experiment {name!r}": holding(experiments=[{"experiment": name}])
        for name in ("../outside", "/x", 5)
    },
    **{f"the schema {schema!r}": holding(schema=schema) for schema in (99, True, "1", None)},
    "an input outside": holding(experiments=[{"experiment": "demo", "table": "../runs.json"}]),
    "no text": holding(files={"runs/x": 1}),
    "no files": holding(files=None),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a list": lambda path: archive_of(path, []),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_archive_is_one_message(archive, tmp_path, capsys, damage):
    archive = Path(shutil.copy(archive, tmp_path / "logs.json.xz"))
    damage(archive)
    assert main(["report", "rebuild", str(archive), "--output", str(tmp_path / "build")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tokenscale: ") and str(archive) in error and "Traceback" not in error
    if archive.is_file():
        assert main(["verify", str(archive)]) == 1
    assert not (tmp_path / "build").exists() and not (tmp_path / "outside").exists()


def test_every_flipped_bit_of_an_archive_is_refused(archive, tmp_path):
    draw = random.Random(23)
    for _ in range(50):
        data = bytearray(archive.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (tmp_path / "logs.json.xz").write_bytes(data)
        with pytest.raises(UserError):
            restore(tmp_path / "logs.json.xz", tmp_path / "build")


def list_paths(folder):
    """Return all paths below a folder, with the contents of files."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def write_files(folder, **files):
    """Write files of letters: `a_b="x"` is x in a/b."""
    for name, text in files.items():
        path = folder / name.replace("_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_what_holds_other_files_is_not_replaced(archive, results):
    for place in (results, results / INPUTS.table):
        before = list_paths(results)
        with pytest.raises(UserError, match="holds other files"):
            rebuild(archive, place, LEDGER, **COPIED)
        assert list_paths(results) == before


FOREIGN_INDICES = (
    {"my": "own list"},
    [],
    {"files": []},
    {"files": {"thesis.txt": "0" * 64}},
    {"files": {"thesis.txt": [sha256_text("years")]}},
    {"schema": 1, "files": {}, "unfinished": True},
)


@pytest.mark.parametrize("index", FOREIGN_INDICES)
def test_a_foreign_file_of_the_index_name_makes_nothing_ours(index, tmp_path):
    output = tmp_path / "build"
    write_json(output / INDEX, index)
    for _ in range(2):
        before = list_paths(output)
        with pytest.raises(UserError, match="holds other files"):
            put_in_place(write_files(tmp_path / "made", a="1"), output)
        assert list_paths(output) == before
        (output / "thesis.txt").write_text("years")


class Killed(BaseException):
    """The end of a process that handles nothing any more."""


def put_until(number, made, output):
    """Put files in place until the `number`-th rename or removal, before which all ends. Return
    whether that was reached.
    """
    left = number

    def count(function, *arguments, **options):
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed
        return function(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, partial(count, getattr(os, name)))
        try:
            put_in_place(made, output)
        except Killed:
            return True
    return False


PLANTED = ("notes.md", "a/notes.md", "c/d/mine", "a/b", "c/d/e", "c/g", "new/mine")


@pytest.mark.parametrize("planted", [None, *PLANTED])
def test_a_killed_call_leaves_nothing_of_a_user_to_be_removed(planted, tmp_path):
    """Killed before each rename and removal; then a user adds, or writes over, a file."""
    earlier = write_files(tmp_path / "earlier", a_b="1", a_c="2", c_d_e="3", f="4")
    later = write_files(tmp_path / "later", a_b="1", a_c="22", c_g="5", f_h="6")
    for number in itertools.count(1):
        output = tmp_path / f"build-{number}"
        put_in_place(earlier, output)
        reached = put_until(number, made=later, output=output)
        if planted is None:
            put_in_place(later, output)
            wanted = list_paths(later).keys() | {INDEX}
            assert list_paths(output).keys() == wanted
        else:
            path = output / planted
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("mine")
            before = list_paths(output)
            with pytest.raises(UserError, match="holds other files") as caught:
                put_in_place(later, output)
            assert planted in str(caught.value.facts["found"])
            assert list_paths(output) == before
        if not reached:
            break
    assert number > 8


@pytest.fixture(scope="module")
def rebuilt(archive, tmp_path_factory):
    """The folder that a second rebuilding left. Nobody may change it."""
    output = tmp_path_factory.mktemp("rebuilt") / "build"
    for _ in range(2):
        rebuild(archive, output, LEDGER, **COPIED)
        check_replaceable(output)
    return output


@pytest.mark.parametrize("change", ["add", "edit", "link"])
def test_a_rebuilt_folder_is_replaced_unless_somebody_changed_it(
    change, archive, rebuilt, tmp_path
):
    output = tmp_path / "build"
    shutil.copytree(rebuilt, output, symlinks=True)
    check_replaceable(output)
    path = output / INPUTS.table
    if change == "add":
        path = path.with_name("notes.md")
    elif change == "link":
        path.unlink()
        path.symlink_to(tmp_path)
    if change != "link":
        path.write_text("mine")
    before = list_paths(output)
    with pytest.raises(UserError, match="holds other files") as caught:
        rebuild(archive, output, LEDGER, **COPIED)
    assert path.name in str(caught.value.facts["found"])
    assert list_paths(output) == before


@pytest.mark.experiment
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == README_EXAMPLE else pytest.mark.long)
        for name in sorted(EVIDENCE)
    ],
)
def test_evidence_is_rebuilt_by_the_commands_of_its_readme(name, tmp_path, monkeypatch, capsys):
    assert sum(path.stat().st_size for path in ROOT.glob("evidence/*/logs.json.xz")) < 6.5e6
    for shared in ("config", "workflow", "evidence", "CITATION.cff"):
        (tmp_path / shared).symlink_to(ROOT / shared)
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "evidence" / name / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    \.venv/bin/tokenscale (.*)$", readme, re.MULTILINE)
    assert [command.split()[:2] for command in commands] == [
        ["verify", f"evidence/{name}"],
        ["report", "rebuild"],
    ]
    for command in commands:
        assert main(shlex.split(command)) == 0, capsys.readouterr()
    judged, committed = (
        Path(folder, "claims.json") for folder in (f"build/{name}/report", f"evidence/{name}")
    )
    assert judged.read_bytes() == committed.read_bytes(), "docs/development.md, Evidence"
    golden.compare(f"evidence/{name}", golden.describe_rebuilt(Path("build", name)))
    pages = [
        path.read_text(encoding="utf-8") for path in Path("build", name, "report").glob("*.html")
    ]
    assert pages and max(len(visible_words(page)) for page in pages) <= 9000
