"""Record golden results again: python -m tests.golden --write [NAME…]. The demo's come from `make
run`.
"""

import argparse
import os
import subprocess
import sys

from tests.golden import FOLDER, ROOT, WRITE

#: name → the tests that compute its values and compare them
TESTS = {
    "run_ids": ["tests/golden/test_golden.py::test_ids_of_all_runs"],
    "demo": ["tests/golden/test_golden.py::test_demo"],
    "layouts": ["tests/distributed/test_parity.py", "-k", "golden"],
    "figures": ["tests/experiments/test_figures.py", "-k", "golden"],
    "evidence": ["tests/unit/test_report_evidence.py", "-k", "rebuilt_by_the_commands"],
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument(
        "--write", nargs="*", choices=TESTS, required=True, metavar="NAME", help=", ".join(TESTS)
    )
    names = parser.parse_args().write or list(TESTS)
    codes = []
    for name in names:
        for path in FOLDER.glob(f"{name}*.json"):
            path.unlink()
        command = [sys.executable, "-m", "pytest", "--quiet", *TESTS[name]]
        codes.append(subprocess.run(command, cwd=ROOT, env=os.environ | {WRITE: "1"}).returncode)
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main())
