"""A user's own text in a project with every experiment: what is planned for it, and by which
commands.
"""

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

pytestmark = [pytest.mark.slow(27), pytest.mark.workflow]
ROOT = Path(__file__).parents[2]
FILE = "mine.yaml"


@pytest.fixture(scope="module")
def shipped(tmp_path_factory) -> Project:
    """The project as it is shipped, with its own configuration."""
    project = make_project(tmp_path_factory.mktemp("shipped"))
    shutil.rmtree(project.root / "config")
    shutil.copytree(ROOT / "config", project.root / "config")
    data = project.root / "my data"
    data.mkdir()
    texts = [f"document {i} of {i * i} words" for i in range(50)]
    pq.write_table(pa.table({"body": texts, "number": range(50)}), data / "mine.parquet")
    source = {"files": "my data/mine.parquet", "text_column": "body"}
    (project.root / FILE).write_text(
        json.dumps({"corpus": "mine", "corpora": {"mine": {"source": source}}})
    )
    return project


def tokenscale(project: Project, *arguments: str, code: int = 0) -> str:
    """What a command prints; it must end with `code`."""
    command = [served.python(), "-m", "tokenscale", *arguments]
    done = subprocess.run(
        command, cwd=project.root, env=project.environment, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_demo_is_planned_on_own_text_alone(shipped):
    planned = shipped.dry_run("--configfile", FILE)
    assert (
        "corpus mine" in planned
        and "tokenizer bpe-4096-mine" in planned
        and "train packed" in planned
    )
    assert "docstrings" not in planned, "the embedded corpus is neither read nor learnt from"


def test_every_command_reads_the_configuration_of_snakemakes_options(shipped):
    plan = tokenscale(shipped, "plan", "demo", "--configfile", FILE)
    assert "demo: " in plan
    runs = re.findall(r"^Job \d+: train (\S+)", shipped.dry_run("--configfile", FILE), re.MULTILINE)
    run = min(runs)
    printed = tokenscale(shipped, "launch", run, "--configfile", FILE, "--print")
    assert "results/corpus/mine" in printed or "results/tokens/mine" in printed
    assert f"no experiment has a run {run}" in tokenscale(shipped, "launch", run, "--print", code=2)
    assert "demo: " in tokenscale(
        shipped, "check", "demo", "--configfile", FILE, "--config", "scale=demo"
    )
    (shipped.root / "other-claims.yaml").write_text("claims: []\n")
    claims = tokenscale(
        shipped, "claims", "--configfile", FILE, "--config", "claims=other-claims.yaml", code=2
    )
    assert "other-claims.yaml" in claims


def test_a_list_of_files_may_be_longer_than_an_argument(shipped):
    folder = (
        shipped.root
        / "a_folder_of_a_crawl_with_a_long_name_as_on_clusters"
        / "snapshot_of_the_first_week_of_it"
    )
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"part-{number:05d}-of-00900.jsonl" for number in range(900)]
    for number, file in enumerate(files):
        file.write_text(json.dumps({"text": f"document {number}"}) + "\n")
    assert len(" ".join(map(str, files))) > 128 * 1024
    source = {"source": {"files": [str(file) for file in files]}, "validation_share": 0.1}
    corpora = {f"many-{parts}": source | {"parts": parts} for parts in (1, 2)}
    (shipped.root / "many.yaml").write_text(json.dumps({"corpora": corpora}))
    manifests = [f"results/corpus/{name}/manifest.json" for name in corpora]
    shipped.snakemake("--cores", "2", *manifests, "--configfile", "many.yaml")
    for manifest in manifests:
        splits = json.loads((shipped.root / manifest).read_text())["splits"]
        assert sum(split["rows"] for split in splits.values()) == 900
