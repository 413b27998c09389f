"""What `doctor` says of machines that lack something, one lack at a time; and of this one."""

import errno
import http.server
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from tokenscale.diagnosis import checks, doctor, machine, packages, probe
from tokenscale.diagnosis.checks import Asked, Finding
from tokenscale.records import control_groups

ROOT = Path(__file__).parents[2]
#: what the ranks say on a machine without GPU where all is well
TORCH = {"stage": "torch", "version": "2.13.0", "cuda": "13.0", "rocm": None, "gloo": True, "nccl": True}
STAGES = {
    "torch": TORCH,
    "gloo": {"stage": "gloo", "ranks": 2, "seconds": 0.1},
    "bf16 on the CPU": {"stage": "bf16 on the CPU"},
    "devices": {"stage": "devices", "devices": [], "reason": None},
}
GPU = {"name": "NVIDIA H200", "memory_bytes": 150 * 2**30, "capability": "9.0", "bf16": True}


def ready(value):
    future = Future()
    future.set_result(value)
    return future


def asked(results=Path("results"), *, network=False, imports=None, stages=None, ended=()):
    ranks = {"stages": STAGES if stages is None else stages, "ended": list(ended)}
    return Asked(Path(results), network, ready(imports or {}), ready(ranks))


def program(folder, name, text):
    """A program of that name, first in what the test puts into PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


# -- as a command


def run_doctor(*arguments, without=(), cwd=ROOT, **environment):
    code = f"import sys\nfor name in {list(without)!r}: sys.modules[name] = None\n"
    code += f"from tokenscale.cli import main\nsys.exit(main({['doctor', *arguments]!r}))"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The examination of this machine as JSON, where a folder beyond ASCII is asked for."""
    results = tmp_path_factory.mktemp("doctor") / "résultats"
    return run_doctor("--json", "--results", str(results)), results


def test_json_holds_every_check_and_every_conclusion(here):
    done, results = here
    said = json.loads(done.stdout)
    findings = {f["name"]: f for f in said["findings"]}
    assert list(findings) == list(doctor.CHECKS)
    assert {f["verdict"] for f in said["findings"]} <= {"ok", "note", "no"} and all(f["fact"] for f in said["findings"])
    assert [a["what"] for a in said["can_run"]][0] == doctor.DEMO and len(said["can_run"]) == 7
    assert done.returncode == (0 if said["demo"] else 2)
    assert not results.exists()  # a check makes nothing


def test_two_real_processes_meet_here(here):
    findings = {f["name"]: f for f in json.loads(here[0].stdout)["findings"]}
    assert findings["gloo"]["verdict"] == "ok" and findings["gloo"]["values"]["ranks"] == 2
    assert not [name for name, f in findings.items() if "the check itself failed" in f["fact"]]


def test_it_runs_without_any_package_and_says_which_are_missing(tmp_path):
    done = run_doctor(without=[p.module for p in packages.PACKAGES], PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and "Traceback" not in done.stdout, done.stdout
    lines = done.stdout.splitlines()
    for group in packages.GROUPS:
        line = next(line for line in lines if line.startswith(f"{group} packages"))
        assert line.split()[2] == "no" and f"for {packages.GROUPS[group]}, missing: " in line
    assert "missing: torch, numpy" in done.stdout and "missing: snakemake, " in done.stdout
    # what does not need packages is examined all the same
    assert next(line for line in lines if line.startswith("loopback")).split()[1] == "ok"
    assert lines[-1].startswith("make run cannot run here yet. First: ") and "pip install -e '.[test]'" in lines[-1]


def test_the_text_is_ascii_whatever_is_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "try_imports", dict)
    monkeypatch.setattr(probe, "try_ranks", lambda: {"stages": STAGES, "ended": []})
    folder = tmp_path / "résultats"
    text = doctor.examine(folder).render()
    assert text.isascii() and r"r\xe9sultats" in text


def offline():
    """A prefix that starts a program where no interface is up, not even the loopback one; or None."""
    prefix = ["unshare", "--map-root-user", "--net"]
    usable = shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    return prefix if usable else None


@pytest.mark.skipif(offline() is None, reason="no network namespaces here")
def test_without_a_loopback_interface_no_ranks_and_no_demo():
    done = subprocess.run(
        [*offline(), sys.executable, "-m", "tokenscale", "doctor", "--json"], cwd=ROOT, capture_output=True, text=True
    )
    said = json.loads(done.stdout)
    verdicts = {f["name"]: f["verdict"] for f in said["findings"]}
    assert (verdicts["loopback"], verdicts["gloo"], verdicts["trainer packages"]) == ("no", "no", "ok")
    assert done.returncode == 2 and not said["demo"]


