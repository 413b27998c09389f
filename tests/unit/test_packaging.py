"""One list of dependencies, import groups, nothing of one machine in the project; and what others
read about it.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tokenscale
from tests.faults import campaign
from tests.long import lock, logs, wheels
from tests.machines import program

pytestmark = pytest.mark.slow(11)

ROOT = Path(__file__).parents[2]
GOLDEN = "packages/golden/pyproject.toml"
PLATFORM = f"{sys.platform}-{platform.machine()}-python3.{sys.version_info[1]}"
SUPPORTED = wheels.PYTHONS


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def split(requirement: str) -> tuple[str, str]:
    requirement = requirement.partition(";")[0]
    name, bounds = re.fullmatch(r"([A-Za-z0-9_.-]+?)\s*([<>=!~].*)?", requirement.strip()).groups()
    return name.lower(), ",".join(sorted((bounds or "").replace(" ", "").split(",")))


def test_every_dependency_has_both_bounds():
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    stated = [
        *built,
        *project()["dependencies"],
        *(r for of in project()["optional-dependencies"].values() for r in of),
    ]
    bounds = dict(split(r) for r in stated)
    assert {
        name: both for name, both in bounds.items() if not re.fullmatch(r"<[\d.]+,>=[\d.]+", both)
    } == {}
    assert bounds["torch"] == "<2.16,>=2.9"


# -- versions: ours, Python, torch


def test_our_version_is_the_same_everywhere():
    golden = tomllib.loads((ROOT / GOLDEN).read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text())[1]
    (needed,) = map(Requirement, project()["optional-dependencies"]["golden"])
    stated = {golden["version"], citation["version"], newest}
    assert stated == {tokenscale.__version__} and needed.name == golden["name"]
    assert needed.specifier.contains(tokenscale.__version__)


LOCK = ROOT / f"locks/{PLATFORM}.txt"
only_locked = pytest.mark.skipif(LOCK not in lock.LOCKS, reason=f"{PLATFORM} has no lock")


def locked(path: Path = LOCK) -> dict[str, str]:
    """Package → version of the lock."""
    return dict(re.findall(r"(?m)^([\w.-]+)==(\S+)", path.read_text()))


@pytest.mark.parametrize("path", lock.LOCKS, ids=lambda path: path.stem)
def test_a_lock_names_packages_by_version_and_hash_and_no_place_to_get_them_from(path):
    text = path.read_text()
    assert "://" not in text and not re.search(r"(?m)^-|@", text)
    entries = re.findall(r"(?m)^(?!#)\S.*\n(?:    .*\n)+", text)
    assert len(entries) == len(locked(path)) > 100
    assert all(
        re.fullmatch(r"[\w.-]+==[\w.]+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+", entry)
        for entry in entries
    )
    assert not [name for name in locked(path) if lock.OF_TORCH.match(f"{name}==")], (
        "its builds differ in hashes"
    )


@only_locked
def test_the_lock_is_what_pyproject_asks_for():
    """Everything that is required, by the metadata of what is installed, is in the lock and within
    its bounds.
    """
    versions = locked() | {
        "torch": re.search(r"==(\S+)", (ROOT / "locks/constraints.txt").read_text())[1]
    }
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())
    golden = tomllib.loads((ROOT / GOLDEN).read_text())
    todo = [
        Requirement(requirement)
        for requirement in (
            *ours["project"]["dependencies"],
            *ours["project"]["optional-dependencies"]["test"],
            *ours["build-system"]["requires"],
            *golden["build-system"]["requires"],
            *golden["project"]["dependencies"],
        )
    ]
    seen = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        key = str(requirement)
        if key in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(key)
        if lock.OF_TORCH.match(f"{name}==") and name != "torch":
            continue
        assert requirement.specifier.contains(versions[name]), (
            f"{requirement}: the lock has {versions[name]}"
        )
        for extra in ("", *requirement.extras):
            further = map(Requirement, importlib.metadata.requires(name) or [])
            todo += [r for r in further if not r.marker or r.marker.evaluate({"extra": extra})]


@only_locked
def test_this_environment_is_the_lock():
    """Unless somebody asked for the newest versions, in which case all of them are newer."""
    installed = {canonicalize_name(d.name): d.version for d in importlib.metadata.distributions()}
    assert locked().items() <= installed.items() or os.environ.get("NEWEST"), (
        "make setup installs the lock"
    )


@pytest.fixture
def makefile(tmp_path):
    """A folder with nothing but what `make setup` reads, and a function that runs make there on a
    PATH.
    """
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "locks", tmp_path / "locks")
    (tmp_path / "packages/golden").mkdir(parents=True)
    shutil.copy(ROOT / GOLDEN, tmp_path / GOLDEN)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("make", "sh", "cat", "cksum", "cut", "head", "rm", "sed"):
        (tools / name).symlink_to(shutil.which(name))

    def make(*arguments: str, **pythons: str) -> subprocess.CompletedProcess:
        for name, script in pythons.items():
            program(tools, name.replace("_", "."), script)
        environment = {"PATH": str(tools), "MAKEFLAGS": ""}
        return subprocess.run(
            ["make", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return make


def installs_of(path: Path) -> list[str]:
    """What `make setup` installs where there is a lock: build tools first, the project last, and
    in between nothing that is not in the lock but torch.
    """
    return [
        "--require-hashes --no-deps -r /dev/stdin",
        f"--require-hashes --no-deps --no-build-isolation -r locks/{path.name} || .venv/bin/python -m",
        "-r locks/constraints.txt",
        "--no-deps --no-build-isolation -e packages/golden -e .",
    ]


@pytest.mark.parametrize(
    "platform, flags, installs",
    [
        *((path.stem, (), installs_of(path)) for path in lock.LOCKS),
        (lock.PLATFORM[:-4], ("NEWEST=1",), ["--upgrade --upgrade-strategy eager -e"]),
        ("linux-aarch64-python3.12", (), ["--constraint locks/constraints.txt -e"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_make_setup_installs_the_lock_of_this_platform(makefile, platform, flags, installs):
    python = f'case "$2" in *uname*) echo {platform};; esac'
    lines = makefile("-n", "setup", *flags, python3=python).stdout.splitlines()
    found = [line for line in lines if " pip install" in line]
    assert len(found) == len(installs) and all(
        part in line for part, line in zip(installs, found, strict=True)
    ), found
    if len(found) > 1:
        assert found[0].startswith("sed -n '/^\\(setuptools\\|uv\\)==/")
        assert found[0].count("locks/") == 1
    notes = [line for line in lines if "there is no lock for" in line]
    assert [platform in note for note in notes] == (
        [True] if len(installs) == 1 and not flags else []
    )


def test_the_only_index_that_is_named_is_the_only_one_asked(makefile):
    python = f'case "$2" in *uname*) echo {lock.PLATFORM[:-4]};; esac'
    named = makefile("-n", "setup", "PIP_ARGS=--index-url https://a.b/simple", python3=python)
    installs = [line for line in named.stdout.splitlines() if " -m pip install " in line]
    assert len(installs) == len(installs_of(Path(lock.PLATFORM)))
    assert all("--index-url https://a.b/simple" in line for line in installs)
    assert "/uv " not in named.stdout


def test_the_makefile_names_this_platform_as_the_locks_are_named(makefile):
    text = makefile("-n", "setup", python3=REAL).stdout
    assert (f"locks/{PLATFORM}.txt" in text) is (LOCK in lock.LOCKS)


@pytest.mark.parametrize(
    "name", ["pyproject.toml", GOLDEN, "locks/constraints.txt", f"locks/{lock.PLATFORM}"]
)
def test_an_edited_list_of_dependencies_is_installed(makefile, tmp_path, name):
    def ready():
        return re.search(r"\.ready-\d+", makefile("-n", "setup").stdout.split("touch")[1])[0]

    before = ready()
    (tmp_path / name).touch()
    assert ready() == before
    with (tmp_path / name).open("a") as file:
        file.write("# edited\n")
    assert ready() != before


OLD = "case $1 in --version) echo Python 3.9.2;; *) exit 1;; esac"
SHIM = 'echo "pyenv: $0: command not found" >&2; exit 127'
REAL = f'exec {sys.executable} "$@"'


@pytest.mark.parametrize(
    "goal, pythons, next",
    [
        ((), {"python3": OLD, "python3_11": REAL}, "make run PYTHON=python3.11"),
        (
            ("setup",),
            {"python3": OLD, "python3_13": SHIM, "python3_12": REAL},
            "make setup PYTHON=python3.12",
        ),
        (
            ("run", "CONFIG=mine.yaml"),
            {"python3_11": REAL},
            "make run CONFIG=mine.yaml PYTHON=python3.11",
        ),
        (("test",), {"python3": OLD, "python3_13": SHIM}, "then  make test PYTHON=python3.13"),
    ],
    ids=["another is on PATH", "a command of pyenv that does not run", "no python3", "none"],
)
def test_an_unsupported_python_is_refused_with_a_command_that_works(
    makefile, tmp_path, goal, pythons, next
):
    done = makefile(*goal, **pythons)
    assert done.returncode == 2 and not (tmp_path / ".venv").exists()
    shown = done.stderr.splitlines()
    assert shown[0] == "tokenscale: this Python is not supported."
    assert ("Python 3.9.2" if "python3" in pythons else "python3: not found") in shown[1]
    assert shown[2].split(None, 1)[1] == f"Python {SUPPORTED[0]} to {SUPPORTED[-1]}"
    assert shown[3].startswith("  next") and shown[3].endswith(next)


#: modules of tokenscale, and packages that are not installed where they run
GROUPS = {
    # a training that reads a store: as in a container without the host's packages
    "train.loop data.batches.stored data.stores.parquet": (
        "yaml snakemake duckdb pandas matplotlib tokenizers mistral_common tiktoken"
    ),
    "settings.config settings.closure runs.launch.start": "torch pandas",
    "analysis.ingest referee.validity report.page report.pdf report.save": "torch transformers snakemake tokenizers",
    "data.corpus.build data.stores.packed data.tokenizers.load": "torch pydantic",
    "data.order.permutation data.order.packing": "torch pyarrow pydantic",
    "runs.records.external runs.records.provenance runs.launch.failure_hints": "torch pyarrow pydantic",
    "cli.train.command": "torch pydantic yaml snakemake duckdb tokenizers mistral_common",
    "costs.flops runs.records.events cli.main": "torch numpy pydantic",
    "cli.judge report.run_sets report.build": "torch transformers snakemake tokenizers",
    "analysis.trackers cli.track": "torch pydantic pandas tensorboard mlflow wandb",
}


@pytest.mark.parametrize("modules, forbidden", GROUPS.items())
def test_import_groups(modules, forbidden):
    """Each group runs where the others' packages are not installed: they are made unimportable
    here.
    """
    imports = "".join(f"import tokenscale.{name}\n" for name in modules.split())
    code = f"import sys\nfor name in {forbidden.split()!r}: sys.modules[name] = None\n{imports}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_no_file_names_a_path_of_this_machine():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    for name in tracked:
        path = ROOT / name
        if path.is_file() and path.suffix in {
            ".py",
            ".md",
            ".yaml",
            ".yml",
            ".toml",
            ".smk",
            ".sql",
            ".j2",
            "",
        }:
            text = path.read_text(errors="ignore")
            assert f"{ROOT}/" not in text and f"{Path.home()}/" not in text, name


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CONTRIBUTING.md",
        *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")),
    ],
)
def test_links_lead_somewhere(name):
    """Files of the project that a text links to are there, and of headings those that a link
    names.
    """
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\((?!https?://|mailto:)([^)\s]+)\)", text):
        file, _, heading = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, target


def test_the_readme_is_read_in_a_few_screens():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    prose = [line for line in lines if not line.startswith(("|", "!", "    "))]
    assert max(map(len, prose)) <= 120


# -- what others read: the workflow catalog, a citation, GitHub


def test_rows_of_the_table_of_faults_name_tests_that_are_there_and_no_kill_lost_anything():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    for row in page.split("<!-- faults -->")[1].splitlines()[3:]:
        file = ""
        for named in re.findall(r"`(.*?)`", row.rsplit("|", 2)[1]):
            path, _, name = (
                named.rpartition("::") if named.startswith("tests/") else (file, "", named)
            )
            file = path or named
            assert f"def {name if path else 'test_'}" in (ROOT / file).read_text(), named
    rows = campaign.read(campaign.LOG)
    page = campaign.PAGE.read_text()
    assert page == campaign.with_table(page, rows), "python -m tests.faults.campaign --kills 0"
    assert sum(row["injected"] for row in rows) >= 200 and not any(row["lost"] for row in rows)


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem
)
def test_actions_are_pinned_by_commit_and_name_the_tag(path):
    used = re.findall(r"(?m)^\s*(?:- )?uses:\s*(.*)$", path.read_text())
    assert used and all(
        re.fullmatch(r"[\w-]+/[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", name) for name in used
    ), used


def test_github_runs_the_suites_of_ci_and_every_supported_python():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    matrix = job["strategy"]["matrix"]
    suites = {target for suite in matrix["suite"] for target in suite.split()}
    started = re.findall(r"(?m)^(?:suite|start) (\S+)", (ROOT / ".ci/run").read_text())
    assert suites | {"setup"} == set(started)
    runs = {
        (python, target)
        for python in matrix["python"]
        for suite in matrix["suite"]
        for target in suite.split()
    }
    runs |= {(row["python"], row["suite"]) for row in matrix["include"]}
    assert {(python, suite) for python in SUPPORTED for suite in ("test", "run")} <= runs


# -- the gate: every test is in a suite of .ci/run or in make long-test


def find_long_files(folder: str = "tests") -> set[str]:
    """Test files with a case that has the mark; this file has none."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("test_*.py")
        if re.search(r"mark\.long\b", path.read_text(encoding="utf-8"))
    }


