"""What `doctor` learns from a child process that crashes, hangs or prints."""

from tokenscale.cli import doctor_checks, doctor_python


def module(folder, name, text):
    (folder / f"{name}.py").write_text(f"{text}\n")


def test_the_child_tells_broken_crashing_and_chatty_packages_apart(monkeypatch, tmp_path):
    module(tmp_path, "chatty", "import sys\nprint('hello')\nprint('{}')\nprint('more', end='', file=sys.stderr)")
    module(tmp_path, "broken", "raise ImportError('libcuda.so.1: cannot open shared object file')")
    module(tmp_path, "leaving", "raise SystemExit(3)")
    module(tmp_path, "crashing", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    module(tmp_path, "unreached", "")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor_python.probe(["chatty", "missing", "broken", "leaving", "crashing", "unreached"]) == {
        "broken": {
            "broken": "ImportError: libcuda.so.1: cannot open shared object file",
            "leaving": "SystemExit: 3",
            "crashing": "importing it kills Python: signal 9",
        },
        "stages": {},
        "ended": "signal 9",
    }


def test_an_import_that_hangs_is_given_up(monkeypatch, tmp_path):
    module(tmp_path, "hanging", "import time\ntime.sleep(60)")
    module(tmp_path, "first", "")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor_python, "LIMIT_S", 2.0)
    found = doctor_python.probe(["first", "hanging"])
    assert found["broken"] == {"hanging": "importing it kills Python: no exit within 2 s"}


def test_torch_of_this_machine_multiplies_in_bf16():
    found = doctor_python.probe(["torch"])
    assert (
        found["broken"] == {}
        and found["ended"] == ""
        and list(found["stages"]) == ["torch", "bf16 on the CPU", "devices"]
    )
    assert found["stages"]["torch"]["version"] and "error" not in found["stages"]["bf16 on the CPU"]


def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path):
    command = f"(sleep 3; touch {tmp_path}/late) & echo begun; sleep 60"
    assert doctor_checks.run_command(["sh", "-c", command], 0.5) == (None, "begun\nno output within 0.5 s")
    doctor_checks.run_command(["sleep", "3"])
    assert not (tmp_path / "late").exists()
