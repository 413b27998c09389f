"""Progress of a call: numbers of jobs, the estimate of the time left, and the plugin that shows
them in Snakemake.
"""

import io
import json
import logging
import re

import pytest
from snakemake.settings.enums import Quietness
from snakemake_interface_logger_plugins.common import LogEvent
from snakemake_interface_logger_plugins.tests import MockOutputSettings, TestLogHandlerBase

import snakemake_logger_plugin_tokenscale as plugin
from tokenscale.cli.snakemake import internals
from tokenscale.cli.snakemake.progress import Progress, read_recorded_jobs

ONE = [("train", 0, 60)]
NINE = [("train", 10 * n, 10 * n + 10) for n in range(9)]
#: side by side, and alone
DRAWN = [("draw", 0, 10), ("draw", 0, 10), ("train", 10, 40), ("train", 40, 70)]
RUNNING = [*ONE, ("train", 60, None)]


@pytest.mark.parametrize(
    ("jobs", "recorded", "ran", "at", "seconds", "not_estimated"),
    [
        ({"train": 4, "draw": 2}, {}, [], 0, 0, 6),
        ({"train": 4, "draw": 2}, {}, ONE, 60, 180, 2),
        ({"train": 4, "draw": 2}, {}, RUNNING, 100, 2 * 60 + 20, 2),
        # late: no time is taken from the jobs that wait
        ({"train": 4, "draw": 2}, {}, RUNNING, 500, 2 * 60, 2),
        ({"draw": 6, "train": 4}, {}, DRAWN, 70, 4 * 5 + 2 * 30, 0),
        ({"train": 11}, {"train": [(0, 100), (100, 200)]}, [], 0, 11 * 100, 0),
        ({"train": 11}, {"train": [(0, 100), (100, 200)]}, NINE, 90, 2 * (100 + 9 * 10) / 10, 0),
    ],
)
def test_the_time_left_is_estimated_from_jobs_that_ran(
    jobs, recorded, ran, at, seconds, not_estimated
):
    progress = Progress(jobs, recorded)
    starts = [(start, 1, number) for number, (_, start, _) in enumerate(ran)]
    ends = [(end, 0, number) for number, (*_, end) in enumerate(ran) if end is not None]
    for when, starting, number in sorted(starts + ends):
        progress.start(number, ran[number][0], "", when) if starting else progress.finish(
            number, when
        )
    left = progress.time_left(at)
    assert (left.seconds, left.without) == (pytest.approx(seconds), not_estimated)


