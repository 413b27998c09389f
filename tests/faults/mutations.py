"""Guards taken out one at a time: a test must turn red for each.  python -m tests.faults.mutations [NAME …]

The first are those of the README's guarantees; reruns have `tests/workflow/guards.md`. Prints a
line a guard. Not part of `make test`: it is for those who change a guard or its test, and for the
evidence.
"""

# ruff: noqa: E501

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# ruff: noqa: F401  what tests would import: they run in forks
import hypothesis
import numpy
import pandas
import pyarrow.parquet
import pydantic
import pytest
import torch._dynamo

ROOT = Path(__file__).parents[2]
COPIED = (
    "src",
    "packages",
    "tests",
    "workflow",
    "arms",
    "locks",
    "config",
    "profiles",
    "docs",
    "pyproject.toml",
    "README.md",
)


@dataclass(frozen=True)
class Guard:
    """A guard: the text of it in its file, what stands there without it, and the test that must see
    that.
    """

    file: str
    guard: str
    without: str
    test: str


BATCHES = "tests/unit/test_batches.py"
MANIFESTS = "tests/unit/test_bad_input_stores.py"
LOCKS = "tests/unit/test_launch_workflows.py"
WRITER = "tests/unit/test_launch_lock.py"
SECURITY = "tests/unit/test_security.py"
SETTINGS = "tests/unit/test_bad_input_settings.py"
GUARDS = {
    "ranks share the slots of a batch": Guard(
        "data/order/permutation.py", "start + least + (rank < more))", "start + least)", BATCHES
    ),
    "rows online are those of the store": Guard(
        "data/batches/online.py",
        "            self.documents(indices), width",
        "            self.documents(indices)[::-1], width",
        BATCHES,
    ),
    "copies share the mean gradient": Guard(
        "train/parallel/sharding.py",
        "            flat /= dist.get_world_size(reduction.group)\n",
        "            pass\n",
        "tests/distributed/test_parity.py",
    ),
    "parts of a checkpoint have their place": Guard(
        "train/checkpoint.py",
        "    return low, tuple(",
        "    return tuple(offsets), tuple(",
        "tests/experiments/test_layout_checkpoints.py",
    ),
    "a run goes on behind its last step": Guard(
        "train/loop.py",
        '        self.batches.seek({"step": found.record["step"]})\n',
        "",
        "tests/faults/test_resume.py",
    ),
    "warm-up is no speed": Guard(
        "analysis/sql/macros.sql",
        "g.attempt_step >= warmup_steps AND ",
        "",
        "tests/unit/test_analysis_live.py",
    ),
    "a killed process's temporaries are removed": Guard(
        "base/files.py",
        "            if gone:\n",
        "            if False:\n",
        WRITER + "::test_what_a_killed_writer_left_is_removed_by_the_next_and_a_living_ones_stays",
    ),
    "a killed Snakemake's lock is taken off": Guard(
        "runs/launch/lock.py", '        shutil.rmtree(folder / "locks")\n', "", LOCKS
    ),
    "one call works in a folder": Guard(
        "runs/launch/lock.py", "    if not free:", "    if False:", LOCKS
    ),
    "an owner on another machine counts": Guard(
        "runs/launch/lock.py", "    if owner and", "    if False and", LOCKS
    ),
    "a link is not followed": Guard(
        "base/files.py", "(0 if follow else os.O_NOFOLLOW)", "0", LOCKS
    ),
    "a record has the digest of its content": Guard(
        "base/files.py",
        "    if not is_sealed(record, key) and ",
        "    if False and ",
        WRITER + "::test_no_flipped_bit_of_a_sealed_record_is_read_as_another",
    ),
    "what is not JSON is refused": Guard(
        "base/files.py",
        "        parse_constant=refuse,\n",
        "",
        WRITER + "::test_json_that_we_do_not_write_is_refused_with_its_name",
    ),
    "a tokenizer has one writer": Guard(
        "cli/tokenizer.py",
        "from tokenscale.runs.launch.lock import hold_run_folder\n",
        "from contextlib import nullcontext\nhold_run_folder = lambda *a, **k: nullcontext()\n",
        WRITER + "::test_a_store_that_another_process_makes_is_waited_for",
    ),
    "a run has one writer": Guard(
        "base/files.py",
        "fcntl.flock(file, fcntl.LOCK_EX",
        "fcntl.flock(file, fcntl.LOCK_SH",
        WRITER + "::test_a_held_folder_is_refused_with_its_owner",
    ),
    "content of corpora and stores": Guard(
        "base/manifests.py",
        "    if found != sha256:\n        raise changed_error(",
        "    if False:\n        raise changed_error(",
        MANIFESTS,
    ),
    "sizes of corpora and stores": Guard(
        "base/manifests.py",
        "        if found != size:",
        "        if False:",
        MANIFESTS,
    ),
    "a store's manifest hashes itself": Guard(
        "data/stores/manifest.py",
        "    if not is_sealed(manifest, key=SEAL) or",
        "    if",
        "tests/unit/test_formats.py",
    ),
    "schemas of the future": Guard(
        "base/files.py",
        "    if not oldest <= version <= newest:",
        "    if False:",
        MANIFESTS + "::test_whatever_has_another_version_is_refused",
    ),
    "ids outside of the vocabulary": Guard(
        "data/stores/packed.py",
        "                raise vocabulary_error(",
        "                print(",
        MANIFESTS,
    ),
    "content of checkpoints": Guard(
        "train/checkpoint.py", '(verify and _hash(path) != stated["xxh3_128"])', "False", MANIFESTS
    ),
    "states of other code are not resumed": Guard(
        "train/resume.py",
        'if found.record.get("digest") == self._record.get("digest"):',
        "if True:",
        "tests/faults/test_resume.py::test_states_of_other_code_are_not_resumed",
    ),
    "states of other data are not resumed": Guard(
        "train/resume.py",
        "        if differing or found.record",
        "        if False and found.record",
        "tests/faults/test_resume.py::test_a_checkpoint_of_other_data_or_code_is_refused_by_name",
    ),
    "an edited record is not sealed": Guard(
        "runs/records/provenance.py",
        "return record if is_sealed(record) else None",
        "return record if isinstance(record, dict) and 'seal' in record else None",
        "tests/unit/test_launch.py",
    ),
    "names are of plain letters": Guard(
        "settings/options.py", 'r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"', 'r"^.*$"', SETTINGS
    ),
    "only http is read from elsewhere": Guard(
        "settings/data.py", "elif _SCHEME.match(file):", "elif False:", SETTINGS
    ),
    "passwords in addresses": Guard("settings/data.py", "if shown != file:", "if False:", SETTINGS),
    "messages carry no password": Guard(
        "base/errors.py", '_PASSWORD.sub("//…@", text)', "text", SECURITY
    ),
    "secrets of the environment": Guard(
        "runs/records/provenance.py", " and not SECRET_NAME.search(k)}", "}", SECURITY
    ),
    "a ledger's SQL reads its tables alone": Guard(
        "referee/claims.py", "SET enable_external_access = false", "SELECT 1", SECURITY
    ),
    "the report's policy": Guard("report/page.html.j2", "default-src 'none'; ", "", SECURITY),
    "text is escaped": Guard(
        "report/page.py",
        "autoescape=True",
        "autoescape=False",
        "tests/experiments/test_report_pages.py",
    ),
    "the world is the run's": Guard(
        "train/parallel/world.py",
        "if expected_size not in (None, size):",
        "if False:",
        "tests/unit/test_parallel_places.py",
    ),
    "a broken line is kept apart": Guard(
        "analysis/logs.py",
        (
            '            broken.append({"line": number, "reason": str(reason), "text": text, '
            '"benign": False})'
        ),
        "            pass",
        "tests/unit/test_ingest_logs.py",
    ),
    "times of a log are by one clock": Guard(
        "runs/records/events.py",
        "return self._epoch + mono_s",
        "return time.time()",
        "tests/faults/test_clock.py::test_a_training_goes_on_and_its_times_stay_in_order",
    ),
    "attempts of one boot are told apart by its clock": Guard(
        "referee/clocks.py",
        '"t_mono_s" if one_boot else "t_unix_s"',
        '"t_unix_s"',
        "tests/faults/test_clock.py::test_the_next_attempt_is_not_taken_for_a_second_one_at_the_same_time",
    ),
    "two attempts at one time are seen": Guard(
        "referee/clocks.py",
        "        if len(begun) and begun.min() < ended.max(initial=-np.inf):",
        "        if False:",
        "tests/unit/test_ingest.py",
    ),
    "another port is tried": Guard(
        "runs/launch/ranks.py",
        "        if code != PORT_TAKEN:\n",
        "        if True:\n",
        "tests/faults/test_ports.py::test_ranks_meet_elsewhere_and_where_they_cannot_the_next_call_trains",
    ),
    "memory that is full is told": Guard(
        "cli/main.py",
        "    return _translate_memory_error(error, number, path) or _translate_fault(number, facts)\n",
        "    return None\n",
        "tests/faults/test_memory.py",
    ),
    "messages carry no signature": Guard(
        "base/errors.py", '_SIGNATURE.sub(r"\\1…", ', "str(", SECURITY
    ),
    "a forged verdict is told": Guard(
        "report/verification.py",
        "    elif not _is_equal(path, other):\n",
        "    elif False:\n",
        "tests/experiments/test_report_folder.py::test_a_forged_verdict_is_named_though_the_whole_report_was_built_with_it",
    ),
    "a forged table is told": Guard(
        "report/verification.py",
        "        if path.name == tables.RECOUNTS or _is_equal(path, other):\n",
        "        if True:\n",
        "tests/experiments/test_report_folder.py::test_results_name_forged_tables_and_drawings_and_reports_that_are_older",
    ),
    "a rank that stands still is named": Guard(
        "train/watchdog.py",
        "                faulthandler.dump_traceback_later(self._patience_s, file=self._file)",
        "                pass",
        "tests/faults/test_hung.py::test_the_rank_that_hangs_is_named_with_its_stack_and_the_others_as_waiting",
    ),
    "boots tell machines apart": Guard("runs/launch/lock.py", " and boot not in owner", "", LOCKS),
    "another user's folder is one message": Guard(
        "cli/snakemake/internals.py",
        "    if not os.access(place, os.W_OK):",
        "    if False:",
        LOCKS,
    ),
    "users need no name": Guard(
        "cli/snakemake/internals.py",
        '        os.environ["USER"] = str(os.getuid())',
        "        pass",
        "tests/faults/test_users.py",
    ),
    "users need no home": Guard(
        "cli/snakemake/internals.py",
        '        os.environ["XDG_CACHE_HOME"] = ',
        "        _ = ",
        "tests/faults/test_users.py",
    ),
    "a part that was written is a full disk": Guard(
        "cli/main.py",
        "    if SHORT_WRITE.fullmatch(str(error)):",
        "    if False:",
        "tests/faults/test_disk.py::test_a_disk_that_took_a_part_is_full_whoever_wrote",
    ),
    "what is no regular file is refused": Guard(
        "base/files.py",
        "    if not stat.S_ISREG(",
        "    if False and (",
        WRITER + "::test_what_is_no_regular_file_is_refused_and_not_waited_for",
    ),
    "names in files are plain": Guard(
        "base/files.py",
        '        or Path(name).name != name\n        or name in ("", "..", ".")\n',
        "",
        MANIFESTS + "::test_a_manifest_that_names_files_elsewhere_is_refused",
    ),
    "archives unpack to bounded sizes": Guard(
        "report/packed_logs.py",
        ", UNPACKED + RATIO * len(packed))",
        ")",
        "tests/unit/test_report_evidence.py::test_a_damaged_archive_is_one_message",
    ),
    "differences are kept on request": Guard(
        "runs/records/provenance.py",
        ' if os.environ.get(KEEP_DIFF) else ""',
        "",
        "tests/unit/test_records.py",
    ),
    "only what an earlier call made is removed": Guard(
        "report/packed_logs.py",
        "        _refuse(output, others)",
        "        pass",
        "tests/unit/test_report_evidence.py::test_a_killed_call_leaves_nothing_of_a_user_to_be_removed",
    ),
    "ranks that may open too few files do not start": Guard(
        "runs/launch/ranks.py",
        "    _check_open_files(world_size)\n",
        "",
        "tests/unit/test_launch.py::test_ranks_that_may_open_too_few_files_do_not_start",
    ),
    "a recording has one writer": Guard(
        "arms/record.py", ", pass_fds=keep", "", "tests/faults/test_recordings.py"
    ),
    "a drawing is the one that was drawn": Guard(
        "base/manifests.py",
        '        raise ValueError(f"changed: sha256',
        '        print(f"changed: sha256',
        "tests/faults/test_drawings.py::test_a_drawing_with_a_script_is_named_and_not_read",
    ),
}


