"""Conversion of the decoder's weights to and from the library `transformers`.

Read: the model types llama, mistral, qwen2, qwen3 and gpt2. Written: llama, qwen2, qwen3 and gpt2, the first that fits.

Pure functions on weights by name and plain configuration values: the library itself is not needed.

Nothing is computed: matrices are renamed, GPT-2's transposed (its Conv1D holds [in, out]) and its query, key and value
joined. So a way there and back gives the same bits.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokenscale.base.errors import UserError, few
from tokenscale.settings.model import ModelSettings
from tokenscale.train.models.decoder import LLAMA3, rotary_frequencies

Weights = dict[str, Tensor]

#: `rope_scaling` of the config.json of Llama 3.1 and 3.2, but for its factor
ROPE_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": LLAMA3["low_turns"],
    "high_freq_factor": LLAMA3["high_turns"],
    "original_max_position_embeddings": LLAMA3["original_positions"],
}
_ROTARY = {"norm": ("rms",), "positions": ("rotary",), "activation": ("swiglu",)}
#: the values of each setting that a model type can express; a shape is written as the first type that fits
FAMILIES: dict[str, dict[str, tuple]] = {
    "llama": _ROTARY | {"query_key_norm": (False,), "attention_biases": (None, "all")},
    "qwen3": _ROTARY | {"query_key_norm": (True,), "biases": (False,), "attention_biases": (None, "all")},
    "qwen2": _ROTARY | {"query_key_norm": (False,), "biases": (False,), "attention_biases": ("inputs",)},
    "gpt2": {
        "norm": ("layer",),
        "positions": ("learned",),
        "activation": ("gelu",),
        "biases": (True,),
        "query_key_norm": (False,),
        "head_dim": (None,),
    },
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
#: name in a block of ours → name in a layer of theirs, with .weight and .bias
LLAMA_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
HEAD_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
LLAMA = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
GPT2_LAYER = {
    "attention_norm": "ln_1",
    "attention.output": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}
GPT2 = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
#: GPT-2 holds these three side by side in one matrix
JOINED, PARTS = "attn.c_attn", ("attention.query", "attention.key", "attention.value")
#: the library's own defaults are ids of its tokenizers
SPECIAL_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def family(shape: ModelSettings) -> str:
    """Return the model type of the library that has this shape. Raises UserError where none has."""
    if shape.transformers is not None:
        raise UserError(
            "the model is one of transformers already.",
            model=f"{shape.name} ({shape.transformers})",
            expected="a decoder of this project",
            next="its weights have the library's own names, behind `model.`",
        )
    wrong = {}
    for name, facts in FAMILIES.items():
        wrong[name] = [
            f"{field} {_show(getattr(shape, field))} for {' or '.join(map(_show, allowed))}"
            for field, allowed in facts.items()
            if getattr(shape, field) not in allowed
        ]
        if name == "gpt2" and shape.key_value_heads != shape.heads:
            wrong[name].append(f"key_value_heads {shape.key_value_heads} for {shape.heads}")
        if not wrong[name]:
            return name
    raise UserError(
        "transformers has no model of this shape.",
        model=shape.name,
        **{name: "has " + ", ".join(reasons) for name, reasons in wrong.items()},
        next="train the shape of a preset: its name names the family",
    )


def _show(value: Any) -> str:
    return "none" if value is None else str(value).lower()


def to_hf(shape: ModelSettings, weights: Weights, sequence_length: int) -> tuple[dict[str, Any], Weights]:
    """Return (the values of config.json, weights by the library's names) of a decoder's named parameters.

    `sequence_length` is how many positions the configuration states where they are not counted (rotary ones). Raises
    UserError for a shape that the library does not support, and for missing, unknown or wrongly sized weights.
    """
    kind = family(shape)
    renamed = _names(shape, kind)
    if kind != "gpt2":
        expected = set(renamed)
        _check_names(expected, weights, "the decoder")
        found = {theirs: weights[ours] for ours, theirs in renamed.items()}
        return _llama_config(shape, kind, sequence_length), found
    joined = {f"{layer}{part}.{w}" for layer, _ in _layers(shape, kind) for part in PARTS for w in ("weight", "bias")}
    _check_names(set(renamed) | joined, weights, "the decoder")
    found = {theirs: _turned(theirs, weights[ours]) for ours, theirs in renamed.items()}
    for ours, theirs in _layers(shape, kind):
        for suffix in ("weight", "bias"):
            parts = [weights[f"{ours}{part}.{suffix}"] for part in PARTS]
            name = f"{theirs}{JOINED}.{suffix}"
            found[name] = _turned(name, torch.cat(parts))
    return _gpt2_config(shape), found


def from_hf(config: dict[str, Any], weights: Weights) -> tuple[ModelSettings, Weights]:
    """Return (shape, weights by the decoder's names) of a library model, from its config.json and its weights.

    The base model alone, whose names have no prefix, and files of before 2023, which hold constants beside the weights,
    are read as the library does. Ends that the configuration ties and the file holds as two different matrices stay
    two. Raises UserError for a type that is not among `ARCHITECTURES`, for a setting that the decoder does not have,
    and for weights that are missing or unknown.
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise UserError(
            f"weights of the model type {kind!r} are not read.",
            expected=", ".join(ARCHITECTURES),
            next="convert one of these",
        )
    shape = _gpt2_shape(config) if kind == "gpt2" else _llama_shape(config, kind)
    ends = GPT2 if kind == "gpt2" else LLAMA
    prefix, head = ends["norm"].partition(".")[0] + ".", f"{ends['head']}.weight"
    if not any(name.startswith(prefix) for name in weights):
        weights = {name if name == head else prefix + name: w for name, w in weights.items()}
    weights = {name: w for name, w in weights.items() if not _is_constant(name, w, shape)}
    if shape.tied_embeddings and head in weights:
        tied = weights.setdefault(f"{ends['embedding']}.weight", weights[head])
        if torch.equal(tied, weights[head]):
            del weights[head]
        else:
            shape = replace(shape, tied_embeddings=False)
    renamed = _names(shape, kind)
    expected = set(renamed.values())
    if kind == "gpt2":
        expected |= {f"{layer}{JOINED}.{w}" for _, layer in _layers(shape, kind) for w in ("weight", "bias")}
    _check_names(expected, weights, f"the {kind} model")
    found = {ours: _turned(theirs, weights[theirs]) for ours, theirs in renamed.items()}
    if kind == "gpt2":
        for ours, theirs in _layers(shape, kind):
            for suffix in ("weight", "bias"):
                whole = _turned(f"{theirs}{JOINED}.{suffix}", weights[f"{theirs}{JOINED}.{suffix}"])
                parts = whole.chunk(3)
                found |= {f"{ours}{part}.{suffix}": p.contiguous() for part, p in zip(PARTS, parts, strict=True)}
    return shape, found


def _is_constant(name: str, values: Tensor, shape: ModelSettings) -> bool:
    """Return whether a tensor holds what the decoder computes itself, as files of before 2023 do: GPT-2's causal mask
    (its value for masked scores is any large negative number), and rotary frequencies.
    """
    if name.endswith(".attn.masked_bias"):
        return values.numel() == 1 and values.item() <= -1e4
    if name.endswith(".attn.bias"):
        square = values.dim() >= 2 and values.shape[-1] == values.shape[-2]
        return square and torch.equal(values, torch.ones_like(values).tril())
    if name.endswith(".rotary_emb.inv_freq"):
        expected = rotary_frequencies(shape)
        return values.shape == expected.shape and torch.allclose(values.double(), expected, rtol=1e-2, atol=0)
    return False


# ------------------------------------------------------------------------------------------------------------- names


def _layers(shape: ModelSettings, kind: str) -> list[tuple[str, str]]:
    prefix = "transformer.h" if kind == "gpt2" else "model.layers"
    return [(f"blocks.{n}.", f"{prefix}.{n}.") for n in range(shape.layers)]


def _names(shape: ModelSettings, kind: str) -> dict[str, str]:
    """Return our name → the library's, for every weight that both have as one tensor."""
    layer, whole = (GPT2_LAYER, GPT2) if kind == "gpt2" else (LLAMA_LAYER, LLAMA)
    if shape.query_key_norm:
        layer = layer | HEAD_NORMS
    pairs = [(ours, theirs) for ours, theirs in whole.items() if not (ours == "head" and shape.tied_embeddings)]
    pairs += [(a + ours, b + theirs) for a, b in _layers(shape, kind) for ours, theirs in layer.items()]
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in pairs}
    return names | {f"{ours}.bias": f"{theirs}.bias" for ours, theirs in pairs if _has_bias(shape, ours)}


def _has_bias(shape: ModelSettings, ours: str) -> bool:
    module = ours.rsplit(".", 1)[-1]
    if module.endswith("norm"):
        return shape.norm == "layer" and shape.biases
    return module not in ("embedding", "positions", "head") and shape.has_bias(module)


def _turned(name: str, weight: Tensor) -> Tensor:
    """Transpose the matrices of GPT-2's linear layers; everything else stays as it is."""
    linear = name.endswith((f"{JOINED}.weight", ".c_proj.weight", ".c_fc.weight"))
    return weight.t().contiguous() if linear else weight


def _check_names(expected: set[str], weights: Iterable[str], where: str) -> None:
    missing, unknown = sorted(expected - set(weights)), sorted(set(weights) - expected)
    if missing or unknown:
        raise UserError(
            f"these are not the weights of {where}.",
            missing=few(missing) or None,
            unknown=few(unknown) or None,
            next="compare the shape that is stated with the one of the weights",
        )


# ---------------------------------------------------------------------------------------------------- configurations


def _llama_config(shape: ModelSettings, kind: str, sequence_length: int) -> dict[str, Any]:
    """Return the keys that published configurations have; versions 4 and 5 of the library read them."""
    scaling = ROPE_SCALING | {"factor": shape.rope_factor} if shape.rope_scaling == "llama3" else None
    biases = {"attention_bias": shape.has_bias("output"), "mlp_bias": shape.biases}
    own = {
        "llama": biases,
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"attention_bias": shape.has_bias("output"), "use_sliding_window": False},
    }
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": shape.vocabulary_size,
        "hidden_size": shape.dimension,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head_dimension,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072 if scaling else sequence_length,
        "initializer_range": shape.initial_deviation,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        **own[kind],
        "attention_dropout": shape.dropout,
        "tie_word_embeddings": shape.tied_embeddings,
        **SPECIAL_IDS,
    }


