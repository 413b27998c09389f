"""What a run in training is evaluated on: held-out rows and pairs, when they are due, and the
events of both.
"""

import time
from collections.abc import Callable

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.data.batches.batch import Inputs
from tokenscale.data.batches.open import load_held_out
from tokenscale.runs.records.events import Writer
from tokenscale.settings.run import RunSettings
from tokenscale.train.evaluation.generation import TextModel, held_out_pairs, translate
from tokenscale.train.evaluation.validation import ValidationSums, add_sums, validate
from tokenscale.train.trainer import Trainer


class HeldOut:
    """One slice of rows, or one for each corpus of a mixture, and the pairs to translate. `beat` is
    called meanwhile.

    All is read at once, so that what is missing is reported before the first step.
    """

    def __init__(
        self,
        run: RunSettings,
        inputs: Inputs,
        vocabulary_size: int,
        trainer: Trainer,
        writer: Writer,
        beat: Callable[[], None],
    ):
        self._run = run
        self._trainer = trainer
        self._writer = writer
        self._beat = beat
        self.slices = (
            load_held_out(run, inputs, vocabulary_size=vocabulary_size)
            if run.validation.rows
            else []
        )
        self.pairs = []
        self._prompts: list[np.ndarray] = []
        self._tokenizer = None
        if run.validation.bleu:
            from tokenscale.data.stores.text import encode_prompts
            from tokenscale.data.tokenizers.load import load_tokenizer

            user = "validation.bleu"
            self._tokenizer = load_tokenizer(inputs.require("tokenizer", run, user))
            corpus = inputs.require("corpus", run, user)
            self.pairs = held_out_pairs(corpus, count=run.validation.bleu)
            sources = [pair.source for pair in self.pairs]
            name = run.corpus.name
            self._prompts = encode_prompts(self._tokenizer, prompts=sources, name=name, eos=True)

    def due(self, done: int, *, epoch_ended: bool, last: bool) -> bool:
        """Return whether the loss is due after `done` steps."""
        policy = self._run.validation
        between = bool(policy.every and done % policy.every == 0) or (
            policy.each_epoch and epoch_ended
        )
        if not self.slices:
            return False
        if not done:
            return policy.at_start
        return policy.at_end if last else between

    def validate(self, done: int) -> float:
        """Validate on each slice and return the loss over all of them, in nats per useful token. A
        collective.

        Raises UserError for a slice without labels.
        """
        began = time.monotonic()
        sums = []
        trainer = self._trainer
        run = self._run
        for held_out in self.slices:
            self._beat()
            began_slice = time.monotonic()
            accuracy = run.validation.accuracy
            found = validate(
                trainer.parallel,
                data=held_out,
                micro_batch_size=run.micro_batch,
                mesh=trainer.mesh,
                autocast=trainer.autocast,
                accuracy=accuracy,
            )
            if found.useful_tokens == 0:
                what = "no row of the held-out slice keeps a label: there is no validation loss."
                next_step = "raise sequence_length or validation.rows, or set validation.rows: 0"
                raise UserError(
                    what,
                    corpus=held_out.corpus,
                    found=f"{held_out.global_rows} rows",
                    next=next_step,
                )
            sums.append(found)
            if run.mixture is not None:
                self._log(
                    "source_validation",
                    done,
                    found=found,
                    rows=held_out.global_rows,
                    began=began_slice,
                    corpus=held_out.corpus,
                )
        total = add_sums(sums)
        self._log(
            "validation",
            done,
            found=total,
            rows=sum(held_out.global_rows for held_out in self.slices),
            began=began,
        )
        return total.loss_sum / total.useful_tokens

    def _log(
        self, event: str, done: int, found: ValidationSums, rows: int, began: float, **fields: str
    ) -> None:
        if self._trainer.world.rank == 0:
            sums = {
                name: getattr(found, name)
                for name in ("loss_sum", "useful_tokens", "correct_tokens")
            }
            self._writer.event(
                event, step=done, **sums, rows=rows, duration_s=time.monotonic() - began, **fields
            )

    def translate(self, done: int) -> None:
        """Translate the pairs, each reader its share. BLEU is computed when the logs are read."""
        assert self._tokenizer is not None  # there are pairs
        trainer = self._trainer
        place = self._trainer.mesh.place
        run = self._run
        model = TextModel(trainer.parallel, trainer.world.device)
        device = trainer.world.device
        readers = run.layout
        for found in translate(
            model,
            pairs=self.pairs,
            prompts=self._prompts,
            tokenizer=self._tokenizer,
            positions=run.sequence_length,
            device=device,
            rank=place.data_rank,
            world_size=readers.data_parallel_size,
        ):
            self._beat()
            if not place.is_group_leader:  # its group translates the same
                continue
            self._writer.event(
                "translation",
                step=done,
                number=found.pair.number,
                source=found.pair.source,
                hypothesis=found.hypothesis,
                reference=found.pair.reference,
                duration_s=found.duration_s,
            )
