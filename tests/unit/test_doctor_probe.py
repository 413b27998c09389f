"""What `doctor` learns from children that crash, hang or print."""

import subprocess
import sys
import time

from tokenscale.cli import doctor_probe as probe
from tokenscale.cli import packages


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
        "crashing": "importing it kills Python: signal 9",
    }


def test_torch_is_imported_by_the_ranks_alone(monkeypatch):
    """It takes 2 s of a core: the child that imports the other packages does not need it."""
    names = [p.module for p in packages.PACKAGES if p.module not in ("torch", *probe.WITH_TORCH)]
    code = f"import sys\nfrom tokenscale.cli import doctor_probe\ndoctor_probe.probe_imports({names!r})\n"
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False", done.stdout + done.stderr
    started = []
    monkeypatch.setattr(probe, "_start_child", lambda kind, *names: started.append(names))
    monkeypatch.setattr(probe, "_collect_lines", lambda child, timeout_s: ([], 0))
    probe.try_imports()
    assert started and not {"torch", "accelerate"} & set(started[0])


def test_a_torch_that_hangs_is_given_up(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    start_child = probe._start_child

    def child(kind, **environment):
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)  # the folder that `python -m` looks in first
            return start_child(kind, **environment)

    monkeypatch.setattr(probe, "_start_child", child)
    monkeypatch.setattr(probe, "LIMIT_S", 1.0)
    start = time.monotonic()
    assert probe.try_ranks() == {"stages": {}, "ended": ["no exit within 1 s"] * 2}
    assert time.monotonic() - start < 20
