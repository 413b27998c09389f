"""What `doctor` finds. No GPU and no cluster is needed: driver, torch and SLURM are told what to
say.
"""

import errno
import fcntl
import importlib.metadata
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.machines import GPU, TORCH, asked, program
from tokenscale.cli import doctor
from tokenscale.cli.doctor import GROUPS, PURPOSES, list_packages
from tokenscale.runs.records import provenance

CHECKS = dict(doctor.CHECKS)


@pytest.mark.parametrize(
    "lines, files, limits",
    [
        (
            ["0::/job"],
            {"job/cpu.max": "250000 100000", "job/memory.max": "8589934592"},
            (2.5, 8 * 2**30),
        ),
        # the parent limits
        (["0::/job/step"], {"job/memory.max": "1000", "job/step/memory.max": "max"}, (None, 1000)),
        (["0::/"], {"cpu.max": "max 100000", "memory.max": "max"}, (None, None)),
        # inside a container
        (["0::/not/visible"], {"memory.max": "5000", "cpu.max": "50000 100000"}, (0.5, 5000)),
        ([], {}, (None, None)),
    ],
)
def test_control_groups_limit_cores_and_memory(tmp_path, lines, files, limits):
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()} | {
        "proc/self/cgroup": "\n".join(lines)
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert provenance.cgroup_limits(tmp_path) == limits
    usable = [provenance.usable_cores(*of) for of in ((8, None), (8, 2.5), (2, 16.0), (4, 0.2))]
    assert usable == [8, 3, 2, 1], "cores that work at once"


@pytest.mark.parametrize("limit, verdict", [(None, "ok"), (2**30, "no"), (2 * 2**30, "note")])
def test_what_counts_of_cores_and_memory_is_what_a_control_group_leaves(
    monkeypatch, limit, verdict
):
    monkeypatch.setattr(provenance, "read_memory", lambda: (64 * 2**30, 60 * 2**30))
    monkeypatch.setattr(provenance, "cgroup_limits", lambda: (1.5, limit))
    monkeypatch.setattr(provenance, "count_affinity_cores", lambda: 16)
    found = doctor.check_memory(asked())
    assert found.verdict == verdict and found.fact.startswith("64.0 GiB")
    found = doctor.check_cores(asked())
    assert found.verdict == "note" and found.values["usable"] == 2 and "--cores 2" in found.next


@pytest.mark.parametrize(
    "spoil, verdict, words",
    [
        (lambda folder, env: None, "ok", "slurm 22.05.8, partitions normal, debug"),
        (lambda folder, env: (folder / "sbatch").unlink(), "no", "sbatch not found"),
        (lambda folder, env: (folder / "srun").unlink(), "no", "srun not found"),
        (
            lambda folder, env: program(folder, "sinfo", "echo Unable to contact; exit 1"),
            "no",
            "Unable to contact",
        ),
        (
            lambda folder, env: program(folder, "sacct", "exit 1"),
            "note",
            "--slurm-status-command squeue",
        ),
        (lambda folder, env: (folder / "sacct").unlink(), "note", "--slurm-status-command squeue"),
        (lambda folder, env: env.setenv("SLURM_JOB_ID", "42"), "note", "inside job 42"),
    ],
)
def test_what_a_cluster_lacks_is_told(tmp_path, monkeypatch, spoil, verdict, words):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    kinds = [
        "normal*|gpu:gh200:4(S:0-3)|12:00:00|288|870000",
        "debug|(null)|1:30:00|288+|450000",
        "debug|gpu:2|1:30:00|64|870000",
    ]
    partitions = "".join(f"echo '{kind}'; " for kind in kinds)
    programs = {
        "srun": "exit 0",
        "sbatch": "echo slurm 22.05.8",
        "sinfo": partitions,
        "sacct": "exit 0",
    }
    for name, text in programs.items():
        program(tmp_path, name, text)
    spoil(tmp_path, monkeypatch)
    found = doctor.check_slurm(asked())
    assert found.verdict == verdict and words in f"{found.fact}; {found.next}", found
    assert verdict != "ok" or found.values["partitions"] == {
        "normal": {"gpus": 4, "minutes": 720, "cores": 288, "memory_mb": 870_000},
        "debug": {"gpus": 2, "minutes": 90, "cores": 288, "memory_mb": 870_000},
    }


@pytest.mark.parametrize(
    "driver, torch, hidden, verdict, words",
    [
        ([], {}, None, "no", "training runs on the CPU"),
        (
            ["NVIDIA H200"],
            {"devices": [GPU]},
            None,
            "ok",
            "1 x NVIDIA H200 (150 GiB, capability 9.0); torch for CUDA",
        ),
        (
            ["NVIDIA H200"],
            {"cuda": None, "version": "2.13.0+cpu"},
            None,
            "no",
            "2.13.0+cpu is a build for CPUs",
        ),
        (["NVIDIA H200"], {}, "", "no", "CUDA_VISIBLE_DEVICES='' hides them"),
        (
            ["NVIDIA H200"],
            {"error": "RuntimeError: driver is too old"},
            None,
            "no",
            "driver is too old",
        ),
        (
            ["NVIDIA H200"],
            {"devices": [GPU | {"error": "no kernel image"}]},
            None,
            "no",
            "GPU 0: no kernel image",
        ),
        (
            ["NVIDIA H200"] * 4,
            {"devices": [GPU]},
            "2",
            "note",
            "sees 4 (NVIDIA H200); CUDA_VISIBLE_DEVICES is 2",
        ),
        ([], {"cuda": None, "rocm": "7.1", "devices": [GPU] * 2}, None, "ok", "2 x NVIDIA H200"),
    ],
)
def test_gpus_of_driver_and_torch_are_compared(monkeypatch, driver, torch, hidden, verdict, words):
    monkeypatch.setattr(doctor, "query_driver", lambda: (driver, ""))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    found = doctor.check_gpus(asked(torch=TORCH | torch))
    assert found.verdict == verdict and words in found.fact, found


def test_the_driver_is_asked_through_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.query_driver()[0] == []
    program(tmp_path, "nvidia-smi", "echo 'NVIDIA H200'; echo 'NVIDIA H200'")
    assert doctor.query_driver() == (["NVIDIA H200"] * 2, "")
    program(
        tmp_path,
        "nvidia-smi",
        "echo 'NVIDIA-SMI has failed because it could not talk to the driver'; exit 9",
    )
    assert (
        doctor.query_driver()[0] == []
        and "could not talk to the driver" in doctor.query_driver()[1]
    )


@pytest.mark.parametrize(
    "ending, verdict, words",
    [
        (
            (
                1,
                (
                    "Traceback:\ntorch.distributed.DistNetworkError: refused\n  at\ntokenscale: it "
                    "failed."
                ),
            ),
            "no",
            "refused",
        ),
        (
            (2, "tokenscale: a rank of the sweep failed.\n  code  -11"),
            "no",
            "a rank of the sweep failed.",
        ),
        ((None, "no output within 60 s"), "note", "did not end within 60 s"),
        ((None, "no output within 60 s, and no loopback"), "no", "no output within 60 s"),
        ((-9, ""), "no", "signal 9"),
        ((0, ""), "ok", "an all-reduce, at 40 GB/s"),
    ],
)
def test_an_all_reduce_that_fails_is_no_and_one_that_hangs_a_note(
    monkeypatch, ending, verdict, words
):
    def sweep(*arguments):
        size = int(arguments[arguments.index("--sizes") + 2])
        records = [{"bytes": 4096, "seconds": 1.0}, {"bytes": size, "seconds": size / 40e9}]
        Path(arguments[-1]).write_text(json.dumps({"records": records}))
        return ending

    monkeypatch.setattr(doctor, "run_python", sweep)
    monkeypatch.setattr(doctor, "reaches_itself", lambda: "no loopback" not in ending[1])
    for found in (
        CHECKS["gloo"](asked()),
        doctor.check_nccl(asked(torch=TORCH | {"devices": [GPU, GPU]})),
    ):
        assert (
            found.verdict == verdict and words in found.fact and (verdict == "ok" or found.next)
        ), found
    for name in ("gloo", "nccl"):
        assert CHECKS[name](asked(torch={})).fact == "unknown without torch"
    crashed = {key: value for key, value in TORCH.items() if key != "devices"}
    for name in ("gloo", "nccl", "gpu"):
        assert (
            "ended early: signal 11" in CHECKS[name](asked(torch=crashed, ended="signal 11")).fact
        )
    assert "not in this build" in doctor.check_nccl(asked(torch=TORCH | {"nccl": False})).fact
    assert "sees no GPU" in doctor.check_nccl(asked()).fact
    assert doctor.check_nccl(asked(torch=TORCH | {"devices": [GPU]})).verdict == "ok"


@pytest.mark.parametrize(
    "step, owner, name, replacement",
    [
        (
            "create",
            doctor.tempfile,
            "TemporaryDirectory",
            OSError(errno.EROFS, "Read-only file system"),
        ),
        ("rename", os, "replace", OSError(errno.EXDEV, "Invalid cross-device link")),
        ("rename", os, "replace", None),  # says it did, and did not
        ("flock fails: two processes", doctor, "run_command", (0, "")),
        # Lustre without the option flock
        ("flock", fcntl, "flock", OSError(errno.ENOSYS, "Function not implemented")),
    ],
)
def test_what_a_file_system_cannot_do_is_named(
    tmp_path, monkeypatch, step, owner, name, replacement
):
    failed, skew = doctor.try_folder(tmp_path)
    assert failed == "" and abs(skew) < 5 and list(tmp_path.iterdir()) == []

    def replaced(*args, **kwargs):
        if isinstance(replacement, Exception):
            raise replacement
        return replacement

    monkeypatch.setattr(owner, name, replaced)
    assert doctor.try_folder(tmp_path)[0].startswith(step)
    assert doctor.check_results_folder(asked(tmp_path)).verdict == "no"


@pytest.mark.parametrize(
    "free, kind, skew, verdict, words",
    [
        (10**6, "ext4", 0, "no", "free 95.4 MiB"),
        (10**9, "ext4", 0, "note", "little free space"),
        (10**11, "ext4", 0, "ok", "file system ext4"),
        (10**11, "nfs4", 0, "note", "latency-wait"),
        (10**11, "fuse.sshfs", 0, "note", "latency-wait"),
        (10**11, "tmpfs", 0, "note", "lost on reboot"),
        (10**11, "overlay", 0, "note", "inside a container"),
        (10**11, "ext4", -90, "note", "-90 s off"),
    ],
)
def test_room_kind_and_clock_of_a_file_system_are_judged(
    monkeypatch, tmp_path, free, kind, skew, verdict, words
):
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**12, 0, free)
    )
    monkeypatch.setattr(doctor, "run_command", lambda argv: (0, f"Type\n{kind}"))
    monkeypatch.setattr(doctor, "try_folder", lambda folder: ("", skew))
    found = doctor.check_results_folder(asked(tmp_path))
    assert (
        found.verdict == verdict
        and words in f"{found.fact} {found.next}"
        and f"file system {kind}" in found.fact
    )


