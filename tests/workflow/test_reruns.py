"""What reruns and what does not: days of GPU time hang on it.

The rerun matrix. A row changes something in a built project and states exactly which jobs a dry run then plans; rules
that are not named plan none. A dry run cannot know that a rebuilt manifest will be equal, so below a store it names
what could rerun (`make run` builds tokens first, which stops the wave). `guards.md` lists what was taken out to see
these tests fail.
"""

import json
import shutil
from contextlib import ExitStack

import pytest

from tests.workflow.conftest import CONFIG, EXPERIMENTS, Project, copy_of
from tests.workflow.jobs import (
    ACCEPTED,
    APPROACHES,
    BENCHMARK,
    BOTH,
    CORPUS,
    FOLDER,
    PAGES,
    PAPER,
    REPORT,
    RUNS,
    STORES,
    TOKENIZER,
    WAYS,
    WRITTEN,
    changed,
    source_files,
)

pytestmark = [pytest.mark.slow(112), pytest.mark.workflow]


@pytest.fixture(scope="module")
def shared(built, tmp_path_factory) -> Project:
    """One copy for all rows that put back what they changed."""
    return copy_of(built, tmp_path_factory.mktemp("shared"))


# What only looks like a change


def test_touching_every_file_and_a_fresh_checkout_beside_old_results_rerun_nothing(copy):
    """Content decides: every file is newer, sources are other files, and none has other content."""
    touched = [p for p in copy.root.rglob("*") if p.is_file() and ".snakemake" not in p.parts]
    assert {p.suffix for p in touched} >= {".py", ".smk", ".yaml", ".json", ".parquet", ".bin", ".svg", ".html"}
    for path in touched:
        path.touch()
    for path in source_files(copy):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    assert copy.planned() == {}


def test_what_a_run_or_a_store_reads_is_small_enough_to_be_compared_by_content(built):
    """Snakemake judges larger files by their time. Data enters as a manifest, so its size does not matter."""
    rules = {"build_tokenizer", "pretokenize", "benchmark_data", "train"}
    found = set()
    for record in map(json.loads, (p.read_text() for p in (built.root / ".snakemake/metadata").iterdir())):
        if record["rule"] in rules:
            found.add(record["rule"])
            for name in record["input"]:
                assert name.startswith("results/code/") or name.endswith("/manifest.json"), (record["rule"], name)
                assert (built.root / name).stat().st_size < 1_000_000
    assert found == rules


def test_a_project_that_was_moved_with_its_metadata_reruns_nothing(built, tmp_path):
    assert copy_of(built, tmp_path, copy_function=shutil.copyfile).planned() == {}


def test_lists_of_source_files_and_arguments_that_were_removed_rerun_nothing(copy):
    """They are written anew, with the same content."""
    folders = [copy.root / "results/code", copy.root / "results/arguments"]
    for folder in folders:
        shutil.rmtree(folder)
    assert copy.planned() == {} and all(folder.is_dir() for folder in folders)


def test_a_dry_run_in_a_fresh_clone_writes_nothing_but_lists_of_source_files_and_arguments(fresh):
    before = set(fresh.root.rglob("*"))
    assert fresh.planned()["train"] == 4
    new = {p.relative_to(fresh.root).parts for p in set(fresh.root.rglob("*")) - before if p.is_file()}
    written = {p for p in new if p[0] != ".snakemake" and "__pycache__" not in p}
    assert {p[:2] for p in written} == {("results", "code"), ("results", "arguments")}
    assert {p[-1] for p in written if p[1] == "code"} == {"sources.json"}


def test_a_comment_in_the_workflow_or_the_configuration_reruns_nothing(shared):
    def commented(text):
        inside = text.replace("\n    input:\n", "\n    # a comment\n    input:\n        # another one\n")
        return f"# at the top\n\n{inside}\n\n# at the end\n"

    with ExitStack() as edits:
        for path in [shared.root / "workflow/Snakefile", *(shared.root / "workflow/rules").glob("*.smk")]:
            edits.enter_context(changed(path, commented))
        for path in (shared.root / "config").rglob("*.yaml"):
            edits.enter_context(changed(path, lambda text: f"# a comment\n{text}\n"))
        assert shared.planned() == {}


