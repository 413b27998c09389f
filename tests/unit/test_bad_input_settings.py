"""Configurations of careless and of ill-meaning hands: one message with file and key, and never a
stack trace.

Beside them those of test_config.py and test_settings.py, which are of mistakes.
"""

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.refusals import refused
from tests.unit.test_config import BASE, EXPERIMENT, project, with_run
from tokenscale.base.errors import UserError
from tokenscale.runs.launch import start
from tokenscale.runs.launch.start import Launch
from tokenscale.settings import machine
from tokenscale.settings.claims import load_claims
from tokenscale.settings.config import Config
from tokenscale.settings.data import CorpusSettings, TokenizerSettings
from tokenscale.settings.machine import Machine
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import from_json
from tokenscale.settings.registry import ALIASES, FIGURES
from tokenscale.settings.run import RunSettings
from tokenscale.settings.yaml_files import read_yaml

YAML = {
    "deep list": "[" * 1200 + "]" * 1200,
    "deep mapping": "{a: " * 1200 + "1" + "}" * 1200,
    "contains itself": "corpora: &x\n  c: *x\n",
    "code": "scale: !!python/object/apply:os.system ['true']",
    "many digits": "scale: " + "9" * 5000,
    "a key that is a list": "? [a]\n: 1\n",
    "NUL": "scale: \0",
    "two documents": "a: 1\n---\nb: 2\n",
    "UTF-16": "scale: demo".encode("utf-16"),
    "surrogates": 'question: "\\ud800"',
    "surrogates in a key": '"\\ud800": 1',
    "surrogates in a list": 'a: [{b: "x\\udfffy"}]',
}


@pytest.mark.parametrize("text", YAML.values(), ids=YAML)
def test_a_file_that_is_no_configuration_is_refused_by_name(tmp_path, capsys, text):
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    assert str(path) in refused(capsys, ["check", "--config", path], untouched=tmp_path)


#: YAML → what is read; None: refused by key, because it is read as another value or JSON cannot
#: hold it
SCALARS = {
    **dict.fromkeys(["0100", "-010", "000", "1:30", "1:30:00", "1:30.5", "!!int '0100'"]),
    **dict.fromkeys(
        [".inf", "-.INF", ".nan", "2024-01-01", "2001-12-14t21:59:43.10-05:00", "!!set {a}"]
    ),
    **dict.fromkeys(
        ["!!binary aGk=", "!!omap [a: 1]", "!mine 1", "!!int x", "!!bool x", "!!timestamp x"]
    ),
    **dict.fromkeys(["2020-13-45", "=", "{1: 2}", "{0100: 2}", "{null: 2}"]),
    "'0100'": "0100",
    "100": 100,
    "1_000": 1000,
    "0x10": 16,
    "010.5": 10.5,
    "-0.5": -0.5,
    "0": 0,
    "{<<: {a: 1}, b: 2}": {"a": 1, "b": 2},
}


@pytest.mark.parametrize("text", SCALARS)
@pytest.mark.parametrize(
    ("place", "key"), [("k: {}", "k"), ("a: {{k: {}}}", "a.k"), ("a: [1, {}]", "a.1")]
)
def test_a_value_is_read_as_it_is_written_or_refused_by_key(tmp_path, text, place, key):
    path = tmp_path / "a.yaml"
    path.write_text(place.format(text) + ("\nmore: .inf" if SCALARS[text] is None else ""))
    if SCALARS[text] is not None:
        inner = read_yaml(path)
        while inner != SCALARS[text]:
            inner = inner[-1] if isinstance(inner, list) else next(iter(inner.values()))
        return
    with pytest.raises(UserError) as error:
        read_yaml(path)
    assert error.value.facts["key"].startswith(key) and error.value.facts["file"] == str(path)
    assert "more" in error.value.facts["also"], "all such values of a file are listed"


def test_all_problems_of_a_file_are_in_one_message(tmp_path):
    runs = {"corpus": "x", "tokenizer": "y", "model": "z", "sequence_length": -1, "repeat": 1}
    wrong = {
        "figures": ["x"],
        "original": {"studies": ["9"]},
        "factors": {"seed": [1]},
        "primary_repeats": 9,
    }
    wrong |= {"left_out": [{"cells": {"seed": 7}, "reason": "?"}]}
    of_file = {
        "corpora": {"a": {"x": 1}, "c": {"source": {"files": []}}},
        "tokenizers": {"t": {"kind": "bpe"}},
    }
    of_file |= {
        "mixtures": {"m": {}},
        "scale": "dmeo",
        "experiments": ["e", "e", "f"],
        "corpus": "y",
    }
    for experiment, config, keys in (
        ({"runs": runs}, {}, [f"runs.{key}" for key in runs]),
        (
            wrong,
            {},
            ["figures", "original.studies", "factors.seed", "primary_repeats", "left_out.0.cells"],
        ),
        ({"factors": {"approach": ["pakced", "paded", "packed"]}}, {}, ["'pakced'", "'paded'"]),
        (
            {},
            of_file,
            [
                "corpora.a",
                "corpora.c",
                "tokenizers.t",
                "mixtures.m",
                "scale",
                "experiments",
                "corpus",
            ],
        ),
    ):
        with pytest.raises(UserError) as error:
            project(tmp_path, EXPERIMENT | experiment, **config).runs("e")
        assert [key for key in keys if key not in str(error.value)] == []


