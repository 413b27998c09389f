"""Flags and files of the source studies, translated to this project's settings."""

import math
import re
from dataclasses import fields, replace
from typing import Any, Literal

from tokenscale.base.errors import UserError, unknown
from tokenscale.settings import flags
from tokenscale.settings.flags import spell
from tokenscale.settings.layout import DEGREES
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import decode, option, settings_class
from tokenscale.settings.presets import PRESETS
from tokenscale.settings.run import RunSettings

#: (--dataset-type, --pretokenized) → approach
APPROACH_OF = {
    ("padded", False): "padded",
    ("padding-free", False): "padding-free",
    ("packed", False): "packed",
    ("packed", True): "packed",
    ("padded", True): "pretokenized-padded",
    ("token-list", True): "token-list",
    ("padding-free", True): "token-list",
    ("length-bucketed", True): "length-bucketed",
}

#: dotted key of a run's setting → flags of the studies
FLAG_ALIASES = {
    "optimizer.learning_rate": ("--learning-rate", "--lr"),
    "schedule.warmup_steps": ("--lr-warmup-steps",),
    "budget.steps": ("--training-steps", "--max-steps"),
}

#: flags of study 003 only; with any of them --batch-size counts the sequences of all ranks, as in
#: that study
STUDY_003 = ("n_epochs", "model_max_length", "model_parallel_mode", "n_chunk")
#: default number of micro-batches of a pipeline in study 003
CHUNKS = 4


@settings_class
class TrainOptions:
    """Options of `train` besides the settings of a run."""

    dataset: str = option(
        "dummy",
        description=(
            "a file, `dummy` (random numbers over the model's vocabulary), or a corpus in "
            "config/config.yaml"
        ),
        path=True,
    )
    data_path: str | None = option(
        None,
        description="local file instead of the corpus's download",
        metavar="FILE",
        path=True,
    )
    dataset_type: (
        Literal["padded", "padding-free", "token-list", "packed", "length-bucketed"] | None
    ) = option(
        None,
        description="how documents become sequences (default: packed, or the format of a pretokenized file)",
    )
    approach: Literal[*dict.fromkeys(APPROACH_OF.values())] | None = option(  # type: ignore[valid-type]
        None,
        description="the setting `approach`, in place of --dataset-type and --pretokenized",
        metavar="NAME",
    )
    pretokenized: bool = option(
        False,
        description="the dataset is a file of `pretokenize` or `convert`; a corpus is tokenized before",
    )
    tokenizer_name: str | None = option(
        None,
        description="a folder, a name in results/tokenizers or in config/config.yaml, tekken, a name of "
        "Mistral-Nemo (the same), "
        "or NAME@COMMIT on the Hugging Face hub (default: that of the pretokenized file; else "
        "tekken, or, if the "
        "model's vocabulary is smaller, one trained on the corpus)",
        metavar="NAME",
        path=True,
    )
    text_column: str | None = option(
        None, description="column or key of a file's text (default text)", metavar="NAME"
    )
    target_column: str | None = option(
        None, description="column or key of the translations", metavar="NAME"
    )
    separator: str | None = option(
        None, description="separator of documents in a text file (default: one document per file)"
    )
    model: str | None = option(
        None, description=f"{', '.join(PRESETS)} (default llama-tiny)", metavar="PRESET"
    )
    model_size: Literal["small", "medium"] | None = option(
        None, description="short for --model study-SIZE"
    )
    batch_size: int | None = option(
        None, description="sequences per forward pass of one rank", ge=1
    )
    gradient_accumulation_steps: int | None = option(
        None, description="forward passes per optimizer step", ge=1
    )
    epochs: float | None = option(
        None,
        description="passes over the training data, instead of --training-steps",
        gt=0,
        le=10**9,
    )
    world_size: int | None = option(
        None, description="number of ranks to start here; sets --layout.data", ge=1
    )
    distributed: bool = option(
        False, description="use the ranks of torchrun; implied under torchrun"
    )
    config: str | None = option(
        None,
        description="preset file such as config/presets/small_model.yaml",
        metavar="FILE",
        path=True,
    )
    output_dir: str = option(
        "results/runs",
        description="parent of the run's folder",
        metavar="DIR",
        path=True,
    )
    n_epochs: int | None = option(
        None,
        description="study 003: --epochs; --batch-size counts the sequences of all ranks",
        ge=1,
    )
    model_max_length: int | None = option(None, description="study 003: --sequence-length", ge=8)
    model_parallel_mode: Literal["model_parallel", "pipeline_parallel"] | None = option(
        None,
        description="study 003: split the layers over all ranks (by default 2, else --world-size). "
        "model_parallel: one batch at a "
        "time (--layout.schedule naive); pipeline_parallel: --n-chunk micro-batches "
        "(--layout.schedule gpipe)",
    )
    n_chunk: int | None = option(
        None, description=f"study 003: micro-batches of pipeline_parallel (default {CHUNKS})", ge=1
    )

    @property
    def flag_of_study_003(self) -> str | None:
        """First given flag of study 003."""
        return next((spell(name) for name in STUDY_003 if getattr(self, name) is not None), None)


