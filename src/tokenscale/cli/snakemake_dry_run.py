"""Read what Snakemake would run, and its reason for each job, from the text of a dry run.

Snakemake runs in a process of its own, through its public command line, which is more stable across versions than its
internals. For each job it prints the reason and the command; the command names the output and the log.
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
from tokenscale.settings.profile import NO_OPTIONS, Call

#: kind → (plural, pattern of its output with its experiment and name), in the order of the data flow
KINDS = {
    "download": ("downloads", r"results/downloads/(?P<name>[^/]+)/.*"),
    "corpus": ("corpora", r"results/corpus/(?P<name>[^/]+)/(?!records/).*"),
    "records": ("records", r"results/corpus/(?P<name>[^/]+)/records/.*"),
    "tokenizer": ("tokenizers", r"results/tokenizers/(?P<name>[^/]+)/.*"),
    "store": ("stores", r"results/tokens/(?P<name>.+)/manifest\.json"),
    "mixture": ("mixtures", r"results/mixtures/(?P<name>.+)/manifest\.json"),
    "run": ("runs", r"results/runs/(?P<name>[^/]+)/.*"),
    "benchmark": ("benchmarks", r"results/benchmarks/(?P<name>[^/]+)/(?P<of>[^/]+)\.json"),
    "run table": ("run tables", r"results/experiments/(?P<of>[^/]+)/.*"),
    "tables": ("tables", r"results/tables/(?P<of>[^/]+)(/.*)?"),
    "figure": ("figures", r"results/figures/(?P<of>[^/]+)/(?P<name>[^/.]+).*"),
    "report": ("report", r"results/report/(?P<name>.*)"),
    "job": ("jobs", r".*"),
}
#: rules that make data; each has its source files as the input `code`
DATA_RULES = (
    *("download", "build_corpus", "corpus_part", "merge_corpus", "corpus_records"),
    *("build_tokenizer", "fetch_tokenizer", "pretokenize", "pretokenize_whole", "pretokenize_part", "merge_store"),
    *("mix_corpora", "mix_stores"),
)
#: beginning of Snakemake's reason → its name here
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
# with `message:` a rule prints "Job 5: …" and "Reason: …"; without it "rule name:" and its fields
_JOB = re.compile(r"^(?:Job \d+: (?P<words>.*)|(?:local)?(?:rule|checkpoint) (?P<rule>\w+):)$", re.MULTILINE)


@dataclass(frozen=True)
class Job:
    """One job of a dry run: its label from the rule, its reasons (name → text), its outputs and its log."""

    label: str
    reasons: dict[str, str]
    outputs: tuple[str, ...]
    log: str | None = None

    @cached_property
    def _found(self) -> tuple[str, dict[str, str]]:
        matches = ((k, re.fullmatch(pattern, o)) for o in self.outputs for k, (_, pattern) in KINDS.items())
        return next((kind, found.groupdict()) for kind, found in matches if found)

    @property
    def kind(self) -> str:
        """Return the kind of the job's output (see KINDS); `job` for an output elsewhere."""
        return self._found[0]

    @property
    def experiment(self) -> str | None:
        """Return the experiment that the job belongs to, if any."""
        return self._found[1].get("of")

    @property
    def name(self) -> str:
        """Return the job's name within its kind."""
        return " of ".join(filter(None, [self._found[1].get("name"), self.experiment])) or self.label


def plan_jobs(targets: list[str], call: Call = NO_OPTIONS) -> list[Job]:
    """Return the jobs that Snakemake would run for these targets. Raise UserError if it cannot plan them.

    Snakemake does not examine a job downstream of one that runs. If runs are downstream of edited data code, a second
    dry run accepts that edit, so that the runs' own reasons are known, too.
    """
    text = dry_run(targets, call)
    jobs = parse_jobs(text)
    if not any(job.kind == "run" and set(job.reasons) == {"upstream"} for job in jobs):
        return jobs
    accepted = [rule for rule in DATA_RULES if re.search(rf"^{rule} +\d+$", text, re.MULTILINE)]
    own = {job.outputs: job.reasons for job in parse_jobs(dry_run(targets, call, accepted))}
    return [replace(job, reasons=own.get(job.outputs, {}) | job.reasons) for job in jobs]


