import dataclasses
import importlib
import json
import typing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pydantic
import pytest
import torch

from tokenscale.base.errors import UserError
from tokenscale.data.order.permutation import get_samples
from tokenscale.settings import flags, options, source_studies
from tokenscale.settings.config import ConfigFile
from tokenscale.settings.data import (
    CorpusSettings,
    SourceSettings,
    StoreSettings,
    TokenizerSettings,
)
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.mixture import MixtureStage
from tokenscale.settings.options import LARGEST, decode, from_json, raise_errors
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import (
    BudgetSettings,
    OptimizerSettings,
    RunSettings,
    ScheduleSettings,
    StorageSettings,
    find_difference,
    find_other_schedule,
)
from tokenscale.train.parallel.world import World
from tokenscale.train.trainer import Trainer


def run(**changes) -> RunSettings:
    return RunSettings(**{"model": PRESETS["llama-tiny"], "sequence_length": 256, **changes})


def test_ids_of_runs_stay_what_they_were():
    """Golden ids: a new option must not change the identity of runs that do not use it."""
    assert run().identity == "packed-llama-tiny-single-w1-ef886c7152"
    changed = run(
        approach="padded",
        layout=LayoutSettings(data=4),
        repeat=2,
        optimizer=OptimizerSettings(beta2=0.99),
    )
    assert changed.identity == "padded-llama-tiny-ddp-w4-63550b0c44"
    assert run(layout=LayoutSettings(shard=4)).identity == "packed-llama-tiny-fsdp-w4-e4918f6b2c"
    hybrid = LayoutSettings(data=2, shard=2, sharding="zero2")
    assert run(layout=hybrid).identity == "packed-llama-tiny-hsdp-w4-52026822b7"


@pytest.mark.parametrize(
    "change",
    [
        {"repeat": 1},
        {"seed": 1},
        {"global_batch": 16},
        {"approach": "padded"},
        {"layout": LayoutSettings(data=2)},
        {"storage": StorageSettings(codec="snappy"), "approach": "token-list"},
        {"model": dataclasses.replace(PRESETS["llama-tiny"], layers=3)},
    ],
)
def test_science_changes_the_identity(change):
    assert run(**change).identity != run().identity


def test_a_run_survives_its_json():
    before = run(
        approach="token-list", storage=StorageSettings(codec="zstd", codec_level=9), seed=3
    )
    assert RunSettings.from_json(before.to_json()) == before
    assert json.loads(run(global_batch=8).to_json()).keys() == {"model", "sequence_length"}, (
        "defaults are left out"
    )
    assert replace(before, corpus=replace(before.corpus, name="other")).identity == before.identity


# Doors: each kind of input is decoded by the same rules

CLASSES = [
    cls
    for path in sorted(Path(options.__file__).parent.glob("*.py"))
    for cls in vars(importlib.import_module(f"tokenscale.settings.{path.stem}")).values()
    if dataclasses.is_dataclass(cls)
    and hasattr(cls, "__pydantic_config__")
    and cls.__module__.endswith(path.stem)
]


def refused_keys(decode, *arguments, **named) -> set[str]:
    """Return the keys that one error names, in the fact `key` and in the lines of `also`."""
    with pytest.raises(UserError) as error:
        decode(*arguments, **named)
    facts = error.value.facts
    return {facts["key"], *(line.partition(": ")[0] for line in facts.get("also", "").splitlines())}


def fields_of(cls, *kinds):
    hints = typing.get_type_hints(cls)
    return [n for n, hint in hints.items() if {hint, *typing.get_args(hint)} & set(kinds)]


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (OptimizerSettings, {"learning_rate": True}),
        (OptimizerSettings, {"clip_norm": False}),
        (CorpusSettings, {"validation_share": False}),
        (CorpusSettings, {"source": {"kind": "files", "files": ["a.txt"], "separator": ""}}),
        (MixtureStage, {"weights": [0.5, True]}),
    ],
)
def test_a_boolean_is_no_number_and_an_empty_text_separates_nothing(cls, values):
    for read in (lambda: decode(cls, values), lambda: from_json(cls, json.dumps(values))):
        with pytest.raises(UserError, match="cannot be"):
            read()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_no_number_is_without_bounds_and_none_is_converted(cls):
    """Seeds of 64 bits, sizes of 10**30, infinity: all that are in a file are named at once."""
    integers = fields_of(cls, int)
    numbers = fields_of(cls, float)
    lists = [
        name
        for name in integers + numbers
        if typing.get_origin(typing.get_type_hints(cls)[name]) is tuple
    ]
    for values in (
        (10**30, float("inf")),
        (1 << 63, float("nan")),
        (-(10**30), -float("inf")),
        ("x", "x"),
    ):
        wrong = {
            n: [values[n in numbers]] if n in lists else values[n in numbers]
            for n in integers + numbers
        }
        named = {f"{name}.0" if name in lists else name for name in wrong}
        assert not wrong or named <= refused_keys(decode, cls, wrong, file="f.yaml")
        assert not wrong or named <= refused_keys(from_json, cls, json.dumps(wrong))
    for name in set(integers) - set(lists):
        for value in (True, "5", 2.5):
            assert name in refused_keys(decode, cls, {name: value}, file="f.yaml")


