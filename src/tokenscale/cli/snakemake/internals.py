"""All private parts of Snakemake that the workflow's rules use.

Snakemake may change these parts in any release. A release without one of them is refused with a
clear message.
"""

import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import open_file
from tokenscale.settings.profile import CONFIG_FILE
from tokenscale.settings.yaml_files import read_yaml

#: the release that these parts were last tested with
TESTED = "9.27"
#: events of the jobs of this dry run, where the logger plugin collects them instead of printing
#: each
planned: list[dict[str, Any]] = []


def get_internal(owner: object, path: str) -> Any:
    """Return a private attribute by its dotted path. Raise UserError for a Snakemake without it."""
    value: Any = owner
    for name in path.split("."):
        if not hasattr(value, name):
            raise _unfit(path)
        value = getattr(value, name)
    return value


def load_internal(module: str, name: str) -> Any:
    """Return a name of a module of Snakemake. Raise UserError for a Snakemake without it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise _unfit(f"{module}.{name}") from None


def _unfit(missing: str) -> UserError:
    return UserError(
        "this release of Snakemake does not fit the workflow.",
        found=f"snakemake {version('snakemake')}, without {missing}",
        expected=f"a release like {TESTED}",
        next=f"pip install 'snakemake~={TESTED}.0'",
    )


class JobEvents(logging.Handler):
    """Append the jobs that start or fail to a file, one JSON object a line. The first job creates
    the file.
    """

    def __init__(self, file: str):
        super().__init__()
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        """Append a record about a job. A group that fails is one job without outputs."""
        try:
            if event := read_job_event(record):
                how = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                with open(
                    open_file(self.file, flags=how, follow=False), "a", encoding="utf-8"
                ) as opened:
                    opened.write(json.dumps(event) + "\n")
        except Exception:  # as every handler of logging: it must not end the workflow
            self.handleError(record)


def read_job_event(record: logging.LogRecord) -> dict[str, Any] | None:
    """Return a record of Snakemake's about a job as an event; None for another record."""
    of = dict(vars(record))
    event = of.get("event")
    if event == "group_error":
        first = of["job_error_info"][0]["jobid"]
        of |= {
            "rule_name": of["groupid"],
            "jobid": first,
            "output": [],
            "log": of["aux_logs"],
            "aux": of,
        }
    # indented: a job of the group above
    elif event != "job_info" and (event != "job_error" or of["indent"]):
        return None
    facts = {
        "rule": of["rule_name"],
        "reason": of.get("reason", ""),
        "message": of.get("rule_msg") or "",
    }
    facts |= {name: of[name] for name in ("jobid", "output", "log")}
    name = "job_info" if event == "job_info" else "job_error"
    return {"event": name, **facts, "slurm": of.get("aux", {}).get("external_jobid")}


def record_jobs(workflow: object) -> None:
    """Record the jobs of this call, whatever its logger, beside Snakemake's log; a dry run has
    none.
    """
    manager = get_internal(workflow, path="logger_manager")
    for log in get_internal(manager, path="get_logfile")():
        if log.endswith(".snakemake.log"):
            get_internal(manager, path="logger").addHandler(
                JobEvents(str(Path(log).with_suffix(".jsonl")))
            )


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print a UserError and end the process with exit code 2. Snakemake prints a stack trace of
    other exceptions.
    """
    try:
        yield
    except UserError as error:
        print(error.render(), file=sys.stderr, flush=True)
        sys.exit(2)


class ExitOnError:
    """An object whose methods end the process where they raise a UserError, for functions that
    Snakemake calls.
    """

    def __init__(self, wrapped: object):
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._wrapped, name)
        return exit_on_error()(value) if callable(value) else value


def get_command_line() -> list[str]:
    """Return Snakemake's command line, the program first."""
    return sys.argv


def check_folder(folder: Path = Path(".snakemake")) -> None:
    """Raise UserError if this user cannot write where Snakemake does. A user without a home
    (`docker run -u`) gets its cache there, and the user's number as the name.
    """
    place = folder if folder.exists() else folder.absolute().parent
    if not os.access(place, os.W_OK):
        user = place.stat().st_uid
        following = "make it writable, or work in a copy of the project"
        found = (
            f"it belongs to user {user}, this is {os.geteuid()}"
            if user != os.geteuid()
            else "it is read-only"
        )
        raise UserError(
            "Snakemake cannot write in this folder.", folder=place, found=found, next=following
        )
    if not any(name in os.environ for name in ("LOGNAME", "USER", "LNAME", "USERNAME")):
        os.environ["USER"] = str(os.getuid())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")).absolute()
    if not os.access(
        next(path for path in (cache, *cache.parents) if os.path.exists(path)), os.W_OK
    ):
        os.environ["XDG_CACHE_HOME"] = str(folder.absolute() / "cache")


def check_call_files() -> None:
    """Check what Snakemake reads before our Snakefile: its folder, and configuration files of the
    command line, since its message for a mistake in one names no line. Raise UserError.
    """
    check_folder()
    for file in _parse_command_line().configfile or ():
        _check_configuration_file(file)


