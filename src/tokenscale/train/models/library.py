"""Models of the library `transformers`, by model type, behind the interface of the project's own
decoder.

A configuration of the type is made from the shape's sizes by the library's standard names; all else
is the type's own. Each model is first built without storage (torch's meta device), where its parts
are found and its logits are checked to be exactly what its output head gives.
"""

import functools
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.costs.flops import CountedModel, Weights
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.registry import OBJECTIVES
from tokenscale.train.models.attention import Bounds
from tokenscale.train.models.objective import LanguageModel

#: field of a shape → what configurations call it: the standard name, then those of types that do
#: not map theirs to it
NAMES = {
    "dimension": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "key_value_heads": ("num_key_value_heads",),
    "hidden": ("intermediate_size", "ffn_dim", "hidden_dim", "n_inner"),
    "vocabulary_size": ("vocab_size",),
    "maximum_positions": ("max_position_embeddings",),
}
#: fields without which a configuration cannot have the shape
NEEDED = ("dimension", "layers", "heads", "vocabulary_size")


class LibraryModel(LanguageModel):
    """Token ids [B, T] → logits [B, T, V] by a model of `transformers`, masked or causal by the
    objective.

    The head is taken out of the model and put beside it, so that a loss can be computed from
    `hidden` and `head` without the logits. What a type does before its head (BERT's transform)
    belongs to `hidden`.
    """

    def __init__(self, shape: ModelSettings, objective: str):
        super().__init__()
        twin = _twin(shape, objective)
        self.settings = shape
        self.model = _made(shape, objective, dtype=torch.float32)
        self.head = self.model.get_output_embeddings()
        self._head_name = twin.head_name
        self.states_positions = twin.states_positions
        self.put_head(nn.Identity())

    def put_head(self, module: nn.Module) -> None:
        """Set the module at the place of the library model's output head."""
        owner, _, name = self._head_name.rpartition(".")
        setattr(self.model.get_submodule(owner), name, module)

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]
        """The model's equal blocks; empty where a type has no list of them (ALBERT runs one block
        repeatedly).
        """
        return _blocks(self.model, shape=self.settings)

    def hidden(self, tokens_bt: Tensor, bounds: Bounds | None = None) -> Tensor:
        """[B, T] → [B, T, d], the input of the output head. Attention covers padding and all
        documents of a row.
        """
        if bounds is not None:
            raise ValueError("attention of a model of transformers takes no bounds of documents")
        positions = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)[None]
        stated = {"position_ids": positions} if self.states_positions else {}
        return self.model(input_ids=tokens_bt, **stated).logits  # the head is an identity


def build(
    shape: ModelSettings, sequence_length: int, *, objective: str, kernel: str
) -> LibraryModel:
    shape = shape.with_positions(sequence_length)
    if kernel != "sdpa":
        what = f"models of transformers run their own attention, not the kernel {kernel}."
        raise UserError(
            what, model=f"{shape.name} ({shape.transformers})", next="leave `attention` out"
        )
    shape.check_positions(sequence_length)
    return LibraryModel(shape, objective)


def initialise(model: LibraryModel, seed: int) -> None:
    """Set the type's own initial weights, drawn on the CPU from the seed alone. The caller's random
    state stays.
    """
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    model.put_head(model.head)
    try:
        for part in (*model.modules(), *model.parameters()):
            part.__dict__.pop("_is_hf_initialized", None)  # the library skips what bears this mark
        model.model.initialize_weights()
    finally:
        model.put_head(nn.Identity())
        torch.set_rng_state(state)