#: values that hardly any field takes, of every type that YAML, JSON and flags have
FOREIGN = (
    None, True, -1, 0, 1.5, 10**30, -0.0, float("nan"), float("inf"), "", "-1", "1e999", "é",
    "x" * 200, [], [1], ["a"], [None], {}, {"a": 1}, b"x",
)  # fmt: skip


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("form", ["python", "strings"])
def test_what_a_value_must_be_is_said_in_our_own_words(cls, form):
    """A release of pydantic may say it in others."""
    adapter = options.type_adapter(cls)
    for field in dataclasses.fields(cls):
        for value in FOREIGN:
            values = {field.name: value}
            try:
                getattr(adapter, f"validate_{form}")(values)
            except pydantic.ValidationError as error:
                theirs = {entry["msg"] for entry in error.errors()}
                with pytest.raises(UserError) as ours:
                    decode(cls, values, form=form)
                assert not [text for text in theirs if text in ours.value.render()]


def test_true_and_false_are_taken_as_text_as_snakemake_passes_them():
    assert [
        decode(ConfigFile, {"strict_claims": text}).strict_claims for text in ("true", "false")
    ] == [True, False]
    for value in ("yes", "1", 1, "True "):
        assert refused_keys(decode, ConfigFile, {"strict_claims": value}, file="f.yaml") == {
            "strict_claims"
        }


@pytest.mark.parametrize(
    "flag", source_studies.RUN_FLAGS + source_studies.TRAIN_FLAGS, ids=lambda flag: flag.name
)
def test_flags_have_the_bounds_of_their_settings(flag):
    kinds = {flag.hint, *typing.get_args(flag.hint)}
    texts = (
        ["1" + "0" * 30, str(1 << 63), "-9", "1e3x"] if int in kinds else ["inf", "nan", "1e999"]
    )
    for text in texts if kinds & {int, float} else ():
        with pytest.raises(UserError) as error:
            flags.parse_value(flag, text)
        assert error.value.facts["flag"] == flag.name


def test_patterns_hold_at_every_door():
    (arm,) = [flag for flag in source_studies.RUN_FLAGS if flag.key == "arm"]
    for door in (
        lambda: flags.parse_value(arm, "../x"),
        lambda: from_json(RunSettings, '{"arm": "../x"}'),
        lambda: decode(RunSettings, {"arm": "../x"}),
    ):
        with pytest.raises(UserError, match="letters, digits"):
            door()


def test_all_problems_are_listed_with_the_nearest_spelling():
    wrong = {
        "layout": {"dta": 2, "shard": 0},
        "approach": "paked",
        "budget": {"steps": "5"},
        "model": {"layers": 10**9},
    }
    keys = {"layout.dta", "layout.shard", "approach", "budget.steps", "model.layers"}
    assert refused_keys(decode, RunSettings, wrong, file="f.yaml", key="runs") == {
        f"runs.{key}" for key in keys
    }
    with pytest.raises(UserError) as error:
        decode(RunSettings, wrong, file=lambda key: f"file of {key}")
    assert (
        error.value.facts["file"] == "file of layout.dta"
        and "did you mean 'data'" in error.value.facts["next"]
    )
    assert "did you mean 'packed'?" in error.value.facts["also"]
    problems = [("seed", "one"), ("layout.data", "another")]
    assert refused_keys(raise_errors, problems, file="f.yaml") == {"seed", "layout.data"}


def test_a_seed_of_63_bits_trains_and_repeats_do_not_leave_them():
    largest = run(
        model=replace(PRESETS["llama-micro"], vocabulary_size=64),
        seed=LARGEST,
        layout=LayoutSettings(),
    )
    assert largest.problems() == [] and [
        key for key, _ in replace(largest, repeat=1).problems()
    ] == ["seed"]
    Trainer(largest, largest.model, World(0, 1, 0, torch.device("cpu")), "sdpa")
    assert (
        get_samples(np.arange(9), 9, LARGEST).tolist() != get_samples(np.arange(9), 9, 0).tolist()
    )


