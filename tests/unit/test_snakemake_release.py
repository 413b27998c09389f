"""A release of Snakemake that lacks a private name is refused in one message."""

import enum
import importlib
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenscale.base.errors import UserError
from tokenscale.cli.snakemake import internals

ROOT = Path(__file__).parents[2]
REFUSED = "this release of Snakemake does not fit the workflow."
GUARDED = ROOT / "src/tokenscale/cli/snakemake/internals.py"
RULES = [ROOT / "workflow/Snakefile", *sorted((ROOT / "workflow/rules").glob("*.smk"))]
#: a class of the SLURM plugin's, with the names of another table (tests/workflow/test_slurm_states.py)
EXECUTOR = GUARDED.with_name("executor.py")
SOURCES = [path for path in sorted((ROOT / "src").rglob("*.py")) if path not in (GUARDED, EXECUTOR)]

#: imports of Snakemake, but of the one documented function that the Snakefile calls
IMPORTS = (
    r"(?m)^\s*(?:from|import) snakemake(?!_)\b(?!\.utils import min_version$).*"
    r"|import_module\(.snakemake"
)
#: attributes of its objects; a path such as workflow/rules/common.smk is none
ATTRIBUTES = (
    r"(?<!/)\bworkflow\.(?!smk)\w+"
    r"|\.(?:is_norun|is_producer|has_wildcards|needrun_jobs|_localrules|logger_manager)\b"
)
#: texts of its messages, but in an example of a docstring
FORMATS = (
    r"(?m)^(?!\s*>>>).*(?:has changed since last execution|Directory cannot be locked"
    r"|Error recording metadata)"
)


def build_workflow(left_out: str = "") -> SimpleNamespace:
    """Build a workflow object with the attributes of the table, but one."""
    workflow = SimpleNamespace()
    for path in internals.WORKFLOW_NAMES:
        if path == left_out:
            continue
        owner = workflow
        *outer, name = path.split(".")
        for part in outer:
            if not hasattr(owner, part):
                setattr(owner, part, SimpleNamespace())
            owner = getattr(owner, part)
        if not hasattr(owner, name):
            setattr(owner, name, None)
    return workflow


def find_owner(path: str) -> tuple[object, str]:
    """Return the module or class that holds a name of the table, and the name's last part."""
    importlib.import_module("snakemake.cli")  # other modules cannot be imported before this one
    module, _, attributes = path.partition(":")
    owner: object = importlib.import_module(module)
    *outer, name = attributes.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name


def test_the_installed_release_has_every_name():
    internals.check_release()
    internals.check_release(build_workflow())


@pytest.mark.parametrize("path", internals.NAMES)
def test_a_release_without_a_name_is_refused(path, monkeypatch):
    owner, name = find_owner(path)
    if isinstance(owner, type) and issubclass(owner, enum.Enum):
        values = {one: None for one in owner.__members__ if one != name}
        replaced = SimpleNamespace(**values)
        monkeypatch.setattr(sys.modules[owner.__module__], owner.__name__, replaced)
    else:
        monkeypatch.delattr(owner, name)
    with pytest.raises(UserError, match=REFUSED) as caught:
        internals.check_release()
    assert caught.value.facts["found"].endswith(f"without {path.replace(':', '.')}")
    assert "pip install 'snakemake~=" in caught.value.facts["next"]


@pytest.mark.parametrize("path", internals.WORKFLOW_NAMES)
def test_a_workflow_object_without_a_name_is_refused(path):
    with pytest.raises(UserError, match=REFUSED) as caught:
        internals.check_release(build_workflow(left_out=path))
    assert caught.value.facts["found"].endswith(f"without workflow.{path}")


def test_a_module_that_is_gone_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "snakemake.settings.enums", None)
    with pytest.raises(UserError, match=REFUSED):
        internals.check_release()


WITHOUT = """
import sys
import snakemake.cli
import {module} as module
del module.{path}
sys.argv = ["snakemake", *{words}]
snakemake.cli.main(sys.argv[1:])
"""


@pytest.mark.workflow
@pytest.mark.parametrize(
    "path",
    [
        "snakemake.logging:ColorizingTextHandler",
        "snakemake.workflow:Workflow.is_main_process",
        "snakemake.jobs:Job.is_norun",
    ],
)
def test_a_dry_run_of_such_a_release_ends_with_one_message(path, tmp_path):
    module, _, attributes = path.partition(":")
    files = ["--snakefile", str(ROOT / "workflow/Snakefile"), "--directory", str(tmp_path)]
    words = ["-n", *files, "--workflow-profile", str(ROOT / "profiles/default")]
    code = WITHOUT.format(module=module, path=attributes, words=words)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    text = done.stdout + done.stderr
    assert done.returncode == 2, text
    assert "Traceback" not in text, text
    assert text.count(REFUSED) == 1, text
    assert attributes.rpartition(".")[2] in text and "pip install 'snakemake~=" in text


@pytest.mark.parametrize("event", internals.RECORD_FIELDS)
def test_records_of_jobs_without_a_field_give_one_message(event, capsys):
    internals.report_missing_field.cache_clear()
    fields = dict.fromkeys(internals.RECORD_FIELDS[event][:-1])
    for _ in range(2):
        record = logging.makeLogRecord({"event": event, **fields})
        assert internals.read_job_event(record) is None
    text = capsys.readouterr().err
    assert text.count(REFUSED) == 1
    assert f"the field {internals.RECORD_FIELDS[event][-1]} of {event}" in text


@pytest.mark.parametrize("path", [*RULES, *SOURCES], ids=lambda path: path.stem)
def test_private_parts_are_used_in_one_guarded_file(path):
    text = path.read_text()
    found = re.findall(IMPORTS, text) + re.findall(FORMATS, text)
    if path in RULES or "snakemake" in str(path.relative_to(ROOT)):
        found += re.findall(ATTRIBUTES, text) + re.findall(r"os\._exit|sys\.argv", text)
    assert found == []


def test_the_guarded_file_uses_no_name_that_its_tables_lack():
    # imports for types alone do not happen in a call
    text = re.sub(r"(?m)^if TYPE_CHECKING:\n(?: {4}.*\n)+", "", GUARDED.read_text())
    used = set(re.findall(r"\bworkflow\.(\w+(?:\.\w+)*)", text))
    of_classes = {path.rpartition(".")[2] for path in internals.NAMES}
    listed = set(internals.WORKFLOW_NAMES) | {f"dag.{name}" for name in of_classes}
    assert used
    assert used - listed == set()
    imports = re.findall(r"from (snakemake(?:\.\w+)+) import (.+)", text)
    names = {f"{module}:{name}" for module, line in imports for name in line.split(", ")}
    assert names
    listed = {re.sub(r"(:\w+).*", r"\1", path) for path in internals.NAMES}
    assert names - listed == set()


def test_the_oldest_release_is_stated_alike():
    oldest = internals.OLDEST
    assert f'min_version("{oldest}")' in (ROOT / "workflow/Snakefile").read_text()
    assert f'"snakemake>={oldest},<10"' in (ROOT / "pyproject.toml").read_text()