def command_of(suite: str) -> str:
    """What `make SUITE` runs of pytest, on one line."""
    make = ["make", "--no-print-directory", "--dry-run", suite, "READY="]
    printed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in printed.splitlines() if "-m pytest" in line]
    return line


@pytest.mark.parametrize("folder", ["docs", "experiments", "faults", "slurm"])
def test_long_cases_of_a_suite_leave_the_gate_and_are_in_long_test(folder):
    assert re.search(r'-m "(experiment and )?not long"', command_of(f"{folder}-test"))
    files = find_long_files(f"tests/{folder}")
    assert files and files <= set(command_of("long-test").split())


def test_the_gates_promises_have_tests_that_are_there_and_the_guarantees_are_among_them():
    page = (ROOT / "docs/development.md").read_text()
    table = page.split("\n### The gate\n")[1].split("\n## ")[0]
    files = set(re.findall(r"(?m)^\|[^|]*\| `(\S+)` \|", table))
    assert len(files) > 30 and all((ROOT / "tests" / file).is_file() for file in files)
    for file in files:
        text = (ROOT / "tests" / file).read_text()
        assert not re.search(r"(?m)^pytestmark = .*mark\.long\b", text), file
    guarantees = (ROOT / "README.md").read_text().split("\n## Guarantees\n")[1].split("\n## ")[0]
    assert set(re.findall(r"\(tests/(\S+)\)", guarantees)) <= files