def save(
    shape: ModelSettings,
    objective: str,
    weights: dict[str, Tensor],
    folder: Path,
    ids: dict[str, int | None],
) -> str:
    """Write a trained model's config.json and weights as the library does; `ids` are its special
    ids by their keys.

    Returns the name of the library's class. Raises UserError for a type that counts positions by
    comparing ids with padding, which it did not do in training, and for weights of another shape.
    """
    assert shape.maximum_positions is not None  # as of every trained one
    model = build(
        shape,
        sequence_length=shape.maximum_positions,
        objective=objective,
        kernel="sdpa",
    )
    if model.states_positions:
        raise _refused(
            shape,
            reason="loaded elsewhere it would count positions from its padding id, other than in training",
        )
    named = dict(model.named_parameters())
    if differing := sorted(named.keys() ^ weights.keys()):
        raise _refused(
            shape, reason=f"this version of the library has other weights: {differing[0]}"
        )
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.data = weights[name]
    model.put_head(model.head)
    config = model.model.config
    for key, value in {"use_cache": True, **ids}.items():
        if hasattr(config, key):
            setattr(config, key, value)
    config.dtype = next(iter(weights.values())).dtype
    model.model.save_pretrained(folder)
    return type(model.model).__name__


@functools.cache
def count_weights(shape: ModelSettings) -> CountedModel:
    """Return a model with the numbers of its weights (see `costs.flops.weights`), from a build
    without storage.
    """
    if shape.vocabulary_size is None or shape.maximum_positions is None:
        raise ValueError("the vocabulary and the positions are not resolved yet")
    library = _library()
    # where a type has both heads, they have equal weights
    masked = _config_class(shape) in library.MODEL_FOR_MASKED_LM_MAPPING
    model = _twin(shape, objective="masked" if masked else "causal").model
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tables.discard(id(model.get_output_embeddings().weight))
    parameters = list(model.parameters())
    counted = Weights(
        total=sum(p.numel() for p in parameters),
        looked_up=sum(p.numel() for p in parameters if id(p) in tables),
        matrices=sum(p.numel() for p in parameters if p.dim() > 1 and id(p) not in tables),
        blocks=sum(p.numel() for p in _blocks(model, shape).parameters()),
    )
    return CountedModel(**vars(shape), counted=counted)


# -------------------------------------------------------------------------------------------------
# how one is made


class _Twin:
    """A model without storage, inspected for its head's name and whether it takes positions."""

    def __init__(self, model: Any, shape: ModelSettings):
        self.model = model
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.weight.shape[0] != shape.vocabulary_size:
            raise _refused(
                shape, reason=f"its output head is no linear layer of {shape.vocabulary_size} rows"
            )
        self.head_name = next(name for name, module in model.named_modules() if module is head)
        if any("experts" in name for name, _ in model.named_parameters()):
            raise _refused(
                shape,
                reason="FLOPs of a mixture of experts do not follow from its number of weights",
            )
        block = next(iter(_blocks(model, shape)), model)
        # 2: gate and up in one
        if not any(shape.hidden * k in p.shape for p in block.parameters() for k in (1, 2)):
            raise _refused(
                shape,
                reason=f"its feed-forward part has no width to set: hidden {shape.hidden} is not in it",
            )
        if hasattr(model.config, "use_cache"):
            # without a cache the library looks into the positions, which hold nothing
            model.config.use_cache = True
        self.states_positions = False
        try:
            same = self._logits_are_the_heads()
        # RoBERTa and similar models compute positions from ids, which meta tensors have not
        except (RuntimeError, ValueError, TypeError, IndexError):
            self.states_positions = "position_ids" in inspect.signature(model.forward).parameters
            if not self.states_positions:
                raise
            same = self._logits_are_the_heads()
        if not same:
            raise _refused(
                shape, reason="it changes its logits behind the output head (by a scale or a cap)"
            )

    def _logits_are_the_heads(self) -> bool:
        found: list[Tensor] = []
        head = self.model.get_submodule(self.head_name)
        hook = head.register_forward_hook(lambda module, inputs, output: found.append(output))
        tokens = torch.zeros((1, 4), dtype=torch.int64, device="meta")
        stated = {"position_ids": torch.zeros_like(tokens)} if self.states_positions else {}
        try:
            return self.model(input_ids=tokens, **stated).logits is found[0]
        finally:
            hook.remove()


@functools.lru_cache(4)
def _twin(shape: ModelSettings, objective: str) -> _Twin:
    with torch.device("meta"):
        model = _made(shape, objective, dtype=torch.bfloat16).eval()
        try:
            return _Twin(model, shape)
        except UserError:
            raise
        except Exception as error:  # whatever a type's own code raises
            raise _refused(
                shape, reason=(str(error).strip().splitlines() or [type(error).__name__])[0]
            ) from error