def copy_to(folder: Path) -> None:
    for name in COPIED:
        path = ROOT / name
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(path, folder / name, symlinks=True, ignore=ignored, dirs_exist_ok=True)
        else:
            shutil.copy(path, folder / name)


def outcome(guard: Guard, folder: Path) -> str:
    """What the test says without the guard: `red`, `green` (nobody would notice), or what went
    wrong instead.
    """
    path = folder / "src/tokenscale" / guard.file
    whole = path.read_text()
    if whole.count(guard.guard) != 1:
        return f"the guard stands {whole.count(guard.guard)} times in {guard.file}"
    write(path, whole.replace(guard.guard, guard.without))
    try:
        code, output = run_tests([guard.test], folder)
    finally:
        write(path, whole)
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if code == 1 and failed and failed[0].startswith("FAILED"):
        return "red: " + failed[0].split(" - ")[0].removeprefix("FAILED ").split("::", 1)[1]
    return "GREEN" if code == 0 else f"NO ANSWER: {output[-800:]}"


def write(path: Path, text: str) -> None:
    """Write a source file that looks younger than before: what Python has compiled is then out of
    date.
    """
    later = path.stat().st_mtime + 2
    path.write_text(text)
    os.utime(path, (later, later))


class _AsListed:
    """Plugin of pytest: tests run in the order of their list, quick ones first."""

    def __init__(self, tests: list[str]):
        self._tests = tests

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: [not item.nodeid.startswith(test) for test in self._tests])


