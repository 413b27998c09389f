"""Other people's Snakemake projects, in an environment that has this package."""

import subprocess
import sys

import pytest

SNAKEFILE = """
{configfile}
rule all:
    input: "made.txt"

rule make:
    output: "made.txt"
    shell: "echo {text} > {{output}}"
"""
#: kind of project → (directive, its files, words of the call)
PROJECTS = {
    "no configuration": ("", {}, []),
    "YAML 1.1 and a repeated key": (
        'configfile: "config/config.yaml"',
        {"config/config.yaml": "when: 12:30\nname: a\nname: b\n"},
        [],
    ),
    "a file of its own": ("", {"cfg/a.yaml": "samples: [x]\n"}, ["--configfile", "cfg/a.yaml"]),
}


@pytest.mark.workflow
@pytest.mark.parametrize("kind", PROJECTS)
def test_a_foreign_project_runs_as_without_this_package(kind, tmp_path):
    configfile, files, words = PROJECTS[kind]
    snakefile = SNAKEFILE.format(configfile=configfile, text="ok")
    for name, text in {"workflow/Snakefile": snakefile, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, "-m", "snakemake", "--cores", "1", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made.txt").read_text() == "ok\n"
    assert "tokenscale" not in done.stdout + done.stderr


def test_the_import_of_the_plugin_imports_nothing_of_this_package():
    code = "import sys, snakemake_logger_plugin_tokenscale; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [name for name in done.stdout.split() if name.split(".")[0] == "tokenscale"]