@pytest.mark.parametrize(
    "store",
    [
        StoreSettings("padded"),
        StoreSettings("padded", sequence_length=2048, codec="snappy", dtype="int64", eos=True),
        StoreSettings("token-list", codec_level=22, row_group_rows=50),
        StoreSettings("packed", split="validation", sequence_length=256),
    ],
)
def test_a_store_is_its_folders_name_in_one_spelling(store):
    assert StoreSettings.parse(store.directory) == store
    for name in [
        "padded-sequence_length=1024",
        "padded-eos=false",
        "packed-codec=zstd",
        "padded-sequence_length=0",
        "pad",
    ]:
        with pytest.raises(UserError):
            StoreSettings.parse(name)


@pytest.mark.parametrize(
    "layout, method, ranks",
    [
        (LayoutSettings(), "single", 1),
        (LayoutSettings(data=2), "ddp", 2),
        (LayoutSettings(shard=3, sharding="zero1"), "zero1", 3),
        (LayoutSettings(shard=2, sharding="zero2"), "fsdp", 2),
        (LayoutSettings(shard=2), "fsdp", 2),
        (LayoutSettings(data=2, shard=4), "hsdp", 8),
        (LayoutSettings(tensor=2), "tp", 2),
        (LayoutSettings(tensor=2, shard=4), "tp-fsdp", 8),
        (LayoutSettings(pipeline=2), "1f1b", 2),
        (LayoutSettings(pipeline=2, schedule="naive"), "naive", 2),
        (LayoutSettings(pipeline=2, schedule="gpipe", tensor=2, data=2), "gpipe-tp-ddp", 8),
    ],
)
def test_a_layout_is_named_by_its_method_and_has_the_product_of_its_degrees(layout, method, ranks):
    assert (layout.method, layout.world_size, run(layout=layout).problems()) == (method, ranks, [])


def test_ranks_of_a_tensor_group_are_neighbours_and_stages_lie_furthest_apart():
    layout = LayoutSettings(pipeline=2, data=2, shard=2, tensor=2)
    places = [layout.coordinate(rank) for rank in range(16)]
    assert [p.tensor for p in places] == [0, 1] * 8 and [p.pipeline for p in places] == [0] * 8 + [
        1
    ] * 8
    assert [p.data_rank for p in places] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert sorted(p.data_rank for p in places if p.is_group_leader) == [0, 1, 2, 3], (
        "one rank speaks for each that reads"
    )
    assert layout.node_problem(4) is None and layout.node_problem(2) is None
    assert "tensor 2 fits" in LayoutSettings(tensor=4).node_problem(2)


@pytest.mark.parametrize(
    ("theirs", "mine", "found"),
    [
        ({}, {}, None),
        ({"seed": 1}, {"seed": 1, "micro_batch": 1}, None),
        ({}, {"model": replace(PRESETS["llama-tiny"], name="own")}, None),
        ({"seed": 1}, {}, ("seed", 1, "the default")),
        ({}, {"seed": 1}, ("seed", "the default", 1)),
        ({"seed": 1, "repeat": 2}, {}, ("repeat", 2, "the default")),
    ],
)
def test_the_first_setting_that_prevents_resuming_is_named_with_both_values(theirs, mine, found):
    assert find_difference(run(**theirs), run(**mine)) == found


def test_steps_within_one_warm_up_had_the_same_learning_rates_whatever_follows():
    theirs, mine, longer = (
        run(
            schedule=ScheduleSettings("linear", warmup_steps, floor=floor),
            budget=BudgetSettings(steps=9),
        )
        for warmup_steps, floor in ((4, 0.1), (4, 0.2), (5, 0.1))
    )
    assert find_other_schedule(theirs, mine, steps=4) == {}
    assert find_other_schedule(theirs, mine, steps=5) == {"schedule.floor": 0.1}
    assert find_other_schedule(theirs, longer, steps=4) == {"schedule.warmup_steps": 4}


PATHS = {
    SourceSettings: ("files", "validation_files", "target_files", "validation_target_files"),
    TokenizerSettings: ("source",),
    RunSettings: ("resume_from",),
}


@pytest.mark.parametrize(
    "cls, field", [(cls, field) for cls, fields in PATHS.items() for field in fields]
)
def test_paths_are_recorded_as_a_shell_expands_them(cls, field, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATA", "/scratch")
    monkeypatch.delenv("NOWHERE", raising=False)
    many = field.endswith("files")

    def read(path):
        value = getattr(decode(cls, {field: [path] if many else path}), field)
        return value[0] if many else value

    assert read("~/a/*.parquet") == f"{tmp_path}/a/*.parquet" and read("${DATA}/x") == "/scratch/x"
    for wrong in ("$NOWHERE/x", ""):
        with pytest.raises(UserError, match=field):
            read(wrong)
