"""Hugging Face `transformers`: its Trainer, on the contract's batches and weights.

The model is read by `from_pretrained`. The dataset is the contract's sequences, read in order. A
sequence has T input tokens and T labels, which are passed as `shift_labels`: the model would
otherwise shift `labels` itself and lose the last one. Losses and times are taken from hooks,
because the Trainer logs means over several steps.
"""

import torch
from contract import Contract
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, logging

contract = Contract()
optimizer = contract.optimizer
schedule = contract.schedule
contract.require(
    {
        "dropout, whose random numbers differ": contract.shape["dropout"] > 0,
        "micro-batches of unequal size": contract.rows % contract.micro_batch != 0,
        "another schedule than constant": schedule["shape"] != "constant",
        "warm-up, which begins at a learning rate of zero": schedule["warmup_steps"] > 0,
        "several ranks, as its data loader divides one dataset between them": contract.world_size
        > 1,
    }
)


class Sequences(torch.utils.data.Dataset):
    """The contract's sequences, in the order of the steps."""

    rows = contract.tokens.reshape(-1, contract.sequence_length + 1)

    def __len__(self):
        """Return the number of sequences of all steps."""
        return len(self.rows)

    def __getitem__(self, index):
        """Return one sequence. The model computes a loss only where `labels` are passed as well."""
        tokens = torch.from_numpy(self.rows[index].astype("int64"))
        return {"input_ids": tokens[:-1], "labels": tokens[1:], "shift_labels": tokens[1:]}


class WatchedTrainer(Trainer):
    """The Trainer, with the contract's hooks on its model and optimizer."""

    def create_optimizer(self, model=None):
        """Make the Trainer's optimizer, and watch it with the model, which is not wrapped yet."""
        made = super().create_optimizer(model)
        contract.watch(self.model, made)
        return made

    def training_step(self, *values, **options):
        """Take the loss of each backward pass: the sum over a micro-batch, divided by the labels of
        the step.
        """
        loss = super().training_step(*values, **options)
        contract.loss(loss)
        return loss


logging.set_verbosity_error()
arguments = TrainingArguments(
    output_dir=str(contract.folder),
    max_steps=contract.steps,
    per_device_train_batch_size=contract.micro_batch,
    gradient_accumulation_steps=contract.micro_steps,
    train_sampling_strategy="sequential",
    # shift_labels is not an argument of forward, which passes it on to the loss
    remove_unused_columns=False,
    optim="adamw_torch_fused" if optimizer["fused"] else "adamw_torch",
    learning_rate=contract.learning_rates[0],
    adam_beta1=optimizer["beta1"],
    adam_beta2=optimizer["beta2"],
    adam_epsilon=optimizer["epsilon"],
    weight_decay=optimizer["weight_decay"],
    max_grad_norm=optimizer["clip_norm"] or 0.0,
    lr_scheduler_type="constant",
    bf16=contract.precision == "bf16",
    torch_compile=contract.compile,
    use_cpu=contract.device == "cpu",
    seed=contract.seed,
    logging_strategy="no",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
arguments._n_gpu = min(arguments.n_gpu, 1)  # it would use every visible GPU through DataParallel
model = AutoModelForCausalLM.from_pretrained(contract.weights_folder, dtype=torch.float32)
WatchedTrainer(model=model, args=arguments, train_dataset=Sequences()).train()
contract.close()
