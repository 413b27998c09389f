"""All private parts of Snakemake that the workflow, its progress plug-in and commands use.

Snakemake may change these parts in any release. `check_release` refuses one that lacks a name of
the tables below, before anything else is done. After that check the names are used as they are.
"""

import importlib
import inspect
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from logging.handlers import QueueHandler
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, TextIO

from tokenscale.base.errors import UserError
from tokenscale.base.files import open_file
from tokenscale.settings.profile import CONFIG_FILE, parse_pair
from tokenscale.settings.yaml_files import read_yaml

if TYPE_CHECKING:
    from snakemake.jobs import Job
    from snakemake.workflow import Workflow
    from snakemake_interface_logger_plugins.settings import OutputSettingsLoggerInterface

#: how long a text waits for what was logged before it: the log's thread may have ended
LONGEST_LOG_WAIT_S = 1.0
#: the oldest release that works, and the newest that was tested
OLDEST = "9.20"
TESTED = "9.27"
#: names that are looked up in modules and classes, as `module:name`
NAMES = (
    # first: the other modules cannot be imported before this one
    "snakemake.cli:get_argument_parser",
    "snakemake.dag:DAG.jobs",
    "snakemake.dag:DAG.needrun_jobs",
    "snakemake.jobs:Job.is_norun",
    "snakemake.logging:ColorizingTextHandler",
    "snakemake.logging:DefaultFilter",
    "snakemake.logging:DefaultFormatter",
    "snakemake.logging:logger",
    "snakemake.rules:Rule.has_wildcards",
    "snakemake.rules:Rule.is_producer",
    "snakemake.settings.enums:Quietness.ALL",
    "snakemake.settings.enums:Quietness.PROGRESS",
    "snakemake.settings.enums:Quietness.REASON",
    "snakemake.settings.enums:Quietness.RULES",
)
#: the SLURM plugin: the newest release that was tested, what our executor takes from its modules
#: and its class, and what an executor of it has
EXECUTOR_PLUGIN = "snakemake-executor-plugin-slurm"
EXECUTOR_TESTED = "2.8.0"
EXECUTOR_NAMES = (
    "snakemake_executor_plugin_slurm:Executor._report_job_error_threadsafe",
    "snakemake_executor_plugin_slurm:Executor._report_job_submission_threadsafe",
    "snakemake_executor_plugin_slurm:Executor.cancel_jobs",
    "snakemake_executor_plugin_slurm:Executor.check_active_jobs",
    "snakemake_executor_plugin_slurm:Executor.get_account_arg",
    "snakemake_executor_plugin_slurm:Executor.get_status_command",
    "snakemake_executor_plugin_slurm:Executor.run_job",
    "snakemake_executor_plugin_slurm.utils:get_job_wildcards",
    "snakemake_interface_executor_plugins.executors.base:SubmittedJobInfo",
    "snakemake_interface_executor_plugins.executors.real:RealExecutor.format_job_exec",
    "snakemake_interface_executor_plugins.executors.remote:RemoteExecutor.tmpdir",
    "snakemake_interface_executor_plugins.registry:ExecutorPluginRegistry",
)
EXECUTOR_ATTRIBUTES = (
    "_failed_nodes",
    "_job_submission_executor",
    "run_uuid",
    "slurm_logdir",
    "status_rate_limiter",
)
#: attributes of the object `workflow` that a Snakefile has
WORKFLOW_NAMES = (
    "_localrules",
    "config_settings.config",
    "config_settings.configfiles",
    "dag",
    "dryrun",
    "global_resources",
    "is_main_process",
    "logger_manager.get_logfile",
    "logger_manager.logger",
    "main_snakefile",
    "non_local_exec",
    "remote_exec",
    "resource_settings.cores",
    "resource_settings.default_resources",
    "resource_settings.local_cores",
    "resource_settings.nodes",
    "resource_settings.overwrite_resources",
    "resource_settings.overwrite_threads",
    "rules",
    "scheduler",
)
#: event of a log record → its fields that are read without a default
RECORD_FIELDS = {
    "job_info": ("rule_name", "jobid", "output", "log"),
    "job_error": ("rule_name", "jobid", "output", "log", "indent"),
    "group_error": ("job_error_info", "groupid", "aux_logs"),
}
#: messages about Snakemake itself, by how they begin
MESSAGES_ABOUT_ITSELF = (
    "Assuming unrestricted shared filesystem usage",
    "Building DAG of jobs",
    "Using shell:",
    "Singularity containers: ignored",
    "Conda environments: ignored",
    "Select jobs to execute",
    "Elapsed time:",
)
#: beginning of the message about a locked folder, and a part of that about an output's record
FOLDER_LOCKED = "Error: Directory cannot be locked."
RECORD_FAILED = "Error recording metadata"
#: beginning of the reason of a job → its name here
REASONS = {
    "Missing output files:": "missing",
    "Incomplete output files:": "unfinished",
    "Updated input files:": "updated",
    "Input files updated by another job:": "upstream",
    "Set of input files has changed since last execution": "inputs",
    "Code has changed since last execution": "rule",
    "Params have changed since last execution:": "settings",
    "Software environment definition has changed since last execution": "software",
    "Forced execution": "forced",
}
#: where Snakemake records each output's rule, start and end, in seconds since 1970
RECORDS = Path(".snakemake/metadata")
#: where it keeps a log of each call, named by its time; beside it, the workflow writes the jobs'
#: events
LOGS = Path(".snakemake/log")

