import itertools
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json
from tokenscale.settings import config as configuration
from tokenscale.settings.config import Config
from tokenscale.settings.experiments import SCALES, format_cell, merge_settings
from tokenscale.settings.machine import Machine
from tokenscale.settings.yaml_files import read_yaml

ROOT = Path(__file__).parents[2]

BASE = {
    "experiments": ["e"],
    "corpora": {"c": {}},
    "tokenizers": {"t": {"kind": "bpe", "corpus": "c", "vocabulary_size": 300}},
}
EXPERIMENT = {
    "question": "?",
    "runs": {
        "corpus": "c",
        "tokenizer": "t",
        "model": "llama-micro",
        "sequence_length": 64,
        "budget": {"steps": 20},
    },
    "factors": {"approach": ["padded", "packed"], "layout.data": [1, 2]},
    "repeats": 2,
}


def project(tmp_path, experiment=EXPERIMENT, **config) -> Config:
    folder = tmp_path / "config/experiments"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "e.yaml").write_text(json.dumps(experiment))
    return Config({**BASE, **config}, root=tmp_path)


def test_every_cell_is_there_once_per_repeat_and_a_repeat_has_one_seed(tmp_path):
    runs = project(tmp_path).runs("e")
    assert len({r.run_id for r in runs}) == 8 and sorted(r.position for r in runs) == list(range(8))
    cells = [(r.cell["approach"], r.cell["layout.data"], r.repeat) for r in runs]
    assert sorted(cells) == [
        (a, d, k) for a in ("packed", "padded") for d in (1, 2) for k in (0, 1)
    ]
    assert all(run.settings.effective_seed == run.repeat for run in runs)


PRIMARY = {
    "primary": [
        {"of": {"approach": "packed"}, "over": {"approach": "padded"}, "at": {"layout.data": 1}}
    ]
}


