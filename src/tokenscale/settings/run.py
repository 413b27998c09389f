"""Settings of one run: everything that affects its result, the run id derived from it, and resuming
from another.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal

from tokenscale.base.files import canonical_json, sha256_text
from tokenscale.settings.data import (
    CorpusSettings,
    StorageSettings,
    StoreSettings,
    TokenizerSettings,
)
from tokenscale.settings.extensions import ExtensionSettings, show_extension
from tokenscale.settings.layout import LayoutSettings
from tokenscale.settings.mixture import MixtureSettings
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import (
    EXTENSION_NAME,
    LARGEST,
    MOST,
    NAME_PATTERN,
    as_list,
    from_json,
    option,
    settings_class,
    to_dict,
)
from tokenscale.settings.registry import BATCHES, FORMATS, OBJECTIVES

#: value of `arm` for this project's own trainer
OURS = "tokenscale"
#: arms that only read: this project's readers, those of the source studies, and copies of batches
#: in memory, which no reader can be faster than
READERS = ("reader", "studies", "memcpy")
#: approaches that the source studies have readers for, and how their files are stored
STUDIED = ("padded", "padding-free", "pretokenized-padded", "token-list")
STUDIED_STORAGE = StorageSettings("snappy", dtype="int64")
#: approaches of this project
APPROACHES = tuple(BATCHES)


def reads_parquet(approach: str) -> bool:
    """Whether an approach reads a Parquet store, so that `StorageSettings` apply to it."""
    store_format = BATCHES[approach].format
    return store_format is not None and "codec" in FORMATS[store_format].options


@settings_class
class OptimizerSettings:
    """AdamW. Weight decay applies to matrices only, not to norms."""

    learning_rate: float = option(3e-4, description="peak learning rate", gt=0)
    beta1: float = option(
        0.9,
        description="decay of the first moment",
        ge=0,
        lt=1,
    )
    beta2: float = option(
        0.95,
        description="decay of the second moment",
        ge=0,
        lt=1,
    )
    epsilon: float = option(1e-8, description="added to the root of the second moment", gt=0)
    weight_decay: float = option(0.1, description="decoupled weight decay", ge=0)
    clip_norm: float | None = option(
        1.0, description="largest global gradient norm; null: no clipping", gt=0
    )
    moments: Literal["weights", "fp32"] = option(
        "weights",
        description="number format: that of the weights, or fp32 over weights in bf16 (precision bf16-true)",
    )
    fused: bool = option(
        True,
        description="update all weights in one kernel, which also clips and unscales the gradients",
    )


@settings_class
class ScheduleSettings:
    """Learning rate by step: linear warm-up, then decay to a floor."""

    shape: Literal["constant", "linear", "cosine"] = option(
        "cosine", description="decay after the warm-up"
    )
    warmup_steps: int = option(
        10, description="steps of linear warm-up; step 0 uses 1/warmup_steps of the peak", ge=0
    )
    floor: float = option(
        0.1,
        description="final learning rate as a share of the peak",
        ge=0,
        le=1,
    )


@settings_class
class BudgetSettings:
    """Length of a run: `steps`, or one of the other budgets instead."""

    steps: int = option(
        100,
        description="optimizer steps; used when no other budget is set",
        ge=1,
        le=10**12,
    )
    epochs: float | None = option(
        None,
        description="passes over the training data, rounded up to whole steps",
        gt=0,
        le=10**9,
    )
    useful_tokens: int | None = option(
        None,
        description="target tokens that count in the loss, all ranks; rounded up to steps",
        ge=1,
    )
    flops: float | None = option(
        None,
        description="training FLOPs (convention `full`, with padding), rounded up to steps",
        gt=0,
    )
    wall_s: float | None = option(
        None,
        description="seconds of training steps; the first step that begins later is the last",
        gt=0,
    )

    @property
    def kind(self) -> str:
        return next((name for name in BUDGETS if getattr(self, name) is not None), "steps")


#: budgets that replace `steps`
BUDGETS = ("epochs", "useful_tokens", "flops", "wall_s")


@settings_class
class ValidationSettings:
    """Loss on a fixed held-out slice: the first sequences of the packed validation store, for every
    approach. Attention stays inside documents.
    """

    rows: int = option(
        64,
        description="sequences in the slice; 0: no validation",
        ge=0,
        le=MOST,
    )
    every: int = option(
        0, description="steps between validations; 0: only at the start and the end", ge=0
    )
    each_epoch: bool = option(False, description="also validate after the last step of each epoch")
    at_start: bool = option(True, description="validate before the first step")
    at_end: bool = option(True, description="validate after the last step")
    accuracy: bool = option(
        False, description="also measure accuracy: the share of targets with the largest logit"
    )
    bleu: int = option(
        0,
        description="validation pairs to translate at the end, for BLEU; 0: none",
        ge=0,
        le=MOST,
    )
    bleu_each_epoch: bool = option(
        False, description="also translate them after the last step of each epoch"
    )


@settings_class
class CheckpointSettings:
    """Weights and resume states that a run writes to `results/runs/<run id>/checkpoints/`."""

    every: int = option(
        0,
        description="steps between resume states; 0: none, and an interrupted run starts over",
        ge=0,
    )
    each_epoch: bool = option(
        False, description="write a resume state after the last step of each epoch"
    )
    at_start: bool = option(
        False,
        description="write a resume state before the first step: the seed checkpoint for other layouts",
    )
    keep_last: int = option(1, description="newest resume states to keep", ge=1)
    keep_resume_state: bool = option(
        False, description="keep resume states after the run has ended, and write one at its end"
    )
    final: bool = option(
        False, description="write the final weights, for `evaluate`, `generate` and `export`"
    )
    best: bool = option(
        False, description="keep the weights with the lowest validation loss so far"
    )
    asynchronous: bool = option(
        True, description="write a copy in a background thread while training continues"
    )


@settings_class
class MaskingSettings:
    """Masked-language modelling (BERT, Devlin et al. 2019).

    The masked positions depend on (seed, global sample, position) alone.
    """

    share: float = option(
        0.15,
        description="share of useful tokens to predict: 80 % masked, 10 % random, 10 % as is",
        gt=0,
        le=1,
    )


@settings_class
class ProfileSettings:
    """Trace of torch.profiler for each rank, in `attempt=NN/rank=NNNNN/trace.json.gz`."""

    first: int = option(10, description="first step of the trace", ge=0)
    steps: int = option(0, description="steps in the trace; 0: no trace", ge=0)


@settings_class
class ReaderSettings:
    """How an arm that only reads opens its files."""

    cold: bool = option(
        False, description="drop the files from the page cache before they are opened"
    )
    workers: int | None = option(
        None,
        description="worker processes of torch's DataLoader; null: read without a DataLoader",
        ge=0,
        le=MOST,
    )


#: attention kernels that are one back end of torch's scaled_dot_product_attention
SDPA_BACKENDS = ("sdpa-flash", "sdpa-fa3", "sdpa-cudnn")
#: other words for the device `auto`, which is what ids and records hold
GPU = {"cuda": "auto", "gpu": "auto"}


@settings_class
class RunSettings:
    """Scientific settings of one run. Where and how it is started is not part of them."""

    corpus: CorpusSettings = option(
        CorpusSettings, description="text to train on: a corpus or a mixture of config.yaml"
    )
    tokenizer: TokenizerSettings = option(TokenizerSettings, description="tokenizer of the text")
    model: ModelSettings = option(ModelSettings, description="shape of the model")
    approach: Literal[*BATCHES] = option(  # type: ignore[valid-type]
        "packed",
        description="data-loading strategy: how documents become sequences; or one of your own, "
        "`module:Name`",
        extensions=True,
    )
    engine: Literal["auto", "gigatoken", "tokenizers", "tiktoken", "mistral-common"] = option(
        "auto",
        description="library that tokenizes during training, without effect if tokens are read; auto: the "
        "fastest installed one "
        "with exact ids; tokenizers: the one of the source studies",
    )
    sequence_length: int = option(
        1024,
        description="tokens per sequence",
        ge=8,
        le=MOST,
    )
    eos: bool = option(
        False, description="end each document with EOS; every document begins with BOS in any case"
    )
    storage: StorageSettings = option(
        StorageSettings, description="storage options of the Parquet formats"
    )
    packing: Literal["best-fit", "concatenate"] = option(
        "best-fit",
        description="approach packed. best-fit: fill sequences, cut only documents that are longer than one; "
        "concatenate: cut "
        "wherever a sequence ends",
    )
    arm: str = option(
        OURS,
        description="trainer: tokenscale, or a folder in arms/; reader, studies and memcpy only read "
        "batches, as this project, as the source studies and from memory",
        pattern=NAME_PATTERN,
    )
    reader: ReaderSettings = option(
        ReaderSettings, description="how an arm that only reads does it"
    )
    global_batch: int = option(
        8,
        description="global batch size: sequences per optimizer step, over all ranks",
        ge=1,
        le=MOST,
    )
    micro_batch: int = option(
        8,
        description="largest number of sequences per forward pass of one rank",
        ge=1,
        le=MOST,
    )
    prefetch: bool | None = option(
        None, description="read one batch ahead in a thread; by default on GPUs only"
    )
    layout: LayoutSettings = option(LayoutSettings, description="parallel degrees")
    device: Literal["auto", "cpu"] = option(
        "auto",
        description="auto (or cuda, gpu): one GPU per rank if there are GPUs; cpu: never a GPU",
        synonyms=GPU,
    )
    precision: Literal["fp32", "bf16", "fp16", "bf16-true"] = option(
        "fp32",
        description="bf16: autocast with fp32 weights; fp16: the same with loss scaling; bf16-true: weights, "
        "gradients and "
        "optimizer moments in bf16, as in the source studies",
    )
    float8: bool = option(
        False,
        description="float8 matrix products in the blocks (Hopper GPUs or later, needs torchao)",
    )
    objective: Literal[*OBJECTIVES] = option(  # type: ignore[valid-type]
        "causal",
        description="objective: predict the next token, or masked ones; or one of your own, "
        "`module:Name`",
        extensions=True,
    )
    masking: MaskingSettings = option(
        MaskingSettings, description="objective masked: which tokens are predicted"
    )
    labels: Literal["all", "target", "stream"] = option(
        "all",
        description="tokens that are predicted. all: those of documents, but not their first; target: of a "
        "translation pair only "
        "the target, which follows the first EOS; stream: first tokens too, as trainers do that "
        "read one stream of "
        "tokens (packing concatenate)",
    )
    document_mask: bool = option(
        False,
        description="restrict attention to tokens of the same document; for approaches whose rows "
        "hold several: packed, padding-free, token-list",
    )
    attention: Literal["auto", "sdpa", *SDPA_BACKENDS, "flex", "varlen", "flash"] = option(  # type: ignore[valid-type]
        "auto",
        description=(
            "attention kernel; auto: the fastest that device and mask allow; sdpa: torch's, which "
            "chooses its back end, or one back end of it. The run's records name the kernel used"
        ),
    )
    loss_chunk: int = option(
        0, description="positions whose logits are computed at once; 0: all", ge=0
    )
    activation_checkpointing: Literal["none", "block", "selective"] = option(
        "none",
        description="activations recomputed in the backward pass. block: whole blocks; selective: all but "
        "matrix products and "
        "attention",
    )
    compile: bool = option(False, description="apply torch.compile to each block and to the loss")
    optimizer: OptimizerSettings = option(OptimizerSettings, description="AdamW")
    schedule: ScheduleSettings = option(ScheduleSettings, description="learning rate by step")
    budget: BudgetSettings = option(BudgetSettings, description="length of the run")
    validation: ValidationSettings = option(ValidationSettings, description="held-out validation")
    checkpoints: CheckpointSettings = option(
        CheckpointSettings, description="weights and resume states on disk"
    )
    resume_from: str | None = option(
        None,
        description="folder of another run's resume state to continue from; layout, budget and evaluation "
        "may differ. In an "
        "experiment's file also `run` and `step` of a run of the same experiment",
        path=True,
    )
    log_every: int = option(
        10,
        description="steps between readings of device counters; every step is logged in any case",
        ge=1,
    )
    garbage_every: int = option(
        100, description="steps between garbage collections; 0: Python's automatic collection", ge=0
    )
    profile: ProfileSettings = option(ProfileSettings, description="profiler trace of some steps")
    mixture: MixtureSettings | None = option(
        None, description="corpora and weights, if `corpus` is a mixture; filled in"
    )
    extensions: tuple[ExtensionSettings, ...] = option(
        tuple,
        description="extensions that `objective` and `approach` name; filled in",
        science=False,  # their names, which are, have the digests of their code
    )
    seed: int = option(0, description="seed of the initial weights and of the sample order", ge=0)
    repeat: int = option(0, description="number of the repeat; added to the seed", ge=0)

    @property
    def effective_seed(self) -> int:
        """Seed of weights and sample order, shared by the approaches of one repeat (paired
        comparisons).
        """
        return self.seed + self.repeat

    @property
    def autocasts(self) -> bool:
        """Whether weights are fp32 and autocast rounds them for products; else all is computed in
        one format.
        """
        return self.precision in ("bf16", "fp16") and self.layout.gather == "stored"

    @property
    def number_format(self) -> str:
        """Number format of most matrix products, as the table of peaks names it."""
        if self.float8:
            return "fp8"
        if self.precision == "bf16-true":
            return "bf16"
        return self.precision

    @property
    def identity(self) -> str:
        """Run id: a readable prefix and ten hex digits over the science fields that differ from
        their defaults, and the word for the order of an approach that has one.
        """
        science = to_dict(self, science_only=True)
        approach = BATCHES.get(self.approach)
        if approach is not None and approach.order:
            science["order"] = approach.order
        digest = sha256_text(canonical_json(science))
        if self.arm in READERS:
            return f"{self.arm}-{self.approach}-w1-{digest[:10]}"
        trainer = self.approach if self.arm == OURS else self.arm
        if EXTENSION_NAME.fullmatch(trainer):
            trainer = trainer.rpartition(".")[0]
        return f"{trainer}-{self.model.name}-{self.layout.method}-w{self.layout.world_size}-{digest[:10]}"

    @property
    def store(self) -> StoreSettings | None:
        """Token store that the run reads; None where it reads text alone. An online stream reads the
        lengths of its documents.
        """
        store_format = BATCHES[self.approach].format
        if store_format is None:
            return None
        own = {"sequence_length": self.sequence_length, "eos": self.eos, "packing": self.packing}
        storage = STUDIED_STORAGE if self.arm == "studies" else self.storage
        values = vars(storage) | own
        known = FORMATS[store_format].options
        return StoreSettings(
            store_format, **{name: value for name, value in values.items() if name in known}
        )

    @property
    def online(self) -> bool:
        """Whether the run tokenizes while it trains."""
        return BATCHES[self.approach].online

    @property
    def validation_store(self) -> StoreSettings | None:
        """Store of the held-out slice: always packed, so that all approaches are evaluated on the
        same sequences.
        """
        if self.validation.rows == 0:
            return None
        return StoreSettings(
            "packed", split="validation", sequence_length=self.sequence_length, eos=self.eos
        )

    @property
    def masks_validation(self) -> bool:
        """Whether attention stays inside documents when the held-out rows are read: in every approach
        alike, whatever its own rows show. Models of `transformers` take no mask.
        """
        return self.model.transformers is None

    @property
    def validation_attention(self) -> str:
        """Which tokens a position of a held-out row attends to, as the run's record states it."""
        return "inside documents" if self.masks_validation else "over whole rows"

    @property
    def corpora(self) -> list[CorpusSettings]:
        """The corpus of the run, or the corpora of its mixture."""
        return (
            [self.corpus]
            if self.mixture is None
            else [source.corpus for source in self.mixture.sources]
        )

    @property
    def trained_corpora(self) -> list[CorpusSettings]:
        """The corpus of the run, or the corpora with a weight in its mixture."""
        return (
            [self.corpus]
            if self.mixture is None
            else [source.corpus for source in self.mixture.trained_sources]
        )

    @property
    def keeps_weights(self) -> bool:
        """Whether the run writes weights; the tokenizer is then saved with them."""
        policy = self.checkpoints
        resumable = (
            policy.keep_resume_state or policy.every > 0 or policy.each_epoch or policy.at_start
        )
        return policy.final or policy.best or resumable

    @property
    def reads_tokenizer(self) -> bool:
        """Whether the tokenizer's folder is an input: to tokenize, for its special ids, or to save
        it.
        """
        marks = self.arm == "studies"  # documents by their BOS, also where their ids are stored
        return (
            self.reads_text or OBJECTIVES[self.objective].special_ids or self.keeps_weights or marks
        )

    @property
    def reads_text(self) -> bool:
        """Whether the raw corpus is an input: to tokenize it while training, or to translate it at
        the end.
        """
        return self.online or self.validation.bleu > 0

    @as_list
    def problems(self) -> Iterator[tuple[str, str]]:
        """Violations of rules over several fields, as (field, what is wrong)."""
        yield from ((f"model.{f}", text) for f, text in self.model.problems())
        yield from ((f"tokenizer.{f}", text) for f, text in self.tokenizer.problems())
        yield from self._model_problems()
        yield from ((f"layout.{f}", text) for f, text in self._layout_problems())
        yield from self._budget_problems()
        yield from self._document_mask_problems()
        yield from self._label_problems()
        yield from self._mixture_problems()
        yield from ((f"validation.{f}", text) for f, text in self._translation_problems())
        if self.checkpoints.best and self.validation.rows == 0:
            yield "checkpoints.best", "needs a validation loss: set validation.rows"
        yield from self._kernel_problems()
        yield from self._store_problems()
        if self.objective != "masked" and self.masking != MaskingSettings():
            yield "masking", f"objective {self.objective} does not mask tokens"
        if self.optimizer.moments != "weights" and self.precision != "bf16-true":
            text = f"precision {self.precision} has fp32 weights, and moments like them"
            yield "optimizer.moments", text
        if self.arm in READERS:
            yield from self._reader_problems()
        elif self.arm != OURS:
            yield from self._arm_problems()
        if self.arm not in READERS and self.reader != ReaderSettings():
            yield "reader", f"arm {self.arm} trains: use arm reader"

    def _model_problems(self) -> Iterator[tuple[str, str]]:
        positions = self.model.maximum_positions
        if positions is not None and positions < self.sequence_length:
            text = f"{positions} is less than sequence_length {self.sequence_length}"
            yield "model.maximum_positions", text
        if self.model.transformers and self.attention not in ("auto", "sdpa"):
            text = f"models of transformers ({self.model.transformers}) use their own attention"
            yield "attention", text

    def _budget_problems(self) -> Iterator[tuple[str, str]]:
        warmup = self.schedule.warmup_steps
        trains = self.arm not in READERS
        if trains and self.budget.kind == "steps" and warmup > self.budget.steps:
            text = f"{warmup} is more than budget.steps = {self.budget.steps}"
            yield "schedule.warmup_steps", text
        budgets = [name for name in BUDGETS if getattr(self.budget, name) is not None]
        if len(budgets) > 1 or (budgets and self.budget.steps != BudgetSettings().steps):
            yield f"budget.{budgets[0]}", "a run has one budget: remove the others"
        if self.effective_seed > LARGEST:
            yield "seed", f"seed + repeat is {self.effective_seed}, more than {LARGEST}"

    def _document_mask_problems(self) -> Iterator[tuple[str, str]]:
        if not self.document_mask:
            return
        if self.approach != "packed" and not BATCHES[self.approach].streams:
            text = f"rows of approach {self.approach} hold one document each: nothing is to mask"
            yield "document_mask", text
        if self.model.transformers:
            text = (
                f"models of transformers ({self.model.transformers}) do not support document_mask"
            )
            yield "document_mask", text

    def _label_problems(self) -> Iterator[tuple[str, str]]:
        if self.labels == "target":
            yield from self._target_problems()
        if self.labels == "stream" and (self.approach != "packed" or self.packing != "concatenate"):
            yield "labels", "stream needs approach packed and packing concatenate"
        pairs = [corpus.name for corpus in self.corpora if corpus.source.pairs]
        if pairs and not self.eos:
            yield "eos", f"the two texts of a pair (corpus {pairs[0]}) end with EOS: set eos: true"

    def _target_problems(self) -> Iterator[tuple[str, str]]:
        concatenates = self.packing == "concatenate"
        if BATCHES[self.approach].streams or concatenates:
            cuts = "packing concatenate" if concatenates else f"approach {self.approach}"
            text = f"{cuts} cuts pairs anywhere, so sequences do not show where targets begin"
            yield "labels", text
        if not self.eos:
            yield "labels", "the target of a pair follows EOS: set eos: true"
        if not OBJECTIVES[self.objective].causal:
            yield "labels", f"objective {self.objective} chooses its own targets"

    def _store_problems(self) -> Iterator[tuple[str, str]]:
        if not reads_parquet(self.approach) and self.storage != StorageSettings():
            yield "storage", f"approach {self.approach} does not read a Parquet store"
        if self.packing != "best-fit" and self.approach != "packed":
            yield "packing", f"approach {self.approach} does not pack documents"
        if self.storage.codec != "zstd" and self.storage.codec_level != 3:
            yield "storage.codec_level", f"codec {self.storage.codec} has no level"

    def _reader_problems(self) -> list[tuple[str, str]]:
        """Settings that a run has no use for which reads its batches in one process, and learns
        nothing.
        """
        reads = f"arm {self.arm} only reads"
        theirs = self.arm == "studies"
        rules = [
            ("budget", self.budget.kind != "steps", f"{reads}: set budget.steps"),
            ("layout", self.layout != LayoutSettings(), f"{reads}, in one process"),
            ("device", self.device != "cpu", f"{reads}, and needs no device: set it to cpu"),
            ("validation.rows", self.validation.rows > 0, f"{reads}: set it to 0"),
            ("checkpoints", self.keeps_weights, f"{reads}, and has no weights"),
            ("profile", self.profile != ProfileSettings(), f"{reads}: nothing is profiled"),
            ("resume_from", self.resume_from is not None, reads),
            ("prefetch", bool(self.prefetch), f"{reads}: use reader.workers"),
            (
                "approach",
                theirs and self.approach not in STUDIED,
                f"the studies have {', '.join(STUDIED)}",
            ),
            (
                "reader.workers",
                self.reader.workers is not None and self.arm != "reader",
                f"arm {self.arm} reads without a DataLoader",
            ),
            ("reader.cold", self.reader.cold and self.arm == "memcpy", "memory is never cold"),
        ]
        return [(name, text) for name, wrong, text in rules if wrong]

    def _arm_problems(self) -> list[tuple[str, str]]:
        """Settings that no other trainer takes: it gets weights, batches, learning rates and the
        optimizer's values.
        """
        no = "not supported"
        labels = "needs stream: other trainers cannot ignore labels"
        precision = f"needs fp32 or bf16, not {self.precision}"
        rules = [
            ("labels", self.labels != "stream", labels),
            ("objective", self.objective != "causal", no),
            ("budget", self.budget.kind != "steps", no),
            ("validation.rows", self.validation.rows > 0, "needs 0: only training is compared"),
            ("model.transformers", self.model.transformers is not None, no),
            ("model.dropout", self.model.dropout > 0, "needs 0: random numbers differ"),
            ("document_mask", self.document_mask, no),
            ("float8", self.float8, no),
            ("precision", self.precision not in ("fp32", "bf16"), precision),
            ("checkpoints", self.checkpoints != CheckpointSettings(), no),
            ("profile", self.profile != ProfileSettings(), no),
            ("resume_from", self.resume_from is not None, no),
            ("layout", self.layout.world_size != self.layout.data, "needs data parallelism alone"),
        ]
        return [(name, f"arm {self.arm}: {text}") for name, wrong, text in rules if wrong]

    def _kernel_problems(self) -> Iterator[tuple[str, str]]:
        kernel = self.attention
        masks = self.document_mask or self.model.transformers
        if kernel in ("flex", "varlen") and not masks:
            text = f"{kernel} is used only with document_mask: set it, or remove attention"
            yield "attention", text
        if self.device == "cpu":
            if kernel not in ("auto", "sdpa"):
                yield "attention", f"{kernel} needs a GPU, and device is cpu: use sdpa"
            if self.float8:
                yield "float8", "needs a GPU, and device is cpu: remove float8, or use device auto"
        if kernel in SDPA_BACKENDS and masks:
            yield "attention", f"{kernel} takes no bounds of documents: use varlen or flex"
        if kernel in (*SDPA_BACKENDS, "varlen", "flash") and self.precision == "fp32":
            works = "flex" if self.document_mask and not self.model.dropout else "sdpa"
            yield "attention", f"{kernel} computes in 16 bits only: use {works}, or precision bf16"
        if kernel in ("flex", "varlen") and self.model.dropout:
            yield "attention", f"{kernel} has no dropout: use sdpa, or model.dropout 0"
        if self.float8 and self.model.dimension % 16:
            below = self.model.dimension // 16 * 16
            fitting = " and ".join(str(width) for width in (below, below + 16) if width)
            text = (
                f"no product with a width of {self.model.dimension} can be float8: {fitting} are "
                "multiples of 16"
            )
            yield "model.dimension", text

    def _mixture_problems(self) -> Iterator[tuple[str, str]]:
        if self.mixture is None:
            return
        if self.budget.kind == "epochs":
            yield "budget.epochs", "a mixture has no epochs: set budget.steps"
        for section in ("validation", "checkpoints"):
            if getattr(self, section).each_epoch:
                yield f"{section}.each_epoch", f"a mixture has no epochs: set {section}.every"
        if self.budget.kind != "steps" and any(
            s.maximum_repetitions is not None for s in self.mixture.sources
        ):
            text = (
                "only a budget of steps fixes the sequences of each source in advance: set "
                "budget.steps, or "
            )
            yield (
                f"budget.{self.budget.kind}",
                f"{text}maximum_repetitions: null of the mixture {self.corpus.name}",
            )
        if self.labels == "target":
            for corpus in (corpus for corpus in self.corpora if not corpus.source.pairs):
                yield (
                    "labels",
                    f"documents of corpus {corpus.name} are not pairs: they have no target",
                )

    def _translation_problems(self) -> Iterator[tuple[str, str]]:
        if not self.validation.bleu:
            if self.validation.bleu_each_epoch:
                yield "bleu_each_epoch", "nothing is translated: set validation.bleu"
            return
        if self.mixture is not None:
            yield (
                "bleu",
                (
                    f"{self.corpus.name} is a mixture: evaluate --bleu translates the pairs of one "
                    "corpus"
                ),
            )
        elif not self.corpus.source.pairs:
            yield (
                "bleu",
                (
                    f"documents of corpus {self.corpus.name} are not pairs: there is nothing to "
                    "translate"
                ),
            )
        if not OBJECTIVES[self.objective].causal:
            yield "bleu", f"a model of objective {self.objective} cannot generate text"
        if self.float8:
            yield (
                "bleu",
                "float8 products need more rows: set checkpoints.final, then evaluate --bleu",
            )

    def _layout_problems(self) -> Iterator[tuple[str, str]]:
        if OBJECTIVES[self.objective].whole_model:
            text = (
                f"objective {show_extension(self.objective)} needs the whole model on each rank: use data, or "
                "sharding zero1"
            )
            yield from [
                (name, text) for name in ("tensor", "pipeline") if getattr(self.layout, name) > 1
            ]
            if self.layout.shard > 1 and self.layout.sharding != "zero1":
                yield ("sharding", text)
        if self.layout.gather == "bf16" and self.precision != "bf16":
            yield "gather", f"bf16 needs precision bf16, not {self.precision}: use stored"
        if self.layout.gather == "bf16" and self.validation.bleu:
            yield (
                "gather",
                "translation needs stored weights: set checkpoints.final, then evaluate --bleu",
            )
        if self.layout.accumulation_format == "fp32":
            if self.precision != "bf16-true":
                text = f"precision {self.precision} has gradients in fp32 already: remove it"
                yield "accumulation_format", text
            elif self.optimizer.moments != "fp32":
                text = "moments in bf16 take gradients in bf16: set optimizer.moments: fp32"
                yield "accumulation_format", text
        if self.float8 and self.layout.tensor > 1:
            yield (
                "tensor",
                (
                    "float8 layers cannot be sharded by tensor: remove float8, or use data, "
                    "shard or "
                    "pipeline"
                ),
            )
        if (
            self.layout.pipeline > 1
            and self.layout.schedule == "zero-bubble"
            and (self.float8 or self.compile)
        ):
            yield (
                "schedule",
                f"zero-bubble does not support {'float8' if self.float8 else 'compile'}: use 1f1b",
            )
        yield from self.layout.problems(
            self.model, self.global_batch, self.micro_batch, self.sequence_length
        )

    def to_json(self) -> str:
        """Return canonical JSON without defaults, as a workflow rule passes it to the trainer."""
        return canonical_json(to_dict(self))

    from_json = classmethod(from_json)  # type: ignore[var-annotated]