def test_the_child_tells_broken_crashing_and_chatty_packages_apart(monkeypatch, tmp_path):
    for name, text in {
        "chatty": "import sys\nprint('hello')\nprint('{}')\nprint('more', end='', file=sys.stderr)",
        "broken": "raise ImportError('libcuda.so.1: no such file')",
        "leaving": "raise SystemExit(3)",
        "crashing": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "hanging": "import time\ntime.sleep(60)",
        "unreached": "",
    }.items():
        (tmp_path / f"{name}.py").write_text(f"{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = {"broken": "ImportError: libcuda.so.1: no such file", "leaving": "SystemExit: 3"}
    found |= {"crashing": "importing it kills Python: signal 9"}
    probed = doctor.probe(["chatty", "missing", "broken", "leaving", "crashing", "unreached"])
    assert probed == {"broken": found, "torch": {}, "ended": "signal 9"}
    monkeypatch.setattr(doctor, "LIMIT_S", 2.0)
    assert doctor.probe(["hanging"])["broken"] == {
        "hanging": "importing it kills Python: no exit within 2 s"
    }


def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path):
    command = f"(sleep 3; touch {tmp_path}/late) & echo begun; sleep 60"
    assert doctor.run_command(["sh", "-c", command], 0.5) == (None, "begun\nno output within 0.5 s")
    doctor.run_command(["sleep", "3"])
    assert not (tmp_path / "late").exists()
    assert doctor.run_command([str(tmp_path / "none")])[0] is None