def dry_run(targets: list[str], call: Call = NO_OPTIONS, accepted: Iterable[str] = ()) -> str:
    """Return the output of `snakemake --dry-run` with each job's reason and command.

    Edits of the code of `accepted` rules are ignored. Raise UserError in a folder without a workflow, and with
    Snakemake's message if it cannot plan.
    """
    require_workflow()
    # outputs that a killed Snakemake left incomplete would stop the dry run, too
    command = [sys.executable, "-m", "snakemake", "--dry-run", "--rerun-incomplete", "--printshellcmds", "--nocolor"]
    command += [*call.arguments, *([] if call.profile else ["--cores", "1"])]
    ancient = [f"{rule}=code" for rule in accepted]
    command += ["--consider-ancient", *ancient] if ancient else []
    # a profile may hide reasons: this `--quiet` overrides it
    command += ["--quiet", "host", "--", *targets]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise _planning_error(done.stdout, f"{snakemake_command(call)} --dry-run {' '.join(targets)}".rstrip())
    return done.stdout


def require_workflow() -> None:
    """Raise UserError if the working folder holds no workflow."""
    if not Path("workflow/Snakefile").is_file():
        raise UserError(
            "this folder holds no workflow.",
            folder=Path.cwd(),
            expected="workflow/Snakefile",
            next="cd to the project's folder",
        )


def snakemake_command(call: Call) -> str:
    """Return the Snakemake command line for this configuration; targets may be appended."""
    return shlex.join(["snakemake", *call.arguments, *([] if call.profile else ["--cores", "1"])])


def _planning_error(text: str, command: str) -> UserError:
    own = re.search(r"^tokenscale: (.*)((?:\n  .*)*)", text, re.MULTILINE)
    if own:  # a mistake in the configuration: pass on the workflow's message
        facts: dict[str, str] = {}
        for label, fact in re.findall(
            r"^  (\S*) +(.*)", own[2], re.MULTILINE
        ):  # no label: continuation of the fact above
            label = label or list(facts)[-1]
            facts[label] = "\n".join([*([facts[label]] if label in facts else []), fact])
        return UserError(own[1], **facts)
    text_after = text.partition("Building DAG of jobs...")[2] or text
    return UserError(
        "Snakemake cannot plan the jobs.", snakemake="\n".join(text_after.strip().splitlines()[-12:]), next=command
    )


def parse_jobs(text: str) -> list[Job]:
    """Parse the jobs of a dry run's text. Targets, which write nothing, are left out.

    >>> job = "Job 5: corpus web\\nReason: Missing output files: results/corpus/web/manifest.json\\n"
    >>> parse_jobs(job + "Shell command: tokenscale corpus --output results/corpus/web/manifest.json\\n")[0].name
    'web'
    """
    jobs = []
    for start, block in _split_at(_JOB, text):
        reason = re.search(r"^ *[Rr]eason: (.*)", block, re.MULTILINE)
        listed = re.search(r"^ +output: (.*)", block, re.MULTILINE)
        stated = re.search(r" --output (\S+)", block)
        outputs = [*(listed[1].split(", ") if listed else []), *([stated[1]] if stated else [])]
        log = re.search(r" > (\S+) 2>&1$", block, re.MULTILINE)
        if reason and outputs:
            unquoted = tuple(dict.fromkeys(output.strip("'") for output in outputs))
            jobs.append(
                Job(
                    start["words"] or start["rule"],
                    _parse_reasons(reason[1]),
                    unquoted,
                    log[1].strip("'") if log else None,
                )
            )
    return jobs


def _parse_reasons(text: str) -> dict[str, str]:
    """Split Snakemake's line into its reasons; unknown text is kept whole, as `other`."""
    return {REASONS[s[0]]: text_after.strip(" ;") for s, text_after in _split_at(_REASON, text)} or {
        "other": text.strip()
    }


def _split_at(pattern: re.Pattern, text: str) -> Iterator[tuple[re.Match, str]]:
    """Yield each match with the text up to the next match."""
    starts = list(pattern.finditer(text))
    for start, after in zip(starts, [*starts[1:], None], strict=False):
        yield start, text[start.end() : after.start() if after else None]
