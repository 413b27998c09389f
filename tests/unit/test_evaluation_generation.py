"""Generated text: with a cache and without, as transformers generates, and drawn as a direct
calculation draws.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.corpora import make_corpus, make_tokenizer
from tests.experiments.test_export import checkpoint_of
from tests.refusals import refused
from tests.unit.test_models_convert import LENGTH, SHAPES, agree, named, ours, theirs
from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, write_json, write_sealed
from tokenscale.cli.generate import generate_texts
from tokenscale.cli.main import main
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.settings.data import TokenizerSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.train.checkpoint_models import open_checkpoint, read_published
from tokenscale.train.evaluation.generation import Sampling, generate, generate_rows, probabilities
from tokenscale.train.models.build import build, initialise
from tokenscale.train.models.convert_hf import to_hf

CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0)
PROMPT = [3, 14, 15, 92, 65]


def made(model, prompt=PROMPT, **changes):
    options = {
        "max_new_tokens": 20,
        "positions": LENGTH,
        "vocabulary_size": 96,
        "stop_id": None,
        "sampling": GREEDY,
        "device": CPU,
    }
    return generate(model, prompt, **(options | changes))


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_is_the_same_with_a_cache_without_one_and_in_transformers(name):
    model = ours(SHAPES[name])
    library = theirs(*to_hf(model.settings, named(model), LENGTH))
    seen = set()
    for prompt in (PROMPT, [7], [1, 2] * 15):
        found = made(model, prompt)
        seen |= set(found)
        assert len(found) == min(20, LENGTH - len(prompt)) > 10
        assert made(model, prompt, cached=False) == found
        expected = library.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=len(found),
            pad_token_id=0,
            eos_token_id=None,
        )
        assert expected[0].tolist() == prompt + found
    assert len(seen) > 5


def test_a_model_of_transformers_generates_without_a_cache():
    shape = replace(PRESETS["bert-tiny"], transformers="gpt2", vocabulary_size=96)
    model = build(shape, LENGTH, objective="causal", kernel="sdpa").eval()
    initialise(model, 0)
    tokens = list(PROMPT)
    for _ in range(10):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert made(model, max_new_tokens=10) == tokens[5:]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_of_a_batch_are_answered_as_alone(cached, temperature):
    model = ours(SHAPES["llama"])
    prompts = [PROMPT, [7, 8, 9, 10, 11], [1, 2, 1, 2, 1]]
    options = {
        "max_new_tokens": 20,
        "positions": LENGTH,
        "vocabulary_size": 96,
        "device": CPU,
        "cached": cached,
    }
    free = generate_rows(
        model, prompts, stop_id=None, sampling=Sampling(temperature, seed=4), **options
    )
    stop = free[1][3]
    heard = []
    assert free[0][19] != stop
    found = generate_rows(
        model,
        prompts,
        stop_id=stop,
        sampling=Sampling(temperature, seed=4),
        on_token=heard.append,
        **options,
    )
    for n, prompt in enumerate(prompts):
        assert free[n] == made(
            model, prompt, sampling=Sampling(temperature, seed=4 + n), cached=cached
        )
        assert found[n] == made(
            model, prompt, sampling=Sampling(temperature, seed=4 + n), cached=cached, stop_id=stop
        )
    assert len(found[1]) <= 4 < len(found[0]) and all(len(tokens) == 3 for tokens in heard)
    assert {tokens[1] for tokens in heard[len(found[1]) :]} <= {stop}
    with pytest.raises(ValueError, match="equally long"):
        generate_rows(model, [[1, 2], [3]], stop_id=None, sampling=GREEDY, **options)


def directly(logits, temperature, top_k, top_p):
    """In NumPy, token by token: keep the likeliest until k of them, or p of what k left, are
    there.
    """
    weights = np.exp((logits - logits.max()) / temperature)
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    kept = order[:top_k] if top_k else order
    left = sum(weights[i] for i in kept)
    held = 0.0
    nucleus = []
    for i in kept:
        if nucleus and held / left >= top_p:
            break
        nucleus.append(i)
        held += weights[i]
    result = np.zeros(len(weights))
    result[nucleus] = weights[nucleus] / held
    return result


@given(
    st.integers(0, 10_000),
    st.integers(1, 40),
    st.sampled_from([0.1, 0.7, 1.0, 2.5]),
    st.integers(0, 45),
    st.sampled_from([1.0, 0.9, 0.5, 0.01]),
)
@settings(max_examples=100, deadline=None)
def test_probabilities_are_those_of_a_direct_calculation(seed, size, temperature, top_k, top_p):
    logits = np.random.default_rng(seed).normal(size=size) * 3
    found = probabilities(torch.from_numpy(logits), Sampling(temperature, top_k, top_p)).numpy()
    np.testing.assert_allclose(
        found, directly(logits, temperature, top_k, top_p), rtol=1e-9, atol=1e-15
    )
    assert found.sum() == pytest.approx(1) and np.count_nonzero(found) >= 1


def test_a_seed_draws_the_same_text_and_another_seed_another():
    model = ours(SHAPES["llama"])
    drawn = [made(model, sampling=Sampling(1.0, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert made(model, sampling=Sampling(1.0, seed=1), cached=False) == drawn[0]
    assert made(model, sampling=Sampling(1.0, top_k=1, seed=5)) == made(model)


def test_draws_are_as_frequent_as_they_are_likely():
    model = ours(SHAPES["llama"])
    with torch.no_grad():
        likely = model(torch.tensor([PROMPT]))[0, -1].double().softmax(-1)
    drawn = generate_rows(
        model,
        [PROMPT] * 400,
        max_new_tokens=1,
        positions=LENGTH,
        vocabulary_size=96,
        stop_id=None,
        sampling=Sampling(1.0, seed=0),
        device=CPU,
    )
    counts = torch.bincount(torch.tensor([token for (token,) in drawn]), minlength=96)
    assert ((counts - 400 * likely).abs() < 5 * (400 * likely * (1 - likely)).sqrt() + 1).all()


def test_it_ends_with_the_stop_and_where_positions_end_and_ids_that_are_no_text_are_never_chosen():
    model = ours(SHAPES["llama"])
    heard = []
    free = made(model)
    stopped = made(model, stop_id=free[7], on_token=heard.append)
    assert stopped == heard == free[: free.index(free[7]) + 1]
    assert (
        len(made(model, max_new_tokens=1000)) == LENGTH - len(PROMPT)
        and made(model, list(range(LENGTH))) == []
    )
    assert max(made(model, vocabulary_size=max(free))) < max(free)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    texts = [f"once upon a time, {i} words é 漢字 stood in a row" for i in range(60)]
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"), texts)
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), corpus, 290)
    size = load_tokenizer(tokenizer).vocabulary_size
    shape = replace(SHAPES["llama"], vocabulary_size=size + 3)  # three embeddings that are no text
    folder = tmp_path_factory.mktemp("run") / "final"
    stored(folder, shape, tokenizer)
    return folder


def stored(folder, shape, tokenizer, **options):
    checkpoint_of(folder, shape, tokenizer=tokenizer, **options)
    write_sealed(folder / "checkpoint.json", read_json(folder / "checkpoint.json") | {"step": 7})


def saved(shape, folder, **options):
    """A model, which the library wrote to a folder."""
    model = ours(shape)
    theirs(*to_hf(model.settings, named(model), LENGTH)).save_pretrained(folder, **options)
    return model


def test_the_verb_streams_what_it_generates(checkpoint, capsys):
    argv = [
        "generate",
        "--checkpoint",
        str(checkpoint),
        "--prompt",
        "Once upon a time,",
        "--max-new-tokens",
        "25",
    ]
    assert main(argv) == 0
    pieces = []
    (text,) = generate_texts(
        checkpoint, argv[4:5], max_new_tokens=25, sampling=GREEDY, on_text=pieces.append
    )
    assert capsys.readouterr().out == "".join(pieces) == argv[4] + text + "\n" and len(pieces) > 5
    drawn = []
    for seed in ("1", "1", "2"):
        assert (
            main([*argv, "--temperature", "1", "--top-k", "50", "--top-p", "0.95", "--seed", seed])
            == 0
        )
        drawn.append(capsys.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]


def test_prompts_of_a_file_are_each_as_alone(checkpoint, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("once\nupon a\n")
    argv = [
        "generate",
        "--checkpoint",
        str(checkpoint),
        "--temperature",
        "1",
        "--max-new-tokens",
        "9",
    ]
    assert main([*argv, "--prompts-file", str(tmp_path / "prompts.txt")]) == 0
    together = capsys.readouterr().out
    for seed, prompt in enumerate(["once", "upon a"]):
        main([*argv, "--prompt", prompt, "--seed", str(seed)])
    assert capsys.readouterr().out == together


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--prompt", "a", "--temperature", "-1"], "--temperature"),
        (["--prompt", "a", "--seed", "18446744073709551616"], "--seed"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["--prompt", "word " * 60], "leaves no room"),
    ],
)
def test_what_cannot_be_generated_is_said(checkpoint, capsys, arguments, words):
    assert words in refused(capsys, ["generate", "--checkpoint", checkpoint, *arguments])


def test_a_masked_model_writes_no_text(tmp_path, checkpoint, capsys):
    stored(
        tmp_path,
        replace(SHAPES["llama"], vocabulary_size=290),
        checkpoint / "tokenizer",
        objective="masked",
    )
    assert "cannot generate text" in refused(
        capsys, ["generate", "--checkpoint", tmp_path, "--prompt", "a"]
    )


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_model_of_transformers_is_read_as_the_library_saved_it(
    tmp_path, checkpoint, capsys, name
):
    tokenizer = checkpoint / "tokenizer"
    shape = replace(SHAPES[name], vocabulary_size=load_tokenizer(tokenizer).vocabulary_size)
    model = saved(shape, tmp_path / "hub", max_shard_size="60kB")
    assert (tmp_path / "hub/model.safetensors.index.json").is_file()
    texts = generate_texts(
        tmp_path / "hub", ["once upon"], max_new_tokens=20, sampling=GREEDY, tokenizer=tokenizer
    )
    loaded = open_checkpoint(tmp_path / "hub", tokenizer=tokenizer)
    assert agree(named(loaded.model), model)
    engine = load_tokenizer(tokenizer)
    ids = [engine.bos_id, *engine.encode_batch(["once upon"])[0].tolist()]
    found = made(model, ids, vocabulary_size=engine.vocabulary_size, stop_id=engine.eos_id)
    assert texts == [engine.decode([i for i in found if i != engine.eos_id])]
    command = ["evaluate", "--checkpoint", tmp_path / "hub", "--tokenizer", tokenizer]
    assert "names no corpus" in refused(capsys, command)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "gemma"}, "weights of the model type 'gemma' are not read"),
        ({"hidden_size": None}, "key +hidden_size"),
        ({"vocab_size": 5}, "more entries than the model's embedding"),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_read_is_refused_by_what_was_found(
    tmp_path, checkpoint, capsys, changes, words
):
    saved(SHAPES["llama"], tmp_path)
    config = (
        read_json(tmp_path / "config.json") | {"rope_theta": 1e4, "rope_parameters": None} | changes
    )
    write_json(
        tmp_path / "config.json", {key: value for key, value in config.items() if value is not None}
    )
    argv = ["--checkpoint", tmp_path, "--tokenizer", checkpoint / "tokenizer", "--prompt", "a"]
    assert re.search(words, refused(capsys, ["generate", *argv]))


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda w: w | {"norm.weight": w["norm.weight"] * torch.nan}, "not finite"),
        (
            lambda w: w | {"norm.weight": w["norm.weight"].to(torch.int8)},
            "weights in int8 are not read",
        ),
        (
            lambda w: w | {"norm.weight": w["norm.weight"][:-1].clone()},
            "are not those of the model",
        ),
        (lambda w: w | {"layers.0.self_attn.q_proj.weight_scale": torch.ones(1)}, "weight_scale"),
        (None, "cannot be read"),
    ],
    ids=["nan", "int8", "short", "scale", "pickled"],
)
def test_weights_that_cannot_be_read_are_refused(tmp_path, checkpoint, spoil, words):
    model = ours(replace(SHAPES["llama-tied"], vocabulary_size=290))
    theirs(*to_hf(model.settings, named(model), LENGTH)).model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if spoil is None:
        file.rename(tmp_path / "pytorch_model.bin")
    else:
        save_file(spoil(load_file(file)), file)
    with pytest.raises(UserError, match=words) as error:
        open_checkpoint(tmp_path, tokenizer=checkpoint / "tokenizer")
    assert error.value.facts["next"]


def test_files_of_a_model_are_chosen_as_the_library_does(tmp_path):
    """One whole file comes before an index; two files that hold a tensor are refused unless it is
    the same.
    """
    model = saved(SHAPES["gpt2"], tmp_path, max_shard_size="60kB")
    first, second, *_ = sorted(tmp_path.glob("model-*"))
    one = load_file(first)
    two = load_file(second)
    name = next(iter(one))
    save_file(two | {name: one[name]}, second)
    assert agree(read_published(tmp_path)[1], model)
    save_file(two | {name: one[name] + 1}, second)
    with pytest.raises(UserError, match="two files"):
        read_published(tmp_path)
    whole = {key: w + 1 for key, w in to_hf(model.settings, named(model), LENGTH)[1].items()}
    save_file(whole, tmp_path / "model.safetensors")
    assert torch.equal(
        read_published(tmp_path)[1]["embedding.weight"], named(model)["embedding.weight"] + 1
    )


@pytest.mark.parametrize(
    "argv", [("generate", "--prompt", "once"), ("evaluate", "--corpus", "a.txt")]
)
def test_text_that_the_tokenizer_loses_is_neither_scored_nor_continued(
    argv, checkpoint, capsys, tmp_path, monkeypatch
):
    """As if the bound were below what any tokenizer loses; shares are measured as for stores."""
    (tmp_path / "a.txt").write_text("once upon a time\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TokenizerSettings, "accepted_loss", -1.0)
    said = refused(capsys, [argv[0], "--checkpoint", checkpoint, *argv[1:]])
    assert "loses 0.0% of this text" in said
    assert "name its folder: --tokenizer" in said