def test_other_resources_threads_and_log_paths_rerun_nothing(shared):
    def other(text):
        for old, new in [
            ("mem_mb=settings.machine.memory_mb", "mem_mb=7"),
            ("runtime=job_minutes", "runtime=60"),
            ("threads: ALL_CORES", "threads: 1"),
            ("results/logs/train/{run_id}.log", "results/logs/elsewhere/{run_id}.log"),
        ]:
            assert old in text
            text = text.replace(old, new)
        return text

    with changed(shared.root / "workflow/rules/train.smk", other):
        options = ("--set-resources", "train:mem_mb=7", "--set-threads", "train=2", "pretokenize=2")
        assert shared.planned("all", *options) == {}


@pytest.mark.parametrize(
    "profile, configuration",
    # what the profile says about the machine stays
    [
        ("profiles/default", []),
        ("alps", ["machine=profiles/alps/machine.toml"]),
        ("profiles/slurm-test", ["machine=profiles/slurm-test/machine.toml"]),
    ],
)
def test_another_profile_reruns_nothing(shared, monkeypatch, profile, configuration):
    monkeypatch.setenv("ALPS_ACCOUNT", "g1")
    assert shared.planned("--profile", profile, "--config", "scale=demo", *configuration) == {}


# A code edit in every room


ROOMS = [
    ("settings/options.py", CORPUS),
    ("settings/run.py", BENCHMARK | RUNS),
    ("settings/config.py", {}),
    ("settings/presets.py", {}),
    ("settings/registry.py", {}),
    ("costs/flops.py", RUNS),
    ("costs/peaks.py", BOTH),  # what a device can do stands beside every run
    ("data/order/packing.py", STORES | {"pretokenize": 2}),
    ("data/order/permutation.py", BENCHMARK | RUNS | {"pretokenize": 2}),  # rows of packed stores are shuffled by it
    ("runs/records/events.py", RUNS),
    ("runs/records/provenance.py", BENCHMARK | RUNS),
    ("data/corpus/build.py", CORPUS),
    ("data/corpus/download.py", {}),
    ("data/corpus/dummy.py", CORPUS),
    ("parity/certificate.py", {}),
    ("arms/train.py", {}),  # no run of the copy has another trainer
    ("data/tokenizers/backends.py", TOKENIZER),
    ("data/tokenizers/tekken.py", TOKENIZER),  # tokenizers are one group
    ("data/batches/torch_data.py", BENCHMARK | WAYS),
    ("data/stores/packed.py", BENCHMARK | RUNS),
    ("data/stores/parquet.py", {"train": 1} | BENCHMARK | WAYS),
    ("data/stores/write_packed.py", STORES | {"pretokenize": 2}),
    ("data/stores/write_parquet.py", {"pretokenize": 4, "train": 1} | BENCHMARK | WAYS),
    ("data/stores/writing.py", STORES),
    ("data/batches/online.py", {"train": 1} | BENCHMARK | WAYS),
    ("data/batches/stored.py", BENCHMARK | RUNS),
    ("train/models/decoder.py", RUNS),
    ("train/models/build.py", RUNS),
    ("train/models/library.py", {}),  # no run has a model of transformers
    ("train/models/convert_hf.py", {}),
    ("train/parallel/ddp.py", RUNS),
    ("train/evaluation/validation.py", RUNS),
    ("train/loop.py", RUNS),
    ("cli/train_inputs.py", {}),
    ("runs/launch/ranks.py", RUNS),
    ("runs/launch/attempts.py", {}),
    ("analysis/ingest.py", BOTH),
    ("analysis/sql/loss_curves.sql", {"draw_figure": 1, "judge_claims": 1} | WRITTEN),
    ("analysis/sql/order.sql", {"judge_claims": 1} | WRITTEN),
    ("analysis/claims.py", {"judge_claims": 1} | WRITTEN),
    ("report/style.py", {"draw_figure": 4} | WRITTEN),
    ("report/drawings/loss_over_time.py", {"draw_figure": 1, "build_experiment_page": 1} | PAPER),
    ("report/page.py", PAGES),
    ("report/page.css", PAGES),
    ("report/pdf.py", PAPER),
    ("report/bundle.py", FOLDER),
    ("benchmark/data.py", BENCHMARK | WAYS),
    ("cli/pretokenize.py", STORES),
    ("cli/train.py", {}),
    ("cli/doctor.py", {}),
    ("cli/rank.py", RUNS),
    ("cli/launch.py", {}),
    ("base/files.py", CORPUS),
    ("base/errors.py", {}),
    ("cli/main.py", {}),
    ("__init__.py", {}),
]


