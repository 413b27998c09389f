"""A source, a tokenizer, an approach and a figure of one's own: each one file or function, and a
line.

Formats, copies and objectives are added by docs/extend.md, which `make long-test` runs.
"""

import json
import re

import pyarrow.parquet as pq
import pytest

from tests.workflow.conftest import EVERY_SCALE, RUNS

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
def open_ends(run, inputs):
    """The last tokens of each document, padded."""
    sources = open_documents(run, inputs)
    documents, tokenizer, width = join(sources), sources[0].tokenizer, run.sequence_length + 1

    def read(indices):
        ends = [documents.document(i)[-width:] for i in indices.tolist()]
        return pad_documents(ends, width, tokenizer.pad_id)

    order = open_order(run, [len(source) for source in sources])
    return RowBatches(read, order, run, tokenizer.vocabulary_size, inputs)


OPENERS["ends"] = open_ends
'''
STEPS_TAKEN = '''
"""How many steps each run took."""

from tokenscale.report import style
from tokenscale.report.figure import Figure


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
    "BATCHES": ('"ends": Approach(online=True),', "data/batches/online.py", ENDS),
    "DRAWINGS": ('"steps_taken": "steps_taken",', "report/drawings/steps_taken.py", STEPS_TAKEN),
}
FIGURE = "results/figures/toys/steps_taken"


def test_a_source_a_tokenizer_an_approach_and_a_figure_are_a_file_or_function_and_a_line(fresh):
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
        "runs": RUNS | {"corpus": "fortunes", "tokenizer": "bytes", "approach": "ends"},
        "figures": ["steps_taken"],
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
