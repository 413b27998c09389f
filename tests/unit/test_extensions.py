"""A user's own modules in the folder `extensions/`: what their names promise, and what is refused."""

import argparse
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.corpora import make_run
from tests.refusals import refused
from tokenscale.base.errors import UserError
from tokenscale.cli.train import command as train
from tokenscale.cli.train.request import parse_request
from tokenscale.runs.launch import start
from tokenscale.settings import extensions, registry
from tokenscale.settings.closure import training_code
from tokenscale.settings.extensions import load_extension, read_extension
from tokenscale.settings.run import RunSettings

LOSS = """
from extensions import parts
from tokenscale.settings.extensions import objective
from tokenscale.train.models.objective import Objective


@objective(causal=False, rows="rows:open_rows", flops=2)
class Own(Objective):
    scale = parts.SCALE
"""
FILES = {
    "loss.py": LOSS,
    "parts.py": "import extensions.deeper\n\nSCALE = extensions.deeper.SCALE\n",
    "deeper.py": "SCALE = 2.0\n",
    "rows.py": "def open_rows(run, inputs, held_out):\n    return (run, held_out)\n",
    "weights.json": "[1]\n",
    "inner/words.txt": "a\n",
}
#: of no run with the objective
OTHERS = {"other.py": "raise SystemExit\n", ".hidden": "x", "__pycache__/loss.cpython.pyc": "x"}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A project's folder with the extension `loss:Own`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(extensions._Finder, "files", {})
    for name in [name for name in sys.modules if name.partition(".")[0] == "extensions"]:
        monkeypatch.delitem(sys.modules, name)
    for table in (registry.OBJECTIVES, registry.BATCHES, registry.FORMATS):
        for name in [name for name in table if "." in name]:
            monkeypatch.delitem(table, name)
    write(tmp_path / "extensions", FILES | OTHERS)
    return tmp_path / "extensions"


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def read(reference: str = "loss:Own", kind: str = "objective") -> extensions.Source:
    return read_extension((kind,), reference)


def run_of(source: extensions.Source) -> RunSettings:
    run = make_run("packed", 32)
    return RunSettings(**vars(run) | {"objective": source.name, "extensions": source.settings})


# -- identity


def test_each_file_of_the_code_is_in_the_name_and_no_other_is(folder):
    before = read()
    assert before.files.keys() == FILES.keys()
    for name in (*FILES, *OTHERS):
        text = (folder / name).read_text()
        (folder / name).write_text(text + "\n")
        assert (read().name != before.name) == (name in FILES), name
        (folder / name).write_text(text)
    assert read() == before


@settings(max_examples=25)
@given(names=st.lists(st.sampled_from("abcdef"), unique=True, min_size=1), data=st.data())
def test_the_code_is_what_import_statements_reach(names, data, tmp_path_factory):
    """In any graph of imports, with cycles; the form of the statement does not matter."""
    folder = tmp_path_factory.mktemp("graph")
    imports = {name: data.draw(st.lists(st.sampled_from("abcdef"))) for name in names}
    forms = ["import extensions.{}", "from extensions import {}", "from extensions.{} import x"]
    for name, imported in imports.items():
        lines = [data.draw(st.sampled_from(forms)).format(other) for other in imported]
        (folder / f"{name}.py").write_text("\n".join(lines))
    reached = {names[0]}
    while more := {o for name in reached for o in imports[name] if o in names} - reached:
        reached |= more
    found = extensions._hash_files(folder, [names[0]])
    assert found.keys() == {f"{name}.py" for name in reached}


def test_the_name_is_in_the_run_id_and_the_files_are_code_of_the_run(folder):
    run = run_of(read())
    assert run.problems() == []
    assert [f for f in training_code(run) if f.startswith("extensions/")] == [
        f"extensions/{name}" for name in ("deeper.py", "loss.py", "parts.py", "rows.py")
    ]
    (folder / "deeper.py").write_text("SCALE = 3.0\n")
    assert run_of(read()).identity != run.identity
    plain = make_run("packed", 32)
    assert RunSettings(**vars(plain) | {"extensions": read().settings}).identity == plain.identity


def test_a_run_is_understood_where_its_module_is_not(folder, tmp_path_factory, monkeypatch):
    text = run_of(read()).to_json()
    name = read().name
    del registry.OBJECTIVES[name]
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    run = RunSettings.from_json(text)
    spec = registry.OBJECTIVES[run.objective]
    assert (spec.causal, spec.whole_model, spec.flops, spec.rows) == (
        False,
        True,
        2.0,
        "rows:open_rows",
    )
    assert run.to_json() == text and run.identity == RunSettings.from_json(text).identity
    with pytest.raises(UserError, match="is missing"):
        load_extension(name, "objective")


