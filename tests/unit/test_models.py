import hashlib
from dataclasses import replace

import pytest
import torch

from tokenscale.base.errors import UserError
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import RunSettings
from tokenscale.train.models.build import build
from tokenscale.train.models.build import initialise as initialise_any
from tokenscale.train.models.decoder import Decoder, initialise, rotary_frequencies

pytestmark = pytest.mark.slow(19)

MICRO = PRESETS["llama-micro"].with_vocabulary(64)
GPT2 = PRESETS["gpt2-micro"].with_vocabulary(64)


def decoder(seed=0, shape=MICRO, **options) -> Decoder:
    model = Decoder(shape, 16, **options)
    initialise(model, seed)
    return model


def test_the_future_changes_the_past_of_an_encoder_alone():
    model = decoder()
    tokens = torch.randint(0, 64, (2, 16))
    changed = tokens.clone()
    changed[:, 10:] = 1
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10])
    assert not torch.allclose(model(tokens)[:, 10:], model(changed)[:, 10:])
    encoder = decoder(causal=False)
    assert not torch.allclose(encoder(tokens)[:, :10], encoder(changed)[:, :10], atol=1e-4)


@pytest.mark.parametrize(
    "name, digest",
    [
        ("llama-micro", "72b4ccfb337bf614"),
        ("llama-tiny", "0f9beb511745a9f2"),
        ("gpt2-micro", "5f610818c16b6cf2"),
    ],
)
def test_initial_weights_stay_what_they_were_with_biases_at_zero_and_norms_at_one(name, digest):
    """Bit for bit, with their names. They changed once, when each rank began to make its own
    part.
    """
    model = Decoder(PRESETS[name].with_vocabulary(300), 32)
    initialise(model, 3)
    found = hashlib.sha256()
    for key, weight in model.named_parameters():
        found.update(key.encode() + weight.detach().numpy().tobytes())
        assert weight.dim() > 1 or (weight == (0 if key.endswith("bias") else 1)).all(), key
    assert found.hexdigest()[:16] == digest


def test_a_table_of_positions_is_as_long_as_the_sequence_unless_stated():
    assert Decoder(GPT2, 16).settings.maximum_positions == 16
    assert Decoder(replace(GPT2, maximum_positions=40), 16).positions.weight.shape == (40, 32)
    with pytest.raises(UserError, match="fewer positions") as error:
        Decoder(replace(GPT2, maximum_positions=8), 16)
    assert {"model", "requested", "next"} <= set(error.value.facts)


