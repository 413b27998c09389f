import json
import subprocess
import sys

import pytest

from tokenscale.settings.closure import PACKAGE, closure_of, code_of, layout_code, training_code
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.registry import BATCHES, FORMATS, PARALLEL, TOKENIZERS
from tokenscale.settings.run import RunSettings


def names(files):
    return {f.split("tokenscale/", 1)[1] for f in files}


def training(approach):
    return names(code_of("rank", BATCHES[approach], PARALLEL["single"]))


def test_a_run_depends_on_its_own_approach_only():
    assert "formats/token_list.py" in training("token-list")
    for approach in set(BATCHES) - {"token-list", "length-bucketed"}:
        assert "formats/token_list.py" not in training(approach), approach
    assert "formats/padded.py" not in training("packed")


def test_masking_is_code_of_masked_runs_only():
    assert "batches/masked.py" in names(training_code(RunSettings(objective="masked")))
    assert "batches/masked.py" not in names(training_code(RunSettings()))


def test_a_layouts_code_is_its_own_file_and_what_that_alone_imports():
    layouts = {
        "single": ({}, {"single"}),
        "ddp": ({"data": 2}, {"data"}),
        "zero1": ({"shard": 2, "sharding": "zero1"}, {"zero1", "data", "exchange"}),
        "fsdp": ({"shard": 2}, {"fully_sharded"}),
        "hsdp": ({"data": 2, "shard": 2}, {"fully_sharded"}),
        "tp-ddp": ({"data": 2, "tensor": 2}, {"tensor", "data", "exchange"}),
        "gpipe": ({"pipeline": 2, "schedule": "gpipe"}, {"pipeline", "deferred", "single"}),
    }
    for method, (degrees, files) in layouts.items():
        run = RunSettings(layout=LayoutSettings(**degrees))
        assert run.layout.method == method
        expected = {f"parallel/{file}.py" for file in files}
        if "pipeline" in files:
            expected |= {"costs/partition.py", "costs/schedules.py"}
        assert names(layout_code(run)) == expected, method


def test_a_training_leaves_out_the_report_the_command_line_and_the_host():
    code = training("packed")
    assert {"training/loop.py", "models/decoder.py", "order/permutation.py", "records/events.py"} <= code
    assert not [f for f in code if f.startswith(("report/", "analysis/", "launch/", "corpus/build", "benchmark/"))]
    assert not code & {"cli.py", "errors.py", "settings/config.py", "settings/validate.py", "settings/experiments.py"}


def test_only_models_of_transformers_depend_on_the_code_for_them():
    runs = {name: RunSettings(model=PRESETS[name]) for name in ("llama-tiny", "gpt2-tiny", "distilbert-tiny")}
    found = {name: "models/library.py" in names(training_code(run)) for name, run in runs.items()}
    assert found == {"llama-tiny": False, "gpt2-tiny": False, "distilbert-tiny": True}


def test_a_store_depends_on_its_own_format_only():
    for form, module in FORMATS.items():
        code = names(code_of("pretokenize", module, TOKENIZERS["bpe"]))
        others = {m.rsplit(".", 1)[1] for f, m in FORMATS.items() if f != form}
        assert not code & {f"formats/{other}.py" for other in others}, form


def test_sql_counts_as_code():
    files = names(closure_of("tokenscale.report.figures.scaling_throughput"))
    assert {"analysis/sql/scaling.sql", "analysis/sql/steps_global.sql"} <= files


def test_packages_re_export_nothing():
    """`__init__` files are left out of every closure, so they must not hold code."""
    for path in PACKAGE.rglob("__init__.py"):
        if path.parent != PACKAGE:
            assert path.read_text().strip() == "", path


LOADED = """
import sys, importlib, json, os
for name in {common!r}: importlib.import_module(name)
for approach, name in {batches!r}.items():
    if os.fork() == 0:
        importlib.import_module(name)
        files = [m.__file__ for n, m in sys.modules.items() if n.startswith("tokenscale.") and m.__file__]
        print(json.dumps([approach, files]), flush=True)
        os._exit(0)
    if os.wait()[1]: sys.exit(1)
"""


@pytest.fixture(scope="module")
def loaded():
    """Approach → files that are loaded once a training with it has imported all. What is common is imported once."""
    common = ["tokenscale.verbs.rank", "tokenscale.training.loop", PARALLEL["ddp"]]
    code = LOADED.format(common=common, batches=dict(BATCHES))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("approach", BATCHES)
def test_what_a_training_imports_is_its_code(loaded, approach):
    """Against the interpreter: nothing that is really loaded is missing from the closure."""
    found = names(f for f in loaded[approach] if not f.endswith("__init__.py"))
    code = names(code_of("rank", BATCHES[approach], PARALLEL["ddp"], TOKENIZERS["bpe"]))
    assert found and found - code <= {"errors.py", "settings/registry.py"}


def test_a_new_registry_entry_or_preset_is_nobodys_code():
    for verb in ("rank", "corpus", "tokenizer", "pretokenize"):
        assert not names(code_of(verb)) & {"settings/registry.py", "settings/presets.py"}


def test_templates_and_styles_count_as_code():
    assert {"report/page.html.j2", "report/page.css"} <= names(closure_of("tokenscale.report.page"))