def test_a_start_looks_at_no_earlier_job():
    compared = []

    class Rule(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            compared.append(other)
            return str.__eq__(self, other)

    progress = Progress({"train": 3, "draw": 1})
    for number in range(50):
        progress.start(number, Rule("train"), "", number)
    assert progress.planned == {"train": 50, "draw": 1}
    assert len(compared) <= 50 * 6  # not 50 * 50 / 2


def test_a_job_that_failed_and_starts_again_keeps_its_number_and_is_not_done():
    progress = Progress({"train": 2})
    first = progress.start(7, "train", "train a", 0)
    progress.fail(7)
    assert (progress.done, progress.failed) == (0, 1)
    assert progress.start(7, "train", "train a", 50).number == first.number == 1
    assert progress.start(8, "train", "train b", 60).number == 2 and progress.total == 2


def test_recorded_jobs_are_read_once_a_job_without_those_that_only_were_touched(tmp_path):
    jobs = [
        ("draw", 0.0, 9.9, "a.log"),
        ("draw", 0.001, 10.0, "a.log"),
        ("draw", 10.0, 30.0, "b.log"),
    ]
    jobs += [
        ("train", 50.0, 50.001, "c.log"),
        ("draw", 0.0, 9.0, {"a": 1}),
        ("draw", 0, 10**400, "d.log"),
    ]
    for number, (rule, start, end, log) in enumerate(jobs):
        values = {"rule": rule, "starttime": start, "endtime": end, "log": [log]}
        (tmp_path / f"{number}").write_text(json.dumps(values))
    (tmp_path / "broken").write_text("{")
    assert read_recorded_jobs(tmp_path) == {"draw": [(0.0, 9.0), (0.001, 10.0), (10.0, 30.0)]}
    assert read_recorded_jobs(tmp_path / "absent") == {}


class TestPlugin(TestLogHandlerBase):
    __test__ = True

    def get_log_handler_cls(self):
        return plugin.LogHandler

    def get_log_handler_settings(self):
        return None


class Terminal(io.StringIO):
    def isatty(self):
        return True


def record(event=None, message="", level=logging.INFO, **extra):
    made = logging.LogRecord("snakemake", level, "", 0, message, (), None)
    made.__dict__.update({"event": event} | extra)
    return made


def job_info(number, rule, **wildcards):
    extra = {
        "jobid": number,
        "rule_name": rule,
        "wildcards": wildcards,
        "output": ["file"],
        "rule_msg": "words",
    }
    extra["log"] = []
    return record(LogEvent.JOB_INFO, **extra)


def failed(number, log):
    extra = {
        "jobid": number,
        "rule_name": "train",
        "rule_msg": "",
        "input": [],
        "output": ["done.json"],
        "aux": {},
    }
    extra |= {
        "log": [log],
        "conda_env": None,
        "shellcmd": "python -m tokenscale",
        "container_img": None,
    }
    return record(LogEvent.JOB_ERROR, "Error in rule train", logging.ERROR, **extra)


EVENTS = [
    record(message="Building DAG of jobs..."),
    record(LogEvent.RESOURCES_INFO, "Provided cores: 2", cores=2),
    record(LogEvent.RUN_INFO, "Job stats:", stats={"train": 2, "draw": 1, "all": 1, "total": 4}),
    record(message="Select jobs to execute..."),
    record(LogEvent.JOB_STARTED, "Execute 1 jobs...", jobs=[1]),
    job_info(1, "train", run_id="packed-w1"),
    record(LogEvent.JOB_FINISHED, "Finished jobid: 1", job_id=1),
    record(LogEvent.PROGRESS, "None", done=1, total=4),
    job_info(2, "train", run_id="packed-w2"),
]


def shown(monkeypatch, tmp_path, stream, events=EVENTS, **settings):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stderr", stream)
    common = MockOutputSettings()
    common.printshellcmds = False
    common.__dict__.update(settings)
    handler = plugin.LogHandler(common_settings=common, settings=None)
    for event in events:
        handler.handle(event)
    handler.close()
    handler.close()  # as `logging` does at the interpreter's end
    return stream.getvalue()


def test_a_log_file_has_one_line_a_job_and_a_call_without_jobs_none(monkeypatch, tmp_path):
    assert shown(monkeypatch, tmp_path, io.StringIO(), EVENTS[:4]) == ""
    first, second, last = shown(monkeypatch, tmp_path, io.StringIO()).splitlines()
    assert (
        "1/3  train packed-w1  (3 jobs not estimated)" in first and "2/3  train packed-w2" in second
    )
    assert last.startswith("1 of 3 jobs done, in ")


def test_a_terminal_has_a_line_for_each_finished_job_above_the_status_line(monkeypatch, tmp_path):
    """What stands there at last: a rewritten line replaces what was on it."""
    text = shown(monkeypatch, tmp_path, Terminal())
    first, last = (line.rpartition("\r\x1b[K")[2] for line in text.split("\n")[:2])
    assert first.startswith("1/3  train packed-w1") and last.startswith("1 of 3 jobs done, in ")
    assert re.search(r"\r\x1b\[Krunning  train packed\S* .* 1/3 done, about 5 s left", text)


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_the_error_of_a_job_is_shown_whole_with_its_log(monkeypatch, tmp_path, stream):
    log = tmp_path / "train.log"
    log.write_text("tokenscale: the disk is full.\n")
    warning = record(message="a warning", level=logging.WARNING)
    text = shown(monkeypatch, tmp_path, stream(), [*EVENTS, failed(2, str(log)), warning])
    for part in (
        "Error in rule train:",
        f"log: {log} (check",
        "python -m tokenscale",
        "tokenscale: the disk is full.",
    ):
        assert part in text
    assert "\na warning" in text.replace("\r\x1b[K", "").replace("\x1b[33m", "")
    assert "1 of 3 jobs done, 1 failed, in " in text


@pytest.mark.parametrize(
    "settings",
    [
        {"dryrun": True},
        {"verbose": True},
        {"quiet": {Quietness.PROGRESS}},
        {"quiet": {Quietness.RULES}},
    ],
)
def test_dry_runs_and_calls_that_ask_for_more_or_less_look_as_without_the_plugin(
    monkeypatch, tmp_path, settings
):
    from snakemake.logging import ColorizingTextHandler, DefaultFilter, DefaultFormatter

    events = [EVENTS[0], *EVENTS[2:4], EVENTS[7]]  # without times of day
    text = shown(monkeypatch, tmp_path, io.StringIO(), events, **settings)
    stream = io.StringIO()
    quiet = settings.get("quiet", set())
    default = ColorizingTextHandler(stream=stream)
    default.addFilter(
        DefaultFilter(
            quiet, False, settings.get("verbose", False), settings.get("dryrun", False), False
        )
    )
    default.setFormatter(DefaultFormatter(quiet, True))
    for event in events:
        default.handle(event)
    assert text == stream.getvalue() and "Select jobs" in text


def test_a_dry_run_prints_warnings_and_keeps_its_jobs_for_the_summary(monkeypatch, tmp_path):
    job = {
        "rule_name": "train",
        "jobid": 1,
        "output": ["a"],
        "log": [],
        "reason": "Forced execution",
    }
    events = [
        *EVENTS,
        record(message="Nothing to be done (all is there)."),
        record(LogEvent.JOB_INFO, **job),
    ]
    events += [
        record(message="odd", level=logging.ERROR),
        record(message="Error: Directory cannot be locked."),
    ]
    text = shown(
        monkeypatch, tmp_path, io.StringIO(), events, dryrun=True, quiet={Quietness.REASON}
    )
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in text.splitlines()]
    assert lines == ["Nothing to be done (all is there).", "odd"]
    assert [event["reason"] for event in internals.planned] == ["", "", "Forced execution"]