def test_a_figures_other_name_is_the_figure_and_an_unknown_one_names_the_nearest(tmp_path):
    """A list may name a figure twice, by its own name and by those of source studies; a claim may
    name it, too.
    """
    asked = [
        "efficiency_comparison",
        "loss_over_time",
        "tokens_per_second",
        "scaling_throughput",
        "loss_over_time",
    ]
    config = project(tmp_path, {**EXPERIMENT, "figures": asked})
    assert config.experiment("e").figures == ("scaling_throughput", "loss_over_time")
    assert set(ALIASES.values()) <= set(FIGURES) and not set(ALIASES) & set(FIGURES)
    for near in ("efficiency_comparison", "scaling_throughput"):
        with pytest.raises(UserError, match=repr(near)):
            project(tmp_path, {**EXPERIMENT, "figures": [f"{near}s"]}).runs("e")
        values = read_yaml(Path(__file__).parents[2] / "config/claims.yaml")
        values["claims"] = {"a": next(iter(values["claims"].values())) | {"shown_in": near}}
        file = tmp_path / "claims.yaml"
        file.write_text(json.dumps(values))
        assert load_claims(file).claims["a"].shown_in == "scaling_throughput"
        file.write_text(file.read_text().replace(f'"{near}"', f'"{near}s"'))
        with pytest.raises(UserError, match=repr(near)):
            load_claims(file)


@pytest.mark.parametrize(
    "line",
    [
        "gpu_memory_gib = inf",
        "runtime_margin = nan",
        "runtime_margin = true",
        "environment = {A = 2024-01-01}",
    ],
)
def test_a_machines_values_are_ones_that_json_can_hold_and_its_file_is_one(tmp_path, line):
    (tmp_path / "m.toml").write_text(line, encoding="utf-8-sig")
    with pytest.raises(UserError) as error:
        machine.load_machine(tmp_path / "m.toml")
    assert error.value.facts["key"].split(".")[0] == line.split()[0]
    (tmp_path / "config").mkdir()
    for path in ("a\0b", ".", "config"):
        with pytest.raises(UserError, match="machine file|not a regular file"):
            machine.load_machine(path, tmp_path)