#: settings that may differ; all others determine the data, the model or the computation of a step
MAY_DIFFER = {
    *("layout", "micro_batch", "device", "engine", "prefetch", "budget", "schedule", "validation"),
    *(
        "checkpoints",
        "resume_from",
        "log_every",
        "garbage_every",
        "profile",
        "attention",
        "loss_chunk",
    ),
    *("activation_checkpointing", "compile"),
}


def state_path(run_id: str, step: int) -> str:
    """Return the path of the resume state that a run writes after `step` steps."""
    return f"results/runs/{run_id}/checkpoints/step={step:08d}"


def parse_run_id(state: str) -> str | None:
    """Return the id of the run that writes a state; None for a state outside `results/runs`."""
    found = re.fullmatch(r"(?:\./)?results/runs/([^/]+)/checkpoints/step=\d+/?", state)
    return found[1] if found else None


def start_step(run: RunSettings) -> int:
    """Return the number of steps done before this run, from the name of the state it resumes
    from.
    """
    found = re.search(r"step=(\d+)/?$", run.resume_from or "")
    return int(found[1]) if found else 0


def find_difference(theirs: RunSettings, mine: RunSettings) -> tuple[str, Any, Any] | None:
    """Return (setting, value there, value here) of the first difference that prevents resuming
    `mine`, or None.
    """
    there, here = (to_dict(run, science_only=True) for run in (theirs, mine))
    for key in sorted((there.keys() | here.keys()) - MAY_DIFFER):
        if there.get(key) != here.get(key):
            return key, there.get(key, "the default"), here.get(key, "the default")
    return None


def find_other_schedule(theirs: RunSettings, mine: RunSettings, steps: int) -> dict[str, Any]:
    """Return the settings of `theirs` that gave its first `steps` steps other learning rates than
    `mine` would.
    """

    def followed(run: RunSettings) -> dict[str, Any]:
        schedule = run.schedule
        kind = run.budget.kind
        found = {"schedule.warmup_steps": schedule.warmup_steps, "schedule.shape": schedule.shape}
        if schedule.shape == "constant":
            return found
        return found | {
            "schedule.floor": schedule.floor,
            f"budget.{kind}": getattr(run.budget, kind),
        }

    if theirs.schedule.warmup_steps == mine.schedule.warmup_steps >= steps:
        return {}
    ours = followed(mine)
    return {name: value for name, value in followed(theirs).items() if ours.get(name) != value}
