"""What reruns and what does not: days of GPU time hang on it.

The rerun matrix. A row changes something in a built project and states exactly which jobs a dry run
then plans; rules that are not named plan none. A dry run cannot know that a rebuilt manifest will
be equal, so below a store it names what could rerun (`make run` builds tokens first, which stops
the wave). `guards.md` lists what was taken out to see these tests fail.
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
    JUDGED,
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

pytestmark = [pytest.mark.slow(90), pytest.mark.workflow]


@pytest.fixture(scope="module")
def shared(built, tmp_path_factory) -> Project:
    """One copy for all rows that put back what they changed."""
    return copy_of(built, tmp_path_factory.mktemp("shared"))


# What only looks like a change


def test_a_project_that_is_all_new_files_elsewhere_reruns_nothing(built, tmp_path):
    """Content decides: every file is newer, sources last, and lists of source files are written
    again.
    """
    moved = copy_of(built, tmp_path, copy_function=shutil.copyfile)
    for path in source_files(moved):
        path.touch()
    assert moved.planned() == {}
    folders = [moved.root / "results/code", moved.root / "results/arguments"]
    for folder in folders:
        shutil.rmtree(folder)
    assert moved.planned() == {} and all(folder.is_dir() for folder in folders)


def test_what_a_run_or_a_store_reads_is_small_enough_to_be_compared_by_content(built):
    """Snakemake judges larger files by their time. Data enters as a manifest, so its size does not
    matter.
    """
    rules = {"build_tokenizer", "pretokenize", "benchmark_storage", "train"}
    found = set()
    for record in map(
        json.loads, (p.read_text() for p in (built.root / ".snakemake/metadata").iterdir())
    ):
        if record["rule"] in rules:
            found.add(record["rule"])
            for name in record["input"]:
                assert name.startswith("results/code/") or name.endswith("/manifest.json"), (
                    record["rule"],
                    name,
                )
                assert (built.root / name).stat().st_size < 1_000_000
    assert found == rules


def test_a_dry_run_in_a_fresh_clone_writes_nothing_but_lists_of_source_files_and_arguments(fresh):
    before = set(fresh.root.rglob("*"))
    assert fresh.planned()["train"] == 4
    new = {
        p.relative_to(fresh.root).parts for p in set(fresh.root.rglob("*")) - before if p.is_file()
    }
    written = {p for p in new if p[0] != ".snakemake" and "__pycache__" not in p}
    assert {p[:2] for p in written} == {("results", "code"), ("results", "arguments")}
    assert {p[-1] for p in written if p[1] == "code"} == {"sources.json"}


def test_a_comment_in_the_workflow_or_the_configuration_reruns_nothing(shared):
    def commented(text):
        inside = text.replace(
            "\n    input:\n", "\n    # a comment\n    input:\n        # another one\n"
        )
        return f"# at the top\n\n{inside}\n\n# at the end\n"

    with ExitStack() as edits:
        for path in [
            shared.root / "workflow/Snakefile",
            *(shared.root / "workflow/rules").glob("*.smk"),
        ]:
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


def test_another_profile_reruns_nothing(shared, monkeypatch):
    monkeypatch.setenv("ALPS_ACCOUNT", "g1")
    configuration = ["scale=demo", "machine=profiles/alps/machine.toml"]
    assert shared.planned("--profile", "alps", "--config", *configuration) == {}


# A code edit in every room


ROOMS = [
    ("settings/options.py", CORPUS),
    ("settings/run.py", BENCHMARK | RUNS),
    ("costs/peaks.py", BOTH),  # what a device can do stands beside every run
    ("data/order/packing.py", STORES | BENCHMARK | {"pretokenize": 2}),
    # rows of packed stores are shuffled by it
    ("data/order/permutation.py", BENCHMARK | RUNS | {"pretokenize": 2}),
    ("data/corpus/build.py", CORPUS),
    ("data/tokenizers/tekken.py", TOKENIZER),  # tokenizers are one group
    ("data/stores/parquet.py", {"train": 1} | BENCHMARK | WAYS),
    ("data/stores/write_packed.py", STORES | {"pretokenize": 2}),
    ("data/stores/write_parquet.py", {"pretokenize": 1, "train": 1} | BENCHMARK | WAYS),
    ("data/stores/writing.py", STORES | BENCHMARK),
    ("data/batches/online.py", {"train": 1} | WAYS),
    ("train/models/decoder.py", RUNS),
    ("analysis/ingest.py", BOTH),
    ("referee/run_values.py", JUDGED),
    ("analysis/sql/loss_curves.sql", {"draw_figure": 1, "judge_claims": 1} | WRITTEN),
    ("referee/claims.py", {"judge_claims": 1} | WRITTEN),
    ("report/style.py", {"draw_figure": 4, "describe_experiment": 2} | WRITTEN),
    ("report/drawings/loss_over_time.py", {"draw_figure": 1, "build_experiment_page": 1} | PAPER),
    ("report/page.css", PAGES),
    ("report/pdf.py", PAPER),
    ("report/bundle.py", FOLDER),
    ("benchmark/storage.py", BENCHMARK | WAYS),
    ("cli/pretokenize.py", STORES),
    ("cli/rank.py", RUNS),
]
#: code of no job: what starts jobs, and trainers, models and sources that no run of the copy has
NOBODYS = [
    *(
        "__init__.py",
        "base/errors.py",
        "settings/config.py",
        "settings/presets.py",
        "settings/registry.py",
    ),
    *(
        "cli/main.py",
        "cli/train/command.py",
        "cli/train/inputs.py",
        "cli/doctor.py",
        "cli/launch.py",
    ),
    *(
        "runs/launch/attempts.py",
        "arms/train.py",
        "parity/certificate.py",
        "data/corpus/download.py",
    ),
    *("arms/reader.py", "data/batches/torch_data.py"),
    *("train/models/library.py", "train/models/convert_hf.py"),
]


#: rooms whose jobs are those of another row
REPEATED = {
    *("settings/options.py", "costs/peaks.py", "data/stores/write_packed.py"),
    *("cli/pretokenize.py", "cli/rank.py"),
}


@pytest.mark.parametrize(
    "file, expected",
    [
        pytest.param(*row, id=row[0], marks=pytest.mark.long if row[0] in REPEATED else ())
        for row in ROOMS
    ],
)
def test_an_edit_reruns_exactly_the_jobs_whose_code_it_is(shared, file, expected):
    with changed(shared.root / "src/tokenscale" / file):
        assert shared.planned() == expected


def test_an_edit_of_code_that_no_job_has_reruns_nothing(shared):
    with ExitStack() as edits:
        for file in NOBODYS:
            edits.enter_context(changed(shared.root / "src/tokenscale" / file))
        assert shared.planned() == {}


def test_an_accepted_edit_of_the_trainings_still_rebuilds_everything_else(shared):
    with changed(shared.root / "src/tokenscale/data/order/packing.py"):
        planned = shared.planned("tokens", *ACCEPTED[1:])
    assert planned == {"pretokenize": 2}


def test_an_accepted_edit_may_add_an_import(shared):
    path = shared.root / "src/tokenscale/train/models/decoder.py"
    with changed(path, lambda text: f"{text}\nimport tokenscale.report.style\n"):
        assert shared.planned(*ACCEPTED) == {}


def test_a_rules_shell_string_is_its_code(shared):
    path = shared.root / "workflow/rules/train.smk"
    with changed(
        path, lambda text: text.replace("tokenscale launch {params", "tokenscale launch  {params")
    ):
        assert shared.planned() == RUNS


# A setting


CORPORA = CONFIG["corpora"]
TOKENIZERS = CONFIG["tokenizers"]
#: what changes → (keys of the experiment `ways` or of the configuration with other values, what is
#: planned)
SETTINGS = {
    "a learning rate trains the runs of its experiment": (
        {"runs": EXPERIMENTS["ways"]["runs"] | {"optimizer": {"learning_rate": 0.01}}},
        {"run_table": 1, "train": 3} | WAYS,
    ),
    "one more level and one more repeat train the new runs": (
        {"factors": {"approach": [*APPROACHES, "padded"]}, "repeats": 2},
        {"run_table": 1, "train": 5} | WAYS,
    ),
    "one level less, another order of starting and another wording train nothing": (
        {"factors": {"approach": APPROACHES[:2]}, "order_seed": 1, "question": "Do they?"},
        {"run_table": 1} | WAYS,
    ),
    "a cleaning option rebuilds everything below that corpus": (
        {"corpora": {"small": CORPORA["small"] | {"cleaning": {"nfc": True}}}},
        {"run_table": 2} | CORPUS,
    ),
    "a tokenizer's option rebuilds everything below that tokenizer": (
        {"tokenizers": {"bpe": TOKENIZERS["bpe"] | {"vocabulary_size": 301}}},
        {"run_table": 2} | TOKENIZER,
    ),
    "a corpus and a tokenizer that nobody uses build nothing": (
        {
            "corpora": CORPORA | {"other": {}},
            "tokenizers": TOKENIZERS | {"other": {"kind": "tekken"}},
        },
        {},
    ),
    "one experiment less in the report rebuilds the report": ({"experiments": ["ways"]}, REPORT),
}


@pytest.mark.parametrize(
    "change, expected", [pytest.param(*row, id=name) for name, row in SETTINGS.items()]
)
def test_a_setting_reruns_exactly_what_depends_on_it(shared, change, expected):
    of_config = change.keys() <= CONFIG.keys()
    file, values = (
        ("config.yaml", CONFIG) if of_config else ("experiments/ways.yaml", EXPERIMENTS["ways"])
    )
    with changed(shared.root / "config" / file, lambda text: json.dumps(values | change)):
        assert shared.planned() == expected