# -- each check by itself


def test_a_check_that_breaks_or_hangs_is_a_line_like_any_other(monkeypatch, tmp_path):
    def breaks(asked):
        raise RuntimeError("the disk sings")

    monkeypatch.setattr(doctor, "CHECKS", doctor.CHECKS | {"clock": breaks, "locale": lambda asked: time.sleep(60)})
    monkeypatch.setattr(doctor, "LIMIT_S", 0.5)
    monkeypatch.setattr(probe, "try_imports", dict)
    monkeypatch.setattr(probe, "try_ranks", lambda: {"stages": STAGES, "ended": []})
    found = doctor.examine(tmp_path)
    assert found.findings["clock"].verdict == found.findings["locale"].verdict == "no"
    assert found.findings["clock"].fact == "the check itself failed: RuntimeError: the disk sings"
    assert "did not answer within 0.5 s" in found.findings["locale"].fact
    assert "Traceback" not in found.render() and not found.demo.possible


@pytest.mark.parametrize("version, verdict", [("3.10.14", "no"), ("3.11.0", "ok"), ("3.12.9", "ok"), ("3.13.1", "no")])
def test_python_3_11_and_3_12_are_right(monkeypatch, version, verdict):
    monkeypatch.setattr(checks.platform, "python_version", lambda: version)
    found = checks.python(asked())
    assert found.verdict == verdict and version in found.fact and ">=3.11,<3.13" in found.fact


def test_bounds_are_the_clone_s_or_else_the_installed_ones(monkeypatch):
    ours = packages.requirements()
    assert set(ours) - {"python"} == {p.distribution for p in packages.PACKAGES} - {"tiktoken"}
    assert (ours["python"], ours["torch"], ours["ruff"]) == (">=3.11,<3.13", ">=2.9,<2.14", ">=0.9")

    monkeypatch.setattr(packages, "__file__", "/nowhere/lib/python3.11/site-packages/tokenscale/diagnosis/packages.py")
    stated = ["torch<2.15,>=2.10", 'pytest>=8; extra == "test"', "PyYAML", "huggingface_hub[cli] (>=1)"]
    monkeypatch.setattr(packages.importlib.metadata, "requires", lambda name: stated)
    installed = packages.requirements()
    assert installed.pop("python") == ">=3.11,<3.13"
    assert installed == {"torch": ">=2.10,<2.15", "pytest": ">=8", "pyyaml": "", "huggingface-hub": ">=1"}


def test_where_nobody_says_the_bounds_nothing_breaks(monkeypatch):
    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages.importlib.metadata, "requires", not_installed)
    monkeypatch.setattr(packages, "__file__", "/nowhere/src/tokenscale/diagnosis/packages.py")
    assert packages.requirements() == {}
    assert checks.python(asked()).verdict == "note" and checks.packages("host", asked()).verdict == "ok"


@pytest.mark.parametrize(
    "version, bounds, holds",
    [
        ("2.9", ">=2.9.0,<2.14", True),
        ("2.14", "<2.14.0", False),
        ("2.13.1+cu130", ">=2.9,<2.14", True),
        ("2.9.0a0+5228986.nv25.10", ">=2.9", True),  # containers of NVIDIA's
        ("2.8.9", ">=2.9,<2.14", False),
        ("2.14.0.dev20261101", "<2.14", False),
        ("10.0", ">=9.20", True),
        ("9.3", ">=9.20", False),
        ("1.8.5", "~=1.8", True),
        ("1.8.5", "!=1.8.5", False),
        ("anything", "", True),
    ],
)
def test_versions_are_compared_as_numbers(version, bounds, holds):
    assert packages.satisfies(version, bounds) is holds


@pytest.mark.parametrize("package", packages.PACKAGES, ids=lambda p: p.distribution)
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package.module, None)  # what makes a module unimportable
    found = checks.packages(package.group, asked(stages={} if package.module == "torch" else None))
    assert f"missing: {package.distribution}" in found.fact and f"for {packages.GROUPS[package.group]}" in found.fact
    assert f"pip install '{package.distribution}" in found.next
    assert found.verdict == ("note" if package.only else "no")


def test_one_package_that_is_needed_weighs_more_than_one_that_is_not(monkeypatch):
    for module in ("yaml", "snakemake_executor_plugin_slurm"):
        monkeypatch.setitem(sys.modules, module, None)
    found = checks.packages("host", asked())
    assert found.verdict == "no" and "snakemake-executor-plugin-slurm (only for SLURM), pyyaml" in found.fact


