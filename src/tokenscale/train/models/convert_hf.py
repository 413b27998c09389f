"""Conversion of the decoder's weights to and from the library `transformers`.

Read: the model types llama, mistral, qwen2, qwen3 and gpt2. Written: llama, qwen2, qwen3 and gpt2,
the first that fits.

Pure functions on weights by name and plain configuration values: the library itself is not needed.

Nothing is computed: matrices are renamed, GPT-2's transposed (its Conv1D holds [in, out]) and its
query, key and value joined. So a way there and back gives the same bits.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokenscale.base.errors import UserError, few
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import decode
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
#: the values of each setting that a model type can express; a shape is written as the first type
#: that fits
FAMILIES: dict[str, dict[str, tuple]] = {
    "llama": _ROTARY | {"query_key_norm": (False,), "attention_biases": (None, "all")},
    "qwen3": _ROTARY
    | {"query_key_norm": (True,), "biases": (False,), "attention_biases": (None, "all")},
    "qwen2": _ROTARY
    | {"query_key_norm": (False,), "biases": (False,), "attention_biases": ("inputs",)},
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
NEEDED = object()
#: (setting of ours, key of a configuration, the library's default); a default None follows from
#: other keys
Table = tuple[tuple[str, str, Any], ...]
LLAMA_CONFIG: Table = (
    ("vocabulary_size", "vocab_size", NEEDED),
    ("dimension", "hidden_size", NEEDED),
    ("hidden", "intermediate_size", NEEDED),
    ("layers", "num_hidden_layers", NEEDED),
    ("heads", "num_attention_heads", NEEDED),
    ("key_value_heads", "num_key_value_heads", None),
    ("head_dimension", "head_dim", None),
    ("initial_deviation", "initializer_range", 0.02),
    ("norm_epsilon", "rms_norm_eps", 1e-6),
    ("rope_theta", "rope_theta", 10_000.0),
    ("dropout", "attention_dropout", 0.0),
    ("tied_embeddings", "tie_word_embeddings", False),
)
GPT2_CONFIG: Table = (
    ("vocabulary_size", "vocab_size", NEEDED),
    ("maximum_positions", "n_positions", NEEDED),
    ("dimension", "n_embd", NEEDED),
    ("layers", "n_layer", NEEDED),
    ("heads", "n_head", NEEDED),
    ("hidden", "n_inner", None),
    ("initial_deviation", "initializer_range", 0.02),
    ("norm_epsilon", "layer_norm_epsilon", 1e-5),
    ("dropout", "embd_pdrop", 0.1),
    ("dropout", "attn_pdrop", 0.1),
    ("dropout", "resid_pdrop", 0.1),
    ("tied_embeddings", "tie_word_embeddings", True),
)
#: defaults that are those of one type
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
#: (key, values that the decoder has, of which the first is the default, words for them)
FIXED: tuple[tuple[str, tuple, str], ...] = (
    ("hidden_act", ("silu",), "silu"),
    ("partial_rotary_factor", (1.0,), "1: all of a head is rotated"),
    ("use_sliding_window", (False, None), "false: attention over the whole row"),
    ("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new"),
    ("scale_attn_weights", (True,), "true"),
    ("scale_attn_by_inverse_layer_idx", (False,), "false"),
    ("quantization_config", (None,), "weights that are not quantized"),
)
#: name of ours → the library's, with .weight and .bias; of several for one name, the rows are
#: joined
LLAMA = {
    "embedding": "model.embed_tokens",
    "blocks.*.attention_norm": "model.layers.*.input_layernorm",
    "blocks.*.attention.query": "model.layers.*.self_attn.q_proj",
    "blocks.*.attention.key": "model.layers.*.self_attn.k_proj",
    "blocks.*.attention.value": "model.layers.*.self_attn.v_proj",
    "blocks.*.attention.query_norm": "model.layers.*.self_attn.q_norm",
    "blocks.*.attention.key_norm": "model.layers.*.self_attn.k_norm",
    "blocks.*.attention.output": "model.layers.*.self_attn.o_proj",
    "blocks.*.feed_forward_norm": "model.layers.*.post_attention_layernorm",
    "blocks.*.feed_forward.gate": "model.layers.*.mlp.gate_proj",
    "blocks.*.feed_forward.up": "model.layers.*.mlp.up_proj",
    "blocks.*.feed_forward.down": "model.layers.*.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
GPT2 = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "blocks.*.attention_norm": "transformer.h.*.ln_1",
    "blocks.*.attention.query": "transformer.h.*.attn.c_attn",
    "blocks.*.attention.key": "transformer.h.*.attn.c_attn",
    "blocks.*.attention.value": "transformer.h.*.attn.c_attn",
    "blocks.*.attention.output": "transformer.h.*.attn.c_proj",
    "blocks.*.feed_forward_norm": "transformer.h.*.ln_2",
    "blocks.*.feed_forward.up": "transformer.h.*.mlp.c_fc",
    "blocks.*.feed_forward.down": "transformer.h.*.mlp.c_proj",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
HEAD = "lm_head.weight"
#: matrices of GPT-2's linear layers
TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
#: what DDP, torch.compile, FSDP and activation checkpointing put before the names of what they wrap
WRAPPERS = re.compile(
    r"(?<![^.])(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)


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


def _show(value: object) -> str:
    return "none" if value is None else str(value).lower()


def to_hf(
    shape: ModelSettings, weights: Weights, sequence_length: int
) -> tuple[dict[str, Any], Weights]:
    """Return (the values of config.json, weights by the library's names) of a decoder's named
    parameters.

    `sequence_length` is how many positions the configuration states where they are not counted
    (rotary ones). Raises UserError for a shape that the library does not support, and for missing,
    unknown or wrongly sized weights.
    """
    kind = family(shape)
    names = _map_names(shape, kind)
    _check_names({name for parts in names.values() for name in parts}, weights, where="the decoder")
    found: Weights = {}
    for theirs, parts in names.items():
        whole = (
            torch.cat([weights[name] for name in parts]) if len(parts) > 1 else weights[parts[0]]
        )
        found[theirs] = whole.t().contiguous() if theirs.endswith(TRANSPOSED) else whole
    return _config(shape, kind, sequence_length=sequence_length), found


def from_hf(config: dict[str, Any], weights: Weights) -> tuple[ModelSettings, Weights]:
    """Return (shape, weights by the decoder's names) of a library model, from its config.json and
    its weights.

    The base model alone, whose names have no prefix, names of wrapped modules, and files of before
    2023, which hold constants beside the weights, are read. Ends that the configuration ties and
    the file holds as two different matrices stay two. Raises UserError for a type that is not among
    `ARCHITECTURES`, for a setting that the decoder does not have, and for weights that are missing
    or unknown.
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        what = f"weights of the model type {kind!r} are not read."
        raise UserError(what, expected=", ".join(ARCHITECTURES), next="convert one of these")
    shape = _shape(config, kind)
    table = GPT2 if kind == "gpt2" else LLAMA
    clean = {WRAPPERS.sub("", name): name for name in weights}
    if len(clean) < len(weights):
        twice = set(weights) - set(clean.values())
        raise UserError(
            "tensors of the model have one name twice.", unknown=few(sorted(twice)), next="keep one"
        )
    prefix = table["norm"].partition(".")[0] + "."
    based = any(name.startswith(prefix) for name in clean)
    weights = {
        name if based or name == HEAD else prefix + name: weights[stored]
        for name, stored in clean.items()
    }
    weights = {
        name: w for name, w in weights.items() if not _is_constant(name, values=w, shape=shape)
    }
    if shape.tied_embeddings and HEAD in weights:
        tied = weights.setdefault(f"{table['embedding']}.weight", weights[HEAD])
        if torch.equal(tied, weights[HEAD]):
            del weights[HEAD]
        else:
            shape = replace(shape, tied_embeddings=False)
    names = _map_names(shape, kind)
    _check_names(set(names), weights, where=f"the {kind} model")
    found: Weights = {}
    for theirs, parts in names.items():
        whole = weights[theirs].t() if theirs.endswith(TRANSPOSED) else weights[theirs]
        found |= {
            ours: part.contiguous()
            for ours, part in zip(parts, whole.chunk(len(parts)), strict=True)
        }
    return shape, found


def _is_constant(name: str, values: Tensor, shape: ModelSettings) -> bool:
    """Return whether a tensor holds what the decoder computes itself, as files of before 2023 do:
    GPT-2's causal mask (its value for masked scores is any large negative number), and rotary
    frequencies.
    """
    if name.endswith(".attn.masked_bias"):
        return values.numel() == 1 and values.item() <= -1e4
    if name.endswith(".attn.bias"):
        square = values.dim() >= 2 and values.shape[-1] == values.shape[-2]
        return square and torch.equal(values, torch.ones_like(values).tril())
    if name.endswith(".rotary_emb.inv_freq"):
        expected = rotary_frequencies(shape)
        return values.shape == expected.shape and torch.allclose(
            values.double(), expected, rtol=1e-2, atol=0
        )
    return False


def _map_names(shape: ModelSettings, kind: str) -> dict[str, list[str]]:
    """Return the library's name → ours, of which GPT-2 joins three."""
    names: dict[str, list[str]] = {}
    for ours, theirs in (GPT2 if kind == "gpt2" else LLAMA).items():
        module = ours.rsplit(".", 1)[-1]
        if (
            module == "head"
            and shape.tied_embeddings
            or module.endswith("y_norm")
            and not shape.query_key_norm
        ):
            continue
        if module.endswith("norm"):
            bias = shape.norm == "layer" and shape.biases
        else:
            bias = module not in ("embedding", "positions", "head") and shape.has_bias(module)
        for suffix in ("weight", "bias")[: 1 + bias]:
            for n in map(str, range(shape.layers if "*" in ours else 1)):
                names.setdefault(f"{theirs}.{suffix}".replace("*", n), []).append(
                    f"{ours}.{suffix}".replace("*", n)
                )
    return names


def _check_names(expected: set[str], weights: Iterable[str], where: str) -> None:
    missing = sorted(expected - set(weights))
    unknown = sorted(set(weights) - expected)
    if missing or unknown:
        what = f"these are not the weights of {where}."
        next_step = "compare the shape that is stated with the one of the weights"
        raise UserError(
            what, missing=few(missing) or None, unknown=few(unknown) or None, next=next_step
        )


def _config(shape: ModelSettings, kind: str, sequence_length: int) -> dict[str, Any]:
    """Return the keys that published configurations have; versions 4 and 5 of the library read
    them.
    """
    table = GPT2_CONFIG
    own: dict[str, Any] = {"activation_function": "gelu_new"}
    if kind != "gpt2":
        scaling = (
            ROPE_SCALING | {"factor": shape.rope_factor} if shape.rope_scaling == "llama3" else None
        )
        length = 131_072 if scaling else sequence_length
        table = LLAMA_CONFIG
        own = {"hidden_act": "silu", "max_position_embeddings": length, "rope_scaling": scaling}
        own |= {} if kind == "qwen2" else {"attention_bias": shape.has_bias("output")}
        own |= {"mlp_bias": shape.biases} if kind == "llama" else {"use_sliding_window": False}
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        **{theirs: getattr(shape, ours) for ours, theirs, _ in table},
        **own,
        # the library's own defaults are ids of its tokenizers
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _shape(config: dict[str, Any], kind: str) -> ModelSettings:
    # version 5, or before
    rotary = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theirs_of = {
        key: rotary[key]
        for key in ("rope_theta", "partial_rotary_factor")
        if rotary.get(key) is not None
    }
    config = DEFAULTS.get(kind, {}) | config | theirs_of
    for key, allowed, words in FIXED:
        _require(
            config,
            key,
            holds=config.get(key, allowed[0]) in allowed,
            expected=words,
        )
    values = _read_table(config, table=GPT2_CONFIG if kind == "gpt2" else LLAMA_CONFIG)
    heads = values["heads"]
    width = values.pop("head_dimension", None)
    whole = width is None or width * heads == values["dimension"]
    values |= {"name": kind, "head_dim": None if whole else width}
    if kind == "gpt2":
        values |= {field: allowed[0] for field, allowed in FAMILIES["gpt2"].items()}
        values |= {"key_value_heads": heads, "hidden": values["hidden"] or 4 * values["dimension"]}
        return decode(ModelSettings, values)
    values |= _read_rope_scaling(config, rotary)
    _require_full_attention(config, kind)
    values |= _read_biases(config, kind)
    values["query_key_norm"] = kind == "qwen3"
    return decode(
        ModelSettings, values=values | {"key_value_heads": values["key_value_heads"] or heads}
    )


def _read_table(config: dict[str, Any], table: Table) -> dict[str, Any]:
    """Return settings by our names. Raises UserError for a missing key, and for keys that
    contradict each other.
    """
    values: dict[str, Any] = {}
    for ours, key, default in table:
        value = default if config.get(key) is None else config[key]
        _require(
            config,
            key,
            holds=value is not NEEDED,
            expected="a number",
        )
        _require(
            config,
            key,
            holds=values.setdefault(ours, value) == value,
            expected=f"as other keys say: {values[ours]}",
        )
    return values


def _read_rope_scaling(config: dict[str, Any], rotary: dict[str, Any]) -> dict[str, Any]:
    if rotary.get("rope_type", rotary.get("type", "default")) == "default":
        return {}
    same = {key: rotary.get(key) for key in ROPE_SCALING} == ROPE_SCALING
    _require(
        config,
        key="rope_scaling",
        holds=same,
        expected="none, or that of Llama 3.1 and 3.2 with any factor",
    )
    return {"rope_scaling": "llama3", "rope_factor": rotary["factor"]}


def _require_full_attention(config: dict[str, Any], kind: str) -> None:
    without = (
        "null: attention over the whole row; up to the window's length the results are the same"
    )
    _require(
        config,
        key="sliding_window",
        holds=kind != "mistral" or not config["sliding_window"],
        expected=without,
    )
    layers = set(config.get("layer_types") or ["full_attention"])
    _require(
        config,
        key="layer_types",
        holds=layers == {"full_attention"},
        expected="full_attention in every layer",
    )


def _read_biases(config: dict[str, Any], kind: str) -> dict[str, Any]:
    attention = bool(config.get("attention_bias", False))
    feeding = bool(config.get("mlp_bias", False))
    _require(
        config,
        key="mlp_bias",
        holds=attention or not feeding,
        expected="false, as attention_bias",
    )
    biases: dict[str, Any] = {"biases": attention and feeding}
    if kind == "qwen2":
        biases["attention_biases"] = "inputs"
    elif attention and not feeding:
        biases["attention_biases"] = "all"
    return biases


def _require(config: dict[str, Any], key: str, holds: bool, expected: str) -> None:
    if not holds:
        what = "the model has a setting that the decoder of this project does not support."
        next_step = "use it as it is: `model.transformers`"
        raise UserError(what, key=key, found=config.get(key), expected=expected, next=next_step)
