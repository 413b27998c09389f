"""A copy of the project at tiny scale, in which the workflow runs: sources are copied, so that a
test may edit them.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import planted
from tests.once import once
from tests.workflow import forked

ROOT = Path(__file__).parents[2]

CONFIG = {
    "scale": "demo",
    "experiments": ["ways", "ranks"],
    "corpora": {
        "small": {
            "source": {
                "kind": "docstrings",
                "packages": ["pydoc_data", "numpy"],
                "maximum_documents": 150,
            }
        }
    },
    "tokenizers": {"bpe": {"kind": "bpe", "corpus": "small", "vocabulary_size": 300}},
}
RUNS = {
    "corpus": "small",
    "tokenizer": "bpe",
    "model": "llama-micro",
    "sequence_length": 32,
    "global_batch": 4,
    "micro_batch": 2,
    "budget": {"steps": 5},
    "schedule": {"warmup_steps": 2},
    "validation": {"rows": 4},
}
EVERY_SCALE = {"workstation": {}, "alps": {}, "study": {}, "campaign": {}}
EXPERIMENTS = {
    "ways": {
        "question": "Do the ways from text to rows differ?",
        "runs": RUNS,
        "factors": {"approach": ["padding-free", "token-list", "packed"]},
        "storage_benchmark": {
            "corpus": "small",
            "tokenizer": "bpe",
            "settings": {
                "formats": ["packed"],
                "sequence_length": 32,
                "rows": 2,
                "single_rows": 2,
                "rounds": 1,
            },
        },
        "figures": ["loss_over_time", "data_stall_share", "storage_benchmark"],
        "scales": EVERY_SCALE,
    },
    # shares its run at world size 1 with the experiment above
    "ranks": {
        "question": "Do two ranks compute what one computes?",
        "runs": RUNS | {"approach": "packed"},
        "factors": {"layout.data": [1, 2]},
        "figures": ["scaling_throughput"],
        "scales": EVERY_SCALE,
    },
}


CLAIMS = {
    "documents": {"paper": {"title": "A paper"}},
    "claims": {
        "packs": {
            "document": "paper",
            "claim": "packed rows hold no padding",
            "experiments": ["ways"],
            "sql": "SELECT not_useful_share AS value, run_id FROM padding WHERE approach = 'packed'",
            "sentence": "Of packed rows {number} carry no label that counts.",
            "direction": "below",
            "bound": 0.5,
            "exact": True,
            "unit": "percent",
            "holds_at": ["demo"],
        }
    },
}


#: the same claim as one of a source study
STUDIES_CLAIMS = CLAIMS | {"documents": {"paper": {"title": "A paper", "study": "000"}}}


@dataclass
class Project:
    """A project folder and its Snakemake."""

    root: Path

    @property
    def environment(self) -> dict[str, str]:
        home = {"PYTHONPATH": str(self.root / "src"), "HOME": str(self.root.parent / "home")}
        return os.environ | planted.ENVIRONMENT | home

    def snakemake(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
        """What Snakemake says and does here, in a fork; stdout and stderr come back together."""
        code, text = forked.snakemake([*arguments], self.root, self.environment)
        assert code == 0 or not check, text[-6000:] + self.logs()
        return subprocess.CompletedProcess(arguments, code, text)

    def command(self, *arguments: str, offline: bool = False, timeout: float = 400) -> str:
        """The same as a user starts it, in a process of its own; `offline` cuts it off where the
        machine allows it.
        """
        command = [*(OFFLINE if offline else ()), sys.executable, "-m", "snakemake", *arguments]
        options = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "timeout": timeout,
        }
        done = subprocess.run(command, cwd=self.root, env=self.environment, **options)
        assert done.returncode == 0, done.stdout[-6000:] + self.logs()
        return done.stdout

    def dry_run(self, *arguments: str) -> str:
        """What a dry run prints."""
        return self.snakemake("-n", "--quiet", "host", "--cores", "2", *arguments).stdout

    def planned(self, *arguments: str) -> dict[str, int]:
        """Rule → number of jobs that a dry run would start, targets left out."""
        text = self.dry_run(*arguments)
        table = text.split("Job stats:")[1].split("\n\n")[0] if "Job stats:" in text else ""
        counts = dict(
            line.split()
            for line in table.splitlines()[3:]
            if line.split()[:1] not in ([], ["total"])
        )
        return {rule: int(count) for rule, count in counts.items() if rule not in TARGETS}

    def logs(self) -> str:
        """The last lines of every log that speaks of an error."""
        texts = [
            (p, p.read_text(errors="replace")) for p in self.root.glob("results/logs/**/*.log")
        ]
        return "".join(
            f"\n--- {p.name}\n{text[-3000:]}"
            for p, text in texts
            if "Error" in text or "tokenscale:" in text
        )

    def records(self) -> dict[str, dict]:
        """What must be equal after a rebuild: manifests, and order digest and loss of every step of
        every rank.
        """
        found = {}
        for path in sorted(self.root.glob("results/to*/**/manifest.json")):
            found[str(path.relative_to(self.root))] = json.loads(path.read_text())
        for path in sorted(self.root.glob("results/runs/*/attempt=*/rank=*/steps.jsonl")):
            steps = [json.loads(line) for line in path.read_text().splitlines()]
            kept = [
                (s["step"], s["order_digest"], s["loss_sum"], s["useful_tokens"], s["grad_norm"])
                for s in steps
            ]
            found[str(path.relative_to(self.root))] = kept
        return found


TARGETS = {
    "all",
    "corpus",
    "tokens",
    "runs",
    "tables",
    "figures",
    "report",
    "report_now",
    "claims",
    *EXPERIMENTS,
}
TARGETS |= {"all_experiments"}


def _offline() -> list[str]:
    """A prefix that cuts the network off, where the machine allows it."""
    for command in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        # the loopback interface must be up: ranks talk over it
        command = [
            *command,
            "sh",
            "-c",
            'ip link set lo up 2>/dev/null || ifconfig lo up; exec "$@"',
            "sh",
        ]
        try:
            probe = (
                "import socket as s; a = s.create_server(('127.0.0.1', 0)); "
                "s.create_connection(a.getsockname(), 2)"
            )
            if (
                subprocess.run(
                    [*command, sys.executable, "-c", probe], capture_output=True, timeout=20
                ).returncode
                == 0
            ):
                return command
        except (OSError, subprocess.TimeoutExpired):
            continue
    return []


OFFLINE = _offline()


def make_project(folder: Path) -> Project:
    """A fresh copy with nothing built."""
    root = folder / "project"
    for name in ("workflow", "arms", "src", "profiles"):
        shutil.copytree(
            ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    os.symlink("profiles/alps", root / "alps")
    (root / "config/experiments").mkdir(parents=True)
    (root / "config/config.yaml").write_text(json.dumps(CONFIG))
    (root / "config/claims.yaml").write_text(json.dumps(CLAIMS))
    (root / "config/replication.yaml").write_text(json.dumps(STUDIES_CLAIMS))
    for name, experiment in EXPERIMENTS.items():
        (root / f"config/experiments/{name}.yaml").write_text(json.dumps(experiment))
    (folder / "home").mkdir()
    return Project(root)


def copy_of(project: Project, folder: Path, **options) -> Project:
    """The project copied as `shutil.copytree` does it, by default with its files' times."""
    (folder / "home").mkdir()
    shutil.copytree(project.root, folder / "project", symlinks=True, **options)
    return Project(folder / "project")


def build(folder: Path) -> None:
    """A project whose report is built as `make run` does it: tokens first, then the rest."""
    project = make_project(folder)
    project.snakemake("--cores", "2", "tokens")
    project.snakemake("--cores", "2")


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Project:
    """A worker's copy of a project whose report is built. Tests leave it complete; what edits it
    copies it first.
    """
    made = once(tmp_path_factory, "built", build)
    return copy_of(Project(made / "project"), tmp_path_factory.mktemp("built-copy"))


@pytest.fixture
def copy(built, tmp_path) -> Project:
    """A copy of the built project, with Snakemake's metadata, for tests that change things."""
    return copy_of(built, tmp_path)


@pytest.fixture
def fresh(tmp_path) -> Project:
    """A project with nothing built, for dry runs and wrong input."""
    return make_project(tmp_path)
