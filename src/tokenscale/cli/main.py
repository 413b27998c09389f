"""Run one command: its configuration options, and errors of the user and of the system without a
stack trace.
"""

import argparse
import errno
import importlib
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from tokenscale import __version__
from tokenscale.base.errors import UserError, as_runnable, as_typed, find_nearest, unknown
from tokenscale.base.files import LOOK_AT_DISK, UNCLOSED, expand_path, read_arguments

if TYPE_CHECKING:
    from tokenscale.settings.config import Config

FULL = (errno.ENOSPC, errno.EDQUOT)
#: how NumPy reports that the disk took a part of an array, without a number
SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")
#: how torch and libraries in Rust state the system's number in a message
ERRNO_IN_MESSAGE = re.compile(r"\((?:os error )?(\d{1,3})\)")
LOCKED = (errno.EROFS, errno.EACCES, errno.EPERM)
#: a file where a folder is needed, and the like
MISPLACED = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
#: numbers that mean a mistake in the code: files that are gone or closed, wrong arguments
MISTAKES = (errno.ENOENT, errno.EBADF, errno.EFAULT, errno.EINVAL, errno.ESRCH, errno.ECHILD)
#: type names and messages of libraries' out-of-memory errors; Arrow's and NumPy's are MemoryErrors
NO_MEMORY = ("OutOfMemoryError", "OutOfMemoryException", "DefaultCPUAllocator: ")


def translate_error(error: Exception) -> UserError | None:
    """Return the user's error for such a failure; None for every other exception.

    Libraries that write files themselves raise their own exception types, with the system's message
    in them.
    """
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        found = repr(error.object[max(0, error.start - 40) : error.end + 20])
        hint = "rename the file; or export PYTHONUTF8=1, if only this terminal is not UTF-8"
        return UserError("a name or an argument is not UTF-8 text.", found=found, next=hint)
    number = _find_number(error)
    path = getattr(error, "filename", None)
    reason = str(error).splitlines()[0] if str(error) else os.strerror(number or 0)
    # a library, or a read or a write by its descriptor, may name no file
    place = {"folder": os.getcwd()} if path is None else {"path": path}
    facts = place | {"reason": reason}
    if number in FULL:
        return _translate_full_disk(path, facts)
    if number in LOCKED:
        how = (
            "the file system is read-only."
            if number == errno.EROFS
            else "permission denied for this file or folder."
        )
        return UserError(how, **facts, next="make it writable for this user, or use another folder")
    if number == errno.ENOENT and _is_raised_by(error, "_get_default_tempdir"):
        following = "export TMPDIR=FOLDER, one that can be written; or raise a limit (ulimit -f)"
        return UserError("no folder takes temporary files.", reason=reason, next=following)
    unmade = number == errno.ENOENT and _is_raised_by(error, "mkdir")  # as in /proc
    if (number in MISPLACED or unmade) and path is not None:
        return UserError("this path cannot be used.", **facts, next="name another file or folder")
    return _translate_memory_error(error, number, path) or _translate_fault(number, facts)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Raise a UserError for what the system refuses, such as a file or memory."""
    try:
        yield
    except (UserError, BrokenPipeError):
        raise
    except Exception as error:
        if (found := translate_error(error)) is None:
            raise
        raise found from error


def _translate_fault(number: int | None, facts: dict[str, Any]) -> UserError | None:
    """Return the error for what a sick disk, a file system that is away or a limit gives; None for
    a number that only a mistake in the code gives.
    """
    if number is None or number in MISTAKES:
        return None
    return UserError("the system refused to read or write.", **facts, next=LOOK_AT_DISK)


def _find_number(error: Exception) -> int | None:
    """Return the system's number of an error, by its message where a library hides it."""
    if SHORT_WRITE.fullmatch(str(error)):
        return errno.ENOSPC
    if str(error) == UNCLOSED:
        return errno.EIO
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    stated = [int(digits) for digits in ERRNO_IN_MESSAGE.findall(str(error))]
    return next((n for n in (*stated, *FULL, *LOCKED) if os.strerror(n) in str(error)), None)


