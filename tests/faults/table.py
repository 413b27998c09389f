"""The table of faults in docs/operations.md: what is injected, what happens then, and what the tests reported.

python -m tests.faults.table --run      run those tests, and write down what each said: evidence/faults/tests.jsonl
                             --run tests/faults/test_kills.py    the same of some
python -m tests.faults.table --write    put the table, as evidence has it, into docs/operations.md
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults import campaign

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "evidence/faults"
TESTS = EVIDENCE / "tests.jsonl"
KILLS = EVIDENCE / "kills.jsonl"
MARK = "<!-- faults -->"
MARK_OF_KILLS = "<!-- kills -->"


@dataclass(frozen=True)
class Fault:
    """A row: what is injected, what happens then, what a person sees, and the tests (a file's, or one by its name)."""

    fault: str
    happens: str
    seen: str
    tests: tuple[str, ...]


LONG, TRAININGS, STATUS = "tests/slurm/test_long_jobs.py", "tests/slurm/test_trainings.py", "tests/slurm/test_status.py"
RESUME, DOWNLOAD = "tests/faults/test_resume.py", "tests/unit/test_download.py"
SUBMISSION, STORES = "tests/experiments/test_submission.py", "tests/unit/test_bad_input_stores.py"
FAULTS = (
    Fault(
        "a job reaches its time limit",
        "`signal_s` before it, ranks write a state; the next attempt goes on",
        "`was stopped after step n; the next attempt goes on from there`",
        (f"{TRAININGS}::test_a_job_beyond_its_time_limit_goes_on_in_the_next",),
    ),
    Fault(
        "preemption, or any other SIGTERM or SIGUSR1",
        "a state between two steps, on all ranks after the same one",
        "the same",
        (f"{LONG}::test_a_run_that_is_told_to_stop_goes_on_from_that_step",),
    ),
    Fault(
        "`scancel`",
        "the same, within the seconds that the site gives; the next call goes on",
        "`CANCELLED`",
        (f"{LONG}::test_a_cancelled_job_is_told_as_such_and_goes_on",),
    ),
    Fault(
        "a node is set down",
        "its job is submitted again, and goes on",
        "`node failure`",
        (f"{LONG}::test_a_node_set_down_costs_an_attempt",),
    ),
    Fault(
        "a node is drained while its job runs",
        "the job ends there; the next one runs on other nodes",
        "nothing",
        (f"{LONG}::test_a_drained_node_ends_its_job_and_the_next_one_runs_elsewhere",),
    ),
    Fault(
        "`scontrol requeue` in mid-run",
        "jobs of the workflow cannot be requeued; one submitted with `--requeue` goes on from its newest state",
        "`goes on after step n`",
        (f"{LONG}::test_a_job_that_is_requeued_in_mid_run_goes_on",),
    ),
    Fault(
        "two `make run` in one folder",
        "the second one ends before its first job",
        "`Snakemake is running in this folder: process …`",
        ("tests/unit/test_launch_workflows.py::test_that_of_a_living_one_stays_and_its_owner_is_named",),
    ),
    Fault(
        "any rule, one rank, or Snakemake is killed at any moment",
        "the next call makes what an undisturbed one makes, and leaves no temporary file",
        "`removing the lock of a Snakemake process that was killed`",
        ("tests/faults/test_kills.py::test_the_last_call_makes_what_an_undisturbed_one_makes",),
    ),
    Fault(
        "the power fails while a corpus, a store or a checkpoint is written, or a run is sealed",
        "what is named is complete: content, names and manifest are synced in that order",
        "nothing; what is not finished is made again",
        ("tests/faults/test_power_cut.py",),
    ),
    Fault(
        "a rented machine is taken away, with or without a warning",
        "the next one, in an empty folder, goes on from the bucket with the same losses",
        "`goes on after step n`",
        ("tests/faults/test_cloud.py",),
    ),
    Fault(
        "a rank is killed with 9",
        "the others are ended; the next attempt has the same losses to the last bit",
        "the rank that failed first",
        (f"{RESUME}::test_kill_9_at_a_random_moment",),
    ),
    Fault(
        "a state to go on from is damaged",
        "it is passed over for the one before, and kept under another name",
        "its name, and which one is taken",
        (f"{RESUME}::test_a_damaged_state_is_passed_over_for_an_older_one",),
    ),
    Fault(
        "the newest state to go on from is gone, because its folder was replaced",
        "the run goes on from the one that is there",
        "both names",
        (f"{RESUME}::test_a_folder_of_older_states_is_noticed",),
    ),
    Fault(
        "source files are edited while a run trains",
        "the run is sealed with their names, and is suspect in tables and report",
        "the files; `outcome.code_changed` in `run.json`",
        (f"{RESUME}::test_source_files_that_are_edited_during_a_run_are_sealed_into_its_record",),
    ),
    Fault(
        "a rank stands still",
        "after `hang_s` (30 minutes) without a step all ranks write where they are, and the run ends",
        "the rank the others waited for, and its stack",
        ("tests/faults/test_hung.py",),
    ),
    Fault(
        "a rank is stopped for 20 s",
        "the others wait; the run goes on with the same losses",
        "one step of 20 s",
        ("tests/faults/test_hung.py::test_a_rank_that_is_stopped_for_twenty_seconds_costs_only_those",),
    ),
    Fault(
        "the out-of-memory killer ends a rank",
        "the others are ended; the next attempt has the same losses to the last bit",
        "the rank, `most often because main memory was full`",
        ("tests/faults/test_memory.py::test_a_rank_that_the_kernel_kills_is_told_as_such_and_the_run_goes_on",),
    ),
    Fault(
        "the disk is full, read-only, not ours, or can hold no more files",
        "nothing is lost or half-written; the same call then goes on",
        "which of them, the path, the next step",
        ("tests/faults/test_disk.py",),
    ),
    Fault(
        "memory is full: in a rank, in a process of the report, in a library",
        "the run goes on from its newest state; nothing half-written stays",
        "whose memory, what to make smaller or larger",
        ("tests/faults/test_memory.py",),
    ),
    Fault(
        "the clock is set back: while a run trains, between attempts",
        "times inside a log stay in order; the attempts of the run stay valid",
        "nothing",
        ("tests/faults/test_clock.py",),
    ),
    Fault(
        "another process takes the port on which ranks were to meet",
        "another port is tried, three times on one machine",
        "the port",
        ("tests/faults/test_port.py",),
    ),
    Fault(
        "secrets stand in the environment, on the command line, in the working tree, in an address",
        "records and logs hold `…` in their place",
        "`…`; `diff_redacted` in `run.json`",
        ("tests/faults/test_secrets.py",),
    ),
    Fault(
        "somebody on the network looks for open ports of a run on one machine",
        "the ranks listen on the loopback interface alone, also under torchrun",
        "nothing",
        ("tests/faults/test_ports.py",),
    ),
    Fault(
        "Snakemake is killed, and started again",
        "its job goes on; the new one waits for it, and seals the run without training",
        "`is being written by process … job n; waiting for it`",
        (f"{LONG}::test_a_restarted_controller_trains_nothing_twice",),
    ),
    Fault(
        "a run fails every time",
        "as many attempts as the profile says, no more",
        "the rank that failed first, the end of its output, cause, next step",
        (f"{LONG}::test_a_run_that_fails_is_tried_as_often_as_the_profile_says",),
    ),
    Fault(
        "sbatch refuses a job",
        "nothing runs",
        "its reason, and the next step",
        (f"{TRAININGS}::test_a_submission_that_is_refused_is_told_with_its_reason",),
    ),
    Fault(
        "the job has fewer nodes than the run needs",
        "nothing trains",
        "both numbers",
        (f"{TRAININGS}::test_a_job_with_fewer_nodes_than_its_run_needs_trains_nothing",),
    ),
    Fault(
        "a link inside a node or between nodes is slower than the machine's file expects",
        "every rank refuses before the first step",
        "measured and expected bandwidth, the nodes",
        ("tests/distributed/test_preflight.py",),
    ),
    Fault(
        "another world size, two ranks on one GPU, ranks on other nodes, NCCL over TCP",
        "every rank refuses before the first step",
        "which ranks, which device, what was found",
        ("tests/unit/test_parallel_places.py",),
    ),
    Fault(
        "`ALPS_ACCOUNT` is not set",
        "nothing is submitted; `-n` warns",
        "the variable",
        (f"{SUBMISSION}::test_an_account_without_a_value_stops_before_the_first_submission",),
    ),
    Fault(
        "the plan is over `budget.node_hours`",
        "nothing is submitted; `-n` warns",
        "the largest experiments, and how to raise it",
        (f"{SUBMISSION}::test_a_plan_over_the_budget_is_refused_before_anything_is_submitted",),
    ),
    Fault(
        "a job waits",
        "",
        "`status`: why, and until when",
        (f"{STATUS}::test_jobs_of_a_folder_and_why_they_wait",),
    ),
    Fault(
        "SLURM's controller does not answer",
        "`status` goes on after ten seconds",
        "one line",
        (f"{STATUS}::test_a_controller_that_does_not_answer_is_one_line",),
    ),
    Fault(
        "scratch has purged token stores",
        "nothing reruns; one command makes them again",
        "the command",
        ("tests/experiments/test_links.py::test_stores_that_scratch_has_purged_are_made_again_by_the_stated_command",),
    ),
    Fault(
        "a download is cut, falls silent, is sent elsewhere, changes meanwhile",
        "it goes on where it ended, or begins anew; the bytes are the server's",
        "what happened, after how many bytes",
        tuple(
            f"{DOWNLOAD}::{name}"
            for name in (
                "test_a_cut_connection_is_continued_where_it_broke",
                "test_random_cuts_never_give_another_file",
                "test_a_server_that_falls_silent_is_asked_again_for_the_rest",
                "test_redirects_are_followed",
                "test_a_file_that_changed_meanwhile_is_begun_anew",
            )
        ),
    ),
    Fault(
        "a download has another length or hash, or is a web page",
        "nothing of it is kept",
        "both hashes, or what came in its place",
        tuple(
            f"{DOWNLOAD}::{name}"
            for name in (
                "test_a_part_longer_than_the_file_is_begun_anew",
                "test_a_wrong_hash_is_refused_and_nothing_is_kept",
                "test_what_is_no_file_is_told_at_once",
            )
        ),
    ),
    Fault(
        "stores (a thousand times), corpora, tokenizers and checkpoints are cut, flipped, exchanged",
        "none is read as something else",
        "the file, what was expected, what was found",
        (
            f"{STORES}::test_of_a_thousand_damaged_stores_none_is_read_as_something_else",
            f"{STORES}::test_damaged_corpora_are_never_read_as_other_text",
            f"{STORES}::test_damaged_tokenizers_never_make_other_ids",
            f"{STORES}::test_damaged_checkpoints_never_give_other_weights",
        ),
    ),
)


class Heard:
    """A plugin of pytest that notes how each test ended."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that fails before or after its call has failed."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome


def run(beginning: str = "") -> int:
    """Run the table's tests whose names begin so, one after the other; returns pytest's exit code.

    What others said before stays, if the table still names them.
    """
    heard = Heard()
    named = [test for fault in FAULTS for test in fault.tests]
    asked = [str(ROOT / test) for test in named if test.startswith(beginning)]
    for test, outcome in outcomes().items():
        if not test.startswith(beginning) and any(belongs(test, name) for name in named):
            heard.outcomes[test] = outcome
    code = pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *asked], plugins=[heard])
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"test": test, "outcome": outcome}) for test, outcome in sorted(heard.outcomes.items())]
    TESTS.write_text("".join(f"{line}\n" for line in lines))
    return int(code)


def outcomes(path: Path = TESTS) -> dict[str, str]:
    """Test → how it ended."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["test"]: row["outcome"] for row in rows}


def belongs(test: str, named: str) -> bool:
    """Whether a test, by pytest's name for it, is one of those that a row names."""
    return test.split("[")[0] == named or test.startswith(f"{named}::")


def table(found: dict[str, str]) -> str:
    """Markdown: a row a fault. Injected: tests that ran, of each of its values one; survived: those that passed."""
    lines = ["| fault | what happens | what you see | injected | survived | tests |", "|---|---|---|---:|---:|---|"]
    for row in FAULTS:
        ended = Counter(o for test, o in found.items() if any(belongs(test, named) for named in row.tests))
        ran = ended["passed"] + ended["failed"]
        files = ", ".join(f"`{name}`" for name in dict.fromkeys(named.split("::")[0] for named in row.tests))
        where = f"`{row.tests[0]}`" if len(row.tests) == 1 else files
        cells = [row.fault, row.happens, row.seen, str(ran) if ran else "not run", str(ended["passed"]), where]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def written(readme: str) -> str:
    """The README with both tables as the evidence has them."""
    for mark, text in ((MARK, table(outcomes())), (MARK_OF_KILLS, campaign.table(campaign.read(KILLS)))):
        before, _, after = readme.split(mark)
        readme = f"{before}{mark}\n{text}\n{mark}{after}"
    return readme


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="?", const="", metavar="BEGINNING", help="of tests' names; without it all")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.run is not None:
        raise SystemExit(run(asked.run))
    if asked.write:
        (ROOT / "docs/operations.md").write_text(written((ROOT / "docs/operations.md").read_text()))
    else:
        print(table(outcomes()))


if __name__ == "__main__":
    main()