#: what would leave its folder, or mean something to a shell, a terminal, a glob, a regular
#: expression or SLURM
NAMES = [
    *(
        "../c",
        "/c",
        "a/b",
        "..",
        ".",
        "",
        ".hidden",
        "-rf",
        "c\0",
        "c d",
        "c'",
        'c"',
        "c\n",
        "c\\b",
        "{corpus}",
    ),
    *(
        "c;true",
        "$(true)",
        "`true`",
        "c|d",
        "c&d",
        "c>d",
        "c*",
        "c?",
        "[c]",
        "~",
        "%j",
        "c#d",
        "\x1b[31m",
    ),
    # Cyrillic, full width, steering and hidden characters
    *("é", "с", "ｃ", "c\u202e", "c\u200b", "😀", "c" * 101),
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("section", ["corpora", "tokenizers"])
def test_a_name_that_becomes_a_folder_is_of_plain_letters(tmp_path, section, name):
    values = BASE | {section: {**BASE[section], name: next(iter(BASE[section].values()))}}
    with pytest.raises(UserError) as error:
        Config(values, root=tmp_path)
    assert "letters, digits" in str(error.value) and error.value.facts["key"].startswith(section)
    assert str(error.value).replace("\n", "").isprintable(), "what steers a terminal is not printed"


@pytest.mark.parametrize("name", [name for name in NAMES if name and name != "😀"], ids=ascii)
def test_a_models_label_which_is_part_of_a_runs_folder_is_of_plain_letters(tmp_path, name):
    with pytest.raises(UserError, match="letters, digits") as error:
        project(tmp_path, with_run(model={"preset": "llama-micro", "name": name})).runs("e")
    assert error.value.facts["key"] == "runs.model.name"


OF_FILES = [n for n in NAMES if n and "/" not in n and "\0" not in n and n != "." * len(n)]


@pytest.mark.parametrize("name", [*OF_FILES, "report", "all", "all_experiments"], ids=ascii)
def test_an_experiments_file_which_is_a_target_is_of_plain_letters_and_no_other_target(
    tmp_path, name
):
    project(tmp_path)
    (tmp_path / "config/experiments" / f"{name}.yaml").write_text(json.dumps(EXPERIMENT))
    config = project(tmp_path)
    with pytest.raises(UserError, match="cannot have this name"):
        config.runs(name)
    assert config.usable(["e"]) == ["e"] and name in [
        *config.broken_experiments,
        ".hidden",
        "all_experiments",
    ]


def test_names_of_plain_letters_are_taken(tmp_path):
    Config(
        BASE | {"corpora": {name: {} for name in ("c", "C4.en_v1-2", "0", "c" * 100)}},
        root=project(tmp_path).root,
    )


@pytest.mark.parametrize(
    "change", [{"repeats": 10**9}, {"factors": {f"k{i}": list(range(10)) for i in range(12)}}]
)
def test_more_runs_than_anyone_can_start_are_counted_not_listed(tmp_path, change):
    with pytest.raises(UserError, match="too many runs: [0-9,]*000,000,000"):
        project(tmp_path, {**EXPERIMENT, **change}).runs("e")


OTHER_SCHEMES = [
    "file:///etc/passwd",
    "FILE:/etc/passwd",
    "javascript:alert(1)",
    "data:text/plain,x",
]
OTHER_SCHEMES += ["ftp://host/x.txt", "s3://bucket/x.txt", "gopher://host/x.txt"]


@pytest.mark.parametrize("kind", ["url", "files", "hub", None])
@pytest.mark.parametrize("address", OTHER_SCHEMES)
@pytest.mark.parametrize("option", ["files", "validation_files"])
def test_only_http_is_read_from_elsewhere(tmp_path, kind, address, option):
    if (kind, option) == (None, "files") and address.startswith("s3:"):
        pytest.skip("a source of kind bucket")
    source = {"files": ["x.txt"] if kind != "url" else ["https://host/x.txt"], option: [address]}
    source |= {"kind": kind} if kind else {}
    source |= {"repository": "a/b", "revision": "0" * 40} if kind == "hub" else {}
    with pytest.raises(UserError) as error:
        project(tmp_path, corpora={"c": {"source": source}})
    assert (
        error.value.facts["key"] == f"corpora.c.source.{option}"
        and "http" in error.value.facts["reason"]
    )


def test_an_address_without_a_host_is_refused_and_those_that_only_look_odd_are_taken(tmp_path):
    for address in ("https://", "https:///x.txt", "https://[::1/x.txt", "https://host/a b.txt"):
        with pytest.raises(UserError, match="not a complete address"):
            project(tmp_path, corpora={"c": {"source": {"kind": "url", "files": [address]}}})
    for file in (
        "HTTPS://host/x.txt",
        "https://host:80/a@b.txt",
        "https://host/?q=me@here",
        "a:b.txt",
        "/a//b@c.txt",
    ):
        project(tmp_path, corpora={"c": {"source": {"files": file}}})


SECRET = [
    f"{userinfo}@host/x.txt" for userinfo in ("me:planted", "planted", "me:p@planted", ":planted")
]
SECRET += [
    f"host/x.txt?{q}"
    for q in ("X-Amz-Signature=planted", "a=1&sig=planted%2B&b=2", "TOKEN=planted")
]


@pytest.mark.parametrize("kind", ["url", "files", None])
@pytest.mark.parametrize("address", SECRET)
def test_a_password_or_signature_in_an_address_is_refused_and_not_repeated(tmp_path, kind, address):
    source = {"files": f"https://{address}"} | ({"kind": kind} if kind else {})
    with pytest.raises(UserError) as error:
        project(tmp_path, corpora={"c": {"source": source}})
    assert "host/x.txt" in str(error.value) and "planted" not in str(error.value)


def values(depth_names: list[str]):
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.dates(),
        st.binary(max_size=4),
    )
    scalars |= st.sampled_from(
        ["c", "t", "e", "packed", "demo", "llama-micro", -1, 0, 1, 2**70, 1e300, "../x"]
    )
    keys = st.one_of(
        st.sampled_from(depth_names), st.text(max_size=5), st.integers(-1, 1), st.none()
    )
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=12,
    )