def test_what_a_project_folder_lacks_is_named(monkeypatch, tmp_path):
    assert doctor.check_project_folder(asked()).verdict in ("ok", "note")
    monkeypatch.chdir(tmp_path)
    found = doctor.check_project_folder(asked())
    assert found.verdict == "no" and "workflow/Snakefile" in found.fact
    for name in (
        "workflow/Snakefile",
        "config/config.yaml",
        "profiles/default/config.yaml",
        "pyproject.toml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    # what Git makes of a link where links are not supported
    (tmp_path / "alps").write_text("profiles/alps")
    assert "ln -sfn" in doctor.check_project_folder(asked()).next
    monkeypatch.setenv("PATH", str(tmp_path))
    found = doctor.check_project_folder(asked())
    assert found.verdict == "note" and "make and git" in found.fact


@pytest.mark.parametrize(
    "version, verdict", [("3.10.14", "no"), ("3.11.0", "ok"), ("3.14.2", "ok"), ("3.15.0", "no")]
)
def test_the_version_of_python_is_compared_with_the_projects(monkeypatch, version, verdict):
    monkeypatch.setattr(doctor.platform, "python_version", lambda: version)
    found = doctor.check_python(asked())
    assert found.verdict == verdict and version in found.fact and ">=3.11,<3.15" in found.fact
    assert verdict == "ok" or found.next.startswith("make setup PYTHON=python3.")


def test_bounds_are_the_clones_or_unknown(monkeypatch):
    ours = doctor.read_requirements()
    listed = set(list_packages(*GROUPS))
    assert listed - set(ours) == {"tiktoken"} and ours["python"] == ">=3.11,<3.15"
    monkeypatch.setattr(doctor, "__file__", "/nowhere/site-packages/tokenscale/cli/doctor.py")
    assert doctor.read_requirements() == {}
    assert (
        doctor.check_python(asked()).verdict == "note"
        and CHECKS["host packages"](asked()).verdict == "ok"
    )


def test_versions_are_compared_as_numbers():
    # the third of a container of NVIDIA's
    for version in ("2.9", "2.13.1+cu130", "2.9.0a0+5228986.nv25.10", "2.10"):
        assert doctor.satisfies(version, ">=2.9.0,<2.14") and doctor.satisfies(version, ""), version
    for version in ("2.14", "2.8.9", "2.14.0.dev20261101"):
        assert not doctor.satisfies(version, ">=2.9,<2.14.0"), version


@pytest.mark.parametrize(
    "group, name", [(group, name) for group in GROUPS for name in list_packages(group)]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, group, name):
    # what makes a module unimportable
    monkeypatch.setitem(sys.modules, doctor.module_of(name), None)
    found = doctor.check_packages(group, asked())
    assert f"missing: {name}" in found.fact and f"for {PURPOSES[group]}" in found.fact
    assert f"pip install '{name}" in found.next
    assert found.verdict == ("note" if name in doctor.ONLY else "no")


@pytest.mark.parametrize("version", ["2.8.0", "2.16.0"])
def test_a_torch_outside_its_bounds_or_a_package_that_does_not_import_is_refused(
    monkeypatch, version
):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == "torch" else real(name)
    )
    found = doctor.check_packages("trainer", asked())
    assert found.verdict == "no" and f"torch {version} is outside >=2.9,<2.16" in found.fact
    assert "'torch>=2.9,<2.16'" in found.next
    found = doctor.check_packages(
        "report", asked(broken={"duckdb": "ImportError: no libstdc++.so.6"})
    )
    assert found.verdict == "no" and "does not import: ImportError: no libstdc++.so.6" in found.fact
    assert "--force-reinstall 'duckdb" in found.next
    # one that is needed weighs more than one that is not
    for module in ("yaml", "snakemake_executor_plugin_slurm"):
        monkeypatch.setitem(sys.modules, module, None)
    assert doctor.check_packages("host", asked()).verdict == "no"
