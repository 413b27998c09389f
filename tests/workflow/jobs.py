"""What a dry run of the tiny project plans when a thing has changed, and how a test changes it.

Rules that are not named plan no job.
"""

from contextlib import contextmanager
from pathlib import Path

from tests.workflow.conftest import EXPERIMENTS

# The tiny project (conftest.py): the experiment `ways` trains three approaches on one rank; `ranks`
# shares one of these runs and adds one on two ranks. Five stores, one of them for the benchmark of
# `ways` alone.
FOLDER = {"build_bundle": 1}
PAGES = {"build_page": 1, "build_experiment_page": 2} | FOLDER
PAPER = {"build_pdf": 1} | FOLDER
#: pages and PDF anew, from the same tables
WRITTEN = PAGES | PAPER
#: of other tables: what is said of all experiments
REPORT = {"judge_claims": 1, "build_page": 1} | PAPER
#: of another experiment: all that its tables are read for
SHOWN = {"describe_experiment": 1, "build_experiment_page": 1} | REPORT
WAYS = {"ingest": 1, "validate": 1, "draw_figure": 3} | SHOWN
RANKS = {"ingest": 1, "validate": 1, "draw_figure": 1} | SHOWN
#: runs that are judged anew, by the same tables
JUDGED = {"validate": 2, "draw_figure": 4} | SHOWN
JUDGED |= {"describe_experiment": 2, "build_experiment_page": 2}
BOTH = {"ingest": 2} | JUDGED
RUNS = {"train": 4} | BOTH
BENCHMARK = {"benchmark_storage": 1}
STORES = {"pretokenize": 4} | RUNS
TOKENIZER = {"build_tokenizer": 1} | BENCHMARK | STORES
CORPUS = {"build_corpus": 1, "corpus_records": 1} | TOKENIZER
#: accepts an edit of a training's code that cannot change its result
ACCEPTED = ("all", "--consider-ancient", "train=code")
APPROACHES = EXPERIMENTS["ways"]["factors"]["approach"]


@contextmanager
def changed(path: Path, change=lambda text: text + "\n"):
    """The file with another text, by default one empty line more; put back afterwards byte for
    byte.
    """
    before = path.read_bytes()
    after = change(before.decode()).encode()
    assert after != before, f"nothing to change in {path}"
    path.write_bytes(after)
    try:
        yield
    finally:
        path.write_bytes(before)


def source_files(project):
    return [
        p
        for p in project.root.rglob("*")
        if p.is_file() and not {".snakemake", "results"} & {*p.parts}
    ]