#: endings of configuration files
CONFIG_ENDINGS = (".yaml", ".yml", ".json")
#: events of the jobs of this dry run, where the logger plugin collects them instead of printing
#: each
planned: list[dict[str, Any]] = []


def check_release(workflow: object = None) -> None:
    """Raise UserError for a release of Snakemake without a name that is used here.

    The logger plugin has no workflow object yet: then the names of modules alone are checked.
    """
    _check_names(NAMES)
    if workflow is not None:
        for path in WORKFLOW_NAMES:
            _check_path(workflow, path, label=f"workflow.{path}")


def check_executor_plugin() -> None:
    """Raise UserError for a release of the SLURM plugin without a name that our executor uses."""
    _check_names(EXECUTOR_NAMES, package=EXECUTOR_PLUGIN, tested=EXECUTOR_TESTED)


def check_executor(executor: object) -> None:
    """Raise UserError for an executor of the SLURM plugin without an attribute that ours uses."""
    for name in EXECUTOR_ATTRIBUTES:
        if not hasattr(executor, name):
            raise _unfit(f"Executor.{name}", package=EXECUTOR_PLUGIN, tested=EXECUTOR_TESTED)


def _check_names(entries: Iterable[str], **package: str) -> None:
    """Raise UserError unless modules and classes have the names of a table."""
    for entry in entries:
        module, _, path = entry.partition(":")
        try:
            owner = importlib.import_module(module)
        except ImportError:
            raise _unfit(module, **package) from None
        _check_path(owner, path, label=f"{module}.{path}", **package)


def _check_path(owner: object, path: str, label: str, **package: str) -> None:
    """Raise UserError unless an object has an attribute, whose last part is not computed.

    An abstract method is none: an interface may keep one that the class has lost.
    """
    *outer, name = path.split(".")
    try:
        for part in outer:
            owner = getattr(owner, part)
        found = inspect.getattr_static(owner, name)
    except AttributeError:
        raise _unfit(label, **package) from None
    if getattr(found, "__isabstractmethod__", False):
        raise _unfit(label, **package)


def _unfit(missing: str, package: str = "snakemake", tested: str = f"{TESTED}.0") -> UserError:
    of = "Snakemake" if package == "snakemake" else package
    return UserError(
        f"this release of {of} does not fit the workflow.",
        found=f"{package} {version(package)}, without {missing}",
        expected=f"{OLDEST} to {TESTED}" if package == "snakemake" else tested,
        next=f"pip install '{package}~={tested}'",
    )


@cache
def report_missing_field(event: str, field: str) -> None:
    """Print once that log records of this release lack a field. Jobs run on."""
    error = _unfit(f"the field {field} of {event}")
    print(error.render(), file=sys.stderr, flush=True)


def create_text_handler(
    settings: "OutputSettingsLoggerInterface", stream: TextIO
) -> logging.Handler:
    """Return the handler that Snakemake has without plugins."""
    from snakemake.logging import ColorizingTextHandler, DefaultFilter, DefaultFormatter

    # its parameters are named as the settings are, and newer releases have more of them
    names = inspect.signature(DefaultFilter).parameters
    handler = ColorizingTextHandler(nocolor=settings.nocolor, stream=stream)
    handler.addFilter(DefaultFilter(**{name: getattr(settings, name) for name in names}))
    handler.setFormatter(DefaultFormatter(settings.quiet, settings.show_failed_logs))
    return handler