CONFIG_KEYS = [
    "scale",
    "experiments",
    "experiments_folder",
    "machine",
    "budget",
    "corpus",
    "corpora",
    "tokenizers",
]
CONFIG_KEYS += [
    "c",
    "t",
    "source",
    "kind",
    "files",
    "cleaning",
    "vocabulary_size",
    "node_hours",
    "name",
]
EXPERIMENT_KEYS = [
    "question",
    "runs",
    "factors",
    "left_out",
    "repeats",
    "canary",
    "scales",
    "figures",
]
EXPERIMENT_KEYS += [
    "approach",
    "layout",
    "layout.data",
    "model",
    "preset",
    "budget",
    "steps",
    "demo",
    "cells",
    "cell",
]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.dictionaries(
        st.sampled_from(CONFIG_KEYS) | st.text(max_size=4), values(CONFIG_KEYS), max_size=5
    )
)
@example({"corpora": {"c": {"source": {"files": {"a": 1}}}}})
@example({"machine": 5, "corpora": {"c": None}})
@example({"experiments": "e", "tokenizers": {"t": 5}})
def test_any_values_are_a_configuration_or_one_message(tmp_path_factory, found):
    root = tmp_path_factory.mktemp("config")
    try:
        config = Config({**BASE, "experiments": [], **found}, root=root)
    except UserError as error:
        assert error.facts.keys() & {"file", "key"}
    else:
        assert all(
            not Path(name).is_absolute() and Path(name).name == name for name in config.corpora
        )


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    st.dictionaries(
        st.sampled_from(EXPERIMENT_KEYS) | st.text(max_size=4), values(EXPERIMENT_KEYS), max_size=5
    )
)
@example({"runs": {"model": {"preset": "llama-micro", "layers": "x"}}})
@example({"runs": {"resume_from": {"run": [], "step": 1}}})
@example({"factors": {"": [1]}})
@example({"factors": {".": [1], "a..b": [1]}})
@example({"canary": {"cell": {"approach": "packed"}, "every": 1}})
def test_any_values_are_an_experiment_or_one_message(tmp_path_factory, found):
    root = tmp_path_factory.mktemp("experiment")
    folder = root / "config/experiments"
    folder.mkdir(parents=True)
    (folder / "e.yaml").write_text(
        json.dumps({**EXPERIMENT, **found}, default=str), encoding="utf-8"
    )
    try:
        runs = Config(BASE, root=root).runs("e")
    except UserError:
        return
    assert all(Path(run.run_id).name == run.run_id for run in runs)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.text(alphabet=st.characters(codec="utf-8"), max_size=60)
    | st.binary(max_size=60).map(lambda b: b.decode("latin-1"))
)
@example("%YAML 9.9\n---\na: 1")
@example("a: *b")
@example("a: !!float x")
@example("a: !!binary '%%%'")
@example("<<: 5")
@example("a: 1:99:99")
def test_any_text_is_a_mapping_or_one_message(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("yaml") / "a.yaml"
    path.write_bytes(text.encode("utf-8"))
    try:
        assert isinstance(read_yaml(path), dict)
    except UserError as error:
        assert error.facts["file"].partition(", line ")[0] == str(path)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.sampled_from([CorpusSettings, TokenizerSettings, RunSettings, ModelSettings]),
    values(["source", "name", "model", "corpus", "cleaning", "files", "kind", "layout"]),
)
@example(RunSettings, {"model": [1]})
@example(CorpusSettings, {"source": {"files": 5}})
@example(CorpusSettings, {"source": None, "cleaning": []})
@example(RunSettings, {"layout": {"dta": 2}})
@example(RunSettings, {"seed": float("nan")})
def test_any_settings_passed_as_json_are_taken_or_one_message(cls, found):
    for text in (json.dumps(found, default=str), "{", "3", "[]", "[" * 5000):
        try:
            assert isinstance(from_json(cls, text), cls) and text.startswith("{")
        except UserError as error:
            assert "next" in error.facts


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(WORDS)
@example("a b'c\"d;$(true)`true`\n|&*?~#%j\\")
@example("-rf")
def test_any_word_comes_back_out_of_a_printed_command(word):
    folder = Path("results") / word.replace("/", "_") / "run"
    run = RunSettings(resume_from=word)
    launch = Launch(run, Machine(environment={"VARIABLE": word}), folder)
    argv, variables = launch.command(0, {"store": Path(word)})
    assert variables == {"VARIABLE": word}
    assert argv[argv.index("--directory") + 1] == str(folder) and argv[
        argv.index("--store") + 1
    ] == str(Path(word))
    assert RunSettings.from_json(argv[argv.index("--settings") + 1]) == run
    # where the line of variables goes on
    printed = launch.printed({"store": Path(word)}).replace("\\\n", "", 1)
    assert shlex.split(printed) == [f"VARIABLE={word}", *argv]
    srun = Machine(starter="srun", gpus_per_node=4)
    step = start.srun_argv(argv, launch.shape, srun, name=word, outputs=folder, root=Path("/r"))
    assert (
        shlex.split(shlex.join(step)) == step
        and step[-len(argv) :] == argv
        and f"--job-name={word}" in step
    )
