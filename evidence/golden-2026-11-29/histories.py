"""Judge the changes of golden losses that a repository keeps in git, as README.md here has them.

python histories.py REPOSITORY 'tests/assets/losses/*.txt'
"""

import argparse
import itertools
import random
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from tokenscale_golden.platforms import Platform
from tokenscale_golden.reading import Curve, GoldenError, read
from tokenscale_golden.verdict import judge

#: parts of names that stand for platforms
PLATFORMS = ("a100", "h100", "gb200", "cuda", "rocm_mi350x", "rocm")


class History:
    """Golden losses of a clone, by commit and file."""

    def __init__(self, repository: Path, glob: str):
        self._repository = repository
        self._read: dict[tuple[str, str], Curve | None] = {}
        self.commits: dict[str, list[str]] = {}
        log = self._git("log", "--reverse", "--format=@%h", "--name-only", "--", glob)
        for line in log.splitlines():
            if line.startswith("@"):
                commit = line[1:]
            elif line:
                self.commits.setdefault(line, []).append(commit)

    def curve(self, commit: str, name: str) -> Curve | None:
        """Return a file's losses at a commit; None where it has none."""
        if (commit, name) not in self._read:
            with tempfile.TemporaryDirectory() as folder:
                copy = Path(folder) / Path(name).name
                copy.write_text(self._git("show", f"{commit}:{name}"))
                try:
                    self._read[commit, name] = read(copy)
                except GoldenError:
                    self._read[commit, name] = None
        return self._read[commit, name]

    def second(self, commit: str, name: str) -> Platform | None:
        """Return the change of another platform's file in the same commit."""
        folder, _, file = name.rpartition("/")
        for one, other in itertools.permutations(PLATFORMS, 2):
            partner = f"{folder}/{file.replace(one, other)}"
            if one in file and commit in self.commits.get(partner, ()):
                old = self.curve(f"{commit}^", partner)
                new = self.curve(commit, partner)
                if old is not None and new is not None:
                    return Platform(old, new)
        return None

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self._repository), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    parser.add_argument("glob")
    parser.add_argument("--most", type=int, default=10**9, help="changes that are judged")
    arguments = parser.parse_args()
    history = History(arguments.repository, arguments.glob)
    names = sorted(name for name, commits in history.commits.items() if len(commits) > 1)
    random.Random(29).shuffle(names)
    counts: dict[str, Counter[str]] = {"alone": Counter(), "history": Counter(), "both": Counter()}
    for name in names:
        if counts["alone"].total() >= arguments.most:
            break
        found = [(commit, history.curve(commit, name)) for commit in history.commits[name]]
        versions = [(commit, curve) for commit, curve in found if curve is not None]
        for number, ((_, old), (commit, new)) in enumerate(itertools.pairwise(versions), 1):
            earlier = [curve for _, curve in versions[:number]]
            second = history.second(commit, name)
            verdicts = {
                "alone": judge(old, new),
                "history": judge(old, new, versions=earlier),
                "both": judge(old, new, versions=earlier, second=second),
            }
            for way, verdict in verdicts.items():
                counts[way][verdict.kind] += 1
            kinds = " | ".join(verdict.kind for verdict in verdicts.values())
            print(f"{commit} {name} | {second is not None} | {kinds}")
    for way, of in counts.items():
        print(way, dict(of.most_common()))


if __name__ == "__main__":
    main()
