"""The locks of `make setup` and of arms, resolved from scratch: `python -m tests.long.lock`
compares, `--write` writes.

`--write NAME …` resolves only the locks of these arms. Needs the package registry. The first line
of a lock names a date, and nothing that the registry got later counts. The lock therefore comes out
byte for byte as long as the registry has what it had then. It holds every package but torch by
version and hash. torch is pinned by version alone (locks/constraints.txt): its CPU and CUDA builds have
equal versions and other hashes. Packages that only a CUDA build needs are left to the requirements
of that build.
"""

import argparse
import atexit
import datetime
import difflib
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.long import logs

ROOT = Path(__file__).parents[2]
#: locks of `make setup` and their Pythons; arms have a lock for the first
LOCKS = {ROOT / f"locks/linux-x86_64-python{v[:4]}.txt": v for v in ("3.11.7", "3.12.1", "3.13.0")}
PLATFORM = next(iter(LOCKS)).name
#: how long before today a lock's date lies: mirrors of the registry get new files days after their
#: upload
MARGIN = datetime.timedelta(days=7)
#: the resolver is pinned, so that equal packages give equal bytes
UV = "uv==0.13.9"
OF_TORCH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)==")
HEAD = """\
# What {user} installs on x86-64 Linux with Python {python}: the registry as it was before {date}T00:00:00Z.
# `make lock` writes this file anew. torch is not in it: locks/constraints.txt pins its version, since its CPU and CUDA
# builds have equal versions and other hashes.
"""


@cache
def install_uv() -> Path:
    """Install the resolver in a temporary folder and return its program. It resolves for any
    version of Python.
    """
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, UV], check=True
    )
    return folder / "bin/uv"


def resolve(lock: Path, date: str) -> str:
    """Return a lock with the newest versions before a date (ISO 8601) that its requirements
    allow.
    """
    ours = lock in LOCKS
    python = LOCKS[ROOT / "locks" / lock.name]
    source = (
        ["pyproject.toml", "--extra", "test"] if ours else [str(lock.with_name("requirements.in"))]
    )
    user = "`make setup`" if ours else f"the arm {lock.parent.name}"
    command: list[str | Path] = [install_uv(), "pip", "compile", *source]
    command += [
        "--constraint",
        "locks/constraints.txt",
        "--exclude-newer",
        f"{date}T00:00:00Z",
        "--generate-hashes",
    ]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    command += ["--no-header", "--no-annotate", "--quiet"]
    text = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    entries = re.findall(r"(?m)^\S.*\n(?:    --hash=.*\n)+", text)
    return HEAD.format(user=user, python=python[:4], date=date) + "".join(
        e for e in entries if not OF_TORCH.match(e)
    )


def main() -> int:
    """0 where the locks are what the registry gives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", nargs="*", metavar="ARM", help="write the locks of a week ago")
    wanted = parser.parse_args().write
    arms = {
        path.parent.name: path.with_name(PLATFORM)
        for path in sorted(ROOT.glob("arms/*/requirements.in"))
    }
    locks = [arms[name] for name in wanted] if wanted else [*LOCKS, *arms.values()]
    if wanted is not None:
        date = datetime.date.fromisoformat(logs.today()) - MARGIN
        for lock in locks:
            lock.write_text(resolve(lock, date.isoformat()), encoding="utf-8")
        return 0
    return max(compare(lock) for lock in locks)


def compare(lock: Path) -> int:
    """Resolve a lock as of its date and print what differs. Return 0 where nothing does."""
    committed = lock.read_text(encoding="utf-8")
    again = resolve(lock, re.search(r"before (\S+)T", committed)[1])
    sys.stdout.writelines(
        difflib.unified_diff(committed.splitlines(True), again.splitlines(True), "committed", "now")
    )
    same = committed == again
    packages = len(re.findall(r"(?m)^[\w.-]+==", again))
    hashes = again.count("--hash=")
    print(
        f"{lock.relative_to(ROOT)}: {packages} packages, {hashes} hashes; "
        f"{'the same' if same else 'not the same'}"
    )
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
