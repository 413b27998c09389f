"""A source and a tokenizer of one's own: each a file of the package and a line. An approach, a format,
an objective and a figure: each a file of the folder `extensions`, named by settings.

The larger examples of docs/extend.md run in `make long-test`.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.workflow.conftest import EVERY_SCALE, ROOT, RUNS, Project
from tokenscale.settings.config import load_config
from tokenscale.settings.manifests import list_manifests

pytestmark = [pytest.mark.experiment, pytest.mark.workflow]

REGISTRY = "src/tokenscale/settings/registry.py"
FORTUNE = '''
"""The source `fortune`: short sentences, counted."""


def describe(source, downloads=None):
    return {"kind": "fortune", "documents": source.documents}


def documents(source, downloads=None):
    for i in range(source.documents):
        yield f"Fortune {i} favours the bold and the patient.", f"fortune::{i}"
'''
BYTES = '''
"""The tokenizer `bytes`: an id for each byte of UTF-8, after three control tokens."""

import json

import numpy as np

from tokenscale.data.tokenizers.base import Tokenizer, join_ids, to_strings


def make(settings, directory, corpus_directory):
    path = directory / "bytes.json"
    path.write_text(json.dumps({"control": 3}))
    return path, {"vocabulary_size": 259, "bos_id": 0, "eos_id": 1, "pad_id": 2}


def load(path, manifest, engine="auto"):
    return Bytes(manifest)


class Bytes(Tokenizer):
    def encode(self, texts):
        return join_ids([
            np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) + 3 for text in to_strings(texts)
        ])

    def decode(self, ids):
        return bytes(int(i) - 3 for i in ids if i >= 3).decode(errors="replace")
'''
ENDS = '''
"""The last tokens of each document, padded."""

from tokenscale.data.batches.batch import RowBatches
from tokenscale.data.batches.online import open_documents
from tokenscale.data.batches.streams import join
from tokenscale.data.mixtures import open_order
from tokenscale.data.stores.documents import pad_documents
from tokenscale.settings.extensions import approach


@approach(online=True)
def open_ends(run, inputs):
    sources = open_documents(run, inputs)
    documents, tokenizer, width = join(sources), sources[0].tokenizer, run.sequence_length + 1

    def read(indices):
        ends = [documents.document(i)[-width:] for i in indices.tolist()]
        return pad_documents(ends, width, tokenizer.pad_id)

    order = open_order(run, [len(source) for source in sources])
    return RowBatches(read, order, run, tokenizer.vocabulary_size, inputs)
'''
STEPS_TAKEN = '''
"""How many steps each run took."""

from tokenscale.report import style
from tokenscale.report.figure import Figure
from tokenscale.settings.extensions import figure


@figure()
class StepsTaken(Figure):
    title = "Measured steps"
    queries = ("throughput",)

    def data(self):
        return self.throughput[["run_id", "steps"]]

    def draw(self):
        with style.style():
            made, (axes,) = style.figure(1)
            axes.bar(self.throughput["series"], self.throughput["steps"])
            axes.set_ylabel("steps")
        return made

    def caption(self):
        return f"{len(self.throughput)} runs."

    def alt(self):
        return f"Bars of the measured steps of {len(self.throughput)} runs."
'''
#: table of the registry → (the line, the file, the text at its end)
ADDED = {
    "SOURCES": (
        (
            '"fortune": SourceSpec("short sentences", ("documents",), '
            'module="tokenscale.data.corpus.fortune"),'
        ),
        "data/corpus/fortune.py",
        FORTUNE,
    ),
    "TOKENIZERS": (
        '"bytes": TokenizerSpec(module="tokenscale.data.tokenizers.utf8"),',
        "data/tokenizers/utf8.py",
        BYTES,
    ),
}
EXTENSIONS = {"ends.py": ENDS, "drawn.py": STEPS_TAKEN}
#: the module of the document of this name
DOCUMENT = (ROOT / "docs/extend.md").read_text()
FIGURE = "results/figures/toys/drawn.StepsTaken"


def documented(name: str) -> str:
    """A module of docs/extend.md."""
    return re.search(rf"```python extensions/{name}.py\n(.*?)```\n", DOCUMENT, re.DOTALL)[1]


def add_extensions(project: Project, files: dict[str, str]) -> Path:
    folder = project.root / "extensions"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text.lstrip())
    return folder


def test_sources_and_tokenizers_are_a_file_and_a_line_approaches_and_figures_a_file(fresh):
    add_extensions(fresh, EXTENSIONS)
    text = (fresh.root / REGISTRY).read_text()
    for table, (line, file, module) in ADDED.items():
        text, found = re.subn(rf"^{table} = {{\n", rf"\g<0>    {line}\n", text, flags=re.MULTILINE)
        assert found == 1, table
        with (fresh.root / "src/tokenscale" / file).open("a") as stream:
            stream.write(module.lstrip() if stream.tell() == 0 else module)
    (fresh.root / REGISTRY).write_text(text)
    config = {
        "scale": "demo",
        "experiments": ["toys"],
        "corpora": {"fortunes": {"source": {"kind": "fortune", "documents": 60}}},
        "tokenizers": {"bytes": {"kind": "bytes"}},
    }
    experiment = {
        "question": "Does what was added work together?",
        "runs": RUNS | {"corpus": "fortunes", "tokenizer": "bytes", "approach": "ends:open_ends"},
        "figures": ["drawn:StepsTaken"],
        "scales": EVERY_SCALE,
    }
    (fresh.root / "config/config.yaml").write_text(json.dumps(config))
    (fresh.root / "config/claims.yaml").write_text("{}")
    for old in (fresh.root / "config/experiments").iterdir():
        old.unlink()
    (fresh.root / "config/experiments/toys.yaml").write_text(json.dumps(experiment))
    fresh.snakemake("--cores", "2", f"{FIGURE}.svg")
    source, tokenizer = (
        json.loads((fresh.root / f"results/{folder}/manifest.json").read_text())
        for folder in ("corpus/fortunes", "tokenizers/bytes")
    )
    assert source["source"] == {"kind": "fortune", "documents": 60}
    assert (
        sum(split["rows"] for split in source["splits"].values()) == 60
        and tokenizer["vocabulary_size"] == 259
    )
    (log,) = fresh.root.glob("results/runs/*/attempt=00/rank=00000/steps.jsonl")
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert "ends" in str(log) and len(steps) == RUNS["budget"]["steps"]
    # each document is longer than a row, whose first token is none of its start: all labels count
    assert all(step["total_tokens"] == step["useful_tokens"] == 4 * 32 for step in steps)
    assert pq.read_table(fresh.root / f"{FIGURE}.parquet").num_rows == 1
    assert (fresh.root / f"{FIGURE}.svg").stat().st_size > 1000
    wrong = {
        "corpora": {"c": {"source": {"kind": "fortun"}}},
        "tokenizers": {"t": {"kind": "byte"}},
    }
    (fresh.root / "mine.yaml").write_text(json.dumps(wrong))
    message = fresh.snakemake("-n", "--configfile", "mine.yaml", check=False).stdout
    assert "'fortune'" in message and "'bytes'" in message


OWN = {
    "question": "Does an own loss over an own store train?",
    "runs": RUNS | {"approach": "raw:Raw"},
    "factors": {"objective": ["causal", "smoothed:Smoothed"], "layout.data": [1, 2]},
    "figures": ["loss_over_time", "drawn:StepsTaken"],
    "scales": EVERY_SCALE,
}


@pytest.fixture
def own(fresh) -> Project:
    """A project with an own objective, format and figure."""
    modules = {f"{name}.py": documented(name) for name in ("smoothed", "raw")}
    add_extensions(fresh, modules | {"drawn.py": STEPS_TAKEN})
    (fresh.root / "config/experiments/own.yaml").write_text(json.dumps(OWN))
    return fresh


def tokenscale(project: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in the project, as a user starts it."""
    command = [sys.executable, "-m", "tokenscale", *arguments]
    return subprocess.run(
        command, cwd=project.root, env=project.environment, capture_output=True, text=True
    )


