import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tokenscale.analysis.queries import PARAMETERS
from tokenscale.base.errors import UserError
from tokenscale.base.files import sha256_file
from tokenscale.settings import closure
from tokenscale.settings.closure import (
    ONLINE,
    PACKAGE,
    TOKENIZER_LOADER,
    find_missing_packages,
    import_closure,
    list_changes,
    training_code,
    training_imports,
    write_listing,
)
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.registry import BATCHES, FORMATS, TOKENIZERS
from tokenscale.settings.run import RunSettings

#: what the report does before matplotlib is imported, whichever of its modules comes first
BACK_END = "import os\nos.environ['MPLBACKEND'] = 'agg'"


def names(files):
    return {str(f).rpartition("src/tokenscale/")[2] for f in files}


def name_file(module):
    return module.removeprefix("tokenscale.").replace(".", "/") + ".py"


def test_a_run_imports_what_its_own_code_imports_and_nothing_else():
    always = {("torch",), ("numpy",), ("pydantic",), ("pyarrow",), ("safetensors",), ("xxhash",)}
    engines = ("gigatoken", "mistral_common", "tiktoken", "tokenizers")
    library = replace(PRESETS["llama-micro"], transformers="distilbert")
    for settings, more in (
        ({"approach": "packed"}, set()),
        ({"approach": "padded"}, {engines}),  # tekken: the fastest of these that is there
        ({"approach": "padded", "engine": "tiktoken"}, {("tiktoken",)}),
        ({"approach": "packed", "float8": True}, {("torchao",)}),
        ({"approach": "packed", "attention": "flash"}, {("flash_attn",)}),
        ({"approach": "packed", "model": library, "objective": "masked"}, {("transformers",)}),
    ):
        assert training_imports(RunSettings(**settings)) == always | more, settings


def test_packages_that_an_image_lacks_are_named_with_the_runs_that_import_them():
    runs = {
        "a": RunSettings(approach="packed"),
        "b": RunSettings(approach="padded"),
        "c": RunSettings(float8=True),
    }
    alone = {"a": runs["a"]}
    has = ["torch", "numpy", "pydantic", "pyarrow", "safetensors", "xxhash"]
    found = find_missing_packages(runs, has)
    assert (
        found["torchao"] == ["c"]
        and "b" in found["gigatoken or mistral_common or tiktoken or tokenizers"]
    )
    assert not find_missing_packages(alone, has) and not find_missing_packages(
        runs, [*has, "torchao", "tiktoken"]
    )
    assert find_missing_packages(alone, has[1:]) == {"torch": ["a"]}


def test_a_training_leaves_out_the_report_the_command_line_and_the_host():
    code = names(training_code(RunSettings())) - {"runs/launch/ranks.py"}  # what sets processes up
    assert {
        "train/loop.py",
        "train/models/decoder.py",
        "data/order/permutation.py",
        "runs/records/events.py",
    } <= code
    elsewhere = (
        "report/",
        "analysis/",
        "referee/",
        "runs/launch/",
        "data/corpus/build",
        "benchmark/",
        "costs/memory",
    )
    assert not [f for f in code if f.startswith(elsewhere)]
    assert not code & {
        "cli/main.py",
        "base/errors.py",
        *(f"settings/{n}.py" for n in ("config", "yaml_files")),
    }
    # left out of every closure, so they must not hold code
    for path in PACKAGE.rglob("__init__.py"):
        code = ast.unparse(ast.parse(path.read_text()))
        assert path.parent == PACKAGE or code in ("", BACK_END), path


def test_what_some_runs_load_by_name_is_no_code_of_others():
    of_packed = names(training_code(RunSettings(approach="packed")))
    others = (ONLINE, closure.LIBRARY, closure.ARM, closure.READER)
    assert not of_packed & set(map(name_file, others))
    of_reader = names(training_code(RunSettings(approach="packed", arm="reader")))
    assert "arms/reader.py" in of_reader and not {
        file
        for file in of_reader
        if file.startswith(("train/models/", "train/loop", "train/trainer"))
    }
    for importer, imported in closure.NOT_FOLLOWED:
        files = names(import_closure(importer))
        assert name_file(importer) in files and name_file(imported) not in files, importer


