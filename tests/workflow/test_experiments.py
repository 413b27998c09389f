"""Every experiment of config/experiments, cut down, from an empty results folder to one report:
`all_experiments`.
"""

import csv
import json
import shutil
from pathlib import Path

import pytest

from tests.corpora import pairs_source
from tests.once import once
from tests.workflow import forked
from tests.workflow.conftest import ROOT, Project, copy_of, make_project
from tokenscale.analysis.queries import query
from tokenscale.referee.claims import VERDICTS
from tokenscale.settings import config as configuration
from tokenscale.settings import options
from tokenscale.settings.config import ALL
from tokenscale.settings.experiments import Experiment, expand_cells
from tokenscale.settings.options import to_dict
from tokenscale.settings.yaml_files import read_yaml

pytestmark = [pytest.mark.long, pytest.mark.slow(20), pytest.mark.workflow]
REPORT = f"results/report-experiments={ALL}"
#: file of claims → folder of the report that tests them
LEDGERS = {"claims": REPORT, "replication": "results/replication"}

#: cells of an experiment that are run, one repeat each; of these more: one reads a store, one is
#: sharded
MOST = 3
MORE = {"data_path": 4, "elastic_resume": 4}
TINY = {"kind": "docstrings", "packages": ["pydoc_data", "numpy"], "maximum_documents": 150}
BENCHMARKS = {
    "storage_benchmark": {
        "sequence_length": 32,
        "documents": 50,
        "codecs": ["none", "zstd-3"],
        "rounds": 2,
    },
}
#: in place of what the file says: lengths that fit short rows
WRITTEN = {
    "prompt_tokens": [8],
    "new_tokens": [12, 40],
    "batches": [2],
    "sample_tokens": 10,
    "rounds": 2,
}
#: two trainings at a time, on a core each
FAST = ("--cores", "2", "--set-threads", "train=1", "--resources", "machine=2")