def _translate_full_disk(path: str | None, facts: dict[str, Any]) -> UserError:
    if _lacks_inodes(path):
        following = (
            "delete files (`df -i .` counts them), then repeat the command: finished parts are kept"
        )
        return UserError("the file system can hold no more files.", **facts, next=following)
    following = "free space (`df -h .`), then repeat the command: finished parts are kept"
    return UserError("the disk is full.", **facts, next=following)


def _is_raised_by(error: Exception, function: str) -> bool:
    """Return whether a function of this name raised the error itself."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].name == function


def _lacks_inodes(path: str | None) -> bool:
    """Whether the file system of a path, or of the working folder, has room for bytes but hardly
    for another file.
    """
    folder = Path(path or ".").absolute()
    found = os.statvfs(next(parent for parent in (folder, *folder.parents) if parent.exists()))
    # a file may be gone by now
    return found.f_favail * 100 < found.f_files and found.f_bavail * 100 > found.f_blocks


def _translate_memory_error(
    error: Exception, number: int | None, path: str | None
) -> UserError | None:
    message = f"{type(error).__name__}: {error}"
    reason = message.strip().splitlines()[0]
    if "CUDA out of memory" in message or "HIP out of memory" in message:
        following = (
            "use a smaller micro_batch, activation_checkpointing, or a layout that shards the model"
        )
        return UserError("a GPU's memory was full.", reason=reason, next=following)
    named = isinstance(error, MemoryError) or any(word in message for word in NO_MEMORY)
    if named or number == errno.ENOMEM:
        following = (
            "allow more memory (memory_mb in machine.toml for trainings, mem_mb in the profile), "
        )
        following += "run fewer jobs at a time, or use a smaller micro_batch"
        what = "main memory was full, or this job's share of it."
        return UserError(what, path=path, reason=reason, next=following)
    return None


#: group → its commands → their purposes. Each is a module of this package, imported when it is
#: called. The last group, which only the workflow and launchers call, is not listed by `--help`.
GROUPS = {
    "models": {
        "train": "a training from flags: a file, a corpus or random tokens",
        "generate": "text from a checkpoint",
        "evaluate": "perplexity, bits per byte, accuracy or BLEU of a checkpoint",
        "export": "a checkpoint → a folder that transformers loads",
        "launch": "start one run of an experiment again, and seal its record",
        "arm": "list other trainers, or build the environment of one",
    },
    "data": {
        "advise": "which format for your text: padding, cut text, bytes",
        "corpus": "raw text → Parquet with train and validation splits",
        "tokenizer": "train or fetch a tokenizer",
        "pretokenize": "Parquet → a token store",
        "convert": "token stores from and to Megatron-LM, nanoGPT, Hugging Face, …",
        "download": "fetch the files of a corpus, and verify them by hash",
        "audit": "what a data loader of yours reads: lost, doubled, resumed",
    },
    "before a run": {
        "ready": "whether experiments can start here or under a profile",
        "plan": "what would run, on what, and what it would cost",
        "check": "the configuration and the design of experiments",
        "predict": "step times on more ranks, by a fitted model",
        "doctor": "what this machine has and lacks",
    },
    "during a run": {
        "status": "progress of jobs and runs, why they wait, what failed",
        "track": "events of a run → TensorBoard, MLflow or W&B offline",
        "cloud": "an experiment on rented machines, with a bucket",
    },
    "results": {
        "ingest": "logs of runs and benchmarks → tables (Parquet)",
        "validate": "tables → validity of the runs, with reasons",
        "report": "tables → figures, pages and the folder of a report",
        "claims": "verdicts on claims; --strict fails where one does not hold",
        "verify": "whether results and reports are what their data produce",
        "diff": "compare two reports cell by cell",
        "trace": "which text was in a step of a run",
        "judge": "two sets of runs of any trainer: throughput and loss",
        "environment": "the packages of a report or a run, as requirements for pip",
    },
    "trainers and machines": {
        "parity": "compare two recorded trainings, and find what differs",
        "golden": "compare golden losses: rounding or a real change",
        "benchmark": "measurements side by side",
    },
    "": {
        "rank": "one rank of a run, as a launcher starts it",
        "arm_record": "record the first steps of a run for its parity certificate",
        "mixture": "manifest of the corpora or token stores of a mixture",
    },
}
COMMANDS = [command for commands in GROUPS.values() for command in commands]
#: commands that make nothing that lasts
PRINTING = {*GROUPS["before a run"], "advise", "status", "verify", "diff", "environment", "golden"}
#: so do these without `--output`
PRINTING_UNLESS_ASKED = {"audit", "judge", "trace"}
#: commands of several files, in a folder
IN_FOLDERS = ("status", "train")


def load_command(command: str) -> ModuleType:
    """Return a command's module, with `add_arguments` and `run`."""
    name = f"{command}.command" if command in IN_FOLDERS else command
    return importlib.import_module(f"tokenscale.cli.{name}")


