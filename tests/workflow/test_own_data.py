"""A user's own text in a project with every experiment: what is planned for it, and which mistakes planning reports."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import served
from tests.workflow.conftest import Project, make_project
from tokenscale.settings import profile

pytestmark = [pytest.mark.slow(27), pytest.mark.workflow]
ROOT = Path(__file__).parents[2]
TEXTS = [f"document {i} of {i * i} words" for i in range(50)]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory) -> Project:
    """The project as it is shipped, with its own configuration."""
    project = make_project(tmp_path_factory.mktemp("shipped"))
    shutil.rmtree(project.root / "config")
    shutil.copytree(ROOT / "config", project.root / "config")
    data = project.root / "my data"
    data.mkdir()
    pq.write_table(pa.table({"body": TEXTS, "number": range(50)}), data / "mine.parquet")
    (data / "cut.parquet").write_bytes((data / "mine.parquet").read_bytes()[:-100])
    (data / "mine.jsonl").write_text("".join(json.dumps({"content": text}) + "\n" for text in TEXTS))
    (data / "mine.txt").write_bytes("\r\n".join(TEXTS).encode())
    (data / "utf-16.txt").write_bytes("\n".join(TEXTS).encode("utf-16"))
    return project


def tokenscale(project: Project, *arguments: str, code: int = 0) -> str:
    """What a command prints; it must end with `code`."""
    command = [served.python(), "-m", "tokenscale", *arguments]
    done = subprocess.run(command, cwd=project.root, env=project.environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def configure(project: Project, **source) -> str:
    """Write mine.yaml, as the README shows it, and return its name."""
    text = json.dumps({"corpus": "mine", "corpora": {"mine": {"source": source}}})
    (project.root / "mine.yaml").write_text(text)
    return "mine.yaml"


@pytest.mark.parametrize(
    "source",
    [
        {"files": "my data/mine.parquet", "text_column": "body"},
        {"files": "my data/*.jsonl", "text_column": "content"},
        {"files": ["my data/mine.txt"], "separator": "\n"},
    ],
    ids=["parquet", "json lines", "text"],
)
def test_the_demo_is_planned_on_own_text_alone(shipped, source):
    planned = shipped.dry_run("--configfile", configure(shipped, **source))
    assert "corpus mine" in planned and "tokenizer bpe-4096-mine" in planned and "train packed" in planned
    assert "docstrings" not in planned, "the embedded corpus is neither read nor learnt from"


def test_every_command_reads_the_configuration_of_snakemakes_options(shipped):
    file = configure(shipped, files="my data/mine.parquet", text_column="body")
    plan = tokenscale(shipped, "plan", "demo", "--configfile", file)
    assert "demo: " in plan
    runs = re.findall(r"^Job \d+: train (\S+)", shipped.dry_run("--configfile", file), re.MULTILINE)
    run = sorted(runs)[0]
    printed = tokenscale(shipped, "launch", run, "--configfile", file, "--print")
    assert "results/corpus/mine" in printed or "results/tokens/mine" in printed
    assert f"no experiment has a run {run}" in tokenscale(shipped, "launch", run, "--print", code=2)
    assert "demo: " in tokenscale(shipped, "check", "demo", "--configfile", file, "--config", "scale=demo")
    stale = tokenscale(shipped, "status", "--stale", "results/corpus/mine/manifest.json", "--configfile", file)
    assert "corpus mine" in stale
    (shipped.root / "other-claims.yaml").write_text("claims: []\n")
    claims = tokenscale(shipped, "claims", "--configfile", file, "--config", "claims=other-claims.yaml", code=2)
    assert "other-claims.yaml" in claims
    for command in ("plan", "check", "launch", "status", "claims"):
        missing = tokenscale(shipped, command, *["x"] * (command == "launch"), *["--stale"] * (command == "status"),
                                     "--configfile", "absent.yaml", code=2)  # fmt: skip
        assert "absent.yaml" in missing and "Traceback" not in missing


def test_status_uses_the_configuration_of_the_last_call(shipped, monkeypatch):
    file = configure(shipped, files="my data/mine.parquet", text_column="body")
    target = "results/corpus/mine/manifest.json"
    assert "configuration of the last call" not in tokenscale(shipped, "status", "--stale", "corpus")
    shipped.snakemake("--cores", "1", target, "--configfile", file)
    shipped.snakemake("-n", "corpus")
    shipped.snakemake("--cores", "1", target, "--configfile", file, "--config", "report_logs=false")
    monkeypatch.chdir(shipped.root)
    last = profile.load_last_call()
    assert (last.configfiles, last.config) == ((file,), {}), "neither a dry run nor a call without jobs is the last"
    told = tokenscale(shipped, "status", "--stale", target)
    assert f"snakemake --configfile {file}" in told and "nothing is stale" in told


@pytest.mark.parametrize("parts", [1, 2])
def test_a_list_of_files_may_be_longer_than_an_argument(shipped, parts):
    folder = shipped.root / "a_folder_of_a_crawl_with_a_long_name_as_on_clusters" / "snapshot_of_the_first_week_of_it"
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"part-{number:05d}-of-00900.jsonl" for number in range(900)]
    for number, file in enumerate(files):
        file.write_text(json.dumps({"text": f"document {number}"}) + "\n")
    assert len(" ".join(map(str, files))) > 128 * 1024
    name = f"many-{parts}"
    source = {"source": {"files": [str(file) for file in files]}, "parts": parts, "validation_share": 0.1}
    (shipped.root / "many.yaml").write_text(json.dumps({"corpora": {name: source}}))
    manifest = f"results/corpus/{name}/manifest.json"
    shipped.snakemake("--cores", "2", manifest, "--configfile", "many.yaml")
    splits = json.loads((shipped.root / manifest).read_text())["splits"]
    assert sum(split["rows"] for split in splits.values()) == 900