@pytest.mark.parametrize("order_seed", range(4))
@pytest.mark.parametrize(
    "changes",
    [
        {"repeats": 6},
        {"repeats": 7},
        {"repeats": 1, "primary_repeats": 6} | PRIMARY,
        {"repeats": 3, "primary_repeats": 8} | PRIMARY,
    ],
)
def test_pairs_of_cells_alternate_in_order(tmp_path, changes, order_seed):
    """Every other block is reversed: each pair runs in both orders equally often, an odd number of
    repeats but for one, and a linear drift adds up to nothing in a primary comparison.
    """
    runs = project(tmp_path, {**EXPERIMENT, **changes, "order_seed": order_seed}).runs("e")
    assert [r.repeat for r in runs] == sorted(r.repeat for r in runs)
    place = {(format_cell(r.cell), r.repeat): r.position for r in runs}
    for of, over in itertools.combinations({cell for cell, _ in place}, 2):
        apart = [
            place[of, k] - place[over, k] for k in range(9) if {(of, k), (over, k)} <= place.keys()
        ]
        assert all(
            (one > 0) != (two > 0) for one, two in zip(apart[::2], apart[1::2], strict=False)
        )
    of = "approach=packed, layout.data=1"
    over = "approach=padded, layout.data=1"
    apart = [
        place[of, k] - place[over, k]
        for k in range(changes.get("primary_repeats", changes["repeats"]))
    ]
    assert sum(apart[: len(apart) // 2 * 2]) == 0
    if "primary" in changes:
        assert {abs(distance) for distance in apart} == {1}


def test_an_order_is_random_and_repeatable(tmp_path):
    first, again, other = (
        project(tmp_path, {**EXPERIMENT, "repeats": 8, "order_seed": seed}).runs("e")
        for seed in (0, 0, 5)
    )
    assert [r.run_id for r in first] == [r.run_id for r in again] != [r.run_id for r in other]
    assert {r.run_id for r in first} == {r.run_id for r in other}
    blocks = [[r.cell for r in first if r.repeat == k] for k in (0, 2, 4, 6)]
    assert any(block != blocks[0] for block in blocks)


def test_a_level_that_is_a_mapping_is_merged_over_the_runs_and_stays_what_it_is(tmp_path):
    levels = [{"learning_rate": 0.1}, {"learning_rate": 0.2, "weight_decay": 0.3}]
    experiment = {
        **with_run(optimizer={"beta1": 0.8}),
        "factors": {"optimizer": levels, "optimizer.beta2": [0.5, 0.6]},
        "repeats": 1,
    }
    config = project(tmp_path, experiment)
    found = [r.settings.optimizer for r in config.runs("e")]
    assert sorted((x.beta1, x.learning_rate, x.weight_decay, x.beta2) for x in found) == [
        (0.8, 0.1, 0.1, 0.5),
        (0.8, 0.1, 0.1, 0.6),
        (0.8, 0.2, 0.3, 0.5),
        (0.8, 0.2, 0.3, 0.6),
    ]
    assert config.experiment("e").factors["optimizer"] == levels


def test_cells_are_left_out_by_the_settings_of_a_mapping_with_the_reason(tmp_path):
    left_out = [{"cells": {"layout.schedule": "gpipe", "micro_batch": 8}, "reason": "one is none"}]
    layouts = [{"data": 2}, {"tensor": 2}, {"pipeline": 2, "schedule": "gpipe"}]
    experiment = {
        **with_run(model="llama-tiny"),
        "factors": {"layout": layouts, "micro_batch": [8, 4]},
        "repeats": 1,
    }
    config = project(tmp_path, {**experiment, "left_out": left_out})
    found = [(r.settings.layout.method, r.settings.micro_batch) for r in config.runs("e")]
    assert sorted(found) == [("ddp", 4), ("ddp", 8), ("gpipe", 4), ("tp", 4), ("tp", 8)]
    assert config.table("e")["left_out"] == left_out


def test_keys_that_move_together_become_plain_cells(tmp_path):
    factors = {"approach": ["padded", "packed"], "layout.data, global_batch": [[1, 4], [2, 8]]}
    config = project(tmp_path, {**EXPERIMENT, "factors": factors, "repeats": 1})
    found = {canonical_json(run.cell) for run in config.runs("e")}
    assert found == {
        canonical_json({"approach": a, "layout.data": n, "global_batch": 4 * n})
        for a in ("padded", "packed")
        for n in (1, 2)
    }
    assert {(r.settings.layout.data, r.settings.global_batch) for r in config.runs("e")} == {
        (1, 4),
        (2, 8),
    }
    # the same runs as of the design that takes every other combination out
    left_out = [
        {"cells": {"layout.data": n, "global_batch": b}, "reason": "-"} for n, b in ((1, 8), (2, 4))
    ]
    plain = {"approach": ["padded", "packed"], "layout.data": [1, 2], "global_batch": [4, 8]}
    other = project(tmp_path, {**EXPERIMENT, "factors": plain, "left_out": left_out, "repeats": 1})
    assert {r.run_id for r in other.runs("e")} == {r.run_id for r in config.runs("e")}


def test_a_scale_overlays_the_experiment_and_removes_a_factor_by_null(tmp_path):
    alps = {"runs": {"budget": {"steps": 99}}, "factors": {"layout.data": [16]}}
    runs = project(
        tmp_path, {**with_run(global_batch=16), "scales": {"alps": alps}}, scale="alps"
    ).runs("e")
    found = {
        (r.settings.budget.steps, r.settings.layout.world_size, r.settings.sequence_length)
        for r in runs
    }
    assert found == {(99, 16, 64)}
    study = {"factors": {"layout.data": None, "layout.data, global_batch": [[1, 2], [2, 4]]}}
    runs = project(tmp_path, {**EXPERIMENT, "scales": {"study": study}}, scale="study").runs("e")
    assert {(r.settings.layout.data, r.settings.global_batch) for r in runs} == {(1, 2), (2, 4)}


def test_an_experiment_without_an_overlay_is_none_of_all_and_refused_by_its_name(tmp_path):
    """Its own settings are those of the scale demo: elsewhere it would run these on another
    machine's nodes.
    """
    project(tmp_path)
    for name, scales in (("f", {"alps": {"repeats": 1}}), ("g", {"alps": {}, "workstation": {}})):
        (tmp_path / f"config/experiments/{name}.yaml").write_text(
            json.dumps(EXPERIMENT | {"scales": scales})
        )
    alps = Config(BASE | {"scale": "alps"}, root=tmp_path)
    assert alps.select_experiments(["all_experiments"]) == alps.at_scale == ["f", "g"]
    assert alps.left_out_note == "left out of all_experiments (no overlay for scale alps): e"
    assert [run.run_id for run in alps.runs("g")] == [
        run.run_id for run in project(tmp_path).runs("e")
    ]
    box = Config(BASE | {"scale": "workstation"}, root=tmp_path)
    assert box.usable(["g"]) == ["g"] and not box.unusable
    for use in (box.experiment, box.runs, lambda name: box.usable([name])):
        with pytest.raises(
            UserError, match="the experiment f has no settings for scale workstation"
        ) as error:
            use("f")
    assert (
        error.value.facts["key"] == "scales.workstation"
        and error.value.facts["found"] == "demo, alps"
    )
    assert (
        "--config scale=alps" in error.value.facts["next"]
        and "{workstation: {}}" in error.value.facts["next"]
    )
    demo = Config(BASE, root=tmp_path)
    assert demo.at_scale == ["e", "f", "g"] and demo.left_out_note is None
    with pytest.raises(UserError, match="unknown scale of the experiments 'study'") as error:
        Config(BASE | {"scale": "study"}, root=tmp_path).select_experiments(["all_experiments"])
    assert error.value.facts["allowed"] == "alps, demo, workstation"


def test_one_word_stands_for_all_experiments_and_equal_runs_are_shared(tmp_path):
    project(tmp_path)
    (tmp_path / "config/experiments/f.yaml").write_text(json.dumps({**EXPERIMENT, "repeats": 1}))
    config = Config(BASE, root=tmp_path)
    chosen = [config.select_experiments(words) for words in ([], ["f"], ["all_experiments"])]
    assert chosen == [["e"], ["f"], ["e", "f"]] and len(config.all_runs(["e", "f"])) == 8


@pytest.mark.parametrize(
    ("of_e", "of_f", "machine", "places"),
    [
        (True, True, {}, {4: 1, 2: 2, 1: 4}),
        (True, False, {}, {4: 1, 2: 1, 1: 1}),
        (False, True, {}, {4: 1, 2: 1, 1: 1}),
        (True, True, {"exclusive": False}, {4: 1, 2: 1, 1: 1}),
        (True, True, {"gpus_per_node": 2}, {4: 1, 2: 1, 1: 2}),
    ],
)
def test_runs_share_nodes_if_all_their_experiments_say_so(of_e, of_f, machine, places, tmp_path):
    """On a machine that charges whole nodes; run ids are those of runs alone."""
    ranks = {**EXPERIMENT, "factors": {"layout.data": [1, 2, 4]}}
    alone = set(project(tmp_path, ranks).all_runs(["e"]))
    project(tmp_path, ranks | {"share_nodes": of_e})
    (tmp_path / "config/experiments/f.yaml").write_text(json.dumps(ranks | {"share_nodes": of_f}))
    found = Config(BASE, root=tmp_path).all_runs(["e", "f"])
    assert set(found) == alone
    cluster = Machine(**{"starter": "srun", "gpus_per_node": 4, "exclusive": True} | machine)
    assert {
        run.settings.layout.world_size: run.count_places(cluster) for run in found.values()
    } == places


def with_run(**changes):
    return {**EXPERIMENT, "runs": {**EXPERIMENT["runs"], **changes}}


WRONG = yaml.safe_load(Path(__file__).with_name("wrong_experiments.yaml").read_text())
ROWS = [
    (row, corpus)
    for name, rows in WRONG.items()
    for row in rows
    for corpus in [None, "d"][: 1 + (name == "early")]
]


@pytest.mark.parametrize(
    ("row", "corpus"), ROWS, ids=lambda value: value[0] if isinstance(value, list) else value
)
def test_a_wrong_experiment_is_explained_before_it_is_used(tmp_path, row, corpus):
    key, change, *words = row
    values = {**EXPERIMENT, **change}
    if isinstance(change.get("runs"), dict):
        values["runs"] = EXPERIMENT["runs"] | change["runs"]
    values = {name: value for name, value in values.items() if value != "GONE"}
    with pytest.raises(UserError) as error:
        project(tmp_path, values, corpora={"c": {}, "d": {}}, corpus=corpus).runs("e")
    assert error.value.facts["key"] == key and error.value.facts["file"].endswith("e.yaml")
    assert all(word in str(error.value) for word in words), error.value


def test_benchmarks_alone_have_no_runs_and_follow_another_corpus(tmp_path):
    alone = {
        "question": "?",
        "storage_benchmark": {"corpus": "c", "tokenizer": "t"},
    }
    both = {"question": "?", "runs": {"corpus": "c", "tokenizer": "t"}}
    (tmp_path / "config/experiments").mkdir(parents=True)
    for name, values in (("alone", alone), ("both", both)):
        (tmp_path / f"config/experiments/{name}.yaml").write_text(json.dumps(values))
    values = {
        "experiments": ["alone", "both"],
        "corpora": {name: {"source": {"documents": 9}} for name in "cd"},
        "tokenizers": {
            name: {"kind": "numbers", "vocabulary_size": 99} for name in ("t", "tekken")
        },
    }
    config = Config(values, root=tmp_path)
    assert config.runs("alone") == [] and len(config.runs("both")) == 1
    assert config.table("alone")["runs"] == config.table("alone")["cells"] == []
    assert config.list_corpora(["alone"]) == ["c"]
    assert set(config.relevant_values("alone")["tokenizers"]) == {"t"}
    other = Config(values | {"corpus": "d"}, root=tmp_path)
    assert other.runs("alone") == [] and other.list_corpora(["alone", "both"]) == ["d"]
    (tmp_path / "config/experiments/alone.yaml").write_text(
        json.dumps({**alone, "storage_benchmark": {"corpus": "x"}})
    )
    with pytest.raises(UserError, match="storage_benchmark.corpus"):
        Config(values, root=tmp_path).runs("alone")


def test_renaming_an_experiment_repeats_no_measurement(tmp_path):
    benchmark = {"corpus": "c", "tokenizer": "t"}
    config = project(tmp_path / "a", EXPERIMENT | {"storage_benchmark": benchmark})
    (file,) = config.experiment("e").benchmark_files("e")
    assert config.experiment("e").benchmark_files("renamed") == [file]
    other = project(
        tmp_path / "b", EXPERIMENT | {"storage_benchmark": benchmark | {"settings": {"rounds": 4}}}
    )
    assert other.experiment("e").benchmark_files("e") != [file]


def test_comparisons_name_cells_as_the_table_of_runs_does():
    for scale in SCALES:
        config = configuration.load_config(
            "config/config.yaml", root=ROOT, overrides={"scale": scale}
        )
        for name in config.at_scale:
            table = json.loads(canonical_json(config.table(name)))  # as `ingest` reads it
            cells = {format_cell(run["cell"]) for run in table["runs"]}
            compared = {
                comparison[side] for comparison in table["primary"] or () for side in ("of", "over")
            }
            assert compared <= cells and cells <= set(table["cell_repeats"]), (scale, name)
            assert table["primary"] is not None or not cells, (scale, name)


def test_changes_of_a_preset_are_validated_values(tmp_path):
    """YAML reads 1e6 as text; 10000 and 10000.0 are one run."""
    one = project(
        tmp_path / "a", with_run(model={"preset": "llama-micro", "rope_theta": "1e6"})
    ).runs("e")
    two = project(
        tmp_path / "b", with_run(model={"preset": "llama-micro", "rope_theta": 1000000})
    ).runs("e")
    assert [r.run_id for r in one] == [r.run_id for r in two]
    assert one[0].settings.model.rope_theta == 1e6 and isinstance(
        one[0].settings.model.rope_theta, float
    )


def test_a_tokenizer_is_what_it_was_learnt_from_not_what_that_is_called(tmp_path):
    renamed = {
        "corpora": {"d": {}},
        "tokenizers": {"t": {"kind": "bpe", "corpus": "d", "vocabulary_size": 300}},
    }
    other = {"corpora": {"c": {"source": {"packages": ["numpy"]}}}}
    base = project(tmp_path / "a")
    ids = [r.run_id for r in base.runs("e")]
    assert [
        r.run_id for r in project(tmp_path / "b", with_run(corpus="d"), **renamed).runs("e")
    ] == ids
    assert [r.run_id for r in project(tmp_path / "c", **other).runs("e")] != ids
    more = {**BASE["tokenizers"], "unused": {"kind": "tekken"}}
    assert base.relevant_values("e") == project(tmp_path / "d", tokenizers=more).relevant_values(
        "e"
    )


@pytest.mark.parametrize(
    ("factor", "levels", "ranks", "words"),
    [("data", [6, 5], 4, "use 4 or 6"), ("tensor", [4], 2, "span nodes of 2 ranks: tensor 2 fits")],
)
def test_layouts_are_held_against_the_nodes_of_the_machine(tmp_path, factor, levels, ranks, words):
    shape = {"layers": 2, "heads": 4, "key_value_heads": 4}
    experiment = {**with_run(global_batch=12, model=shape), "factors": {f"layout.{factor}": levels}}
    assert project(tmp_path / "a", experiment).runs("e")
    (tmp_path / "m.toml").write_text(f"gpus_per_node = {ranks}\n")
    with pytest.raises(UserError, match=words):
        project(tmp_path / "b", experiment, machine=str(tmp_path / "m.toml")).runs("e")


def on_corpus(name, **source):
    values = read_yaml(ROOT / "config/config.yaml")
    added = {"corpora": {**values["corpora"], name: {"source": source}}} if source else {}
    return Config(values | {"corpus": name} | added, root=ROOT)


def test_the_corpus_of_the_configuration_replaces_that_of_an_experiment_and_of_its_learnt_tokenizers():
    config = on_corpus("mine", files="mine/*.parquet")
    plain = Config(read_yaml(ROOT / "config/config.yaml"), root=ROOT)
    assert config.list_corpora(["demo"]) == ["mine"]
    (used,) = {run.settings.tokenizer for run in config.runs("demo")}
    (own,) = {run.settings.tokenizer for run in plain.runs("demo")}
    assert (used.name, used.corpus, used.learnt_from) == (
        "bpe-4096-mine",
        "mine",
        config.corpora["mine"],
    )
    assert (used.kind, used.vocabulary_size) == (
        own.kind,
        own.vocabulary_size,
    ) and own.name == "bpe-4096"
    assert config.tokenizers["bpe-4096"] == own, (
        "it stays what it is for other configurations in the same folder"
    )
    assert not {r.run_id for r in config.runs("demo")} & {r.run_id for r in plain.runs("demo")}
    with pytest.raises(UserError, match="unknown corpus 'dumy'"):
        on_corpus("dumy")


def test_a_run_table_is_the_same_from_the_configuration_that_is_passed_to_its_rule():
    config = on_corpus("mine", files="mine/*.parquet")
    again = Config(json.loads(canonical_json(config.relevant_values("demo"))), root=ROOT)
    assert again.table("demo") == config.table("demo")


GRID = {
    **EXPERIMENT,
    "factors": {"approach": ["padded", "packed"], "layout.data, global_batch": [[1, 8], [2, 16]]},
    "repeats": 1,
}
PACKED = {"of": {"approach": "packed"}, "over": {"approach": "padded"}, "at": {"layout.data": 1}}
LARGER = {"of": {"layout.data": 2}, "over": {"layout.data": 1}, "at": {"approach": "packed"}}


def test_cells_of_primary_comparisons_run_more_often_than_others(tmp_path):
    primary = {"primary": [PACKED, LARGER], "primary_repeats": 7}
    config = project(tmp_path / "a", {**GRID, **primary})
    runs = Counter((run.cell["approach"], run.cell["layout.data"]) for run in config.runs("e"))
    assert runs == {("packed", 1): 7, ("padded", 1): 7, ("packed", 2): 7, ("padded", 2): 1}
    assert {run.repeat for run in config.runs("e")} == set(range(7))
    table = config.table("e")
    assert list(table["cell_repeats"].values()) == [7, 1, 7, 7]
    packed, larger = table["primary"]
    assert (packed["names"], packed["factor"]) == (
        ["approach=packed", "approach=padded"],
        "approach",
    )
    assert (
        packed["at"] == "global_batch=8, layout.data=1"
        and packed["quantity"] == "useful_tokens_per_s"
    )
    assert larger["factor"] == "world_size", "a global batch may grow with the world size"
    assert project(tmp_path / "b", GRID).table("e")["primary"] is None


def test_tokenizers_in_factors_and_benchmarks_follow_the_corpus_too(tmp_path):
    experiment = {**EXPERIMENT, "factors": {"tokenizer, log_every": [["t", 1], ["fixed", 2]]}}
    experiment["storage_benchmark"] = {"corpus": "c", "tokenizer": "t"}
    tokenizers = {**BASE["tokenizers"], "fixed": {"kind": "tekken"}}
    config = project(
        tmp_path, experiment, corpus="other", corpora={"c": {}, "other": {}}, tokenizers=tokenizers
    )
    assert {run.settings.tokenizer.name for run in config.runs("e")} == {"t-other", "fixed"}
    assert config.experiment("e").storage_benchmark.tokenizer == "t-other"


def test_experiments_that_cannot_run_on_the_corpus_are_refused_by_name_and_stop_no_other(tmp_path):
    experiments = tmp_path / "experiments"
    shutil.copytree(ROOT / "config/experiments", experiments)
    of_cells = ("factors", "left_out", "primary", "primary_repeats")
    demo = {
        key: value
        for key, value in read_yaml(experiments / "demo.yaml").items()
        if key not in of_cells
    }
    numbered = demo | {"runs": demo["runs"] | {"corpus": "dummy", "tokenizer": "numbers"}}
    compared = demo | {"factors": {"corpus": ["docstrings", "tinystories"]}}
    (experiments / "numbered.yaml").write_text(json.dumps(numbered))
    (experiments / "compared.yaml").write_text(json.dumps(compared))
    values = read_yaml(ROOT / "config/config.yaml") | {"experiments_folder": str(experiments)}
    mine = {"corpus": "mine", "corpora": {"mine": {"source": {"files": "mine/*.parquet"}}}}
    layers = [("config/config.yaml", values), ("mine.yaml", mine)]
    config = Config(merge_settings(values, mine), root=ROOT, layers=layers)
    usable = config.usable(["demo"])
    chosen = config.select_experiments(["all_experiments"])
    assert "demo" in usable
    for name, reason in {
        "translation_data_parallel": "documents of corpus mine are not pairs",
        "numbered": "the tokenizer numbers reads numbers",
        "compared": "the experiment compares corpora",
    }.items():
        assert (
            name not in [*usable, *chosen]
            and name in config.unusable
            and name in config.left_out_note
        )
        with pytest.raises(
            UserError, match=f"the experiment {name} cannot run on the corpus mine"
        ) as error:
            config.usable(["demo", name])
        assert error.value.facts["file"] == "mine.yaml" and error.value.facts["key"] == "corpus"
        assert reason in error.value.facts["reason"]


def test_an_error_names_the_file_that_sets_the_value(tmp_path):
    mine = tmp_path / "mine.yaml"
    for text, key in [
        (
            "corpora: {mine: {source: {files: a.parquet, text_colum: b}}}",
            "corpora.mine.source.text_colum",
        ),
        (
            "corpora: {mine: {source: {files: a.parquet, documents: 3}}}",
            "corpora.mine.source.documents",
        ),
        ("scale: dmeo", "scale"),
        ("corpus: mien", "corpus"),
        ("tokenizers: {t: {kind: bpe, corpus: nope, vocabulary_size: 300}}", "tokenizers.t.corpus"),
        ("corpora: {c: {source: {kind: docstring}}}", "corpora.c.source.kind"),
        ("tokenizers: {t: {kind: bpe}}", "tokenizers.t.corpus"),
        ("tokenizers: {t: {kind: tekken, source: x}}", "tokenizers.t.source"),
        ("experiments: [dmeo]", "experiments"),
    ]:
        mine.write_text(text)
        with pytest.raises(UserError) as error:
            configuration.load_config(root=ROOT, configfiles=[mine])
        assert error.value.facts["file"] == str(mine) and error.value.facts["key"] == key
    with pytest.raises(UserError) as error:
        configuration.load_config(
            root=ROOT, configfiles=[mine], overrides={"experiments": ["demo"], "scale": "dmeo"}
        )
    assert error.value.facts["file"] == "--config"


def test_the_configuration_is_merged_as_snakemake_merges_it(tmp_path):
    first = tmp_path / "first.yaml"
    second = tmp_path / "second.yaml"
    first.write_text(
        "{scale: workstation, corpora: {mine: {source: {files: a.parquet, text_column: a}}}}"
    )
    second.write_text("{corpora: {mine: {source: {text_column: b}}}, experiments: [precision]}")
    config = configuration.load_config(
        root=ROOT, configfiles=[first, second], overrides={"engine": "tokenizers"}
    )
    assert config.corpora["mine"].source.files == ("a.parquet",)
    assert config.corpora["mine"].source.text_column == "b" and "docstrings" in config.corpora
    assert (config.settings.scale, config.settings.experiments) == ("workstation", ("precision",))
    assert config.settings.engine == "tokenizers"
    config = configuration.load_config(root=ROOT, configfiles=[first], profile="alps")
    assert config.settings.scale == "alps", (
        "a profile's config: is Snakemake's --config, and wins over files"
    )
    for word in ("cuda:1", "tpu", "", 1, True):
        with pytest.raises(UserError) as error:
            Config(BASE | {"device": word}, root=tmp_path)
        assert error.value.facts["key"] == "device"


@pytest.mark.parametrize(
    ("files", "given", "experiments", "name"),
    [
        ([], {}, (), ""),
        (
            [],
            {"scale": "demo", "experiments": "demo", "engine": "tokenizers", "bucket": "s3://b/p"},
            (),
            "",
        ),
        ([], {}, ["demo"], ""),
        ([], {}, ["storage"], "-experiments=storage"),
        ([], {"experiments": "storage"}, (), "-experiments=storage"),
        ([], {"experiments": ["demo", "storage"]}, (), "-experiments=demo+storage"),
        (
            [],
            {"scale": "alps", "corpus": "grammar"},
            ["all_experiments"],
            "-scale=alps,experiments=all_experiments,corpus=grammar",
        ),
        (["mine.yaml"], {}, (), "-mine"),
        (["mine.yaml"], {"scale": "alps"}, (), "-mine"),
        (["mine.yaml"], {"scale": "demo"}, ["storage"], "-mine,scale=demo,experiments=storage"),
        (["a/mine.yaml"], {}, (), "-a+mine"),
        (["a.yaml", "mine.yaml"], {}, (), "-a,mine"),
        (["a,mine.yaml"], {}, (), "-a%2Cmine"),
        (["{my} config.yml"], {}, (), "-%7Bmy%7D%20config.yml"),
    ],
)
def test_each_choice_of_what_is_reported_has_a_report_of_its_own(
    tmp_path, files, given, experiments, name
):
    shutil.copytree(ROOT / "config", tmp_path / "config")
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("scale: alps" if "mine" in file else "{}")
    config = configuration.load_config(root=tmp_path, configfiles=files, overrides=given)
    assert config.report_folder(experiments) == f"results/report{name}"


def test_reports_of_many_experiments_and_of_other_corpora_have_names_that_differ():
    names = set()
    for documents in (None, 3, 4):
        given = (
            {"corpora": {"docstrings": {"source": {"maximum_documents": documents}}}}
            if documents
            else {}
        )
        config = configuration.load_config(root=ROOT, overrides=given)
        names |= {
            config.report_folder(chosen)
            for chosen in (list(config.available), list(config.available)[1:])
        }
    assert len(names) == 6 and max(map(len, names)) < 150


@pytest.mark.parametrize(
    "word, device", [("cuda", "auto"), ("gpu", "auto"), ("auto", "auto"), ("cpu", "cpu")]
)
def test_a_device_has_several_names_and_one_value_in_ids(tmp_path, word, device):
    (tmp_path / "config/experiments").mkdir(parents=True)
    ids = {}
    for name, given in {
        "stated": word,
        "value": device,
        "other": "cpu" if device == "auto" else "auto",
    }.items():
        values = EXPERIMENT | {"runs": EXPERIMENT["runs"] | {"device": given}}
        (tmp_path / f"config/experiments/{name}.yaml").write_text(json.dumps(values))
        config = Config(BASE | {"experiments": [name]}, root=tmp_path)
        ids[name] = [run.run_id for run in config.runs(name)]
        chosen = Config(BASE | {"experiments": [name], "device": word}, root=tmp_path).runs(name)
        assert {run.settings.device for run in chosen} == {device} and [
            run.run_id for run in chosen
        ] == ids["stated"]
    assert ids["stated"] == ids["value"] != ids["other"]
