"""What Snakemake would run, and its reason for each job: its dry run's text, read.

Snakemake is asked as anybody asks it, in a process of its own: that outlives its versions better than its internals
do. Of each job it prints the reason and the command, and the command names the output and the log.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.settings.calls import NO_OPTIONS, Call

#: kind → (its plural, pattern of its output: what it is of, and its name). In the order of the data's way.
KINDS = {
    "download": ("downloads", r"results/downloads/(?P<name>[^/]+)/.*"),
    "corpus": ("corpora", r"results/corpus/(?P<name>[^/]+)/.*"),
    "tokenizer": ("tokenizers", r"results/tokenizers/(?P<name>[^/]+)/.*"),
    "store": ("stores", r"results/tokens/(?P<name>.+)/manifest\.json"),
    "run": ("runs", r"results/runs/(?P<name>[^/]+)/.*"),
    "benchmark": ("benchmarks", r"results/benchmarks/(?P<name>[^/]+)/(?P<of>[^/]+)\.json"),
    "run table": ("run tables", r"results/experiments/(?P<of>[^/]+)/.*"),
    "tables": ("tables", r"results/tables/(?P<of>[^/]+)(/.*)?"),
    "figure": ("figures", r"results/figures/(?P<of>[^/]+)/(?P<name>[^/.]+).*"),
    "report": ("report", r"results/report/(?P<name>.*)"),
    "job": ("jobs", r".*"),
}
#: rules that make data, each with its source files as the input `code`
DATA_RULES = ("download", "build_corpus", "build_tokenizer", "fetch_tokenizer", "pretokenize")
#: how Snakemake begins a reason → its name here
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
_REASON = re.compile("|".join(re.escape(words) for words in REASONS))
# with a `message:` a rule prints "Job 5: …" and "Reason: …"; without one "rule name:" and a list of its parts
_JOB = re.compile(r"^(?:Job \d+: (?P<words>.*)|(?:local)?(?:rule|checkpoint) (?P<rule>\w+):)$", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """One job of a dry run: its words as the rule has them, its reasons (name → text), what it writes, its log."""

    words: str
    reasons: dict[str, str]
    outputs: tuple[str, ...]
    log: str | None = None

    @cached_property
    def _found(self) -> tuple[str, dict[str, str]]:
        matches = ((k, re.fullmatch(pattern, o)) for o in self.outputs for k, (_, pattern) in KINDS.items())
        return next((kind, found.groupdict()) for kind, found in matches if found)

    @property
    def kind(self) -> str:
        """What it makes (see KINDS), from its output; `job` for an output of another place."""
        return self._found[0]

    @property
    def experiment(self) -> str | None:
        """The experiment it belongs to, if it belongs to one."""
        return self._found[1].get("of")

    @property
    def name(self) -> str:
        """Which one of its kind."""
        return " of ".join(filter(None, [self._found[1].get("name"), self.experiment])) or self.words


def planned(targets: list[str], call: Call = NO_OPTIONS) -> list[Job]:
    """The jobs that Snakemake would run here for these targets. Raises UserError where it cannot plan them.

    Snakemake does not look at a job behind one that runs. Where runs stand behind edited code of their data, it is
    asked again as if that edit were accepted, so that what hits the runs themselves is known, too.
    """
    text = dry_run(targets, call)
    jobs = parse(text)
    if not any(job.kind == "run" and set(job.reasons) == {"upstream"} for job in jobs):
        return jobs
    accepted = [rule for rule in DATA_RULES if re.search(rf"^{rule} +\d+$", text, re.MULTILINE)]
    own = {job.outputs: job.reasons for job in parse(dry_run(targets, call, accepted))}
    return [replace(job, reasons=own.get(job.outputs, {}) | job.reasons) for job in jobs]


def dry_run(targets: list[str], call: Call = NO_OPTIONS, accepted: Iterable[str] = ()) -> str:
    """What `snakemake --dry-run` prints here, with each job's reason and command.

    Edits of the code of `accepted` rules count as none. Raises UserError in a folder without a workflow, and with
    Snakemake's own words where it cannot plan.
    """
    need_workflow()
    # what a killed Snakemake left unfinished would stop the dry run, too
    command = [sys.executable, "-m", "snakemake", "--dry-run", "--rerun-incomplete", "--printshellcmds", "--nocolor"]
    command += [*call.arguments, *([] if call.profile else ["--cores", "1"])]
    ancient = [f"{rule}=code" for rule in accepted]
    command += ["--consider-ancient", *ancient] if ancient else []
    # a profile may hide reasons: `--quiet` said here replaces what it says
    command += ["--quiet", "host", "--", *targets]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise _refused(done.stdout, f"{snakemake(call)} --dry-run {' '.join(targets)}".rstrip())
    return done.stdout


def need_workflow() -> None:
    """Raise UserError where the working folder holds no workflow."""
    if not Path("workflow/Snakefile").is_file():
        raise UserError(
            "there is no workflow here.",
            folder=Path.cwd(),
            expected="workflow/Snakefile",
            next="change to the project's folder",
        )


def snakemake(call: Call) -> str:
    """The command line with which a person runs Snakemake on this configuration; targets may follow it."""
    return shlex.join(["snakemake", *call.arguments, *([] if call.profile else ["--cores", "1"])])


def _refused(text: str, command: str) -> UserError:
    own = re.search(r"^tokenscale: (.*)((?:\n  .*)*)", text, re.MULTILINE)
    if own:  # a mistake in the configuration: the workflow's message says it all
        facts: dict[str, str] = {}
        for label, fact in re.findall(r"^  (\S*) +(.*)", own[2], re.MULTILINE):  # no label: the fact above goes on
            label = label or list(facts)[-1]
            facts[label] = "\n".join([*([facts[label]] if label in facts else []), fact])
        return UserError(own[1], **facts)
    text_after = text.partition("Building DAG of jobs...")[2] or text
    return UserError(
        "Snakemake cannot plan this.", snakemake="\n".join(text_after.strip().splitlines()[-12:]), next=command
    )


def parse(text: str) -> list[Job]:
    """The jobs in a dry run's text. Targets, which write nothing, are left out.

    >>> job = "Job 5: corpus web\\nReason: Missing output files: results/corpus/web/manifest.json\\n"
    >>> parse(job + "Shell command: python -m tokenscale corpus --output results/corpus/web/manifest.json\\n")[0].name
    'web'
    """
    jobs = []
    for start, block in _parts(_JOB, text):
        reason = re.search(r"^ *[Rr]eason: (.*)", block, re.MULTILINE)
        listed = re.search(r"^ +output: (.*)", block, re.MULTILINE)
        stated = re.search(r" --output (\S+)", block)
        outputs = [*(listed[1].split(", ") if listed else []), *([stated[1]] if stated else [])]
        log = re.search(r" > (\S+) 2>&1$", block, re.MULTILINE)
        if reason and outputs:
            unquoted = tuple(dict.fromkeys(output.strip("'") for output in outputs))
            jobs.append(
                Job(start["words"] or start["rule"], _reasons(reason[1]), unquoted, log[1].strip("'") if log else None)
            )
    return jobs


def _reasons(text: str) -> dict[str, str]:
    """Snakemake's line by its reasons; words that are not known are kept whole, as `other`."""
    return {REASONS[s[0]]: text_after.strip(" ;") for s, text_after in _parts(_REASON, text)} or {"other": text.strip()}


def _parts(pattern: re.Pattern, text: str) -> Iterator[tuple[re.Match, str]]:
    """Each match with the text between it and the next one."""
    starts = list(pattern.finditer(text))
    for start, after in zip(starts, [*starts[1:], None], strict=False):
        yield start, text[start.end() : after.start() if after else None]
