"""One list of dependencies, import groups, and nothing of one machine in the project."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
#: conda's names where they differ from pip's
CONDA = {
    "snakemake": "snakemake-minimal",
    "torch": "pytorch",
    "duckdb": "python-duckdb",
    "matplotlib": "matplotlib-base",
    "huggingface-hub": "huggingface_hub",
}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def split(requirement: str) -> tuple[str, str]:
    name, bounds = re.fullmatch(r"([A-Za-z0-9_.-]+?)\s*([<>=!~].*)?", requirement.strip()).groups()
    return name.lower(), ",".join(sorted((bounds or "").replace(" ", "").split(",")))


def test_conda_and_pip_install_the_same():
    stated = project()["dependencies"] + [r for extra in project()["optional-dependencies"].values() for r in extra]
    wanted = {split(r) for r in stated} | {("python", split("python" + project()["requires-python"])[1])}
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(d["pip"] for d in conda if isinstance(d, dict))
    found = {split(d) for d in conda if isinstance(d, str) and d != "pip"} | {split(p) for p in pip if p[0] != "-"}
    assert [p for p in pip if p[0] == "-"] == ["-e ."]
    back = {conda: pip_name for pip_name, conda in CONDA.items()}
    assert {(back.get(name, name), bounds) for name, bounds in found} == wanted


def test_torch_and_mistral_common_are_bounded():
    bounds = dict(split(r) for r in project()["dependencies"])
    assert bounds["torch"] == "<2.14,>=2.9" and bounds["mistral-common"] == "<1.10,>=1.8"


def test_all_extras_resolve_together():
    extras = ",".join(project()["optional-dependencies"])
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-build-isolation"]
    done = subprocess.run([*command, "-e", f".[{extras}]"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # every installed package finds its own requirements: one environment holds all extras
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "modules, forbidden",
    [
        (  # trainer, for an approach that reads a store: as in a container without the host's packages
            ["tokenscale.training.loop", "tokenscale.batches.packed", "tokenscale.batches.token_list"],
            ["pydantic", "snakemake", "duckdb", "pandas", "matplotlib", "tokenizers", "mistral_common", "tiktoken"],
        ),
        (["tokenscale.settings.config", "tokenscale.settings.closure", "tokenscale.launch.start"], ["torch", "pandas"]),
        (
            ["tokenscale.analysis.ingest", "tokenscale.report.page", "tokenscale.report.pdf", "tokenscale.report.save"],
            ["torch", "transformers", "snakemake", "tokenizers"],
        ),
        (["tokenscale.corpus.build", "tokenscale.formats.packed", "tokenscale.tokenizer.load"], ["torch", "pydantic"]),
        (["tokenscale.order.permutation", "tokenscale.order.packing"], ["torch", "pyarrow", "pydantic"]),
        (["tokenscale.costs.flops", "tokenscale.records.events", "tokenscale.cli"], ["torch", "numpy", "pydantic"]),
    ],
)
def test_import_groups(modules, forbidden):
    """Each group runs where the others' packages are not installed: they are made unimportable here."""
    code = f"import sys\nfor name in {forbidden!r}: sys.modules[name] = None\nimport {', '.join(modules)}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_workflow_names_every_verb():
    from tokenscale.cli import VERBS

    assert {p.stem for p in (ROOT / "src/tokenscale/verbs").glob("*.py")} - {"__init__"} == set(VERBS)
    for verb in VERBS:
        done = subprocess.run(
            [sys.executable, "-m", "tokenscale", verb, "--help"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and "usage:" in done.stdout


def test_no_file_names_a_path_of_this_machine():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for name in tracked:
        path = ROOT / name
        if path.is_file() and path.suffix in {".py", ".md", ".yaml", ".yml", ".toml", ".smk", ".sql", ".j2", ""}:
            text = path.read_text(errors="ignore")
            assert f"{ROOT}/" not in text and f"{Path.home()}/" not in text, name