def runs_of(project: Project) -> dict[str, dict]:
    """Run id → record, of the experiment's runs."""
    table = json.loads((project.root / "results/experiments/own/runs.json").read_text())["runs"]
    paths = {row["run_id"]: project.root / "results/runs" / row["run_id"] for row in table}
    return {run_id: json.loads((path / "run.json").read_text()) for run_id, path in paths.items()}


def test_own_modules_go_from_the_file_to_the_page_and_are_not_needed_to_judge_again(own):
    own.snakemake("--cores", "2", "own")
    records = runs_of(own)
    assert all(record["outcome"]["status"] == "complete" for record in records.values())
    ours = [record for record in records.values() if record["run"].get("objective")]
    assert len(records) == 4 and len(ours) == 2
    assert all("extensions/smoothed.py" in record["code"] for record in ours)
    # an own loss is another loss, and two ranks compute that of one
    report = own.root / "results/report-experiments=own"
    page = (report / "index.html").read_text()
    assert "smoothed:Smoothed" in page and "Measured steps" in page
    rows = pq.read_table(own.root / "results/tables/own/validity.parquet").to_pylist()
    assert {row["validity"] for row in rows} <= {"valid", "suspect"}, rows
    assert not any("changed" in str(row["reason"]) for row in rows if "reason" in row)
    # an edit plans another run of its own objective, and of nothing else
    module = own.root / "extensions/smoothed.py"
    module.write_text(module.read_text().replace("0.1", "0.2"))
    assert own.planned("runs", "--config", "experiments=own").get("train") == 2
    # the report is built again where the modules are not
    shutil.rmtree(own.root / "extensions")
    archive = report.rename(own.root.parent / "report")
    done = tokenscale(own, "report", "rebuild", f"{archive}/logs.json.xz", "--output", "again")
    assert done.returncode == 0, done.stderr
    again = (own.root / "again/report/index.html").read_text()
    assert "drawn.StepsTaken is left out: extensions/drawn.py is not here" in again
    assert "smoothed:Smoothed" in again