@pytest.fixture(scope="module")
def planned_by(shared):
    """Plan a dry run with a file edited; once for files that are in the same listings, by which alone jobs see code."""
    listings = {path: path.read_text() for path in shared.root.glob("results/code/**/sources.json")}
    assert listings
    planned = {}

    def plan(file: str) -> dict[str, int]:
        holding = frozenset(path for path, text in listings.items() if f'"tokenscale/{file}"' in text)
        if holding not in planned:
            with changed(shared.root / "src/tokenscale" / file):
                planned[holding] = shared.planned()
        return planned[holding]

    return plan


@pytest.mark.parametrize("file, expected", [pytest.param(*row, id=row[0]) for row in ROOMS])
def test_an_edit_reruns_exactly_the_jobs_whose_code_it_is(planned_by, file, expected):
    assert planned_by(file) == expected


def test_an_accepted_edit_of_the_trainings_still_rebuilds_everything_else(shared):
    with changed(shared.root / "src/tokenscale/data/order/packing.py"):
        planned = shared.planned("tokens", *ACCEPTED[1:])
    assert planned == {"pretokenize": 2}


def test_an_accepted_edit_may_add_an_import(shared):
    path = shared.root / "src/tokenscale/train/models/decoder.py"
    with changed(path, lambda text: f"{text}\nimport tokenscale.report.style\n"):
        assert shared.planned() == RUNS and shared.planned(*ACCEPTED) == {}


def test_a_rules_shell_string_is_its_code(shared):
    path = shared.root / "workflow/rules/train.smk"
    with changed(path, lambda text: text.replace("tokenscale launch {params", "tokenscale launch  {params")):
        assert shared.planned() == RUNS


# A setting


def in_experiment(**changes):
    """The text of the experiment `ways` with other values of keys, dotted ones nested."""
    return "experiments/ways.yaml", EXPERIMENTS["ways"], changes


def in_config(**changes):
    """The text of the configuration with other values of keys."""
    return "config.yaml", CONFIG, changes


CORPORA, TOKENIZERS = CONFIG["corpora"], CONFIG["tokenizers"]
SETTINGS = {
    "a learning rate trains the runs of its experiment": (
        in_experiment(runs=EXPERIMENTS["ways"]["runs"] | {"optimizer": {"learning_rate": 0.01}}),
        {"run_table": 1, "train": 3} | WAYS,
    ),
    "one more level trains the new run": (
        in_experiment(factors={"approach": [*APPROACHES, "padded"]}),
        {"run_table": 1, "train": 1} | WAYS,
    ),
    "one more repeat trains the new runs": (in_experiment(repeats=2), {"run_table": 1, "train": 3} | WAYS),
    "one level less trains nothing": (in_experiment(factors={"approach": APPROACHES[:2]}), {"run_table": 1} | WAYS),
    "another order of starting trains nothing": (in_experiment(order_seed=1), {"run_table": 1} | WAYS),
    "a question's wording trains nothing": (in_experiment(question="Do they?"), {"run_table": 1} | WAYS),
    "a cleaning option rebuilds everything below that corpus": (
        in_config(corpora={"small": CORPORA["small"] | {"cleaning": {"nfc": True}}}),
        {"run_table": 2} | CORPUS,
    ),
    "a tokenizer's option rebuilds everything below that tokenizer": (
        in_config(tokenizers={"bpe": TOKENIZERS["bpe"] | {"vocabulary_size": 301}}),
        {"run_table": 2} | TOKENIZER,
    ),
    "a corpus and a tokenizer that nobody uses build nothing": (
        in_config(corpora=CORPORA | {"other": {}}, tokenizers=TOKENIZERS | {"other": {"kind": "tekken"}}),
        {},
    ),
    "one experiment less in the report rebuilds the report": (in_config(experiments=["ways"]), REPORT),
}


@pytest.mark.parametrize("change, expected", [pytest.param(*row, id=name) for name, row in SETTINGS.items()])
def test_a_setting_reruns_exactly_what_depends_on_it(shared, change, expected):
    file, values, changes = change
    with changed(shared.root / "config" / file, lambda text: json.dumps(values | changes)):
        assert shared.planned() == expected
