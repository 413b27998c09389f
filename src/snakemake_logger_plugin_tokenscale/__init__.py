"""Snakemake's logger plugin `tokenscale`: progress of a call, one line a job, with an estimate of
the time left.

On a terminal, a line for each finished job stands above a status line that is rewritten. Elsewhere,
in a log file say, one line is printed for each job when it starts. A dry run's jobs are grouped by
their reasons (`CallChecks`). Warnings and errors look as without the plugin. So does everything
with `--verbose`, `--debug-dag`, `--quiet progress`, `--quiet rules` or `--quiet all`, and in a dry
run with `--printshellcmds` or any `--quiet`.

Snakemake imports every installed plugin in every call, also those of other projects. So the import
does nothing, and nothing of `tokenscale` is imported before Snakemake has chosen this plugin, which
profiles/default of this project asks for.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable
from logging import INFO, LogRecord

from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

#: events that the progress display replaces
REPLACED = {
    LogEvent.WORKFLOW_STARTED,
    LogEvent.RUN_INFO,
    LogEvent.RESOURCES_INFO,
    LogEvent.PROGRESS,
}
REPLACED |= {LogEvent.JOB_INFO, LogEvent.JOB_STARTED, LogEvent.JOB_FINISHED}


class LogHandler(LogHandlerBase):
    """Print progress, and pass everything else to the handler that Snakemake has without
    plugins.
    """

    writes_to_stream = True
    writes_to_file = False
    has_filter = True
    has_formatter = True
    needs_rulegraph = False

    def __post_init__(self) -> None:
        from tokenscale.cli.snakemake import internals

        with internals.exit_on_error():
            internals.check_release()
            internals.check_command_line()
        s = self.common_settings
        self.stream = sys.stdout if s.stdout else sys.stderr
        self.default = internals.create_text_handler(s, self.stream)
        self.plain = not internals.is_display_replaced(s)
        if s.dryrun and not self.plain:
            self.planned = internals.planned = []
        self.display: Display | None = None

    def emit(self, record: LogRecord) -> None:
        """Print a record of Snakemake's."""
        try:
            self._emit(record)
        # as every handler of logging: a display that fails must not end the workflow
        except Exception:
            self.handleError(record)

    def _emit(self, record: LogRecord) -> None:
        from tokenscale.cli.snakemake import internals

        event = getattr(record, "event", None)
        # printed in a dry run, which continues
        if str(record.msg).startswith(internals.FOLDER_LOCKED):
            record.msg = (
                "tokenscale: another call works in this folder, or was killed. What is left to "
                "do now:"
            )
        text = str(record.msg)  # of Snakemake's own errors: a full disk, a folder of another user
        if "[Errno" in text and (text.startswith("Traceback") or internals.RECORD_FAILED in text):
            from tokenscale.cli.main import translate_error

            last = next(line for line in reversed(text.splitlines()) if "[Errno" in line)
            record.msg = (
                found.render() if (found := translate_error(RuntimeError(last.strip()))) else text
            )
        if self.plain:
            self.default.handle(record)
        elif self.common_settings.dryrun:
            self._plan(record)
        elif event in REPLACED:
            self._show(event, record)
        elif not (event is None and str(record.msg).startswith(internals.MESSAGES_ABOUT_ITSELF)):
            if event == LogEvent.JOB_ERROR and self.display:
                self.display.fail(record.jobid)
            above = self.display.above if self.display else lambda print_record: print_record()
            above(lambda: self.default.handle(record))

    def _plan(self, record: LogRecord) -> None:
        """Keep a job of a dry run; pass on warnings, errors, and that nothing is to be done."""
        from tokenscale.cli.snakemake.internals import read_job_event

        if found := read_job_event(record):
            self.planned.append(found)
        elif record.levelno > INFO or str(record.msg).startswith("Nothing to be done"):
            self.default.handle(record)

    def _show(self, event: LogEvent, record: LogRecord) -> None:
        if event == LogEvent.RUN_INFO:
            self.display = Display(self.stream, counts=record.stats)
        elif event == LogEvent.JOB_INFO and self.display:
            wildcards = dict(record.wildcards or {})
            self.display.start(
                record.jobid, record.rule_name, wildcards, is_target=not record.output
            )
        elif event == LogEvent.JOB_FINISHED and self.display:
            self.display.finish(record.job_id)

    def close(self) -> None:
        """Print how many jobs have run."""
        if self.display:
            self.display.close()
        super().close()


class Display:
    """Lines about jobs on a stream; on a terminal a status line below them, rewritten every
    second.
    """

    def __init__(self, stream, counts: dict[str, int]):
        from tokenscale.cli.snakemake import progress as progress
        from tokenscale.settings.config import TARGETS

        self.stream = stream
        self.terminal = stream.isatty()
        planned = {rule: count for rule, count in counts.items() if rule not in ("total", *TARGETS)}
        self.progress = progress.Progress(
            counts=planned, recorded=progress.read_recorded_jobs(), started_s=time.time()
        )
        self._lock = threading.RLock()
        self._closed = threading.Event()
        if self.terminal:
            threading.Thread(target=self._refresh, daemon=True).start()

    def start(self, job_id: int, rule: str, wildcards: dict[str, str], is_target: bool) -> None:
        """Show a job that starts. A target, such as an experiment's name, makes nothing itself and
        is not counted.
        """
        with self._lock:
            if is_target:
                self.progress.planned.pop(rule, None)
                return
            label = f"{rule} {'/'.join(map(str, wildcards.values()))}".rstrip()
            job = self.progress.start(job_id, rule, label, time.time())
            self._print(None if self.terminal else self.progress.format_start(job, now=time.time()))

    def finish(self, job_id: int) -> None:
        """Show a job that has finished."""
        with self._lock:
            finished = self.progress.finish(job_id, time.time())
            self._print(
                self.progress.format_finish(*finished) if finished and self.terminal else None
            )

    def fail(self, job_id: int) -> None:
        """Count a job that has failed; Snakemake's own message says why."""
        with self._lock:
            self.progress.fail(job_id)

    def above(self, print_text: Callable[[], None]) -> None:
        """Print something above the status line."""
        with self._lock:
            self._write("\r\x1b[K" if self.terminal else "")
            print_text()
            self._print(None)

    def close(self) -> None:
        """Print the last line, once."""
        if not self._closed.is_set():
            self._closed.set()
            with self._lock:
                self._print(self.progress.format_end(time.time()), status=False)

    def _refresh(self) -> None:
        while not self._closed.wait(1.0):
            with self._lock:
                self._print(None)

    def _print(self, line: str | None, status: bool = True) -> None:
        """Print a line, if there is one, then the status line on a terminal."""
        text = f"{line}\n" if line else ""
        if self.terminal:
            below = (
                self.progress.format_status(time.time(), shutil.get_terminal_size().columns)
                if status
                else ""
            )
            text = f"\r\x1b[K{text}{below}"
        self._write(text)

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