TRAIN_FLAGS = flags.build_flags(TrainOptions)
#: settings without a flag of their own; --epochs is an option of `train`, which needs the data to
#: compute steps
LEFT_OUT = (
    "corpus",
    "mixture",
    "extensions",
    "tokenizer",
    "model",
    "approach",
    "repeat",
    "reader",
    "budget.epochs",
)
RUN_FLAGS = flags.build_flags(RunSettings, left_out=LEFT_OUT, aliases=FLAG_ALIASES)
#: key → flag shown in messages, if it has none or a less familiar one
FLAG_OF = {"layout.data": "--world-size", "model": "--model", "tokenizer": "--tokenizer-name"}
FLAG_OF |= {"corpus": "--dataset", "storage": "--storage.codec"}


def find_flag(key: str) -> str:
    """Return the flag that sets a run's setting.

    >>> find_flag("schedule.warmup_steps"), find_flag("model.heads")
    ('--lr-warmup-steps', '--model')
    """
    own = next((flag.name for flag in RUN_FLAGS if flag.key == key), None)
    return FLAG_OF.get(key) or own or FLAG_OF.get(key.split(".", maxsplit=1)[0], spell(key))


def resolve_approach(dataset_type: str, pretokenized: bool) -> str:
    """Return the approach of a dataset type. Raises UserError for an unsupported combination."""
    try:
        return APPROACH_OF[dataset_type, pretokenized]
    except KeyError:
        wanted = [(dataset_type, pretokenized), *APPROACH_OF]
        requested, *pairs = (
            f"--dataset-type {form}{' --pretokenized' * before}" for form, before in wanted
        )
        facts = {
            "allowed": "\n".join(pairs),
            "next": "run `tokenscale pretokenize`, then add --pretokenized",
        }
        raise UserError(
            "this dataset type does not support this mode.", requested=requested, **facts
        ) from None


def translate_study_flags(
    words: TrainOptions, stated: dict[str, Any], ranks: int | None
) -> tuple[TrainOptions, dict[str, Any], tuple[str, ...]]:
    """Translate study 003's flags: (options, settings by dotted key, notes for the user).

    `ranks` is the number of ranks if known. Raises UserError for contradicting flags.
    """
    if words.flag_of_study_003 is None:
        return words, stated, ()
    values = dict(stated)
    excluded = (
        ("--n-epochs", "--epochs", words.n_epochs and words.epochs),
        (
            "--model-max-length",
            "--sequence-length",
            words.model_max_length and "sequence_length" in stated,
        ),
    )
    for flag, other, both in excluded:
        if both:
            raise UserError(
                f"{flag} and {other} exclude each other.", flag=flag, next="remove one of them"
            )
    if words.n_epochs is not None:
        words = replace(words, epochs=float(words.n_epochs))
    if words.model_max_length is not None:
        values["sequence_length"] = words.model_max_length
    mode = words.model_parallel_mode
    if words.n_chunk is not None and (mode != "pipeline_parallel" or "micro_batch" in stated):
        what = "--n-chunk needs --model-parallel-mode pipeline_parallel and excludes --micro-batch."
        found = f"--model-parallel-mode {mode or 'was not given'}"
        if "micro_batch" in stated:
            found = "--micro-batch"
        next_step = "remove --n-chunk, or use that mode without --micro-batch"
        raise UserError(what, flag=f"--n-chunk {words.n_chunk}", found=found, next=next_step)
    if mode is None:
        return words, values, ()
    layout, notes = _translate_mode(mode, stated=stated, ranks=ranks)
    return words, values | layout, notes