def _made(shape: ModelSettings, objective: str, dtype: torch.dtype) -> Any:
    library = _library()
    config_class = _config_class(shape)
    masked = library.MODEL_FOR_MASKED_LM_MAPPING
    causal = library.MODEL_FOR_CAUSAL_LM_MAPPING
    if config_class not in (masked if objective == "masked" else causal):
        other = [
            word
            for word, known in (("masked", masked), ("causal", causal))
            if config_class in known
        ]
        what = f"transformers has no {objective} language model of type {shape.transformers}."
        next_step = f"use `objective: {other[0]}`" if other else "choose another type"
        raise UserError(
            what,
            model=shape.name,
            has=", ".join(other) or "neither a masked nor a causal one",
            next=next_step,
        )
    config = _config(shape, config_class)
    if config.is_encoder_decoder:
        raise _refused(shape, reason="it is an encoder with a decoder")
    config.is_decoder = OBJECTIVES[objective].causal  # an encoder is causal only when told so
    auto = library.AutoModelForMaskedLM if objective == "masked" else library.AutoModelForCausalLM
    return auto.from_config(config, dtype=dtype)


def _config(shape: ModelSettings, config_class: Any) -> Any:
    """Return the type's configuration with the shape's sizes and dropout, and no special ids."""
    default = config_class()
    known = set(default.to_dict()) | set(config_class.attribute_map)
    values: dict[str, Any] = {}
    for field, names in NAMES.items():
        name = next((name for name in names if name in known), None)
        if name is not None:
            values[name] = getattr(shape, field)
        elif field in NEEDED:
            raise _refused(shape, reason=f"its configuration has no {names[0]}")
        elif field == "key_value_heads" and shape.key_value_heads != shape.heads:
            raise UserError(
                f"a model of type {shape.transformers} has as many key-value heads as heads.",
                model=shape.name,
                found=f"key_value_heads {shape.key_value_heads}, heads {shape.heads}",
                next="set both to the same number",
            )
    if "head_dim" in known:
        values["head_dim"] = shape.head_dimension
    values |= {
        name: shape.dropout
        for name, value in default.to_dict().items()
        if isinstance(value, float) and ("dropout" in name or name.endswith("_pdrop"))
    }
    # padding is known by length here, never by an id: an id that is special to the library would
    # lose its gradient
    values |= {name: None for name in default.to_dict() if name.endswith("_token_id")}
    if "use_cache" in known:
        values["use_cache"] = False
    try:
        return config_class(**values)
    except Exception as error:  # the library's own checks share no base
        raise _refused(shape, reason=str(error).strip().splitlines()[-1]) from error


def _config_class(shape: ModelSettings) -> type:
    mapping = _library().CONFIG_MAPPING
    known = list(mapping.keys())
    assert shape.transformers is not None  # else it is a model of ours
    if shape.transformers not in known:
        near = find_nearest(shape.transformers, words=known)
        raise UserError(
            f"transformers has no model type {shape.transformers!r}.",
            model=shape.name,
            known=f"{len(known)} types, such as bert, distilbert, mistral, opt and qwen2",
            next=f"did you mean {near!r}?" if near else "see `model_type` in a model's config.json",
        )
    return mapping[shape.transformers]


def _blocks(model: nn.Module, shape: ModelSettings) -> nn.ModuleList:
    lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == shape.layers)
    return next(lists, nn.ModuleList())


def _library() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        what = "the model is one of the library transformers, which this environment lacks."
        next_step = (
            "make setup installs it; a container needs it, too (profiles/alps/requirements.txt)"
        )
        raise UserError(what, reason=error, next=next_step) from None
    return transformers


def _refused(shape: ModelSettings, reason: str) -> UserError:
    what = f"the model type {shape.transformers} of transformers cannot be used here."
    next_step = "choose another type; those tested are named in the README"
    return UserError(what, model=shape.name, reason=reason, next=next_step)
