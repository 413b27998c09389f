"""profiles/alps/prepare.sh with fake programs of the site: folders, their stripes, links, and one job."""

import os
import subprocess

import pytest

from tests.machines import ROOT, program


@pytest.fixture
def project(tmp_path):
    alps = tmp_path / "tokenscale/profiles/alps"
    alps.mkdir(parents=True)
    script = alps / "prepare.sh"
    script.write_text((ROOT / "profiles/alps/prepare.sh").read_text())
    script.chmod(0o755)
    for name in ("lfs", "srun"):
        program(tmp_path, name, f'echo "{name} $TOKENSCALE_ROOT $*" >> {tmp_path}/calls')
    return tmp_path


def prepare(folder, **changes):
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SCRATCH": str(folder / "scratch"),
        "CAPSTOR_SCRATCH": str(folder / "capstor"),
        "ALPS_ACCOUNT": "g1",
    }
    script = folder / "tokenscale/profiles/alps/prepare.sh"
    return subprocess.run(
        [script], env=variables | changes, cwd=folder, capture_output=True, text=True
    )


def test_folders_are_striped_before_anything_is_in_them_and_results_lead_there(project):
    for _ in range(2):
        done = prepare(project)
        assert done.returncode == 0, done.stderr
    results = project / "tokenscale/results"
    assert {path.name: str(path.readlink()) for path in results.iterdir()} == {
        "runs": f"{project}/capstor/tokenscale/runs",
        "corpus": f"{project}/scratch/tokenscale/corpus",
        "tokens": f"{project}/scratch/tokenscale/tokens",
    }
    calls = (project / "calls").read_text().splitlines()
    striped = [line.split()[-1] for line in calls[:4]]
    assert all(
        line.startswith("lfs  setstripe -E 4M -c 1 -E 64M -c 4 -E -1 -c 32") for line in calls[:4]
    )
    assert set(striped) == {
        f"{project}/capstor/tokenscale/runs",
        f"{project}/scratch/tokenscale/corpus",
        f"{project}/scratch/tokenscale/tokens",
        f"{project}/scratch/.edf_imagestore",
    }
    root = f"{project}/tokenscale"
    assert calls[4] == (
        f"srun {root} --account=g1 --partition=debug --nodes=1 --time=30 "
        f"--environment={root}/profiles/alps/train.toml python profiles/alps/install.py"
    )


def test_a_folder_of_results_stays_and_is_named(project):
    runs = project / "tokenscale/results/runs"
    runs.mkdir(parents=True)
    done = prepare(project)
    assert done.returncode == 0 and "results/runs is a folder and stays" in done.stderr
    assert not runs.is_symlink()


@pytest.mark.parametrize("name", ["ALPS_ACCOUNT", "SCRATCH"])
def test_a_variable_without_a_value_ends_it_before_anything_is_made(project, name):
    done = prepare(project, **{name: ""})
    assert done.returncode and name in done.stderr
    assert not (project / "calls").exists() and not (project / "tokenscale/results").exists()