def run_tests(tests: list[str], folder: Path, limit_s: int = 300) -> tuple[int, str]:
    """Run tests in a copy of the project but for long ones, in their order and up to the first that
    fails: (pytest's exit code, its output).

    Runs in a fork of this process, which has imported the packages. Negative where it was ended
    after `limit_s` of CPU time.
    """
    output = folder / "output.txt"
    if (child := os.fork()) == 0:
        os.setsid()
        for stream in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        signal.alarm(10 * limit_s)  # for those that wait
        os.chdir(folder)
        os.environ["PYTHONPATH"] = f"{folder}/src"
        sys.path[:0] = [f"{folder}/src", str(folder)]
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "tokenscale")]:
            del sys.modules[name]
        torch.set_num_threads(1)  # as the tests' own variables say, which come too late here
        options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not long"]
        os._exit(pytest.main([*options, *tests], plugins=[_AsListed(tests)]))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests had started
    text = output.read_text(errors="replace")
    output.unlink()
    return code, text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="of guards; all without")
    asked = parser.parse_args().names or list(GUARDS)
    reds = 0
    with tempfile.TemporaryDirectory(prefix="guards-") as folder:
        copy_to(Path(folder))
        for name in asked:
            found = outcome(GUARDS[name], Path(folder))
            reds += found.startswith("red")
            print(f"{name:<45} {found}", flush=True)
    print(f"{reds} of {len(asked)} guards are held by a test")
    raise SystemExit(reds != len(asked))


if __name__ == "__main__":
    main()