HARMS = {
    "raises": (lambda text: f"{text}\n1 / 0\n", "ZeroDivisionError: division by zero"),
    "another class": (lambda text: text.replace("(Objective)", ""), "no subclass of Objective"),
}


def test_an_own_module_that_fails_on_two_ranks_is_one_message_and_nothing_is_trained(own):
    module = own.root / "extensions/smoothed.py"
    text = module.read_text()
    own.snakemake("--cores", "2", "tokens", "--config", "experiments=own")
    for change, words in HARMS.values():
        module.write_text(change(text))
        runs = load_config(root=own.root).runs("own")
        (run,) = [r for r in runs if "ddp-w2" in r.run_id and "smoothed" in r.settings.objective]
        done = tokenscale(own, "launch", run.run_id)
        assert done.returncode == 2, done.stderr
        messages = [line for line in done.stderr.splitlines() if line.startswith("tokenscale: ")]
        assert [line for line in messages if "rank" not in line] == messages[:1], done.stderr
        assert words in done.stderr and "Traceback" not in done.stderr
        folder = own.root / "results/runs" / run.run_id
        assert not any(path.read_text() for path in folder.rglob("steps.jsonl"))
        assert not (folder / "done.json").exists()
    # what was planned is not what is there
    module.write_text(text)
    manifests = [
        f"--{name.replace('_', '-')}={path}" for name, path in list_manifests(run.settings).items()
    ]
    planned = ["launch", "--run", run.settings.to_json(), "--output", "results/runs/x/done.json"]
    done = tokenscale(own, *planned, *manifests)
    assert done.returncode == 2 and "has changed since this was planned" in done.stderr
    assert not (own.root / "results/runs/x").exists()