def is_display_replaced(settings: "OutputSettingsLoggerInterface") -> bool:
    """Return whether the options of this call leave the progress and a dry run's jobs to us."""
    from snakemake.settings.enums import Quietness

    quiet = set(settings.quiet or ())
    if settings.verbose or settings.debug_dag:
        return False
    if quiet & {Quietness.ALL, Quietness.RULES, Quietness.PROGRESS}:
        return False
    if settings.dryrun:
        return quiet == {Quietness.REASON} and not settings.printshellcmds
    return True


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
    event = getattr(of.get("event"), "value", of.get("event"))
    for field in RECORD_FIELDS.get(str(event), ()):
        if field not in of:
            report_missing_field(event, field)
            return None
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


def record_jobs(workflow: "Workflow") -> None:
    """Record the jobs of this call, whatever its logger, beside Snakemake's log; a dry run has
    none.
    """
    for log in workflow.logger_manager.get_logfile():
        if log.endswith(".snakemake.log"):
            logger = workflow.logger_manager.logger
            logger.addHandler(JobEvents(str(Path(log).with_suffix(".jsonl"))))


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Print a UserError and end the process with exit code 2. Snakemake prints a stack trace of
    other exceptions.
    """
    try:
        yield
    except UserError as error:
        print_after_log(error.render())
        sys.exit(2)


def print_after_log(text: str) -> None:
    """Print a text to stderr after what Snakemake has logged. A thread of its own writes a line and
    its end in two calls, and a text between them would not stand on lines of its own.
    """
    from snakemake.logging import logger

    limit = time.monotonic() + LONGEST_LOG_WAIT_S
    for handler in logger.handlers:
        if isinstance(handler, QueueHandler) and isinstance(handler.queue, Queue):
            while handler.queue.unfinished_tasks and time.monotonic() < limit:
                time.sleep(0.01)
    print(text, file=sys.stderr, flush=True)


class ExitOnError:
    """An object whose methods and properties end the process where they raise a UserError, for
    functions that Snakemake calls.
    """

    def __init__(self, wrapped: object):
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        with exit_on_error():
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


def check_command_line() -> None:
    """Check what Snakemake reads before our Snakefile, and reports without the line or with a stack
    trace: its folder, and `--configfile` and `--config` of the command line. Raise UserError.
    """
    check_folder()
    given = _parse_command_line()
    files = [str(file) for file in given.configfile or ()]
    # the first word is a file or a value, though it may be a wrong one
    _check_no_target(
        "--configfile", targets=[file for file in files[1:] if not _is_config_file(file)]
    )
    values = [value for value in given.config or () if "=" not in value]
    for value in values:
        if value == given.config[0] or value.endswith(CONFIG_ENDINGS):
            parse_pair(value)
    _check_no_target("--config", targets=values)
    for file in files:
        read_yaml(file)


def _is_config_file(name: str) -> bool:
    is_result = name.startswith("results/")
    return not is_result and (name.endswith(CONFIG_ENDINGS) or Path(name).is_file())


def _check_no_target(option: str, targets: list[str]) -> None:
    """Raise UserError for targets that Snakemake takes as words of an option."""
    if targets:
        others = [word for word in sys.argv[1:] if word not in targets]
        raise UserError(
            f"a target stands behind {option}, which takes all words that follow it.",
            found=", ".join(targets),
            next=shlex.join(["snakemake", *targets, *others]),
        )


def check_configuration() -> None:
    """Raise UserError for a mistake in config/config.yaml, which Snakemake reads next."""
    read_yaml(CONFIG_FILE)


def _parse_command_line() -> Any:
    from snakemake.cli import get_argument_parser

    return get_argument_parser().parse_known_args(sys.argv[1:])[0]


def get_targets() -> list[str]:
    """Return the targets on the command line. The workflow object gets them only after it has read
    the rules.
    """
    return _parse_command_line().targets


def get_job_runs() -> list[str]:
    """Return the ids of the runs that the jobs of this process are for; none in the main process.

    A process that runs jobs of another has them as `--target-jobs RULE:WILDCARD=VALUE`.
    """
    jobs = _parse_command_line().target_jobs or ()
    return [job.wildcards_dict["run_id"] for job in jobs if "run_id" in job.wildcards_dict]


def is_main_process(workflow: "Workflow") -> bool:
    """Return whether this process plans the call, instead of running a job of it."""
    return workflow.is_main_process


def get_configuration(workflow: "Workflow") -> tuple[list[Path], dict[str, Any]]:
    """Return (configuration files, values) of the command line."""
    files = workflow.config_settings.configfiles
    return list(files), dict(workflow.config_settings.config)


def is_dry_run(workflow: "Workflow") -> bool:
    return workflow.dryrun


def get_snakefile(workflow: "Workflow") -> str:
    """Return the path of the Snakefile."""
    return workflow.main_snakefile


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


def is_planned(workflow: "Workflow") -> bool:
    """Return whether this call of Snakemake planned jobs; calls such as --list-rules or --unlock do
    not.
    """
    return workflow.scheduler is not None


def get_jobs_to_run(workflow: "Workflow", unfinished: bool = False) -> list["Job"]:
    """Return the jobs that this call runs or has run, or only those that have not finished."""
    return list(workflow.dag.needrun_jobs(exclude_finished=unfinished))


def find_outputs(workflow: "Workflow", rule: str) -> list[str]:
    """Return the first output of each job of a rule that this call requests, whether it runs or is
    up to date.
    """
    return sorted(job.output[0] for job in workflow.dag.jobs if job.rule.name == rule)


def get_jobs_to_submit(workflow: "Workflow") -> list["Job"]:
    """Return the jobs that go to a cluster: all that run, except for local rules and targets."""
    local = workflow._localrules
    return [
        job for job in get_jobs_to_run(workflow) if job.rule.name not in local and not job.is_norun
    ]


def use_cores_of_nodes(workflow: "Workflow", cores: int) -> None:
    """Limit the threads of jobs to the cores of a node, unless the command line has a limit.

    Snakemake limits them to `cores` of profiles/default, those of the machine that submits, and a
    cluster profile cannot override this key. Snakemake also ignores `local-cores`: it becomes the
    limit of the resource `local_cores`, which counts for local rules alone.
    """
    if _parse_command_line().cores is None:
        workflow.resource_settings.cores = cores
        workflow.global_resources["_cores"] = cores
    if workflow.resource_settings.local_cores is not None:
        workflow.global_resources["local_cores"] = workflow.resource_settings.local_cores


def submits_jobs(workflow: "Workflow") -> bool:
    """Return whether this process submits jobs, instead of running them here or inside such a
    job.
    """
    return workflow.non_local_exec and not workflow.remote_exec


def get_given_resources(workflow: "Workflow") -> dict[str, Any]:
    """Return the maps of resources and threads that the command line or a profile gives."""
    return {
        "default-resources": workflow.resource_settings.default_resources or {},
        "set-resources": workflow.resource_settings.overwrite_resources or {},
        "set-threads": workflow.resource_settings.overwrite_threads or {},
    }


def check_call(
    workflow: "Workflow",
    targets: Iterable[str],
    find_nearest: Callable[[str, list[str]], str | None],
) -> None:
    """Raise UserError for a call without cores or jobs, and for a target that no rule makes."""
    cores = workflow.resource_settings.cores
    jobs = workflow.resource_settings.nodes
    for flag, number in (("--cores", cores), ("--jobs", jobs)):
        if number is not None and number < 1:  # Snakemake would wait forever
            raise UserError(
                f"{flag} must be at least 1.", flag=flag, found=number, next=f"{flag} 2, or all"
            )
    rules = list(workflow.rules)
    for target in targets:
        # the report of another configuration may be there
        there = os.path.exists(target) and not target.startswith(("results/report", "config/"))
        if not there and not any(rule.name == target or rule.is_producer(target) for rule in rules):
            names = [rule.name for rule in rules if not rule.has_wildcards()]
            stem = Path(target).stem
            near = stem if stem in names else find_nearest(target, names)
            hint = (
                f"did you mean {near}?" if near else "snakemake --list-target-rules lists the rules"
            )
            raise UserError("no rule makes this target.", target=target, next=hint)
