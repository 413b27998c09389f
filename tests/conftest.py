"""Marks, order and fixtures that all tests share."""

import os
import sys
from pathlib import Path

import pytest

from tests.once import once

# before torch is there. Two workers on two cores: a thread that has no core keeps the others waiting, at full speed.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

ROOT = Path(__file__).parents[1]
#: scripts that tests start
collect_ignore = ["unit/loops", "docs/extended.py"]
#: whole trainings, reports, commands, benchmarks, trackers, as users run them: `make experiments-test`. One experiment
#: from end to end (workflow/test_workflow.py) and the parity of layouts stay with the units
EXPERIMENTS = {
    "distributed/test_layout_checkpoints.py",
    "distributed/test_memory.py",
    "distributed/test_starters.py",
    "distributed/test_study_commands.py",
    "distributed/test_train_flags.py",
    "unit/test_advise.py",
    "unit/test_benchmark_analysis.py",
    "unit/test_benchmark_collectives.py",
    "unit/test_benchmark_data.py",
    "unit/test_benchmark_peers.py",
    "unit/test_benchmark_pretokenize.py",
    "unit/test_evaluation_bleu_rises.py",
    "unit/test_export.py",
    "unit/test_figures.py",
    "unit/test_objectives_end_to_end.py",
    "unit/test_records_external.py",
    "unit/test_report.py",
    "unit/test_report_drawings.py",
    "unit/test_report_folder.py",
    "unit/test_report_whole.py",
    "unit/test_study_pretokenize.py",
    "workflow/test_benchmark_workflow.py",
    "workflow/test_links.py",
    "workflow/test_objectives.py",
    "workflow/test_report.py",
    "workflow/test_reruns_resumed.py",
    "workflow/test_reruns_carried_out.py",
    "workflow/test_submission.py",
}
#: `make long-test`: all shipped experiments, cut down, from an empty folder to the report (7 min)
LONG = {"workflow/test_experiments.py"}
#: test files that take more than ten seconds, the longest first: `pytest -n 2 --dist loadfile --no-loadscope-reorder`
#: begins with them. While the first worker builds the project of tests/workflow, the second needs none.
LONGEST = [
    "faults/test_kills.py",
    "slurm/test_long_jobs.py",
    "slurm/test_trainings.py",
    "workflow/test_experiments.py",
    "workflow/test_reruns.py",
    "distributed/test_parity.py",
    "distributed/test_study_commands.py",
    "distributed/test_train_flags.py",
    "workflow/test_reruns_carried_out.py",
    "distributed/test_training.py",
    "unit/test_packaging.py",
    "workflow/test_objectives.py",
    "workflow/test_report.py",
    "unit/test_report_drawings.py",
    "unit/test_report.py",
    "unit/test_report_folder.py",
    "unit/test_figures.py",
    "unit/test_report_whole.py",
    "unit/test_report_pages.py",
    "unit/test_report_likeness.py",
    "unit/test_analysis_claims.py",
    "unit/test_ingest_logs.py",
    "unit/test_ingest_incremental.py",
    "unit/test_analysis_scaling_model.py",
    "unit/test_records_external.py",
    "unit/test_training_loop.py",
    "unit/test_batches.py",
    "unit/test_advise.py",
    "unit/test_benchmark_peers.py",
    "unit/test_doctor_command.py",
    "workflow/test_user_mistakes.py",
    "workflow/test_workflow.py",
    "workflow/test_submission.py",
    "workflow/test_links.py",
    "workflow/test_benchmark_workflow.py",
    "unit/test_export.py",
    "unit/test_formats_memory.py",
    "workflow/test_sources.py",
    "workflow/test_status.py",
    "workflow/test_archive.py",
    "distributed/test_layout_checkpoints.py",
    "distributed/test_memory.py",
    "distributed/test_starters.py",
    "distributed/test_stopping.py",
    "distributed/test_communication.py",
]


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    for item in items:
        name = item.path.relative_to(ROOT / "tests").as_posix() if item.path.is_relative_to(ROOT / "tests") else ""
        if name in EXPERIMENTS:
            item.add_marker("experiment")
        if name in LONG:
            item.add_marker("long")
    # the longest files first, so that of two workers none is left alone with one of them at the end
    place = {ROOT / "tests" / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """A test draws the same numbers whichever tests its worker ran before: one that fails fails again."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def tekken_folder(tmp_path_factory):
    """The folder of the tokenizer Tekken, made once for all workers. Nobody may change it."""
    pytest.importorskip("mistral_common")
    from tokenscale.data.tokenizers.build import build
    from tokenscale.settings.data import TokenizerSettings

    return once(tmp_path_factory, "tekken", lambda folder: build(TokenizerSettings(), folder))
