"""What `doctor` says of Python, packages and programs, one lack at a time."""

import importlib.metadata
import sys

import pytest

from tests.machines import asked, program
from tokenscale.cli import doctor_checks, doctor_python
from tokenscale.cli.doctor_python import GROUPS


@pytest.mark.parametrize("version, verdict", [("3.10.14", "no"), ("3.11.0", "ok"), ("3.14.1", "ok"), ("3.15.0", "no")])
def test_python_3_11_to_3_14_are_right(monkeypatch, version, verdict):
    monkeypatch.setattr(doctor_python.platform, "python_version", lambda: version)
    found = doctor_python.check_python(asked())
    assert found.verdict == verdict and version in found.fact and ">=3.11,<3.15" in found.fact


def test_an_unsupported_python_is_told_one_that_works(monkeypatch, tmp_path):
    """Python 3.10 has no tomllib, and pyenv has commands for versions that are not in use."""

    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor_python.importlib.metadata, "requires", not_installed)
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setattr(doctor_python.platform, "python_version", lambda: "3.10.14")
    program(tmp_path, "python3.13", "exit 127")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = doctor_python.check_python(asked())
    assert found.verdict == "no" and found.fact == "3.10.14; >=3.11,<3.15 is required"
    assert found.next.startswith("make setup PYTHON=python3.13, once it is installed")
    program(tmp_path, "python3.12", "echo 3.12.4")
    assert doctor_python.check_python(asked()).next == "make setup PYTHON=python3.12"


def test_bounds_are_the_clone_s_or_else_the_installed_ones(monkeypatch):
    ours = doctor_python.read_requirements()
    unmissed = {"mlflow", "wandb", "modal", "torchao"}
    assert set(ours) - {"python"} - unmissed == set(doctor_python.list_packages()) - {"tiktoken"}
    assert (ours["python"], ours["torch"], ours["ruff"]) == (">=3.11,<3.15", ">=2.9,<2.16", ">=0.17,<0.18")

    monkeypatch.setattr(doctor_python, "__file__", "/nowhere/site-packages/tokenscale/cli/doctor_python.py")
    stated = ["torch<2.15,>=2.10", 'pytest>=8; extra == "test"', "PyYAML", "huggingface_hub[cli] (>=1)"]
    monkeypatch.setattr(doctor_python.importlib.metadata, "requires", lambda name: stated)
    installed = doctor_python.read_requirements()
    assert installed.pop("python") == ">=3.11,<3.15"
    assert installed == {"torch": ">=2.10,<2.15", "pytest": ">=8", "pyyaml": "", "huggingface-hub": ">=1"}


def test_where_nobody_says_the_bounds_nothing_breaks(monkeypatch):
    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor_python.importlib.metadata, "requires", not_installed)
    monkeypatch.setattr(doctor_python, "__file__", "/nowhere/src/tokenscale/cli/doctor_python.py")
    assert doctor_python.read_requirements() == {}
    assert (
        doctor_python.check_python(asked()).verdict == "note"
        and doctor_python.check_packages("host", asked()).verdict == "ok"
    )


@pytest.mark.parametrize(
    "version, bounds, holds",
    [
        ("2.9", ">=2.9.0,<2.14", True),
        ("2.14", "<2.14.0", False),
        ("2.13.1+cu130", ">=2.9,<2.14", True),
        ("2.9.0a0+5228986.nv25.10", ">=2.9", True),  # containers of NVIDIA's
        ("2.8.9", ">=2.9,<2.14", False),
        ("2.14.0.dev20261101", "<2.14", False),
        ("10.0", ">=9.20", True),
        ("9.3", ">=9.20", False),
        ("1.8.5", "~=1.8", True),
        ("1.8.5", "!=1.8.5", False),
        ("anything", "", True),
    ],
)
def test_versions_are_compared_as_numbers(version, bounds, holds):
    assert doctor_python.satisfies(version, bounds) is holds


@pytest.mark.parametrize("group, name", [(group, n) for group in GROUPS for n in doctor_python.list_packages(group)])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, group, name):
    monkeypatch.setitem(sys.modules, doctor_python.module_of(name), None)  # what makes a module unimportable
    found = doctor_python.check_packages(group, asked())
    assert f"missing: {name}" in found.fact and f"for {GROUPS[group][0]}" in found.fact
    assert f"pip install '{name}" in found.next
    assert found.verdict == ("note" if name in doctor_python.ONLY else "no")


def test_without_the_package_packaging_pips_copy_compares_versions(monkeypatch):
    monkeypatch.setitem(sys.modules, "packaging", None)
    for name in [name for name in sys.modules if name.startswith("packaging.")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert doctor_python.satisfies("2.13.1+cu130", ">=2.9,<2.14") and not doctor_python.satisfies("3", "<3")
    assert doctor_python.read_requirements()["python"] == ">=3.11,<3.15"
    monkeypatch.setitem(sys.modules, "pip._vendor.packaging.requirements", None)
    assert doctor_python.read_requirements() == {} and doctor_python.check_python(asked()).verdict == "note"


def test_one_package_that_is_needed_weighs_more_than_one_that_is_not(monkeypatch):
    for module in ("yaml", "snakemake_executor_plugin_slurm"):
        monkeypatch.setitem(sys.modules, module, None)
    found = doctor_python.check_packages("host", asked())
    assert found.verdict == "no" and "snakemake-executor-plugin-slurm (only for SLURM), pyyaml" in found.fact


@pytest.mark.parametrize("version", ["2.8.0", "2.16.0"])
def test_a_torch_outside_its_bounds_is_refused(monkeypatch, version):
    real = doctor_python.installed_version
    monkeypatch.setattr(doctor_python, "installed_version", lambda name: version if name == "torch" else real(name))
    found = doctor_python.check_packages("trainer", asked())
    assert found.verdict == "no" and f"torch {version} is outside >=2.9,<2.16" in found.fact
    assert "'torch>=2.9,<2.16'" in found.next


def test_a_package_that_is_there_and_does_not_import_is_broken():
    why = "ImportError: libstdc++.so.6: version not found"
    found = doctor_python.check_packages("report", asked(broken={"duckdb": why}))
    assert found.verdict == "no" and f"does not import: {why}" in found.fact
    assert "--force-reinstall 'duckdb" in found.next


def test_tools_that_are_not_found_are_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = doctor_checks.check_tools(asked())
    assert found.verdict == "note" and found.values == {"make": False, "git": False}
    assert "-m snakemake" in found.next and "git" in found.next