def test_a_module_that_does_not_exist_is_named():
    with pytest.raises(ModuleNotFoundError, match=r"^tokenscale\.nowhere$"):
        import_closure("tokenscale.nowhere")


LOADED = """
import sys, importlib, json, os
for name in {common!r}: importlib.import_module(name)
for approach, names in {batches!r}.items():
    if os.fork() == 0:
        for name in names: importlib.import_module(name)
        files = [m.__file__ for n, m in sys.modules.items() if n.startswith("tokenscale.") and m.__file__]
        print(json.dumps([approach, files]), flush=True)
        os._exit(0)
    if os.wait()[1]: sys.exit(1)
"""


def _variants(approach):
    reads = FORMATS[approach.format].reader if approach.format else ONLINE
    named = [reads] if approach.format else [reads, TOKENIZER_LOADER, TOKENIZERS["bpe"].module]
    return [name.partition(":")[0] for name in named if name is not None]


@pytest.fixture(scope="module")
def loaded():
    """Approach → files that are loaded once a training with it has imported all. What is common is
    imported once.
    """
    common = ["tokenscale.cli.rank", "tokenscale.train.loop"]
    code = LOADED.format(
        common=common, batches={name: list(_variants(entry)) for name, entry in BATCHES.items()}
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("approach", BATCHES)
def test_what_a_training_imports_is_its_code(loaded, approach):
    """Against the interpreter: nothing that is really loaded is missing from the closure."""
    found = names(f for f in loaded[approach] if not f.endswith("__init__.py"))
    trains = ("tokenscale.cli.rank", closure.TRAINER, closure.LINKS)
    code = names(import_closure(*trains, *_variants(BATCHES[approach])))
    assert found and found - code <= {
        "base/errors.py",
        "settings/registry.py",
        "runs/records/redaction.py",
    }


def walk_statements(body):
    """Yield statements and those inside them, but no expressions, which hold most nodes."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from walk_statements(getattr(node, part, ()))


def packages(nodes):
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    named = [a.name for n in imports if isinstance(n, ast.Import) for a in n.names]
    named += [node.module for node in imports if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in named} - {"tokenscale", *sys.stdlib_module_names}


def test_what_a_file_imports_is_what_pythons_parser_finds():
    more = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        tree.body = [
            node
            for node in tree.body
            if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node))
        ]
        found = set()
        statements = list(walk_statements(tree.body))
        for node in statements:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        found = {name for name in found if closure._find_module_file(name)}
        named = {
            path.parent / item
            if node.targets[0].id == "FILES"
            else PACKAGE / f"analysis/sql/{item}.sql"
            for node in (
                *tree.body,
                *(
                    line
                    for node in tree.body
                    if isinstance(node, ast.ClassDef)
                    for line in node.body
                ),
            )
            if isinstance(node, ast.Assign)
            and getattr(node.targets[0], "id", None) in closure.ASSIGNMENTS
            for item in (
                [*PARAMETERS, "macros"]
                if ast.unparse(node.value) == closure.ALL_QUERIES
                else ast.literal_eval(node.value)
            )
        }
        functions = [
            node for node in statements if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        inside = (node for function in functions for node in walk_statements(function.body))
        assert closure._find_packages(path) == (packages(tree.body), packages(inside)), path
        imports, read = closure._scan_source(path)
        views = {PACKAGE / f"analysis/sql/{view}.sql" for view in closure.VIEWS}
        named |= views if any(file.parent.name == "sql" for file in named) else set()
        assert (found, named) == (set(imports) & found, set(read)), path
        more |= {(path.name, name) for name in set(imports) - found}
    assert more == set()


@pytest.fixture
def project(tmp_path, monkeypatch):
    package = tmp_path / "src/tokenscale"
    (package / "cli").mkdir(parents=True)
    (package / "cli/rank.py").write_text("import tokenscale.one\n")
    (package / "one.py").write_text("a = 1\n")
    monkeypatch.setattr(closure, "PACKAGE", package)
    monkeypatch.chdir(tmp_path)
    yield package
    forget()


def forget():
    for name in (
        "write_listing",
        "_list_files",
        "_closure",
        "_find_module_file",
        "_scan_source",
        "_hash_source",
    ):
        getattr(closure, name).cache_clear()


def listed():
    """The listing of the one verb, as another process finds it."""
    forget()
    return Path(write_listing("tokenscale.cli.rank"))


def test_a_listing_is_written_when_a_content_changed_and_only_then(project):
    """The first is as old as its newest file, a changed one is new."""
    for name, seconds in (("one.py", 1000), ("cli/rank.py", 2000)):
        os.utime(project / name, (seconds, seconds))
    path = listed()
    assert (
        path.parts[:2] == ("results", "code")
        and path.name == "sources.json"
        and path.stat().st_mtime == 2000
    )
    assert list(json.loads(path.read_text())["files"]) == [
        "tokenscale/cli/rank.py",
        "tokenscale/one.py",
    ]
    text = path.read_bytes()
    os.utime(project / "one.py", (2e9, 2e9))
    assert listed().stat().st_mtime == 2000
    (project / "one.py").write_text("a = 2\n")
    os.utime(project / "one.py", (1, 1))
    assert listed() == path and path.read_bytes() != text and path.stat().st_mtime > 2000, (
        "an older time, other content"
    )
    (project / "one.py").write_text("a = 1\n")
    assert listed().read_bytes() == text


def test_a_listing_keeps_its_name_when_an_import_is_added_and_is_the_same_elsewhere(
    project, tmp_path, monkeypatch
):
    path = listed()
    text = path.read_bytes()
    moved = tmp_path / "moved"
    moved.mkdir()
    monkeypatch.chdir(moved)
    assert listed() == path and path.read_bytes() == text
    (project / "two.py").write_text("")
    (project / "one.py").write_text("import tokenscale.two\n")
    assert listed() == path and "tokenscale/two.py" in path.read_text()


def test_a_relative_import_is_refused_because_no_closure_follows_it(project):
    (project / "one.py").write_text("from . import two\n")
    with pytest.raises(ValueError, match="one.py: relative imports are not supported"):
        listed()


def test_what_a_job_ran_with_is_compared_with_what_is_there_now(project):
    path = listed()
    first = sha256_file(path)
    for edit in ("a = 2\n", "import tokenscale.two\n"):
        (project / "two.py").write_text("")
        (project / "one.py").write_text(edit)
        listed()
    assert list_changes(path, first) == ["src/tokenscale/one.py", "src/tokenscale/two.py"]
    assert list_changes(path, sha256_file(path)) == [] and list_changes(path, "0" * 64) == []


def test_few_earlier_listings_are_kept(project, monkeypatch):
    monkeypatch.setattr(closure, "MAX_COPIES", 2)
    path = listed()
    for edit in range(5):
        (project / "one.py").write_text(f"a = {edit}, {edit}\n")
        hashed = sha256_file(path)
        listed()
    assert len(list(path.parent.iterdir())) == 3 and list_changes(path, hashed)


def test_a_listing_that_cannot_be_written_is_needed_only_where_it_differs(project, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    def lost(path, text):  # another process wrote the same first
        Path(path).write_text(text)
        raise FileNotFoundError(2, "its temporary file is gone")

    path = listed()
    monkeypatch.setattr(closure, "write_text", refused)
    assert listed() == path
    (project / "one.py").write_text("a = 2\n")
    with pytest.raises(UserError) as error:
        listed()
    assert str(path) in error.value.render() and "Permission denied" in error.value.render()
    path.unlink()
    monkeypatch.setattr(closure, "write_text", lost)
    assert listed() == path


#: files that load modules of ours by name: a table or a command's name says which
TABLES = {
    "benchmark": "cli/benchmark.py",
    "commands": "cli/main.py",
    "figures": "report/figure.py",
    "sources": "data/corpus/build.py",
    "tokenizers": "data/tokenizers/load.py",
}
#: files that load modules of others by name: a user's loader, or packages that may be there
FOREIGN = {
    "cli/audit.py",
    "cli/doctor.py",
    "cli/snakemake/internals.py",
    "data/tokenizers/backends.py",
    # a user's own objectives, approaches, formats and figures, by the digest of their code
    "settings/extensions.py",
}


def test_modules_are_loaded_by_name_in_the_tables_alone():
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\bimport_module\(|\b__import__\(", path.read_text())
    }
    assert found - FOREIGN == set(TABLES.values())