def test_decorators_take_the_facts_that_settings_know(folder):
    for kind, facts in extensions.KINDS.items():
        declare = getattr(extensions, kind)
        assert declare(**facts)(str) is str
        with pytest.raises(TypeError, match="has no argument"):
            declare(wrong=1)


# -- loading


def test_what_is_loaded_is_what_was_named(folder):
    source = read()
    found = load_extension(source.name, "objective")
    assert found.scale == 2.0 and found.__module__ == "extensions.loss"
    assert load_extension(source.name, "objective", "rows")(1, 2, 3) == (1, 3)
    (folder / "deeper.py").write_text("SCALE = 3.0\n")
    with pytest.raises(UserError, match="has changed since this was planned"):
        load_extension(source.name, "objective")
    assert load_extension(read().name, "objective").scale == 3.0
    assert not list(folder.rglob("*.cpython-*.pyc"))


def test_other_modules_of_the_folder_are_not_imported(folder):
    load_extension(read().name, "objective")
    with pytest.raises(UserError, match="not part of its code"):
        importlib.import_module("extensions.other")


#: what is wrong with the module → (its text, words of the message)
WRONG = {
    "raises": (
        LOSS + "\n1 / 0\n",
        ["raises an error", "loss.py, line 11", "ZeroDivisionError", "import extensions.loss"],
    ),
    "an import that is not there": (LOSS + "import nowhere\n", ["No module named 'nowhere'"]),
    "removed again": (LOSS + "\ndel Own\n", ["has no Own", "define Own"]),
    "other modules by name": (
        LOSS + "\nimport importlib\n\nimportlib.import_module('extensions.other')\n",
        ["extensions.other", "not part of its code"],
    ),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_module_that_cannot_be_used_is_one_message(wrong, folder):
    text, words = wrong
    (folder / "loss.py").write_text(text)
    with pytest.raises(UserError) as error:
        load_extension(read().name, "objective")
    assert all(word in error.value.render() for word in words), error.value.render()


# -- between the plan and the start


@pytest.mark.parametrize("harm", ["edited", "removed", "a part of it edited", "data edited"])
def test_a_run_whose_code_changed_is_refused_and_nothing_is_written(
    harm, folder, capsys, monkeypatch
):
    monkeypatch.setattr(start, "start_run", lambda *_, **__: pytest.fail("started"))
    run = run_of(read())
    if harm == "removed":
        (folder / "loss.py").unlink()
    else:
        name = {"a part of it edited": "deeper.py", "data edited": "weights.json"}.get(harm)
        path = folder / (name or "loss.py")
        path.write_text(path.read_text() + "\n")
    command = ["launch", "--run", run.to_json(), "--output", "results/runs/x/done.json"]
    message = refused(capsys, command, untouched=folder.parent)
    assert "loss.py" in message
    assert "start Snakemake again" in message or "is missing" in message


def test_settings_that_are_no_extension_are_refused():
    for own in ({"name": "a.B.0123456789", "kind": "objective", "facts": {"x": 1}}, {"name": "a"}):
        with pytest.raises(UserError):
            RunSettings.from_json(json.dumps({"extensions": [{"kind": "objective"} | own]}))


# -- flags of train


def request(*words: str) -> RunSettings:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parse_request(parser.parse_args(["--dataset", "dummy", *words])).run


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scale=st.floats(0.5, 9), seed=st.integers(0, 9))
def test_a_flag_names_the_run_that_an_experiment_names(folder, scale, seed):
    """The same code is the same run, whoever names it; another code is another run."""
    (folder / "deeper.py").write_text(f"SCALE = {scale}\n")
    run = request("--objective", "loss:Own", "--seed", str(seed))
    source = read()
    own = {"objective": source.name, "extensions": source.settings}
    assert run == replace(request("--seed", str(seed)), **own)
    assert run.identity == RunSettings.from_json(run.to_json()).identity
    assert run.identity != request("--seed", str(seed)).identity
    (folder / "deeper.py").write_text(f"SCALE = {scale + 1}\n")
    assert request("--objective", "loss:Own", "--seed", str(seed)).identity != run.identity


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ("los:Own", ["is missing", "did you mean loss:Own?"]),
        ("loss:Owm", ["declares no extension Owm", "did you mean loss:Own?"]),
        ("loss:", ["names no extension"]),
        ("rows:open_rows", ["declares no extension"]),
        ("casual", ["--objective"]),
    ],
)
def test_a_flag_that_names_no_objective_is_one_message_and_nothing_is_written(
    objective, words, folder, capsys
):
    command = ["train", "--dataset", "dummy", "--objective", objective]
    message = refused(capsys, command, untouched=folder.parent)
    assert all(word in message for word in words), message
