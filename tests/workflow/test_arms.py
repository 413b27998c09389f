"""Trainers beside each other, from raw text to the report: environments, runs, certificates, and an
arm that fails.
"""

import json
import os
import re
import shutil
import time

import pytest

from tests import planted
from tests.long import logs
from tests.workflow.conftest import ROOT, RUNS, Project, make_project
from tokenscale.analysis.queries import query
from tokenscale.arms.environments import BUNDLES
from tokenscale.base.files import read_json
from tokenscale.settings.yaml_files import read_yaml

COMPARED = RUNS | {
    "packing": "concatenate",
    "labels": "stream",
    "model": {"preset": "llama-micro", "layers": 4, "name": "llama-4-layers"},
    "schedule": {"shape": "constant", "warmup_steps": 0},
    "optimizer": {"weight_decay": 0.0, "clip_norm": None},
    "validation": {"rows": 0},
    "device": "cpu",
}
EXPERIMENT = {
    "question": "Do both compute the same?",
    "runs": COMPARED,
    "factors": {"arm": ["tokenscale", "transformers", "silent"]},
    "primary": [
        {"of": {"arm": name}, "over": {"arm": "tokenscale"}} for name in ("transformers", "silent")
    ],
    "figures": ["frameworks", "loss_over_time"],
}


class Connected(Project):
    """A project with the network of this machine: other tests have a proxy that does not exist."""

    @property
    def environment(self) -> dict[str, str]:
        here = super().environment
        return {
            name: os.environ.get(name, "") if name in planted.ADDRESSES else value
            for name, value in here.items()
        }


def with_arms(project: Project) -> Project:
    (project.root / "locks").mkdir()
    shutil.copy(ROOT / "locks/constraints.txt", project.root / "locks")
    return Connected(project.root)


@pytest.mark.long
@pytest.mark.slow(150)
@pytest.mark.workflow
def test_a_trainer_is_compared_with_a_certificate_and_one_that_logs_nothing_is_invalid(fresh):
    pytest.importorskip("transformers")
    project = with_arms(fresh)
    silent = project.root / "arms/silent"
    silent.mkdir()
    (silent / "arm.yaml").write_text("description: does nothing\ntorch: false\n")
    (silent / "requirements.in").write_text("numpy\n")
    (silent / "adapter.py").write_text("from contract import Contract\nContract().close()\n")
    (project.root / "config/experiments/arms.yaml").write_text(json.dumps(EXPERIMENT))
    # one core: ranks of these tests compute with one thread, an arm with those of its job
    project.snakemake("--cores", "1", "arms")
    tables = project.root / "results/tables/arms"
    runs = query("inventory", tables).set_index("arm")
    assert runs["validity"].to_dict() == {
        "tokenscale": "valid",
        "transformers": "valid",
        "silent": "invalid",
    }
    assert runs.loc["silent", "reasons"].startswith("the arm logged no step")
    rows = query("frameworks", tables).set_index("arm")
    ours, theirs = (rows.loc[name] for name in ("tokenscale", "transformers"))
    assert abs(ours["final_loss"] - theirs["final_loss"]) < 1e-5 * ours["final_loss"]
    assert (rows["memory_bytes"] > 100e6).all() and (rows["median_step_s"] > 0).all()
    found = query("certificates", tables).set_index("of_arm")
    assert found.loc["transformers", "verdict"] == "equal to rounding"
    assert 0 < found.loc["transformers", "loss_floor"] < 1e-5
    assert (
        found.loc["silent", "verdict"] == "none" and "no recording" in found.loc["silent", "reason"]
    )
    page = re.sub(
        r"\s+", " ", (project.root / "results/report-experiments=arms/index.html").read_text()
    )
    assert "useful tokens per second as tokenscale (parity: equal to rounding)" in page
    assert (
        "no valid run: the arm logged no step" in page
        and "no certificate: the arm wrote no recording" in page
    )
    again = project.dry_run("arms")
    assert "Nothing to be done" in again


@pytest.mark.long
@pytest.mark.workflow
def test_all_seven_trainers_are_compared(tmp_path):
    """The shipped experiment at demo scale; its environments are built first, and timed apart."""
    if not (os.environ.get(BUNDLES) or os.environ.get("TOKENSCALE_ARM_REMOTES") == "1"):
        pytest.skip(
            f"set {BUNDLES} to a folder of bundles, or TOKENSCALE_ARM_REMOTES=1 to read the "
            "repositories"
        )
    project = with_arms(make_project(tmp_path))
    config = read_yaml(ROOT / "config/config.yaml")
    (project.root / "config/config.yaml").write_text(
        json.dumps(config | {"experiments": ["frameworks"]})
    )
    shutil.copy(ROOT / "config/claims.yaml", project.root / "config/claims.yaml")
    shutil.copy(ROOT / "config/experiments/frameworks.yaml", project.root / "config/experiments")
    experiment = read_yaml(ROOT / "config/experiments/frameworks.yaml")
    names = sorted({arm for _, arm in experiment["factors"]["model, arm"]} - {"tokenscale"})
    assert len(names) >= 6
    records = [f"results/arms/{name}/environment.json" for name in names]
    project.command("--cores", "2", *records, timeout=3600)
    lines = []
    for path in (project.root / record for record in records):
        assert read_json(path)["error"] is None, path
        build = read_json(path.with_name("build.json"))
        lines.append(
            f"environment of {path.parent.name}: {build['seconds']:.0f} s, "
            f"{build['bytes'] / 1e6:,.0f} MB"
        )
    began = time.monotonic()
    project.command("--cores", "2", "results/report/index.html", timeout=7200)
    lines.append(f"frameworks, environments built before: {time.monotonic() - began:.0f} s")
    tables = project.root / "results/tables/frameworks"
    runs = query("inventory", tables)
    assert (runs["validity"] == "valid").all(), runs[["run_id", "reasons"]].to_string()
    table = query("frameworks", tables).groupby(["model", "arm"])
    values = table[["useful_tokens_per_s", "median_step_s", "memory_bytes", "final_loss"]].median()
    certificates = query("certificates", tables)
    assert len(certificates) == 7 and not (certificates["verdict"] == "none").any()
    lines += [
        values.to_string(),
        certificates[["run_id", "verdict", "cause", "loss_difference"]].to_string(),
    ]
    logs.write("frameworks", "\n".join(lines) + "\n")