def small(key, value):
    """The value of a setting at the size of a test; levels stay apart that are apart."""
    if isinstance(value, dict):
        return {
            name: small(f"{key}.{name}" if key else name, inner) for name, inner in value.items()
        }
    shrunk = {
        "model": lambda v: v.replace("-tiny", "-micro") if v in ("llama-tiny", "gpt2-tiny") else v,
        "model.hidden": lambda v: 96,
        "sequence_length": lambda v: v // 4,
        "budget.steps": lambda v: min(6, max(4, v // 4 + 2)),  # the first three are a warm-up
        "budget.useful_tokens": lambda v: v // 10,
        "budget.epochs": lambda v: v / 5,  # 5 steps of the largest batch
        "schedule.warmup_steps": lambda v: 1,
        "checkpoints.every": lambda v: v // 4,
        "resume_from.step": lambda v: v // 4,
        "validation.rows": lambda v: min(v, 4),
        "validation.every": lambda v: min(v, 2),
        "validation.bleu": lambda v: min(v, 2),
    }
    return shrunk[key](value) if key in shrunk else value


def few(every, most):
    """At most so many cells: the first, then such as differ from it in one setting, then in
    several.
    """
    first, *others = every
    apart = {}
    for cell in others:
        apart.setdefault(tuple(key for key in cell if cell[key] != first[key]), []).append(cell)
    queues = sorted(apart.values(), key=lambda queue: sum(queue[0][k] != first[k] for k in first))
    chosen = [first]
    while any(queues):
        chosen += [queue.pop(-(len(chosen) % 2)) for queue in queues if queue]
    return chosen[:most]


def cut(values, file):
    """An experiment's file with small settings, few cells and one repeat."""
    values = {
        key: value
        for key, value in values.items()
        if key not in ("scales", "canary", "primary", "primary_repeats")
    }
    changed = {"repeats": 1, "left_out": []}
    for kind in BENCHMARKS.keys() & values.keys():
        changed[kind] = values[kind] | {"settings": BENCHMARKS[kind]}
    if "inference_benchmark" in values:
        changed["inference_benchmark"] = values["inference_benchmark"] | WRITTEN
    every = expand_cells(options.decode(Experiment, values, file=file))
    if every:
        keys = list(every[0])
        levels = [
            [small(key, cell[key]) for key in keys]
            for cell in few(every, MORE.get(Path(file).stem, MOST))
        ]
        changed["runs"] = small("", values["runs"])
        changed["factors"] = {
            ", ".join(keys): levels if len(keys) > 1 else [level for (level,) in levels]
        }
    return values | changed


def make(folder):
    """A project with all experiments and the ledger, and nothing built."""
    project = make_project(folder)
    shutil.rmtree(project.root / "config/experiments")
    (project.root / "config/experiments").mkdir()
    for ledger in LEDGERS:
        shutil.copy(ROOT / f"config/{ledger}.yaml", project.root / f"config/{ledger}.yaml")
    config = read_yaml(ROOT / "config/config.yaml")
    config["corpora"]["docstrings"]["source"] = TINY
    config["corpora"]["grammar"]["source"] = to_dict(pairs_source(200))
    for place, (name, tokenizer) in enumerate(config["tokenizers"].items()):
        if tokenizer["kind"] == "tekken" or tokenizer.get("corpus") == "docstrings":
            config["tokenizers"][name] = {
                "kind": "bpe",
                "corpus": "docstrings",
                "vocabulary_size": 300 + place,  # an experiment may compare them
            }
    (project.root / "config/config.yaml").write_text(json.dumps(config))
    for path in sorted((ROOT / "config/experiments").glob("*.yaml")):
        if path.stem == "frameworks":  # needs environments of its own: test_arms.py
            continue
        experiment = cut(read_yaml(path), path.name)
        (project.root / "config/experiments" / path.name).write_text(json.dumps(experiment))
    return project


def build(folder):
    project = make(folder)
    targets = [ALL, "replication", *FAST]
    code, text = forked.snakemake(targets, project.root, project.environment, timeout_s=3000)
    assert code == 0, text[-6000:] + project.logs()


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """All of them built, once; nobody changes it."""
    return Project(once(tmp_path_factory, "experiments", build) / "project")


@pytest.fixture(scope="module")
def config(everything):
    return configuration.load_config(root=everything.root)


def test_every_figure_is_there_and_shows_what_was_measured(everything, config):
    empty = []
    for name in config.available:
        assert (everything.root / REPORT / f"{name}.html").is_file()
        for figure in config.experiment(name).figures:
            path = everything.root / f"results/figures/{name}/{figure}"
            assert path.with_suffix(".svg").stat().st_size > 1000
            with open(path.with_suffix(".csv"), newline="") as file:
                if len(list(csv.reader(file))) < 2:
                    empty.append((name, figure))
    assert empty == []


@pytest.mark.parametrize("name", LEDGERS)
def test_every_claim_has_a_verdict_from_an_experiment_made_for_it(everything, name):
    ledger = read_yaml(everything.root / f"config/{name}.yaml")["claims"]
    report = everything.root / LEDGERS[name]
    judged = json.loads((report / "claims.json").read_text())["claims"]
    assert [claim["id"] for claim in judged] == [*ledger]
    for claim in judged:
        assert claim["verdict"] in VERDICTS and (
            claim["experiment"] or claim["sentence"] or claim["reason"]
        )
    answered = {claim["id"]: claim["experiment"] for claim in judged if claim["experiment"]}
    of_studies = name == "replication"
    expected = {"formats_in_training", "parallelism", "precision"} if of_studies else {"demo"}
    assert {*answered.values()} >= expected
    text = (report / "index.html").read_text()
    shown = [claim["id"] for claim in judged if claim["verdict"] != "not tested at this scale"]
    assert all(f'id="claim-{claim}"' in text for claim in shown)
    assert ('id="originals"' in text) == of_studies


def test_runs_that_experiments_share_ran_once(everything, config):
    listed = [run.run_id for name in config.available for run in config.runs(name)]
    assert len(listed) > len(set(listed))
    assert all(len(config.runs(name)) <= MORE.get(name, MOST) for name in config.available)
    assert {path.name for path in everything.root.glob("results/runs/*")} == set(listed)
    for run_id in set(listed):
        attempts = sorted(
            path.name for path in everything.root.glob(f"results/runs/{run_id}/attempt=*")
        )
        assert attempts == ["attempt=00"], run_id


def test_runs_that_go_on_in_other_layouts_have_the_samples_and_losses_of_what_was_not_interrupted(
    everything, config
):
    resumed = [run for run in config.runs("elastic_resume") if run.settings.resume_from]
    assert {run.settings.layout.method for run in resumed} == {"single", "fsdp"}
    pairs = query("order", everything.root / "results/tables/elastic_resume")
    pairs = pairs[pairs["kind"] == "resumed and uninterrupted"]
    assert sorted(pairs["compared"]) == sorted(run.run_id for run in resumed)
    assert (
        pairs["same_data"].all()
        and pairs["same_useful_tokens"].all()
        and set(pairs["steps_compared"]) == {4}
    )
    assert (pairs["largest_loss_difference"] < 1e-5).all()
    report = everything.root / LEDGERS["replication"]
    judged = json.loads((report / "claims.json").read_text())["claims"]
    verdicts = {
        claim["id"]: claim["verdict"] for claim in judged if claim["id"].startswith("resumed-")
    }
    assert verdicts == {"resumed-same-samples": "supported", "resumed-same-losses": "supported"}


def test_a_level_that_is_added_runs_alone_and_renews_what_shows_it(everything, tmp_path):
    project = copy_of(everything, tmp_path)
    assert project.planned(ALL) == {}
    path = project.root / "config/experiments/single_vs_multi.yaml"
    experiment = json.loads(path.read_text())
    (levels,) = experiment["factors"].values()
    levels.append([2, 8, 5])
    path.write_text(json.dumps(experiment))
    assert project.planned(ALL) == {
        "train": 1,
        "run_table": 1,
        "ingest": 1,
        "validate": 1,
        "draw_figure": len(experiment["figures"]),
        "describe_experiment": 1,
        "build_experiment_page": 1,
        "judge_claims": 1,
        "build_page": 1,
        "build_pdf": 1,
        "build_bundle": 1,
    }