def _gpt2_config(shape: ModelSettings) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": shape.vocabulary_size,
        "n_positions": shape.maximum_positions,
        "n_embd": shape.dimension,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": shape.hidden,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": shape.norm_epsilon,
        "initializer_range": shape.initial_deviation,
        "embd_pdrop": shape.dropout,
        "attn_pdrop": shape.dropout,
        "resid_pdrop": shape.dropout,
        "tie_word_embeddings": shape.tied_embeddings,
        **SPECIAL_IDS,
    }


def _llama_shape(config: dict[str, Any], kind: str) -> ModelSettings:
    """Return the shape of a llama, mistral, qwen2 or qwen3 model."""
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        _require(config, key, key in config, "a number")
    rotary = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})  # version 5, or before
    theta = rotary.pop("rope_theta", None) or config.get("rope_theta", 10_000.0)
    scaling: dict[str, Any] = {}
    if rotary.get("rope_type", rotary.get("type", "default")) != "default":
        same = {key: rotary.get(key) for key in ROPE_SCALING} == ROPE_SCALING
        _require(config, "rope_scaling", same, "none, or that of Llama 3.1 and 3.2 with any factor")
        scaling = {"rope_scaling": "llama3", "rope_factor": float(rotary["factor"])}
    whole = rotary.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    _require(config, "partial_rotary_factor", whole == 1.0, "1: all of a head is rotated")
    _require(config, "hidden_act", config.get("hidden_act", "silu") == "silu", "silu")
    window = "sliding_window" if kind == "mistral" else "use_sliding_window"
    without = "null: attention over the whole row; up to the window's length the results are the same"
    _require(config, window, not config.get(window), without)
    layers = set(config.get("layer_types") or ["full_attention"])
    _require(config, "layer_types", layers == {"full_attention"}, "full_attention in every layer")
    attention, feeding = bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))
    _require(config, "mlp_bias", attention or not feeding, "false, as attention_bias")
    biases: dict[str, Any] = {"biases": attention and feeding}
    if kind == "qwen2" or attention and not feeding:
        biases["attention_biases"] = "inputs" if kind == "qwen2" else "all"
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or (128 if kind == "qwen3" else config["hidden_size"] // heads)
    return ModelSettings(
        name=kind,
        dimension=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=None if width * heads == config["hidden_size"] else width,
        hidden=config["intermediate_size"],
        vocabulary_size=config["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        rope_theta=float(theta),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        initial_deviation=config.get("initializer_range", 0.02),
        query_key_norm=kind == "qwen3",
        dropout=config.get("attention_dropout", 0.0),
        **scaling,
        **biases,
    )


def _gpt2_shape(config: dict[str, Any]) -> ModelSettings:
    activation = config.get("activation_function", "gelu_new")
    _require(config, "activation_function", activation in ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    _require(config, "scale_attn_weights", config.get("scale_attn_weights", True), "true")
    by_layer = config.get("scale_attn_by_inverse_layer_idx", False)
    _require(config, "scale_attn_by_inverse_layer_idx", not by_layer, "false")
    dropouts = {config.get(key, 0.1) for key in ("embd_pdrop", "attn_pdrop", "resid_pdrop")}
    _require(config, "resid_pdrop", len(dropouts) == 1, "the same as embd_pdrop and attn_pdrop")
    return ModelSettings(
        name="gpt2",
        dimension=config["n_embd"],
        layers=config["n_layer"],
        heads=config["n_head"],
        key_value_heads=config["n_head"],
        hidden=config.get("n_inner") or 4 * config["n_embd"],
        vocabulary_size=config["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        norm_epsilon=config.get("layer_norm_epsilon", 1e-5),
        initial_deviation=config.get("initializer_range", 0.02),
        maximum_positions=config["n_positions"],
        dropout=dropouts.pop(),
        **{field: allowed[0] for field, allowed in FAMILIES["gpt2"].items()},
    )


def _require(config: dict[str, Any], key: str, holds: bool, expected: str) -> None:
    if not holds:
        raise UserError(
            "the model has a setting that the decoder of this project does not support.",
            key=key,
            found=config.get(key),
            expected=expected,
            next="use it as it is: `model.transformers`",
        )