def check_configuration() -> None:
    """Raise UserError for a mistake in config/config.yaml, which Snakemake reads next."""
    read_yaml(CONFIG_FILE)


def _check_configuration_file(file: Path) -> None:
    target = "." not in file.name or file.parts[0] == "results"
    if target and not file.is_file():
        raise UserError(
            "a target stands behind --configfile, which takes all words that follow it.",
            found=file,
            next=f"snakemake {file} --configfile FILE",
        )
    read_yaml(file)


def _parse_command_line() -> Any:
    parser = load_internal("snakemake.cli", "get_argument_parser")()
    return parser.parse_known_args(sys.argv[1:])[0]


def get_targets() -> list[str]:
    """Return the targets on the command line. The workflow object gets them only after it has read
    the rules.
    """
    return _parse_command_line().targets


def is_main_process(workflow: object) -> bool:
    """Return whether this process plans the call, instead of running a job of it."""
    return get_internal(workflow, "is_main_process")


def get_configuration(workflow: object) -> tuple[list[Path], dict[str, Any]]:
    """Return (configuration files, values) of the command line."""
    files = get_internal(workflow, "config_settings.configfiles")
    return list(files), dict(get_internal(workflow, "config_settings.config"))


def is_dry_run(workflow: object) -> bool:
    return get_internal(workflow, "dryrun")


def get_snakefile(workflow: object) -> str:
    """Return the path of the Snakefile."""
    return get_internal(workflow, "main_snakefile")


def wait_for_jobs_when_interrupted() -> None:
    """Make a second Ctrl-C say what the call waits for, instead of a stack trace; a third one ends
    it at once. SIGTERM is handled by a thread: Snakemake's handler takes a lock that the code it
    interrupts may hold, and hung the call.
    """
    received = 0
    terminate = signal.getsignal(signal.SIGTERM)

    def interrupt(number: int, frame: object) -> None:
        nonlocal received
        received += 1
        if received != 2:
            raise KeyboardInterrupt
        print(
            "tokenscale: waiting for the running jobs, whose trainings save their states.",
            file=sys.stderr,
        )

    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    if callable(terminate):
        signal.signal(
            signal.SIGTERM, lambda *given: Thread(target=terminate, args=given, daemon=True).start()
        )


def is_planned(workflow: object) -> bool:
    """Return whether this call of Snakemake planned jobs; calls such as --list-rules or --unlock do
    not.
    """
    return get_internal(workflow, path="scheduler") is not None


def get_jobs_to_run(workflow: object, unfinished: bool = False) -> list[Any]:
    """Return the jobs that this call runs or has run, or only those that have not finished."""
    return list(get_internal(workflow, path="dag.needrun_jobs")(exclude_finished=unfinished))


def find_outputs(workflow: object, rule: str) -> list[str]:
    """Return the first output of each job of a rule that this call requests, whether it runs or is
    up to date.
    """
    return sorted(
        job.output[0] for job in get_internal(workflow, path="dag").jobs if job.rule.name == rule
    )


def get_jobs_to_submit(workflow: object) -> list[Any]:
    """Return the jobs that go to a cluster: all that run, except for local rules and targets."""
    local = get_internal(workflow, path="_localrules")
    return [
        job
        for job in get_jobs_to_run(workflow)
        if job.rule.name not in local and not get_internal(job, "is_norun")
    ]


def submits_jobs(workflow: object) -> bool:
    """Return whether this process submits jobs, instead of running them here or inside such a
    job.
    """
    return get_internal(workflow, path="non_local_exec") and not get_internal(
        workflow, path="remote_exec"
    )


def get_given_resources(workflow: object) -> dict[str, Any]:
    """Return the maps of resources and threads that the command line or a profile gives."""
    names = {"default-resources": "default_resources", "set-resources": "overwrite_resources"}
    names["set-threads"] = "overwrite_threads"
    return {
        option: get_internal(workflow, path=f"resource_settings.{name}") or {}
        for option, name in names.items()
    }


def check_call(
    workflow: Any, targets: Iterable[str], find_nearest: Callable[[str, list[str]], str | None]
) -> None:
    """Raise UserError for a call without cores or jobs, and for a target that no rule makes."""
    cores = get_internal(workflow, "resource_settings.cores")
    jobs = get_internal(workflow, "resource_settings.nodes")
    for flag, number in (("--cores", cores), ("--jobs", jobs)):
        if number is not None and number < 1:  # Snakemake would wait forever
            raise UserError(
                f"{flag} must be at least 1.", flag=flag, found=number, next=f"{flag} 2, or all"
            )
    rules = list(get_internal(workflow, path="rules"))
    for target in targets:
        # the report of another configuration may be there
        there = os.path.exists(target) and not target.startswith("results/report")
        if not there and not any(
            rule.name == target or get_internal(rule, "is_producer")(target) for rule in rules
        ):
            near = find_nearest(
                target, [rule.name for rule in rules if not get_internal(rule, "has_wildcards")()]
            )
            hint = (
                f"did you mean {near}?" if near else "snakemake --list-target-rules lists the rules"
            )
            raise UserError("no rule makes this target.", target=target, next=hint)
