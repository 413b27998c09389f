"""Marks, order and fixtures that all tests share."""

import itertools
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

import hypothesis
import pytest

from tests.long.logs import record_green
from tests.once import once

# before torch is there. Two workers on two cores: a thread that has no core keeps the others
# waiting, at full speed.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
# as in a shell with the environment activated: messages then name commands without a folder
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

# a machine that does other work, too, fails no test: examples have no deadline
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

#: scripts that tests start
collect_ignore = ["experiments/loops", "docs/extended.py"]


def pytest_collection_modifyitems(items):
    """Sort by the mark `slow`: the longest files first, so that no worker is left alone with one at
    the end.
    """
    seconds = defaultdict(int)
    for item in items:
        for mark in item.iter_markers("slow"):
            seconds[item.path] = max(seconds[item.path], *mark.args)
    items.sort(key=lambda item: -seconds[item.path])


def pytest_terminal_summary(terminalreporter):
    """The ten longest files, their fixtures included, to the file that `.ci/run` names, and the
    long tests that passed to the file that `make long-test` names.
    """
    if path := os.environ.get("GREEN_LONG_TESTS"):
        record_green(Path(path), terminalreporter.stats)
    if path := os.environ.get("LONGEST_TESTS"):
        seconds = Counter()
        for report in itertools.chain(*terminalreporter.stats.values()):
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
        Path(path).write_text(
            "".join(f"{took:8.0f} s  {file}\n" for file, took in seconds.most_common(10))
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """A test draws the same numbers whichever tests its worker ran before: one that fails fails
    again.
    """
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def tekken_folder(tmp_path_factory):
    """The folder of the tokenizer Tekken, made once for all workers. Nobody may change it."""
    pytest.importorskip("mistral_common")
    from tokenscale.data.tokenizers.load import build
    from tokenscale.settings.data import TokenizerSettings

    return once(tmp_path_factory, "tekken", lambda folder: build(TokenizerSettings(), folder))