def test_long_tests_are_listed_with_their_last_green_run():
    lines = (logs.FOLDER / "tests.txt").read_text(encoding="utf-8").splitlines()
    form = r"(?:\d{4}-\d\d-\d\d|unknown) (?:[0-9a-f]{8}|unknown)  (\S+)"
    names = [re.fullmatch(form, line)[1] for line in lines]
    assert names == sorted(names) and all(map(logs.is_test, names))
    assert {name.partition("::")[0] for name in names} == find_long_files()


def test_a_green_run_moves_the_date_of_the_tests_that_passed_alone(tmp_path):
    here = "tests/unit/test_packaging.py::"
    green, red = here + "command_of", here + "test_every_dependency_has_both_bounds"
    gone = here + "test_that_is_gone"
    path = tmp_path / "tests.txt"
    path.write_text(f"2026-11-01 aaaaaaaa  {gone}\n2026-11-01 aaaaaaaa  {red}\n")

    def report(name: str, outcome: str) -> pytest.TestReport:
        return pytest.TestReport(name, ("", None, ""), {}, outcome, None, "call")

    passed = [report(f"{green}[a]", "passed"), report(f"{green}[b]", "passed")]
    passed.append(report(f"{red}[a]", "passed"))
    logs.record_green(path, {"passed": passed, "failed": [report(f"{red}[b]", "failed")]})
    first, second = path.read_text().splitlines()
    assert first.startswith(logs.today()) and first.endswith(green)
    assert second == f"2026-11-01 aaaaaaaa  {red}"


@pytest.mark.parametrize(("before", "over"), [(1000, True), (-1000, False)])
def test_the_gate_ends_with_its_budget_and_fails_on_no_time(tmp_path, before, over):
    """A `make` that does nothing stands in; bash begins to count at `before` seconds."""
    for folder in (".ci", "bin", "results/report"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "results/report/index.html").write_text("report")
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    run = 'echo "Nothing to be done"; if [ "$1" = run ]; then sleep 1; fi'
    for name, text in {".ci/slurm": "", "bin/make": run}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = os.environ | {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "SECONDS": str(before),
    }
    done = subprocess.run(
        [tmp_path / ".ci/run"], env=variables, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    end = r"gate: -?\d+ s, -?[\d.]+ times its make run \(\d+ s\); budget 8\n"
    assert re.search(end + (r"caution: .*\n\Z" if over else r"\Z"), done.stdout), done.stdout