@pytest.mark.parametrize("version", ["2.8.0", "2.14.0"])
def test_a_torch_outside_its_bounds_is_refused(monkeypatch, version):
    real = packages.version_of
    monkeypatch.setattr(checks, "version_of", lambda name: version if name == "torch" else real(name))
    found = checks.packages("trainer", asked())
    assert found.verdict == "no" and f"torch {version} is outside >=2.9,<2.14" in found.fact
    assert "'torch>=2.9,<2.14'" in found.next


def test_a_package_that_is_there_and_does_not_import_is_broken():
    found = checks.packages("report", asked(imports={"duckdb": "ImportError: libstdc++.so.6: version not found"}))
    assert found.verdict == "no" and "does not import: ImportError: libstdc++" in found.fact
    assert "--force-reinstall 'duckdb" in found.next
    crashed = checks.packages("trainer", asked(stages={}, ended=["signal 9", "signal 9"]))
    assert "importing it ends Python: signal 9" in crashed.fact


def test_children_tell_broken_crashing_and_chatty_packages_apart(monkeypatch, tmp_path):
    (tmp_path / "chatty.py").write_text("print('hello')\nprint('{}')\n")
    (tmp_path / "broken.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "crashing.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    (tmp_path / "unreached.py").write_text("")
    names = ("chatty", "broken", "leaving", "crashing", "unreached")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(probe, "PACKAGES", [packages.Package(name, name, "host") for name in names])
    assert probe.try_imports() == {
        "broken": "ImportError: libcuda.so.1: cannot open shared object file",
        "leaving": "SystemExit: 3",
        "crashing": "importing it ends Python: signal 9",
    }


def test_a_torch_that_hangs_is_given_up(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    start_child = probe._child

    def child(kind, **environment):
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)  # the folder that `python -m` looks in first
            return start_child(kind, **environment)

    monkeypatch.setattr(probe, "_child", child)
    monkeypatch.setattr(probe, "LIMIT_S", 1.0)
    start = time.monotonic()
    assert probe.try_ranks() == {"stages": {}, "ended": ["no end within 1 s"] * 2}
    assert time.monotonic() - start < 20


def test_outside_of_the_project_there_is_no_demo(monkeypatch, tmp_path):
    assert checks.project(asked()).verdict in ("ok", "note")
    monkeypatch.chdir(tmp_path)
    found = checks.project(asked())
    assert found.verdict == "no" and "workflow/Snakefile" in found.fact
    assert checks.configuration(asked()).values == {"without": "project"}


def test_a_download_without_links_is_told(monkeypatch, tmp_path):
    for name in ("workflow/Snakefile", "config/config.yaml", "profiles/local/config.yaml", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "alps").write_text("profiles/alps")  # what Git makes of a link where links are not supported
    monkeypatch.chdir(tmp_path)
    assert checks.project(asked()).verdict == "note"


def test_a_mistake_in_the_configuration_is_told_as_the_workflow_tells_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text("scale: dmeo\n")
    found = checks.configuration(asked())
    assert found.verdict == "no" and "unknown scale 'dmeo'" in found.fact and "demo" in found.next


def test_tools_that_are_not_found_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = checks.tools(asked())
    assert found.verdict == "note" and found.values == {"make": False, "git": False}
    assert "snakemake --profile profiles/local" in found.next and "git" in found.next


def group_tree(root, lines, files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("\n".join(lines) + "\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    "lines, files, limits",
    [
        (["0::/job"], {"job/cpu.max": "250000 100000", "job/memory.max": "8589934592"}, (2.5, 8 * 2**30)),
        (["0::/job/step"], {"job/memory.max": "1000", "job/step/memory.max": "max"}, (None, 1000)),  # the parent limits
        (["0::/"], {"cpu.max": "max 100000", "memory.max": "max"}, (None, None)),
        (["4:memory:/"], {"memory/memory.limit_in_bytes": "9223372036854771712"}, (None, None)),  # no limit
        (["0::/not/visible"], {"memory.max": "5000", "cpu.max": "50000 100000"}, (0.5, 5000)),  # inside a container
        (
            ["5:cpu,cpuacct:/box", "4:memory:/box", "0::/"],
            {
                "cpu/box/cpu.cfs_quota_us": "400000",
                "cpu/box/cpu.cfs_period_us": "100000",
                "memory/box/memory.limit_in_bytes": "2000",
                "memory/memory.limit_in_bytes": "9223372036854771712",
            },
            (4.0, 2000),
        ),
        (
            ["5:cpu:/"],
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            (None, None),
        ),
        ([], {}, (None, None)),
    ],
)
def test_control_groups_of_both_versions_limit_cores_and_memory(tmp_path, lines, files, limits):
    assert control_groups.cgroup_limits(group_tree(tmp_path, lines, files)) == limits


@pytest.mark.parametrize("affinity, quota, usable", [(8, None, 8), (8, 2.5, 3), (2, 16.0, 2), (4, 0.2, 1)])
def test_usable_cores_are_those_that_work_at_once(affinity, quota, usable):
    assert control_groups.usable_cores(affinity, quota) == usable


def test_fewer_cores_than_are_visible_is_a_note(monkeypatch):
    monkeypatch.setattr(control_groups, "cgroup_limits", lambda: (1.5, None))
    monkeypatch.setattr(checks, "affinity", lambda: 16)
    found = checks.cpu(asked())
    assert found.verdict == "note" and found.values["usable"] == 2 and "--cores 2" in found.next


@pytest.mark.parametrize("limit, verdict", [(None, "ok"), (2**30, "no"), (2 * 2**30, "note")])
def test_the_memory_that_counts_is_what_a_control_group_leaves(monkeypatch, limit, verdict):
    monkeypatch.setattr(machine, "memory", lambda: (64 * 2**30, 60 * 2**30))
    monkeypatch.setattr(control_groups, "cgroup_limits", lambda: (None, limit))
    found = checks.main_memory(asked())
    assert found.verdict == verdict and found.fact.startswith("64.0 GiB")


def test_little_shared_memory_is_a_note(monkeypatch):
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(2**26, 0, 2**26))
    found = checks.shared_memory(asked())
    assert found.verdict == "note" and "--shm-size" in found.next


# -- GPUs: none can be had in a unit test, so the driver and torch are told what to say

DRIVER = {"names": ["NVIDIA H200"], "version": "570.1", "text": ""}
NO_DRIVER = {"names": [], "version": "", "text": "no driver of a GPU is found (nvidia-smi)"}


@pytest.mark.parametrize(
    "driver, torch, devices, hidden, verdict, words",
    [
        (NO_DRIVER, {}, {"devices": []}, None, "no", "training runs on the CPU"),
        (DRIVER, {}, {"devices": [GPU]}, None, "ok", "1 x NVIDIA H200 (150 GiB, capability 9.0); torch for CUDA 13.0"),
        (
            DRIVER,
            {"cuda": None, "version": "2.13.0+cpu"},
            {"devices": []},
            None,
            "no",
            "2.13.0+cpu is a build for CPUs",
        ),
        (DRIVER, {}, {"devices": []}, "", "no", "CUDA_VISIBLE_DEVICES='' hides them"),
        (DRIVER, {}, {"devices": [], "reason": "driver is too old"}, None, "no", "driver is too old"),
        (DRIVER, {}, {"devices": [GPU | {"error": "no kernel image"}]}, None, "no", "GPU 0: no kernel image"),
        (
            DRIVER | {"names": ["NVIDIA H200"] * 4},
            {},
            {"devices": [GPU]},
            "2",
            "note",
            "the driver sees 4 (NVIDIA H200); CUDA_VISIBLE_DEVICES is 2",
        ),
        (NO_DRIVER, {"cuda": None, "rocm": "7.1"}, {"devices": [GPU] * 2}, None, "ok", "2 x NVIDIA H200"),
    ],
)
def test_gpus_of_driver_and_torch_are_compared(monkeypatch, driver, torch, devices, hidden, verdict, words):
    monkeypatch.setattr(checks, "driver_gpus", lambda: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    found = checks.gpu(asked(stages=STAGES | {"torch": TORCH | torch, "devices": {"stage": "devices"} | devices}))
    assert found.verdict == verdict and words in found.fact, found


def test_the_driver_is_asked_through_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert checks.driver_gpus()["names"] == []
    program(tmp_path, "nvidia-smi", "echo '570.86, NVIDIA H200'; echo '570.86, NVIDIA H200'")
    assert checks.driver_gpus() == {"names": ["NVIDIA H200"] * 2, "version": "570.86", "text": ""}
    program(tmp_path, "nvidia-smi", "echo 'NVIDIA-SMI has failed because it could not talk to the driver'; exit 9")
    found = checks.driver_gpus()
    assert found["names"] == [] and "could not talk to the driver" in found["text"]


@pytest.mark.parametrize(
    "devices, flags, verdict, native",
    [
        ([GPU], set(), "ok", True),
        ([GPU, GPU | {"name": "Tesla T4", "bf16": False}], set(), "note", False),
        ([], {"avx512_bf16"}, "ok", True),
        ([], {"avx2"}, "note", False),
    ],
)
def test_bf16_is_native_or_slow(monkeypatch, devices, flags, verdict, native):
    monkeypatch.setattr(machine, "cpu_flags", lambda: flags)
    found = checks.bf16(asked(stages=STAGES | {"devices": {"stage": "devices", "devices": devices}}))
    assert (found.verdict, found.values["native"]) == (verdict, native)


@pytest.mark.parametrize(
    "stages, words",
    [
        ({"gloo": {"stage": "gloo", "error": "RuntimeError: Connection refused"}}, "Connection refused"),
        ({"gloo": None}, "ended early: signal 11"),
        ({"torch": None}, "not known without torch"),
    ],
)
def test_a_sum_that_fails_crashes_or_cannot_be_tried_is_told_apart(stages, words):
    said = {name: stage for name, stage in (STAGES | stages).items() if stage}
    found = checks.gloo(asked(stages=said, ended=["signal 11"]))
    assert found.verdict == "no" and words in found.fact


def test_nccl_needs_a_build_with_it_and_a_gpu():
    assert "not in this build" in checks.nccl(asked(stages=STAGES | {"torch": TORCH | {"nccl": False}})).fact
    assert "sees no GPU" in checks.nccl(asked()).fact
    two = STAGES | {"devices": {"stage": "devices", "devices": [GPU, GPU]}}
    assert checks.nccl(asked(stages=two | {"nccl": {"ranks": 2, "seconds": 1.0}})).verdict == "ok"
    failed = checks.nccl(asked(stages=two | {"nccl": {"error": "DistBackendError: no transport"}}))
    assert failed.verdict == "no" and "no transport" in failed.fact and "NCCL_DEBUG" in failed.next


# -- files


def test_a_good_folder_passes_every_trial_and_is_left_empty(tmp_path):
    trial = machine.try_folder(tmp_path)
    assert trial["failed"] == {} and abs(trial["clock_skew_s"]) < 5 and trial["fsync_s"] >= 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_no(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    found = checks.results_folder(asked(tmp_path / "file"))
    assert found.verdict == "no" and "create fails: Not a directory" in found.fact

    def read_only(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(machine.tempfile, "TemporaryDirectory", read_only)
    found = checks.results_folder(asked(tmp_path))
    assert found.verdict == "no" and "create fails: Read-only file system" in found.fact and "writable" in found.next


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_no(tmp_path):
    tmp_path.chmod(0o500)
    assert "Permission denied" in checks.results_folder(asked(tmp_path)).fact


@pytest.mark.parametrize(
    "step, name, replacement",
    [
        ("fsync", "os.fsync", OSError(errno.EINVAL, "Invalid argument")),
        ("rename", "os.replace", OSError(errno.EXDEV, "Invalid cross-device link")),
        ("rename", "os.replace", lambda new, old: None),  # says it did, and did not
        ("flock", "output_of", lambda *args, **kwargs: (0, "")),  # two processes hold it
        ("flock", "fcntl.flock", OSError(errno.ENOSYS, "Function not implemented")),  # Lustre without the option flock
        ("memory map", "mmap.mmap", OSError(errno.ENODEV, "No such device")),
    ],
)
def test_what_a_file_system_cannot_do_is_named(tmp_path, monkeypatch, step, name, replacement):
    def replaced(*args, **kwargs):
        if isinstance(replacement, Exception):
            raise replacement
        return replacement(*args, **kwargs)

    import fcntl

    owners = {"os": machine.os, "mmap": machine.mmap, "fcntl": fcntl, "output_of": machine}
    monkeypatch.setattr(owners[name.split(".")[0]], name.split(".")[-1], replaced)
    found = checks.results_folder(asked(tmp_path))
    assert found.verdict == "no" and f"{step} fails: " in found.fact, found
    assert list(found.values["failed"]) == [step]
    if name == "output_of":
        assert "two processes got the same lock" in found.fact


@pytest.mark.parametrize("free, verdict", [(10**6, "no"), (10**9, "note"), (10**11, "ok")])
def test_a_full_disk_is_no(monkeypatch, tmp_path, free, verdict):
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**12, 0, free))
    monkeypatch.setattr(machine, "file_system_of", lambda folder: ("ext4", "/"))
    assert checks.results_folder(asked(tmp_path)).verdict == verdict
    assert checks.temporary_folder(asked()).verdict == ("note" if verdict == "no" else "ok")


@pytest.mark.parametrize(
    "kind, words",
    [
        ("nfs4", "latency-wait"),
        ("lustre", "latency-wait"),
        ("fuse.sshfs", "latency-wait"),
        ("tmpfs", "lost on reboot"),
        ("overlay", "inside a container"),
    ],
)
def test_what_a_kind_of_file_system_means_is_told(monkeypatch, tmp_path, kind, words):
    monkeypatch.setattr(machine, "file_system_of", lambda folder: (kind, "/mnt"))
    found = checks.results_folder(asked(tmp_path))
    assert found.verdict == "note" and words in f"{found.fact} {found.next}" and f"file system {kind}" in found.fact


def test_a_clock_that_differs_between_disk_and_machine_is_a_note(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "file_system_of", lambda folder: ("ext4", "/"))
    monkeypatch.setattr(machine, "_clock_skew", lambda path: -90.0)
    found = checks.results_folder(asked(tmp_path))
    assert found.verdict == "note" and "-90 s off" in found.fact


def test_the_mount_of_a_path_is_the_innermost_and_the_last(tmp_path):
    folder = tmp_path / "a b" / "results"
    folder.mkdir(parents=True)
    mounts = [("/", "ext4"), (str(tmp_path), "nfs4"), (str(tmp_path / "a b"), "xfs"), (str(tmp_path / "a b"), "lustre")]
    mounts.append((str(folder)[:-3], "tmpfs"))  # not a parent, though its name begins alike
    mountinfo = tmp_path / "mountinfo"
    lines = (f"1 2 0:1 / {point.replace(' ', chr(92) + '040')} rw shared:1 - {kind} dev rw" for point, kind in mounts)
    mountinfo.write_text("\n".join(lines))
    assert machine.file_system_of(folder, mountinfo) == ("lustre", str(tmp_path / "a b"))
    assert machine.file_system_of(Path("/"), mountinfo) == ("ext4", "/")
    assert machine.file_system_of(folder, tmp_path / "none") is None


def test_few_open_files_are_a_note(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    assert checks.open_files(asked()).verdict == "note"
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert checks.open_files(asked()).verdict == "ok"


# -- network


@pytest.mark.parametrize("blocked, verdict", [((), "ok"), (("::1",), "ok"), (("127.0.0.1",), "no")])
def test_ranks_need_a_port_at_127_0_0_1(monkeypatch, blocked, verdict):
    def talk(family, address):
        if address in blocked:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(machine, "talk", talk)
    found = checks.loopback(asked())
    assert found.verdict == verdict
    if verdict == "no":
        assert "IPv6 works, but ranks meet at 127.0.0.1" in found.fact and found.next


class Hub(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.server.asked.append(self.path)
        self.send_response(403)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch):
    with http.server.HTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/hub")
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield server
        server.shutdown()


def test_the_network_is_touched_only_when_asked(hub, monkeypatch):
    assert checks.network(asked()).fact.startswith("not tried") and hub.asked == []
    assert checks.network(asked(network=True)).verdict == "ok" and hub.asked == ["/hub"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert checks.network(asked(network=True)).verdict == "note"


def test_a_hub_that_does_not_answer_is_no(hub, monkeypatch):
    hub.shutdown()
    hub.server_close()
    found = checks.network(asked(network=True))
    assert found.verdict == "no" and "refused" in found.fact


# -- SLURM, by programs that say what its own say


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    for name in ("SLURM_JOB_ID", "ALPS_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("srun", "squeue"):
        program(tmp_path, name, "exit 0")
    program(tmp_path, "sbatch", "echo slurm 22.05.8")
    program(tmp_path, "sinfo", "echo 'normal*'; echo debug; echo debug")
    program(tmp_path, "sacct", "exit 0")
    monkeypatch.setenv("ALPS_ACCOUNT", "g123")
    return tmp_path


def test_a_cluster_whose_services_answer_is_ok(cluster):
    found = checks.slurm(asked())
    assert (found.verdict, found.fact) == ("ok", "slurm 22.05.8, partitions normal*, debug")


@pytest.mark.parametrize(
    "spoil, verdict, words",
    [
        (lambda folder, env: (folder / "sbatch").unlink(), "no", "sbatch not found"),
        (lambda folder, env: (folder / "srun").unlink(), "no", "srun not found"),
        (
            lambda folder, env: program(folder, "sinfo", "echo 'Unable to contact slurm controller'; exit 1"),
            "no",
            "controller does not answer: Unable to contact",
        ),
        (lambda folder, env: program(folder, "sacct", "exit 1"), "note", "--slurm-status-command squeue"),
        (lambda folder, env: (folder / "sacct").unlink(), "note", "--slurm-status-command squeue"),
        (lambda folder, env: env.delenv("ALPS_ACCOUNT"), "note", "export ALPS_ACCOUNT"),
        (lambda folder, env: env.setenv("SLURM_JOB_ID", "42"), "note", "inside job 42"),
    ],
)
def test_what_a_cluster_lacks_is_told(cluster, monkeypatch, spoil, verdict, words):
    spoil(cluster, monkeypatch)
    found = checks.slurm(asked())
    assert found.verdict == verdict and words in f"{found.fact}; {found.next}", found


def test_a_program_that_hangs_is_given_up(tmp_path):
    assert machine.output_of([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.5) == (
        None,
        "no answer within 0.5 s",
    )
    assert machine.output_of([str(tmp_path / "none")])[0] is None


# -- process


@pytest.mark.parametrize(
    "variables, verdict, words",
    [
        ({}, "ok", "nothing that changes training"),
        ({"NCCL_P2P_DISABLE": "1"}, "ok", "NCCL_P2P_DISABLE=1"),
        ({"WORLD_SIZE": "4", "RANK": "1"}, "no", "unset RANK WORLD_SIZE"),
        ({"RANK": "0"}, "note", "unset RANK"),
        ({"PYTHONOPTIMIZE": "1"}, "note", "unset PYTHONOPTIMIZE"),
    ],
)
def test_variables_that_change_training_are_told(monkeypatch, variables, verdict, words):
    monkeypatch.setattr(os, "environ", {"PATH": "/bin", "HF_TOKEN": "hf_secret"} | variables)
    found = checks.environment(asked())
    assert found.verdict == verdict and words in f"{found.fact} {found.next}"
    assert "hf_secret" not in json.dumps(found.values) + found.fact


def test_an_output_that_is_not_utf_8_is_a_note(monkeypatch):
    class Terminal:
        encoding = "latin-1"

    monkeypatch.setattr(sys, "stdout", Terminal())
    found = checks.locale(asked())
    assert found.verdict == "note" and "PYTHONUTF8" in found.next


def test_a_clock_that_runs_backwards_is_no(monkeypatch):
    assert checks.clock(asked()).verdict == "ok"
    ticks = iter(range(2000, 0, -1))
    monkeypatch.setattr(checks.time, "perf_counter", lambda: next(ticks))
    assert checks.clock(asked()).verdict == "no"


# -- conclusions


def all_well():
    """Findings of a machine of two cores without GPU where nothing is wrong."""
    findings = {name: Finding("ok", f"fine {name}") for name in doctor.CHECKS}
    for group in packages.GROUPS:
        states = {p.distribution: {"state": "ok", "text": ""} for p in packages.PACKAGES if p.group == group}
        findings[f"{group} packages"] = Finding("ok", "all", values={"packages": states})
    return findings | {
        "configuration": Finding("ok", "", values={"ranks": 2}),
        "tools": Finding("ok", "", values={"make": True, "git": True}),
        "cores": Finding("ok", "", values={"usable": 2}),
        "gpu": Finding("no", "none", "buy one", {"devices": []}),
        "nccl": Finding("no", "no GPU"),
        "slurm": Finding("no", "sbatch not found", values={"account": None}),
    }


def lacking(distribution):
    group = next(p.group for p in packages.PACKAGES if p.distribution == distribution)
    finding = all_well()[f"{group} packages"]
    wrong = {distribution: {"state": "missing", "text": f"{distribution} is missing"}}
    return {
        f"{group} packages": Finding(
            "no", "", f"install {distribution}", {"packages": finding.values["packages"] | wrong}
        )
    }


ALL = ["demo", "CPU", "GPUs", "bf16", "SLURM", "report", "tests"]


def possible(findings):
    return [name for name, ability in zip(ALL, doctor.abilities(findings), strict=True) if ability.possible]


WITHOUT = ["demo", "CPU", "bf16", "report", "tests"]  # what a machine without GPU and SLURM can


@pytest.mark.parametrize(
    "change, left",
    [
        ({}, WITHOUT),
        (lacking("torch"), ["report"]),
        (lacking("pydantic"), ["CPU", "bf16", "report"]),
        (lacking("snakemake-executor-plugin-slurm"), ["demo", "CPU", "bf16", "report"]),
        (lacking("pygments"), ["demo", "CPU", "bf16", "report"]),
        (lacking("mistral-common"), ["report"]),
        (lacking("duckdb"), ["CPU", "bf16"]),
        (lacking("pytest"), ["demo", "CPU", "bf16", "report"]),
        ({"python": Finding("no", "3.9")}, ["bf16"]),
        ({"results folder": Finding("no", "full")}, ["bf16"]),
        ({"memory": Finding("no", "small")}, ["bf16", "report"]),
        ({"project": Finding("no", "elsewhere")}, ["CPU", "bf16", "report"]),
        ({"configuration": Finding("no", "wrong")}, ["CPU", "bf16", "report"]),
        ({"loopback": Finding("no", "down")}, ["bf16", "report"]),
        ({"gloo": Finding("no", "hangs")}, ["bf16", "report"]),
        ({"environment": Finding("no", "WORLD_SIZE=4")}, ["bf16", "report"]),
        ({"bf16": Finding("no", "wrong product")}, ["demo", "CPU", "report", "tests"]),
        ({"tools": Finding("note", "", values={"make": False, "git": False})}, ["demo", "CPU", "bf16", "report"]),
        ({"trainer packages": Finding("no", "the check itself failed")}, []),
        ({"network": Finding("no", "down"), "locale": Finding("note", ""), "open files": Finding("no", "")}, WITHOUT),
    ],
)
def test_each_lack_stops_what_needs_it_and_nothing_else(change, left):
    assert possible(all_well() | change) == left


def gpus(number, nccl="ok", verdict="ok"):
    return {
        "gpu": Finding(verdict, "GPUs", values={"devices": [GPU] * number}),
        "nccl": Finding(nccl, "cannot reach each other", "NCCL_DEBUG=INFO"),
    }


@pytest.mark.parametrize(
    "change, left, ranks",
    [
        (gpus(4), ["demo", "CPU", "GPUs", "bf16", "report", "tests"], "1 to 4 ranks"),
        (gpus(1), ["CPU", "GPUs", "bf16", "report", "tests"], "1 rank"),  # the demo's two ranks need two
        (gpus(4, nccl="no"), ["CPU", "GPUs", "bf16", "report", "tests"], "1 rank only: cannot reach each other"),
        (gpus(2, verdict="no"), ["CPU", "bf16", "report", "tests"], "gpu: GPUs"),
    ],
)
def test_gpus_are_taken_where_there_are_some(change, left, ranks):
    findings = all_well() | change
    assert possible(findings) == left
    assert doctor.abilities(findings)[ALL.index("GPUs")].reason == ranks
    assert "`device: cpu`" in doctor.abilities(findings)[ALL.index("CPU")].reason


def test_one_gpu_cannot_hold_two_ranks_but_the_cpu_can():
    findings = all_well() | gpus(1)
    demo = doctor.abilities(findings)[0]
    assert not demo.possible and demo.next == "CUDA_VISIBLE_DEVICES= make run"
    findings["configuration"].values["gpu_ranks"] = 0  # every run says `device: cpu`
    demo = doctor.abilities(findings)[0]
    assert demo.possible and "on the CPU" in demo.reason


@pytest.mark.parametrize(
    "change, yes",
    [
        ({}, True),
        ({"slurm": Finding("note", "", values={"account": None})}, False),
        ({"slurm": Finding("no", "", values={"account": "g1"})}, False),
        (lacking("snakemake-executor-plugin-slurm"), False),
        ({"project": Finding("note", "no link", "ln")}, False),
    ],
)
def test_the_cluster_profile_needs_its_programs_plugin_account_and_link(change, yes):
    findings = all_well() | {"slurm": Finding("ok", "slurm 22.05.8", values={"account": "g1"})} | change
    assert ("SLURM" in possible(findings)) is yes


def test_the_exit_code_and_the_last_line_say_whether_the_demo_can_run():
    for change, last in (
        ({}, None),
        (lacking("torch"), "make run cannot run here yet. First: install torch"),
        ({"results folder": Finding("no", "full", "free 100 MB")}, "make run cannot run here yet. First: free 100 MB"),
    ):
        findings = all_well() | change
        text = doctor.Examination(findings, doctor.abilities(findings), 1.0).render()
        if last:
            assert text.splitlines()[-1] == last
        else:
            assert "cannot run" not in text


# -- imports


def test_the_packages_of_a_conclusion_are_enough_for_it():
    """The report's code imports with its packages alone, `doctor` with none: the others are made unimportable."""
    report = [p.module for p in packages.PACKAGES if p.group == "report"] + ["numpy", "pyarrow"]
    for allowed, modules in (
        (report, ["analysis.ingest", "report.page", "report.pdf", "report.save", "verbs.ingest", "verbs.report"]),
        ([], ["diagnosis.doctor", "verbs.doctor", "cli"]),
    ):
        forbidden = [p.module for p in packages.PACKAGES if p.module not in allowed]
        code = f"import sys\nfor name in {forbidden!r}: sys.modules[name] = None\n"
        code += "import " + ", ".join(f"tokenscale.{module}" for module in modules)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