def _translate_mode(
    mode: str, stated: dict[str, Any], ranks: int | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Translate --model-parallel-mode: (settings of the layout by dotted key, notes)."""
    order = {"model_parallel": "naive", "pipeline_parallel": "gpipe"}[mode]
    given = stated.get("layout.schedule", order)
    if mode == "model_parallel" and given != order:
        what = "--model-parallel-mode model_parallel supports the schedule naive only."
        next_step = "remove --layout.schedule, or use --model-parallel-mode pipeline_parallel"
        raise UserError(what, flag=f"--layout.schedule {given}", next=next_step)
    layout: dict[str, Any] = {"layout.schedule": given}
    if "layout.pipeline" in stated:
        return layout, ()
    if ranks is None:
        layout["layout.pipeline"] = 2
        return layout, ("--model-parallel-mode: 2 ranks; --world-size N changes the number",)
    others = math.prod(stated.get(f"layout.{degree}", 1) for degree in DEGREES)
    stages = ranks // others
    if stages < 2:
        raise UserError(
            "splitting a model needs at least 2 ranks.",
            flag=f"--model-parallel-mode {mode}",
            found=f"{ranks} ranks for {others} replicas" if others > 1 else f"{ranks} rank",
            next=f"use --world-size {2 * others}, or remove --model-parallel-mode",
        )
    return layout | {"layout.pipeline": stages}, ()


@settings_class
class StudyModel:
    """Section `model`: decoder with RMSNorm, rotary positions, SwiGLU of 4 x hidden_size, tied
    head.
    """

    hidden_size: int = option(768, description="width of the residual stream", ge=8)
    num_layers: int = option(12, description="number of blocks", ge=1)
    num_heads: int = option(12, description="attention heads a layer", ge=1)
    vocab_size: int | None = option(
        None, description="rows of the embedding; by default the tokenizer's size", ge=2
    )
    max_seq_len: int | None = option(None, description="positions a row", ge=8)


@settings_class
class StudyTraining:
    """Section `training`."""

    batch_size: int | None = option(None, description="rows of one rank in a forward pass", ge=1)
    gradient_accumulation_steps: int | None = option(
        None, description="forward passes an optimizer step", ge=1
    )
    learning_rate: float | None = option(None, description="peak learning rate", gt=0)
    max_steps: int | None = option(None, description="optimizer steps", ge=1)
    warmup_steps: int | None = option(None, description="steps of linear warm-up", ge=0)


@settings_class
class StudyDistributed:
    """Section `distributed`."""

    backend: Literal["nccl", "gloo"] | None = option(
        None, description="for information: the device decides"
    )
    mixed_precision: Literal["bf16", "fp16", "fp32", "no"] | None = option(
        None, description="16 bits: autocast over fp32 weights"
    )
    sharding_strategy: Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"] | None = option(
        None, description="FSDP over all ranks: zero3, zero2, or replicas"
    )
    activation_checkpointing: bool | None = option(
        None, description="compute the activations of each block again"
    )


@settings_class
class StudyFile:
    """A preset file."""

    model: StudyModel | None = option(None, description="the decoder's shape")
    training: StudyTraining = option(StudyTraining, description="batch, learning rate and length")
    distributed: StudyDistributed = option(StudyDistributed, description="backend and precision")

    def model_settings(self, name: str) -> ModelSettings | None:
        """Return the model settings, named as a matching preset; None if the file has no section
        `model`.
        """
        if self.model is None:
            return None
        wide = self.model.hidden_size
        heads = self.model.num_heads
        shape = {"dimension": wide, "layers": self.model.num_layers, "hidden": 4 * wide}
        shape |= {"heads": heads, "key_value_heads": heads}
        common = {
            f.name: getattr(PRESETS["study-small"], f.name) for f in fields(ModelSettings)
        } | shape
        known = [
            p
            for p in PRESETS.values()
            if all(getattr(p, k) == v for k, v in (common | {"name": p.name}).items())
        ]
        label = (
            known[0].name
            if known
            else re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-") or "custom"
        )
        return ModelSettings(**common | {"name": label, "vocabulary_size": self.model.vocab_size})

    def layout_values(self, ranks: int) -> dict[str, Any]:
        """Return the settings of sharding one replica over these ranks; empty for full replicas."""
        sharding = {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2"}.get(
            self.distributed.sharding_strategy or ""
        )
        return (
            {"layout.shard": ranks, "layout.sharding": sharding} if sharding and ranks > 1 else {}
        )

    def values(self) -> dict[str, Any]:
        """Return dotted key → value of the settings in the file, without the batch size, which
        depends on ranks.
        """
        precision = self.distributed.mixed_precision
        found = {
            "sequence_length": self.model.max_seq_len if self.model else None,
            "optimizer.learning_rate": self.training.learning_rate,
            "budget.steps": self.training.max_steps,
            "schedule.warmup_steps": self.training.warmup_steps,
            "precision": "fp32" if precision == "no" else precision,
            "activation_checkpointing": "block"
            if self.distributed.activation_checkpointing
            else None,
        }
        return {key: value for key, value in found.items() if value is not None}


def load_preset_file(path: str) -> StudyFile:
    """Load a preset file. Raises UserError for an unreadable file and for unknown keys or
    values.
    """
    from tokenscale.settings.yaml_files import read_yaml  # needs PyYAML

    values = read_yaml(path)
    distributed = values.get("distributed")
    if isinstance(distributed, dict) and distributed.get("mixed_precision") is False:  # YAML's `no`
        values = {**values, "distributed": {**distributed, "mixed_precision": "no"}}
    return decode(StudyFile, values, file=path)


def find_preset(name: str, flag: str) -> ModelSettings:
    """Return the model preset with this name. Raises UserError for an unknown name."""
    if name not in PRESETS:
        raise unknown(
            "model preset",
            word=name,
            words=PRESETS,
            flag=flag,
        )
    return PRESETS[name]