@pytest.mark.parametrize("shape", [MICRO, GPT2], ids=["llama", "gpt2"])
def test_dropout_drops_in_training_only(shape):
    model = decoder(shape=replace(shape, dropout=0.5))
    tokens = torch.randint(0, 64, (2, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    torch.testing.assert_close(model(tokens), decoder(shape=shape)(tokens))


def test_casting_to_bf16_rounds_no_angle():
    model = decoder().to(torch.bfloat16)
    rotation = model.rotation(0, 16, torch.device("cpu"))
    assert torch.equal(rotation[0], decoder().rotation(0, 16, torch.device("cpu"))[0])
    assert rotation[0].dtype == torch.float32
    assert model(torch.ones(1, 4, dtype=torch.int64)).dtype == torch.bfloat16


def test_slowed_frequencies_are_those_of_llama_3_2():
    """The library's own formula, in fp32: the angles of position 1 are the frequencies."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    numbers = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = numbers | {
        "rope_type": "llama3",
        "original_max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
    }
    config = LlamaConfig(
        hidden_size=2048,
        num_attention_heads=32,
        max_position_embeddings=131_072,
        rope_parameters=scaling,
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    shape = PRESETS["llama-3.2-1b"]
    slowed = rotary_frequencies(shape)
    torch.testing.assert_close(slowed.float(), expected, rtol=1e-6, atol=1e-9)
    assert not torch.allclose(
        rotary_frequencies(replace(shape, rope_scaling="none")), slowed, rtol=1e-3, atol=1e-9
    )


# -- generation


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny"])
@pytest.mark.parametrize("prompt", [1, 5])
def test_reading_on_from_a_cache_equals_reading_everything(name, prompt):
    """fp32; products of one position run in another order than those of many, hence 1e-5."""
    model = Decoder(PRESETS[name].with_vocabulary(64), 16).eval()
    initialise(model, 0)
    tokens = torch.randint(0, 64, (3, 12))
    cache = model.new_cache(3, 16, torch.device("cpu"))
    with torch.no_grad():
        expected = model.hidden(tokens)
        found = [model.hidden(tokens[:, :prompt], cache=cache)]
        found += [model.hidden(tokens[:, t : t + 1], cache=cache) for t in range(prompt, 12)]
    assert cache.length == 12
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-5, rtol=1e-5)


def test_a_cache_takes_no_more_than_it_has_room_for():
    model = decoder().eval()
    for room, first, second, words in ((4, 4, 1, "room"), (8, 1, 2, "one position")):
        cache = model.new_cache(1, room, torch.device("cpu"))
        model.hidden(torch.ones(1, first, dtype=torch.int64), cache=cache)
        with pytest.raises(ValueError, match=words):
            model.hidden(torch.ones(1, second, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match="built for"):
        model.new_cache(1, 17, torch.device("cpu"))


# -- settings of shapes


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"heads": 3, "key_value_heads": 1}, "heads"),
        ({"key_value_heads": 3}, "key_value_heads"),
        ({"maximum_positions": 64}, "maximum_positions"),
        ({"positions": "learned", "rope_scaling": "llama3"}, "rope_scaling"),
        ({"transformers": "bert", "activation": "gelu"}, "activation"),
        ({"transformers": "bert", "tied_embeddings": True}, "tied_embeddings"),
    ],
    ids=str,
)
def test_fields_that_do_not_fit_together_are_named(changes, field):
    assert ModelSettings().problems() == []
    assert [name for name, _ in ModelSettings(**changes).problems()] == [field]


def test_a_run_that_its_model_cannot_hold_is_told_before_it_starts():
    run = RunSettings(model=PRESETS["gpt2-124m"], sequence_length=1024)
    assert run.problems() == []
    (problem,) = replace(run, sequence_length=2048).problems()
    assert problem == ("model.maximum_positions", "1024 is less than sequence_length 2048")
    (problem,) = RunSettings(
        model=PRESETS["bert-tiny"], objective="masked", attention="flex"
    ).problems()
    assert problem[0] == "attention"


def test_presets_hold_together():
    assert all(shape.problems() == [] and shape.name == name for name, shape in PRESETS.items())


# -- models of transformers


def library_shape(kind, **changes) -> ModelSettings:
    sizes = {
        "dimension": 64,
        "layers": 3,
        "heads": 4,
        "key_value_heads": 4,
        "hidden": 160,
        "vocabulary_size": 300,
    }
    return ModelSettings(**{"name": kind, "transformers": kind} | sizes | changes)


KINDS = [
    *(
        (kind, "masked", 4)
        for kind in ("distilbert", "bert", "roberta", "modernbert", "electra", "albert")
    ),
    *((kind, "causal", 2) for kind in ("llama", "qwen2", "qwen3", "mistral")),
    *((kind, "causal", 4) for kind in ("bert", "opt", "gpt2", "gpt_neox")),
]


@pytest.mark.parametrize("kind, objective, key_value_heads", KINDS, ids=lambda v: str(v))
def test_a_model_of_transformers_computes_what_it_does_there(kind, objective, key_value_heads):
    """Hidden states and head beside each other against the library's forward pass of the same
    weights, at full length, with ids that the library holds to be padding; and the future is seen
    where the objective is masked only.
    """
    model = build(
        library_shape(kind, key_value_heads=key_value_heads), 32, objective=objective, kernel="sdpa"
    ).eval()
    initialise_any(model, 1)
    tokens = torch.randint(2, 300, (2, 32))
    tokens[0, :4] = torch.tensor([0, 1, 2, 0])
    with torch.no_grad():
        found = model(tokens)
        assert torch.equal(found, model.head(model.hidden(tokens)))
        changed = tokens.clone()
        changed[:, 20:] = 7
        assert torch.allclose(model(changed)[:, :20], found[:, :20], atol=1e-5) == (
            objective == "causal"
        )
        model.put_head(model.head)
        positions = {"position_ids": torch.arange(32)[None]} if kind == "roberta" else {}
        expected = model.model(input_ids=tokens, **positions).logits
    assert torch.equal(found, expected) and found.shape == (2, 32, 300)
    assert len(model.blocks) == (0 if kind == "albert" else 3)


@pytest.mark.parametrize(
    "kind, objective", [("distilbert", "masked"), ("gpt2", "causal"), ("modernbert", "masked")]
)
def test_weights_of_a_library_model_follow_from_the_seed(kind, objective):
    def weights(seed, before):
        torch.manual_seed(before)
        model = build(library_shape(kind), 32, objective=objective, kernel="sdpa")
        state = torch.get_rng_state()
        initialise_any(model, seed)
        assert torch.equal(torch.get_rng_state(), state)
        return list(model.parameters())

    a = weights(1, 5)
    b = weights(1, 6)
    c = weights(2, 5)
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    assert not all(torch.equal(p, q) for p, q in zip(a, c, strict=True))
    assert all(0.0 < p.std() < 1 for p in a if p.dim() > 1)


def test_every_id_of_a_library_model_learns_and_its_dropout_and_attention_are_the_settings():
    """BERT's padding id 0 would have no gradient; here 0 is a token like any other."""
    model = build(library_shape("bert", dropout=0.25), 8, objective="masked", kernel="sdpa")
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.25}
    with pytest.raises(UserError, match="own attention"):
        build(library_shape("bert"), 8, objective="masked", kernel="flex")
    initialise_any(model, 0)
    model.hidden(torch.zeros(1, 8, dtype=torch.int64)).square().sum().backward()
    assert model.model.get_input_embeddings().weight.grad[0].abs().sum() > 0


@pytest.mark.parametrize(
    "changes, objective, words",
    [
        ({"transformers": "distilbrt"}, "masked", "did you mean 'distilbert'"),
        ({"transformers": "distilbert"}, "causal", "use `objective: masked`"),
        ({"transformers": "qwen2"}, "masked", "use `objective: causal`"),
        ({"transformers": "vit"}, "causal", "neither a masked nor a causal one"),
        ({"transformers": "gemma2"}, "causal", "changes its logits"),
        ({"transformers": "bloom"}, "causal", "no width to set"),
        ({"transformers": "bart"}, "masked", "an encoder with a decoder"),
        ({"transformers": "qwen2_moe"}, "causal", "mixture of experts"),
        (
            {"transformers": "bert", "key_value_heads": 2},
            "masked",
            "as many key-value heads as heads",
        ),
        ({"transformers": "bert", "maximum_positions": 4}, "masked", "fewer positions"),
    ],
    ids=str,
)
def test_what_a_library_model_cannot_be_is_said(changes, objective, words):
    with pytest.raises(UserError, match=words) as error:
        build(library_shape("bert", **changes), 8, objective=objective, kernel="sdpa")
    assert "next" in error.value.facts


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(
        UserError, match="library transformers, which this environment lacks"
    ) as error:
        build(library_shape("opt"), 8, objective="causal", kernel="sdpa")
    assert "make setup" in error.value.facts["next"]
    decoder()  # its own models need it not
