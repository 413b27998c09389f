"""One run: everything that decides its result, and the identity that follows from it."""

from dataclasses import dataclass
from typing import Literal

from tokenscale.base.files import canonical_json, sha256_text
from tokenscale.settings.data import CorpusSettings, StorageSettings, StoreSettings, TokenizerSettings
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import STRICT, from_json, option, to_dict
from tokenscale.settings.registry import BATCHES, COPIES, FORMATS, OBJECTIVES

#: approach → the format it reads (None: it tokenizes raw text while training)
APPROACHES = {name: approach.format for name, approach in BATCHES.items()}


def reads_parquet(approach: str) -> bool:
    """Whether the options of `StorageSettings` mean something for it."""
    form = APPROACHES[approach]
    return form is not None and "codec" in FORMATS[form].options


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW. Weight decay falls on matrices only, not on norms."""

    __pydantic_config__ = STRICT

    learning_rate: float = option(3e-4, "peak learning rate", gt=0)
    beta1: float = option(0.9, "decay of the first moment", ge=0, lt=1)
    beta2: float = option(0.95, "decay of the second moment", ge=0, lt=1)
    epsilon: float = option(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = option(0.1, "decoupled weight decay", ge=0)
    clip_norm: float | None = option(1.0, "largest global gradient norm; null: no clipping", gt=0)
    fused: bool = option(True, "one kernel for the update, which clips and unscales as it reads the gradients")


@dataclass(frozen=True)
class ScheduleSettings:
    """Learning rate by step: linear warm-up, then a shape down to a floor."""

    __pydantic_config__ = STRICT

    shape: Literal["constant", "linear", "cosine"] = option("cosine", "after the warm-up")
    warmup_steps: int = option(10, "steps of linear warm-up; step 0 uses 1/warmup_steps of the peak", ge=0, strict=True)
    floor: float = option(0.1, "last learning rate as a share of the peak", ge=0, le=1)


@dataclass(frozen=True)
class BudgetSettings:
    """How long a run trains: `steps`, or one of the others in its place."""

    __pydantic_config__ = STRICT

    steps: int = option(100, "optimizer steps; only where none of the others is set", ge=1, strict=True)
    epochs: float | None = option(None, "passes over what the approach reads, rounded up to whole steps", gt=0)
    useful_tokens: int | None = option(
        None, "labels that count, over all ranks; the step that reaches it is the last", ge=1
    )
    flops: float | None = option(None, "training FLOPs in the full convention, padding included, rounded up", gt=0)
    wall_s: float | None = option(
        None, "seconds of training steps; the first step that begins after them is the last", gt=0
    )

    @property
    def kind(self) -> str:
        """Which of the fields decides."""
        return next((name for name in BUDGETS if getattr(self, name) is not None), "steps")


#: budgets that stand in the place of `steps`
BUDGETS = ("epochs", "useful_tokens", "flops", "wall_s")


@dataclass(frozen=True)
class ValidationSettings:
    """Loss on a fixed held-out slice: the first rows of the packed validation store, the same for every approach."""

    __pydantic_config__ = STRICT

    rows: int = option(64, "rows of the slice; 0: no validation", ge=0, strict=True)
    every: int = option(0, "steps between validations; 0: none between the first step and the last", ge=0, strict=True)
    each_epoch: bool = option(False, "also after the last step of each epoch")
    at_start: bool = option(True, "before the first step")
    at_end: bool = option(True, "after the last step")
    accuracy: bool = option(False, "count the labels that have the largest logit, too")
    bleu: int = option(
        0, "pairs of the validation split that are translated at the end, for BLEU; 0: none", ge=0, strict=True
    )


@dataclass(frozen=True)
class CheckpointSettings:
    """What a run writes of its weights, and what it can be resumed from, in `results/runs/<run id>/checkpoints/`."""

    __pydantic_config__ = STRICT

    every: int = option(0, "steps between resume states; 0: none, an interrupted run begins anew", ge=0, strict=True)
    each_epoch: bool = option(False, "a resume state after the last step of each epoch")
    at_start: bool = option(False, "a resume state before the first step: the seed checkpoint of other layouts")
    keep_last: int = option(1, "resume states kept, the newest", ge=1, strict=True)
    keep_resume_state: bool = option(False, "keep them when the run has ended, and write one at its end")
    final: bool = option(False, "the weights at the end, for `evaluate`, `generate` and `export`")
    best: bool = option(False, "the weights with the lowest validation loss so far")
    asynchronous: bool = option(True, "write in a thread, from a copy, while training goes on")


@dataclass(frozen=True)
class MaskingSettings:
    """Masked-language modelling (BERT, Devlin et al. 2019), chosen by (seed, global sample, position) alone."""

    __pydantic_config__ = STRICT

    share: float = option(
        0.15, "of the useful tokens that are predicted: 80 % masked, 10 % random, 10 % kept", gt=0, le=1
    )


@dataclass(frozen=True)
class ProfileSettings:
    """A trace of torch.profiler for each rank, `attempt=NN/rank=NNNNN/trace.json.gz`."""

    __pydantic_config__ = STRICT

    first: int = option(10, "first step of the trace", ge=0, strict=True)
    steps: int = option(0, "steps in the trace; 0: no trace", ge=0, strict=True)


@dataclass(frozen=True)
class RunSettings:
    """The science of one run. Where and how it is started is not in here."""

    __pydantic_config__ = STRICT

    corpus: CorpusSettings = option(CorpusSettings, "the text")
    tokenizer: TokenizerSettings = option(TokenizerSettings, "text to ids")
    model: ModelSettings = option(ModelSettings, "the decoder's shape")
    approach: Literal[*BATCHES] = option("packed", "how documents become rows, and when they are tokenized")
    engine: Literal["auto", "gigatoken", "tokenizers", "tiktoken", "mistral-common"] = option(
        "auto", "what tokenizes while training; auto: the fastest exact one that is here; tokenizers: the studies' own"
    )
    sequence_length: int = option(1024, "positions a row", ge=8, strict=True)
    eos: bool = option(False, "end each document with EOS, beside its one BOS")
    storage: StorageSettings = option(StorageSettings, "layout of the Parquet formats")
    packing: Literal["best-fit", "concatenate"] = option(
        "best-fit", "packed: fullest rows that cut only documents longer than a row; or cut wherever a row ends"
    )
    global_batch: int = option(8, "rows an optimizer step, over all ranks", ge=1, strict=True)
    micro_batch: int = option(8, "rows a forward pass of one rank, at most", ge=1, strict=True)
    prefetch: bool = option(False, "read one batch ahead, in a thread; the batches are the same")
    layout: LayoutSettings = option(LayoutSettings, "parallel degrees")
    device: Literal["auto", "cpu"] = option("auto", "auto: a GPU a rank where the machine has GPUs; cpu: never one")
    precision: Literal["fp32", "bf16", "fp16", "bf16-true"] = option(
        "fp32",
        "bf16: autocast over fp32 weights; fp16: the same with scaled losses; bf16-true: weights, gradients and "
        "moments in bf16, as the studies had them",
    )
    float8: bool = option(False, "float8 products in the blocks' linear layers (CUDA of Hopper or later, with torchao)")
    objective: Literal[*OBJECTIVES] = option("causal", "predict the next token, or masked tokens")
    masking: MaskingSettings = option(MaskingSettings, "masked: what is predicted")
    labels: Literal["all", "target"] = option(
        "all",
        "what is predicted of a pair (a corpus of texts with translations): all of it, or what stands behind its "
        "first EOS",
    )
    document_mask: bool = option(False, "attention stays inside a document; packed rows only")
    attention: Literal["auto", "sdpa", "flex", "varlen", "flash"] = option(
        "auto", "kernel of attention; auto: the fastest that the device and the mask allow; the one used is recorded"
    )
    loss_chunk: int = option(
        0,
        "positions whose logits exist at once; 0: all, which at a vocabulary of 131k needs much memory",
        ge=0,
        strict=True,
    )
    activation_checkpointing: Literal["none", "block", "selective"] = option(
        "none", "what backward computes again: nothing, whole blocks, or all but products and attention"
    )
    compile: bool = option(False, "torch.compile for each block and for the loss")
    optimizer: OptimizerSettings = option(OptimizerSettings, "AdamW")
    schedule: ScheduleSettings = option(ScheduleSettings, "learning rate by step")
    budget: BudgetSettings = option(BudgetSettings, "when it ends")
    validation: ValidationSettings = option(ValidationSettings, "the held-out slice")
    checkpoints: CheckpointSettings = option(CheckpointSettings, "weights and resume states on disk")
    resume_from: str | None = option(
        None,
        "a resume state of another run, whose layout, budget or evaluation may differ from this one's: its folder; "
        "or, in an experiment's file, `run` and `step` of a run of the same table",
    )
    log_every: int = option(
        10, "steps between readings of the device; each step is logged all the same", ge=1, strict=True
    )
    garbage_every: int = option(100, "steps between Python's garbage collections; 0: left to Python", ge=0, strict=True)
    profile: ProfileSettings = option(ProfileSettings, "a trace of some steps")
    seed: int = option(0, "of the initial weights and of the order", ge=0, strict=True)
    repeat: int = option(0, "which repeat; added to the seed", ge=0, strict=True)

    @property
    def effective_seed(self) -> int:
        """Seed of weights and order: repeats differ, approaches of one repeat share it (paired comparisons)."""
        return self.seed + self.repeat

    @property
    def identity(self) -> str:
        """Readable prefix and ten hex digits over the science fields that differ from their defaults."""
        digest = sha256_text(canonical_json(to_dict(self, science_only=True)))
        return f"{self.approach}-{self.model.name}-{self.layout.method}-w{self.layout.world_size}-{digest[:10]}"

    @property
    def store(self) -> StoreSettings | None:
        """The token store this run reads, or None for an approach that tokenizes while training."""
        form = APPROACHES[self.approach]
        if form is None:
            return None
        options = {
            "sequence_length": self.sequence_length,
            "eos": self.eos,
            "codec": self.storage.codec,
            "codec_level": self.storage.codec_level,
            "dtype": self.storage.dtype,
            "row_group_rows": self.storage.row_group_rows,
            "packing": self.packing,
        }
        return StoreSettings(form, **{k: v for k, v in options.items() if k in StoreSettings.OPTIONS[form]})

    @property
    def validation_store(self) -> StoreSettings | None:
        """The store of the held-out slice: always packed, so that every approach is judged on the same rows."""
        if self.validation.rows == 0:
            return None
        return StoreSettings("packed", split="validation", sequence_length=self.sequence_length, eos=self.eos)

    @property
    def keeps_weights(self) -> bool:
        """Whether it writes weights; the tokenizer is then kept with them."""
        policy = self.checkpoints
        return bool(
            policy.final
            or policy.best
            or policy.keep_resume_state
            or policy.every
            or policy.each_epoch
            or policy.at_start
        )

    @property
    def reads_tokenizer(self) -> bool:
        """Whether the tokenizer's folder is an input: to tokenize, to know its special ids, or to be kept."""
        return self.reads_text or OBJECTIVES[self.objective].special_ids or self.keeps_weights

    @property
    def reads_text(self) -> bool:
        """Whether the raw corpus is an input: to be tokenized while training, or to be translated at the end."""
        return self.store is None or self.validation.bleu > 0

    def problems(self) -> list[tuple[str, str]]:
        """(field, what is wrong) for rules over several fields."""
        found = [(f"model.{f}", text) for f, text in self.model.problems()]
        found += [(f"tokenizer.{f}", text) for f, text in self.tokenizer.problems()]
        if self.model.maximum_positions is not None and self.model.maximum_positions < self.sequence_length:
            text = f"{self.model.maximum_positions} is less than sequence_length {self.sequence_length}"
            found.append(("model.maximum_positions", text))
        if self.model.transformers and self.attention not in ("auto", "sdpa"):
            found.append(("attention", f"models of transformers ({self.model.transformers}) run their own"))
        found += [(f"layout.{field}", text) for field, text in self._layout_problems()]
        if self.budget.kind == "steps" and self.schedule.warmup_steps > self.budget.steps:
            text = f"{self.schedule.warmup_steps} is more than budget.steps = {self.budget.steps}"
            found.append(("schedule.warmup_steps", text))
        stated = [name for name in BUDGETS if getattr(self.budget, name) is not None]
        if len(stated) > 1 or (stated and self.budget.steps != BudgetSettings().steps):
            found.append((f"budget.{stated[0]}", "a run has one budget: leave the others out"))
        if self.document_mask and self.approach != "packed":
            found.append(("document_mask", f"approach {self.approach} keeps no bounds of documents; packed does"))
        if self.document_mask and self.model.transformers:
            found.append(
                ("document_mask", f"models of transformers ({self.model.transformers}) are not masked that way")
            )
        if self.labels == "target":
            if BATCHES[self.approach].streams or self.packing == "concatenate":
                cuts = f"approach {self.approach}" if self.packing == "best-fit" else "packing concatenate"
                found.append(("labels", f"{cuts} cuts pairs anywhere: rows do not show where targets begin"))
            if not self.eos:
                found.append(("labels", "the target of a pair begins behind EOS: set eos"))
            if not OBJECTIVES[self.objective].causal:
                found.append(("labels", f"objective {self.objective} chooses what it predicts"))
        if self.corpus.source.pairs and not self.eos:
            found.append(("eos", f"the two texts of a pair (corpus {self.corpus.name}) end with EOS: set eos"))
        found += [("validation.bleu", text) for text in self._translation_problems()]
        if self.checkpoints.best and self.validation.rows == 0:
            found.append(
                ("checkpoints.best", "the best weights are those of the lowest validation loss, and there is none")
            )
        if self.attention in ("flex", "varlen") and not self.document_mask and not self.model.transformers:
            found.append(("attention", f"{self.attention} takes part only where document_mask is set: leave it out"))
        if self.objective != "masked" and self.masking != MaskingSettings():
            found.append(("masking", f"objective {self.objective} masks nothing"))
        if not reads_parquet(self.approach) and self.storage != StorageSettings():
            found.append(("storage", f"approach {self.approach} reads no Parquet store"))
        if self.engine != "auto" and APPROACHES[self.approach] is not None:
            found.append(("engine", f"approach {self.approach} tokenizes nothing while training"))
        if self.packing != "best-fit" and self.approach != "packed":
            found.append(("packing", f"approach {self.approach} packs nothing"))
        if self.storage.codec != "zstd" and self.storage.codec_level != 3:
            found.append(("storage.codec_level", f"codec {self.storage.codec} has no level"))
        return found

    def _translation_problems(self) -> list[str]:
        if not self.validation.bleu:
            return []
        found = []
        if not self.corpus.source.pairs:
            found.append(f"documents of corpus {self.corpus.name} are no pairs: there is nothing to translate")
        if not OBJECTIVES[self.objective].causal:
            found.append(f"a model of the {self.objective} objective writes no text, so no translation")
        cut = [method for method in self.layout.methods if method not in ("single", *COPIES, "zero1")]
        if cut:
            found.append(f"with {cut[0]} no rank has the whole model: set checkpoints.final, then evaluate --bleu")
        if self.float8:
            found.append("float8 products want 16 rows, a translation has one: checkpoints.final, evaluate --bleu")
        return found

    def _layout_problems(self) -> list[tuple[str, str]]:
        found = []
        if OBJECTIVES[self.objective].whole:
            text = f"objective {self.objective} needs the whole model on each rank: use data, or sharding zero1"
            found += [(name, text) for name in ("tensor", "pipeline") if getattr(self.layout, name) > 1]
            found += [("sharding", text)] * (self.layout.shard > 1 and self.layout.sharding != "zero1")
        if self.float8 and self.layout.tensor > 1:
            found.append(("tensor", "float8 layers are not cut: leave float8 out, or use data, shard or pipeline"))
        if self.layout.pipeline > 1 and self.layout.schedule == "zero-bubble" and (self.float8 or self.compile):
            named = "float8" if self.float8 else "compile"
            found.append(("schedule", f"zero-bubble computes products itself, which {named} would replace: take 1f1b"))
        return found + self.layout.problems(
            self.model,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            sequence_length=self.sequence_length,
        )

    def to_json(self) -> str:
        """Canonical JSON without defaults: what a rule passes to the trainer."""
        return canonical_json(to_dict(self))

    @classmethod
    def from_json(cls, text: str) -> "RunSettings":
        """The run that `to_json` wrote (see `options.from_json`)."""
        return from_json(cls, text)
