"""Run the fast tests of what changed: python -m tests.quick [BASE]. Called by `make quick`.

A changed test file runs itself. A changed module runs the unit tests that import it, and its
docstring examples. Long tests stay out (marks `experiment`, `long`, `distributed`, `workflow`), and
so do files beyond the tenth.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FAST = "not (experiment or long or distributed or workflow)"
#: most test files of one call
LIMIT = 10


def changed(base: str) -> list[str]:
    """Return the files that differ from a commit, those that git does not track yet included."""
    listed = [["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"]]
    lines = [
        subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True).stdout
        for args in listed
    ]
    return sorted({name for text in lines for name in text.split()})


def tests_of(names: list[str], root: Path = ROOT) -> list[str]:
    """Return the test files for changed files: changed tests, then unit tests by the modules they
    import.
    """
    present = [name for name in names if (root / name).is_file()]
    tests = [name for name in present if re.fullmatch(r"tests/unit/(.*/)?test_\w+\.py", name)]
    modules = [name for name in present if re.match(r"(packages/\w+/)?src/.*\.py$", name)]
    dotted = {name.partition("src/")[2].removesuffix(".py").replace("/", ".") for name in modules}
    found = {}
    for path in sorted((root / "tests/unit").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        imports = set(re.findall(r"^from ([\w.]+) import", text, re.MULTILINE))
        for package, names_ in re.findall(
            r"^from ([\w.]+) import \(?([\w, \n]+)", text, re.MULTILINE
        ):
            imports |= {f"{package}.{name.strip()}" for name in names_.split(",")}
        if common := len(imports & dotted):
            found[str(path.relative_to(root))] = common
    ordered = sorted(found, key=lambda name: (-found[name], name))
    examples = [name for name in modules if ">>> " in (root / name).read_text(encoding="utf-8")]
    return [*dict.fromkeys([*tests, *ordered])][:LIMIT] + examples


def main() -> int:
    """Return pytest's exit code; 0 where nothing changed that has a fast test."""
    files = tests_of(changed(sys.argv[1] if len(sys.argv) > 1 else "HEAD"))
    if not files:
        print("quick: no changed file has a fast test")
        return 0
    print(f"quick: {' '.join(files)}", flush=True)
    command = [sys.executable, "-m", "pytest", "--quiet", "-x", "-m", FAST, *files]
    code = subprocess.run(command, cwd=ROOT).returncode
    return 0 if code == 5 else code  # 5: every test of these files has a mark


if __name__ == "__main__":
    raise SystemExit(main())