class Parser(argparse.ArgumentParser):
    """Parser that reports mistakes as `UserError` does: one message, the nearest spelling, exit
    code 2.

    Flags are not abbreviated: an abbreviation would change its meaning when a flag is added.
    """

    def __init__(self, *args, **kwargs):
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)

    def parse_known_args(self, args=None, namespace=None):
        """Refuse unknown flags first: argparse would report a required flag as missing instead of
        misspelt.
        """
        words = list(sys.argv[1:] if args is None else args)
        self._refuse_unknown_flags(words)
        return super().parse_known_args(words, namespace)

    def _get_value(self, action, arg_string):
        """Replace `~` and `$VARIABLES` in a path: a shell leaves them in quotes and behind
        `--flag=`.
        """
        return super()._get_value(
            action, expand_path(arg_string) if action.type is Path else arg_string
        )

    def error(self, message: str) -> NoReturn:
        """Print argparse's message as a user's error, with the nearest allowed value, and exit with
        code 2.
        """
        found = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        near = find_nearest(found[1], words=re.findall(r"[\w.-]+", found[2])) if found else None
        hint = f"did you mean {near}?  " if near else ""
        self._refuse(UserError(f"{message.removesuffix('.')}.", next=f"{hint}{self.prog} --help"))

    def _refuse_unknown_flags(self, words: Sequence[str]) -> None:
        flags = self._option_string_actions
        for word in words:
            flag = word.split("=", 1)[0]
            if word == "--" or (self._subparsers and not word.startswith("-")):
                # the rest are values, or flags of a sub-command, whose own parser looks at them
                return
            if (
                not word.startswith("-")
                or word == "-"
                or " " in word
                or self._negative_number_matcher.match(word)
            ):
                continue  # a value, as argparse sees it
            if flag not in flags and not (flag[1:2] != "-" and flag[:2] in flags):  # -n4 is -n 4
                shown = [name for name, action in flags.items() if action.help != argparse.SUPPRESS]
                near = find_nearest(flag.replace("_", "-"), words=shown)
                hint = f"did you mean {near}?" if near else f"{self.prog} --help"
                self._refuse(UserError(f"unknown flag {flag}.", command=self.prog, next=hint))

    def _refuse(self, error: UserError) -> NoReturn:
        self.exit(2, f"{error.render()}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Return its exit code: 0, or 2 for a user's mistake."""
    open_missing_streams()
    try:
        os.getcwd()
    except FileNotFoundError:
        text = "the folder in which this command was called does not exist any more."
        print(UserError(text, next="cd to the project's folder").render(), file=sys.stderr)
        return 2
    arguments = sys.argv[1:] if arguments is None else arguments
    # a terminal or log that is not UTF-8 shows ? for what it lacks
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    lines = {
        group: [f"  {name:<12} {text}" for name, text in commands.items()]
        for group, commands in GROUPS.items()
    }
    groups = ["\n".join([f"{group}:", *listed]) for group, listed in lines.items() if group]
    parser = Parser(
        prog="tokenscale",
        description="Experiments on LLM pretraining systems.",
        usage=as_typed("tokenscale COMMAND [options]   (COMMAND --help lists a command's options)"),
        epilog="\n\n".join(groups),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tokenscale {__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    command = parser.parse_args(arguments[:1]).command
    if command is None:
        parser.print_help()
        return 0

    def run() -> int | None:
        if command not in COMMANDS:
            raise unknown(
                "command",
                word=command,
                words=[name for group in GROUPS if group for name in GROUPS[group]],
            )
        module = load_command(command)
        command_parser = Parser(
            prog=as_typed(f"tokenscale {command}"), description=as_typed(module.__doc__ or "")
        )
        module.add_arguments(command_parser)
        return module.run(command_parser.parse_args(read_arguments(arguments[1:])))

    only_prints = command in PRINTING
    if command in PRINTING_UNLESS_ASKED:
        only_prints = not any(word.partition("=")[0] == "--output" for word in arguments)
    return exit_code(run, help_command=f"tokenscale {command} --help", only_prints=only_prints)


def open_missing_streams() -> None:
    """Open the null device for standard streams that were closed, as daemons and `2>&-` do: else
    the next file that is opened would take their place.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            stream = open(number, "r" if number == 0 else "w", encoding="utf-8")  # noqa: SIM115  # stays open
            setattr(sys, name, stream)


def exit_code(run: Callable[[], int | None], help_command: str, only_prints: bool = False) -> int:
    """Run a command and return its exit code; print a user's mistake as one message.

    `help_command` is the next step of a mistake that names none. A command that makes something,
    and whose reader leaves before it is made, fails.
    """
    try:
        with translate_errors():
            return run() or 0
    except UserError as error:
        facts = error.facts | {"next": as_runnable(error.facts.get("next", help_command))}
        print(UserError(error.what, **facts).render(), file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has exited (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if only_prints:
            return 0
        text = "the reader of this command's output has left, so it ended before its work was done."
        print(UserError(text, next="repeat it without `| head`").render(), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tokenscale: interrupted.", file=sys.stderr)
        return 130


def add_configuration_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--configfile`, `--config` and `--profile`, as Snakemake has them, and `--scale` and
    `--machine`, two values of the configuration.
    """
    of_files = "YAML merged over config/config.yaml; later files win"
    of_values = "values merged over all files"
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    parser.add_argument("--configfile", **several, metavar="FILE", help=of_files)
    parser.add_argument("--config", **several, metavar="KEY=VALUE", help=of_values)
    parser.add_argument(
        "--profile", help="Snakemake's profile, such as alps: its scale and its machine"
    )
    parser.add_argument("--scale", help="overlay to use instead of the configured one")
    parser.add_argument(
        "--machine", help="file of the machine to run on, such as profiles/alps/machine.toml"
    )


def read_overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the configuration that have options of their own."""
    values = {key: getattr(arguments, key) for key in ("scale", "machine")}
    return {key: value for key, value in values.items() if value is not None}


def load_configuration(
    arguments: argparse.Namespace, overrides: Mapping[str, Any] | None = None
) -> "Config":
    """Load the configuration that these options name; `overrides` take precedence. Raise UserError
    for a missing file or invalid value.
    """
    from tokenscale.settings.config import load_config
    from tokenscale.settings.profile import parse_pair

    files = tuple(map(expand_path, arguments.configfile))
    for file in files:
        if not Path(file).exists():
            near = find_nearest(file, words=map(str, Path().glob("*.yaml")))
            hint = "name an existing file; put targets and names of experiments before --configfile"
            found = f"did you mean {near}?" if near else hint
            raise UserError("the configuration file is missing.", file=file, next=found)
    given = dict(map(parse_pair, arguments.config)) | read_overrides(arguments)
    merged = {**given, **(overrides or {})}
    profile = arguments.profile and expand_path(arguments.profile)
    try:
        return load_config(configfiles=files, profile=profile, overrides=merged)
    except UserError as error:
        if error.facts.get("file") == "--config" and error.facts.get("key") in read_overrides(
            arguments
        ):
            error.facts["file"] = f"--{error.facts['key']}"
        raise
