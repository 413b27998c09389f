"""What `plan` says of hours, files, bytes and memory, and what it reads from a profile."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import mistral_common
import pytest

from tests.refusals import refused
from tokenscale.base.errors import UserError
from tokenscale.cli import plan_prices
from tokenscale.cli.main import main
from tokenscale.cli.plan import plan
from tokenscale.cli.plan_memory import render_memory
from tokenscale.cli.plan_prices import VOCABULARIES, RunPrices, read_gpu_prices
from tokenscale.costs.memory import largest_memory
from tokenscale.costs.prices import sum_prices
from tokenscale.data.tokenizers import tekken
from tokenscale.runs.records.provenance import describe_machine
from tokenscale.settings import config as configuration
from tokenscale.settings import profile
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.options import to_dict
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import READERS, RunSettings

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted(
    path.stem
    for path in (ROOT / "config/experiments").glob("*.yaml")
    if "\n  alps:" in path.read_text()
)
RUNS = {
    "corpus": "text",
    "tokenizer": "bpe",
    "model": "llama-micro",
    "sequence_length": 32,
    "global_batch": 4,
    "micro_batch": 2,
    "precision": "bf16",
    "budget": {"steps": 5},
    "schedule": {"warmup_steps": 2},
}


MACHINE = 'name = "box"\nstarter = "srun"\ngpus_per_node = 4\ndevice = "NVIDIA GH200 120GB"\n'


@pytest.fixture(scope="module")
def alps():
    """The project's own configuration on Alps, with nothing built."""
    return configuration.load_config(overrides=profile.load_profile_config("alps", ROOT), root=ROOT)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Two experiments that share a run, on a cluster whose profile says so."""
    monkeypatch.chdir(tmp_path)
    for folder in ("config/experiments", "profiles/box"):
        (tmp_path / folder).mkdir(parents=True)
    corpora = {"text": {"source": {"kind": "docstrings"}}}
    tokenizers = {"bpe": {"kind": "bpe", "corpus": "text", "vocabulary_size": 300}}
    values = {"experiments": ["a", "b"], "corpora": corpora, "tokenizers": tokenizers}
    (tmp_path / "config/config.yaml").write_text(json.dumps(values))
    for name, sizes in (("a", [1, 2]), ("b", [2, 4])):
        write_experiment(tmp_path, name, factors={"layout.data": sizes})
    (tmp_path / "profiles/box/machine.toml").write_text(MACHINE)
    config = "config: [scale=workstation, machine=profiles/box/machine.toml]\n"
    (tmp_path / "profiles/box/config.yaml").write_text(config)
    return tmp_path


def write_experiment(project, name, runs=(), **fields):
    experiment = {
        "question": "?",
        "runs": RUNS | dict(runs),
        "scales": {"workstation": {}, "alps": {}, "study": {}, "campaign": {}},
    }
    (project / f"config/experiments/{name}.yaml").write_text(json.dumps(experiment | fields))


def load_box():
    return configuration.load_config(overrides=profile.load_profile_config("box"))


def table(lines):
    """Row → its columns."""
    rows = [re.split(r" {2,}", line.strip()) for line in lines]
    return {row[0]: row[1:] for row in rows if len(row) == 7}


def printed(capsys, *arguments):
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_what_the_report_builds_at_scale_alps_fits_the_default_budget(alps, tmp_path):
    assert alps.settings.budget == configuration.CallBudget() and alps.settings.scale == "alps"
    assert next(plan(alps, ["demo"])) == "scale alps"
    totals = RunPrices(alps, tmp_path).sum_by_experiment(alps.all_runs(alps.settings.experiments))
    assert not any(of.unknown or of.bounded for of in totals.values())
    assert 0 < sum(of.node_hours for of in totals.values()) <= 50, totals


def test_runs_sized_for_gpus_are_refused_on_a_cpu_until_the_budget_allows_them(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(plan_prices, "count_gpus", lambda: 0)
    monkeypatch.setattr(plan_prices, "measure_matrix_rate", lambda: 1e11)

    def find(scale, name, **values):
        config = configuration.load_config(overrides={"scale": scale, **values}, root=ROOT)
        prices = RunPrices(config, tmp_path)
        runs = config.all_runs([name])
        return prices.find_cpu_error(runs), sum(prices.price(runs[r]).flops for r in runs)

    error, flops = find("workstation", "ddp_scaling_weak")
    days = flops / 1e11 / 86400
    assert f"at least {int(days)} d" in error.facts["needed"]
    (allowed,) = re.findall(r"budget=\{cpu_hours: (\d+)\}", error.facts["next"])
    assert find("workstation", "ddp_scaling_weak", budget={"cpu_hours": int(allowed)})[0] is None
    assert find("demo", "ddp_scaling_weak")[0] is None
    monkeypatch.setattr(plan_prices, "count_gpus", lambda: 1)
    assert find("workstation", "ddp_scaling_weak")[0] is None


def test_the_budget_counts_a_shared_run_for_the_first_experiment(project):
    config = load_box()
    totals = RunPrices(config).sum_by_experiment(config.all_runs(["a", "b"]))
    assert {name: of.node_hours for name, of in totals.items()} == pytest.approx(
        {"a": 2 / 30, "b": 1 / 30}, rel=0.01
    )
    (only, *_) = config.all_runs(["b"])
    (of,) = RunPrices(config).sum_by_experiment([only]).values()
    assert of.node_hours == pytest.approx(1 / 30, rel=0.01), "of those asked for"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_at_scale_alps_has_its_price(alps, tmp_path, name):
    """Runs whose steps follow from what their stores hold, which are not made yet, and those that
    only read have an upper bound.
    """
    runs = alps.all_runs([name])
    found = sum_prices(RunPrices(alps, tmp_path).price(run) for run in runs.values())
    asked = [run.settings for run in runs.values()]
    assert not found.unknown and found.timed == len(runs) and (found.node_hours > 0 or not runs)
    assert sum(found.bounded.values()) == sum(
        run.budget.kind in ("epochs", "useful_tokens") or run.arm in READERS for run in asked
    )
    # of packed rows and of streams a least fill is known, and of pairs the published number
    limited = sum(count for why, count in found.bounded.items() if why.startswith("the time limit"))
    kinds = ("padded", "pretokenized-padded", "length-bucketed")
    assert limited == sum(
        run.budget.kind == "useful_tokens" and run.approach in kinds for run in asked
    )


def test_shared_runs_count_once_and_columns_add_up(project, capsys):
    """120 s and next to nothing: one run on one node is 1/30 h. Files: six, SLURM's and three a
    rank.
    """
    lines = printed(capsys, "--profile", "box")
    found = table(lines)
    columns = {n: [found[name][n] for name in ("a", "b", "total")] for n in (0, 2, 4)}
    assert columns == {0: ["2", "2", "3"], 2: ["0.0667", "0.0667", "0.100"], 4: ["23", "32", "42"]}
    assert found["a"][3] == "0.100" and found["total"][3] == "0.233", "hours of GPUs"
    assert "within the budget of 50 (budget.node_hours)" in lines[-1]
    text = (project / "config/config.yaml").read_text()
    (project / "config/config.yaml").write_text(text[:-1] + ', "budget": {"node_hours": 0.05}}')
    *_, said, _, line = printed(capsys, "--profile", "box")
    assert (
        "0.100 node-hours: over the budget of 0.05" in said
        and line == "    --config 'budget={node_hours: 10}'"
    )
    assert (
        printed(capsys, "--scale", "workstation", "--machine", "profiles/box/machine.toml")[-1]
        == line
    )


def test_finished_runs_are_counted_and_need_no_budget(project, capsys):
    config = load_box()
    for run_id in config.all_runs(["a"]):
        (project / f"results/runs/{run_id}").mkdir(parents=True)
        (project / f"results/runs/{run_id}/done.json").write_text("{}")
    lines = printed(capsys, "--profile", "box")
    assert [table(lines)[name][:2] for name in ("a", "b", "total")] == [
        ["2", "2"],
        ["2", "1"],
        ["3", "2"],
    ]
    assert lines[-1].startswith("  1 runs are left to do, 0.0333 node-hours: within")


def test_a_machine_without_a_device_has_no_hours_but_files_and_bytes(project, capsys):
    lines = printed(capsys)
    assert table(lines)["total"][2:4] == ["not known", "not known"]
    assert int(table(lines)["total"][4]) == 39 and table(lines)["total"][5].endswith("KiB")
    assert (
        "  hours of 3 of 3 runs are not known: the machine (this machine) states no device" in lines
    )
    assert not any("budget" in line for line in lines)
    (project / "machine.toml").write_text(
        re.search("echo '(.*)' > machine.toml", "\n".join(lines))[1]
    )
    assert table(printed(capsys, "--machine", "machine.toml"))["total"][2] != "not known"


def manifest(project, folder, **facts):
    path = project / "results" / folder / "manifest.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(facts))


def priced(project):
    """What is known of the one run of experiment `b`."""
    config = load_box()
    (run,) = config.runs("b")
    return RunPrices(config).price(run)


STORE = {
    "rows": 1000,
    "documents": 50,
    "tokens_useful": 31000,
    "tokens_cut": 0,
    "vocabulary_size": 300,
}
STORE |= {
    "options": {"split": "train", "eos": False},
    "files": [{"bytes": 66000, "name": "tokens.bin"}],
}


def test_what_cannot_be_priced_exactly_has_an_upper_bound_until_its_store_is_there(project, capsys):
    write_experiment(project, "b", {"budget": {"epochs": 2}})
    found = table(printed(capsys, "--profile", "box"))
    assert found["b"][2] == "≤ 2.00" and found["total"][2] == "≤ 2.07", "the machine's 120 minutes"
    manifest(project, "tokens/text/bpe/packed-sequence_length=32", **STORE)
    assert priced(project).steps == 2 * 1000 / 4 and priced(project).bound is None
    lines = printed(capsys, "--profile", "box")
    assert "≤" not in "".join(lines) and any(
        "token stores, in addition: 1 here with 3 files" in line for line in lines
    )


@pytest.mark.parametrize(
    ("approach", "rows"),
    # 32,050 tokens: rows of 32, which packing fills half at least; or a row for each of 50
    # documents
    [("packed", 2 * 32050 / 32 + 1), ("token-list", 32050 / 32), ("padded", 50)],
)
def test_rows_of_an_epoch_are_bounded_by_another_store_of_the_text(project, approach, rows):
    write_experiment(project, "b", {"budget": {"epochs": 2}, "approach": approach})
    manifest(
        project, "tokens/text/bpe/packed-sequence_length=64", **STORE | {"tokens_useful": 32000}
    )
    found = priced(project)
    assert (
        found.steps == math.ceil(2 * rows / 4) and "another store of the same text" in found.bound
    )


def test_rows_of_an_epoch_are_bounded_by_the_corpus_and_by_what_is_declared_of_it(project):
    write_experiment(project, "b", {"budget": {"epochs": 2}, "approach": "padded"})
    values = json.loads((project / "config/config.yaml").read_text())
    values["corpora"]["text"]["source"]["maximum_documents"] = 70
    (project / "config/config.yaml").write_text(json.dumps(values))
    found = priced(project)
    assert found.steps == 35 and found.bound.endswith("from the configuration of the corpus")
    manifest(project, "corpus/text", splits={"train": {"rows": 60, "utf8_bytes": 9600}})
    assert priced(project).steps == 30 and priced(project).bound.endswith("from the corpus")
    write_experiment(project, "b", {"budget": {"epochs": 2}, "approach": "token-list"})
    # no more tokens than bytes, and four of control a document
    assert priced(project).steps == math.ceil(2 * (9600 + 4 * 60) / 32 / 4)


@pytest.mark.parametrize(("approach", "share"), [("packed", 7 / 16), ("padding-free", 7 / 8)])
def test_a_budget_in_useful_tokens_is_bounded_by_the_least_fill_of_a_row(project, approach, share):
    write_experiment(project, "b", {"budget": {"useful_tokens": 100_000}, "approach": approach})
    found = priced(project)
    assert (
        found.steps == math.ceil(100_000 / (32 * share) / 4)
        and "fewest useful tokens" in found.bound
    )
    write_experiment(project, "b", {"budget": {"useful_tokens": 100_000}, "approach": "padded"})
    assert priced(project).bound.startswith("the time limit"), (
        "documents of any length: nothing is known of padding"
    )


def end(project, run, *, seconds, machine="box", steps=5, begins_at=0, **hardware):
    """A run that ended, as its record has it."""
    outcome = {
        "status": "complete",
        "steps": steps,
        "begins_at": begins_at,
        "ended_unix_s": 1000 + seconds,
    }
    record = {
        "run": to_dict(run.settings),
        "launch": {"machine": machine},
        "started_unix_s": 1000,
        "outcome": outcome,
    }
    path = project / f"results/runs/{run.run_id}/run.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record | {"hardware": describe_machine() | hardware}))
    path.with_name("done.json").write_text("{}")


def repeats(project):
    write_experiment(project, "b", factors={"layout.data": [1, 2]}, repeats=4)
    config = load_box()
    return config, config.runs("b")


def test_repeats_of_a_cell_that_ran_here_are_priced_by_it(project, capsys):
    """The run itself by its own time, other repeats by the median, other cells by the peak."""
    config, runs = repeats(project)
    cell = [run for run in runs if run.settings.layout.data == 2]
    for run, seconds in zip(cell, (100, 300, 200), strict=False):
        end(project, run, seconds=seconds)
    prices = RunPrices(config)
    assert [prices.price(run).seconds for run in cell] == [100, 300, 200, 200]
    assert prices.price(cell[3]).measured and prices.price(cell[3]).node_hours == pytest.approx(
        200 / 3600
    )
    others = [prices.price(run) for run in runs if run not in cell]
    assert not any(price.measured for price in others)
    assert any(
        "measured: hours of 4 of 8 runs" in line
        for line in printed(capsys, "b", "--profile", "box")
    )


def test_the_price_of_a_run_looks_at_no_run_of_other_cells(project, monkeypatch):
    """Cells are compared by their hash: texts are only compared where they are equal."""
    config, runs = repeats(project)
    for run in runs:
        end(project, run, seconds=100)
    compared = []

    class Cell(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            compared.append(self)
            return str.__eq__(self, other)

    cell_of = plan_prices._cell_of
    monkeypatch.setattr(plan_prices, "_cell_of", lambda settings: Cell(cell_of(settings)))
    prices = RunPrices(config)
    assert all(prices.price(run).measured for run in runs)
    assert len(compared) <= 2 * len(runs)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 90),
        ({"steps": 5, "begins_at": 2}, 150),  # its last attempt went on from step 2
        ({"machine": "this machine"}, None),
        ({"steps": 0}, None),
    ],
)
def test_only_whole_runs_of_this_machine_are_a_measure(project, changes, seconds):
    config, (run, *_) = repeats(project)
    end(project, run, seconds=90, **changes)
    found = RunPrices(config).price(run)
    assert found.measured == (seconds is not None) and (
        not seconds or found.seconds == pytest.approx(seconds)
    )


def test_hours_here_are_known_once_the_cells_ran_on_this_very_machine(project, capsys):
    _, runs = repeats(project)
    runs = configuration.load_config(overrides={"scale": "workstation"}).runs("b")
    for run in runs[:2]:
        end(project, run, seconds=7200, machine="this machine", cpu="another one")
    assert table(printed(capsys, "b", "--scale", "workstation"))["b"][2] == "not known"
    shutil.rmtree(project / "results")
    for run in runs[:2]:
        end(project, run, seconds=7200, machine="this machine")
    lines = printed(capsys, "b", "--scale", "workstation")
    assert {run.settings.layout.data for run in runs[:2]} == {1, 2} and table(lines)["b"][
        2
    ] == "16.0"
    assert not any("not known" in line for line in lines)


def test_tekken_has_as_many_entries_as_a_price_takes_for_granted():
    file = Path(mistral_common.__file__).parent / "data" / tekken.FILE
    assert {"tekken": json.loads(file.read_text())["config"]["default_vocab_size"]} == VOCABULARIES


def test_a_profile_is_read_as_snakemake_reads_it(project):
    expected = {"scale": "workstation", "machine": "profiles/box/machine.toml"}
    assert (
        profile.load_profile_config("box")
        == profile.load_profile_config("profiles/box")
        == expected
    )
    file = project / "profiles/box/config.yaml"
    file.write_text("configfile: mine.yaml\nconfig: {scale: alps}\n")
    (project / "mine.yaml").write_text("scale: demo\nbudget: {node_hours: 3}\n")
    assert profile.load_profile_config("box") == {"scale": "alps", "budget": {"node_hours": 3}}
    file.rename(file.with_name("config.v9+.yaml"))
    assert profile.load_profile_config("box")["scale"] == "alps"
    with pytest.raises(UserError, match="no such profile") as error:
        profile.load_profile_config("bx")
    assert error.value.facts["found"] == "box"


GPU = "NVIDIA H100 80GB HBM3"


def test_rent_is_gpu_hours_times_the_price(project, capsys):
    """a and b have runs on 1, 2 and 4 ranks, each 120 s and next to nothing: 7 × 120 s = 0.23 h."""
    entry = {"usd_per_gpu_hour": 3, "source": "a provider", "date": "2026-11-25"}
    (project / "prices.yaml").write_text(json.dumps({GPU: entry, "NVIDIA L40S": {}}))
    lines = printed(capsys, "--prices", "prices.yaml")
    rows = [
        re.split(r" {2,}", row.strip())
        for row in lines[lines.index("rent, if each rank rents one GPU") + 2 :]
    ]
    assert rows[0][1:] == ["0.233", "3.00 (a provider, 2026-11-25)", "0.70"] and rows[1][2:] == [
        "not set"
    ]
    shipped = read_gpu_prices(ROOT / "config/prices.yaml")
    assert shipped and all(price.usd_per_gpu_hour is None for price in shipped.values())


@pytest.mark.parametrize(
    ("gpu", "entry", "key"),
    [
        (GPU, {"usd_per_gpu_hour": -1}, "usd_per_gpu_hour"),
        (GPU, {"date": "soon"}, "date"),
        ("NVIDIA H100", {}, GPU),
    ],
)
def test_a_wrong_price_or_gpu_is_one_message(project, capsys, gpu, entry, key):
    (project / "prices.yaml").write_text(json.dumps({gpu: entry}))
    said = refused(capsys, ["plan", "--prices", "prices.yaml"])
    assert key in said and "prices.yaml" in said


def test_a_plan_states_held_out_texts_that_are_trained_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cleaning = {"documents": {"held_out_in_training": 3}, "deduplicate": True}
    manifest = {"name": "docstrings", "cleaning": cleaning, "splits": {"validation": {"rows": 9}}}
    path = tmp_path / "results/corpus/docstrings/manifest.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(manifest))
    config = configuration.load_config(root=ROOT)
    assert any("3 distinct held-out texts" in line for line in plan(config, ["demo"]))
    path.write_text(json.dumps(manifest | {"cleaning": cleaning | {"documents": {}}}))
    assert not any("held-out" in line for line in plan(config, ["demo"]))


# -- memory

LARGE = RunSettings(
    model=PRESETS["llama-1.4b-nemo"], sequence_length=2048, global_batch=32, micro_batch=2
)


def test_a_line_says_the_sum_and_its_parts():
    """By hand, in GiB: 1.41 G weights in fp32; inputs of 16 blocks 0.50, autocast's copies of their
    matrices 1.63, the loss' gradients by the head's weight 1.00 and by what goes into it 0.03, and
    the last norm 0.03. In the loss for a moment: a chunk's logits in fp32, rounded, and rounded of
    the chunk before 1.00, the head's weight in 16 bits 0.50, and hidden states 0.04.
    """
    _, line = render_memory(
        [replace(LARGE, precision="bf16", activation_checkpointing="block", loss_chunk=1024)]
    )
    named, _, parts = line.partition(" = ")
    assert "block checkpointing, loss_chunk 1024" in named and named.endswith("25.7 GiB")
    states = "5.25 parameters + 5.25 gradients + 10.5 optimizer"
    assert parts == f"{states} + 3.19 activations + 1.54 for a moment in a pass"


def test_layouts_that_need_the_same_share_a_line_and_repeats_add_none():
    layouts = [
        LayoutSettings(),
        LayoutSettings(data=2),
        LayoutSettings(data=16),
        LayoutSettings(shard=2),
    ]
    runs = [
        replace(LARGE, layout=layout, repeat=repeat) for layout in layouts for repeat in range(3)
    ]
    lines = list(render_memory(runs))[1:]
    data = "one rank, data 2 (5.25 GiB sent), data 16 (9.84 GiB sent)"
    assert [(data in line, "zero3 2" in line) for line in lines] == [(True, False), (False, True)]


def test_a_vocabulary_that_is_not_known_is_said_and_not_guessed():
    unknown = replace(LARGE, model=PRESETS["llama-150m"])
    lines = list(
        render_memory([replace(unknown, layout=LayoutSettings(data=n)) for n in (1, 2, 4)])
    )[1:]
    assert lines == [
        (
            "    llama-150m: not known before the tokenizer tekken is built, which decides the "
            "vocabulary"
        )
    ]
    tokenizer = replace(LARGE.tokenizer, kind="numbers", name="numbers", vocabulary_size=512)
    (line,) = list(render_memory([replace(unknown, tokenizer=tokenizer)]))[1:]
    assert "not known" not in line and "activations" in line
    for setting in ("compile", "float8"):
        (line,) = list(render_memory([replace(LARGE, **{setting: True})]))[1:]
        assert f" activations as without {setting} + " in line


def test_runs_that_do_not_fit_the_machines_gpu_are_listed():
    runs = [
        replace(LARGE, layout=LayoutSettings(data=2)),
        replace(LARGE, layout=LayoutSettings(shard=4)),
    ]
    large, small = sorted(list(render_memory(runs, 33.0))[1:])
    assert "data 2" in large and large.endswith(": does not fit a GPU of 33 GiB")
    assert "zero3 4" in small and "fit" not in small
    lines = list(render_memory([replace(LARGE, device="cpu")], 1.0))
    assert "CPU" in lines[0] and not any("fit" in line for line in lines)


def test_a_layout_that_fits_only_without_whole_gradients_is_listed_as_too_large():
    """Four micro-steps: 5.25 GiB of gradients on each rank in place of its shard, 1.31 GiB."""
    fits = LayoutSettings(shard=4)
    layouts = [fits, replace(fits, accumulation="unsharded")]
    room = largest_memory(replace(LARGE, layout=fits), "cuda").total / 2**30 + 1
    lines = sorted(list(render_memory([replace(LARGE, layout=n) for n in layouts], room))[1:])
    sharded, whole = sorted(lines, key=lambda line: "unsharded" in line)
    assert "1.31 gradients" in sharded and "fit" not in sharded
    assert "gradients accumulated unsharded" in whole and "5.25 gradients" in whole
    assert whole.endswith(f": does not fit a GPU of {room:g} GiB")
