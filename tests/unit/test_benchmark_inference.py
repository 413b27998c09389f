"""The inference benchmark: equal texts with a cache and without, what it records, and what it
refuses.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.corpora import make_corpus, make_tokenizer
from tests.unit.test_evaluation_generation import stored
from tests.unit.test_models_convert import LENGTH, SHAPES
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_record
from tokenscale.benchmark import inference
from tokenscale.cli.main import main
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.settings.benchmarks import InferenceBenchmarkSettings, SamplingSettings

SAMPLING = (SamplingSettings(), SamplingSettings(temperature=1.0, top_p=0.9, seed=5))
SHORT = InferenceBenchmarkSettings(
    prompts=("once upon a", "<script>"),
    sampling=SAMPLING,
    sample_tokens=6,
    prompt_tokens=(4,),
    new_tokens=(3, 8),
    batches=(1, 2),
    rounds=2,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = [f"once upon a time, {i} words stood in a row" for i in range(40)]
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"), texts)
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), corpus, 290)


def run_of(folder, tokenizer, name="llama", **options):
    shape = replace(
        SHAPES[name], name=name, vocabulary_size=load_tokenizer(tokenizer).vocabulary_size
    )
    stored(folder / "checkpoints/final", shape, tokenizer, **options)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("runs")
    return [run_of(folder / name, tokenizer, name) for name in ("llama", "gpt2")]


@pytest.fixture(scope="module")
def result(runs, tmp_path_factory):
    output = tmp_path_factory.mktemp("bench") / "bench.json"
    made = inference.measure(SHORT, runs, output)
    assert read_record(output, "benchmark") == json.loads(json.dumps(made))
    return made


def test_every_cell_is_written_with_the_cache_of_its_formula_and_without_in_every_round(result):
    models = {model["of_run"]: model for model in result["models"]}
    assert models["llama"]["key_value_heads"] < models["gpt2"]["key_value_heads"]
    cells = [
        (r["of_run"], r["batch"], r["new_tokens"], r["cached"], r["round"])
        for r in result["records"]
    ]
    assert len(cells) == len(set(cells)) == 2 * 2 * 2 * 2 * 2
    first = cells[: len(cells) // 2]
    second = cells[len(cells) // 2 :]
    assert {c[4] for c in first} == {0} and [c[:4] for c in first] != [c[:4] for c in second]
    for record in result["records"]:
        prompt, *decoded = record["parts"]
        assert (prompt["part"], prompt["tokens"], prompt["position"]) == ("prompt", 4, 0)
        assert sum(part["tokens"] for part in decoded) == record["new_tokens"] - 1
        assert decoded[0]["position"] == 5 and all(part["seconds"] > 0 for part in record["parts"])
        assert (record["rows_equal"], record["first_difference"]) == (record["batch"], None)
        m = models[record["of_run"]]
        numbers = (
            2
            * m["layers"]
            * m["key_value_heads"]
            * m["head_dimension"]
            * (4 + record["new_tokens"])
        )
        assert record["cache_bytes"] == (record["batch"] * numbers * 4 if record["cached"] else 0)


def test_answers_are_those_of_the_verb_and_say_how_they_were_chosen(result, runs, capsys):
    assert len(result["generations"]) == 2 * 2 * 2
    answer = next(a for a in result["generations"] if a["temperature"] == 1 and a["number"] == 1)
    assert (answer["prompt"], answer["top_p"], answer["seed"]) == ("<script>", 0.9, 6)
    argv = [
        "generate",
        "--checkpoint",
        str(runs[0] / "checkpoints/final"),
        "--prompt",
        "<script>",
        "--device",
        "cpu",
    ]
    assert (
        main(
            [*argv, "--max-new-tokens", "6", "--temperature", "1", "--top-p", "0.9", "--seed", "6"]
        )
        == 0
    )
    assert capsys.readouterr().out == f"<script>{answer['text']}\n"
    assert {a["same_uncached"] for a in result["generations"]} == {True}


def test_what_was_measured_is_named(result, runs, tmp_path):
    assert all(len(m["checkpoint_sha256"]) == 64 and m["model_step"] == 7 for m in result["models"])
    text = inference.format_table(result)
    assert "llama" in text and "equal" in text and "differ" not in text and "'<script>'" in text
    made = inference.measure(
        replace(SHORT, bf16=True, rounds=1, batches=(1,)), runs[:1], tmp_path / "out.json"
    )
    assert (made["models"][0]["dtype"], made["models"][0]["number_bytes"]) == ("bfloat16", 2)


def test_no_eos_ends_a_timed_text(runs):
    writer = inference._open_writer(runs[0], SHORT)
    (tokens,) = writer.write((1, 4, 8), cached=True)
    ends = SimpleNamespace(bos_id=writer.engine.bos_id, eos_id=tokens[0], vocabulary_size=290)
    assert (
        replace(writer, engine=ends).write((1, 4, 8), cached=True) == [tokens] and len(tokens) == 8
    )


def test_a_text_that_differs_is_said_and_gives_no_speed_up(runs, tmp_path, monkeypatch):
    right = inference.generate_rows

    def wrong(*arguments, cached, **options):
        found = right(*arguments, cached=cached, **options)
        if not cached and options["max_new_tokens"] == 8:
            found[-1][5] ^= 1
        return found

    monkeypatch.setattr(inference, "generate_rows", wrong)
    made = inference.measure(
        replace(SHORT, batches=(2,), rounds=1), runs[:1], tmp_path / "out.json"
    )
    told = {
        (r["new_tokens"], r["cached"]): (r["rows_equal"], r["first_difference"])
        for r in made["records"]
    }
    assert told == {
        (3, True): (2, None),
        (3, False): (2, None),
        (8, True): (2, None),
        (8, False): (1, 9),
    }
    lines = inference.format_table(made).splitlines()
    assert [line.split()[-1] for line in lines[1:3]] == ["equal", "differ"] and " – " in lines[2]


def test_what_a_model_cannot_write_is_said(runs, tmp_path, tokenizer, capsys):
    output = tmp_path / "out.json"
    for changes, words in (
        ({"prompt_tokens": (LENGTH,)}, "exceed the model"),
        ({"prompts": ("a " * 60,)}, "no room"),
    ):
        with pytest.raises(UserError, match=words):
            inference.measure(replace(SHORT, **changes), runs[:1], output)
    masked = run_of(tmp_path / "masked", tokenizer, objective="masked")
    argv = ["benchmark", "inference", "--output", str(output), "--run"]
    assert main([*argv, str(masked)]) == 2 and "cannot generate text" in capsys.readouterr().err
    assert main([*argv, str(tmp_path / "gone")]) == 2
    said = capsys.readouterr().err
    assert (
        "the run's weights are missing" in said
        and f"snakemake -f {tmp_path}/gone/done.json" in said
    )
    assert not output.exists()
