"""litgpt: its pretraining loop (`litgpt.pretrain`), unchanged, on the contract's batches and
weights.

Batches come in through a data module, weights through litgpt's own conversion of Hugging Face
weights and `initial_checkpoint_dir`. Losses are taken where litgpt calls backward, because its log
has three digits.
"""

import functools
import math
import os
import sys

from contract import Contract

contract = Contract()
shape = contract.shape
optimizer = contract.optimizer
schedule = contract.schedule
if not contract.compile:  # litgpt compiles every model; this is PyTorch's own switch
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

from lightning.fabric.plugins.environments import LightningEnvironment  # noqa: E402
from litgpt import pretrain  # noqa: E402
from litgpt.args import EvalArgs, TrainArgs  # noqa: E402
from litgpt.config import Config  # noqa: E402
from litgpt.data import DataModule  # noqa: E402
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama  # noqa: E402
from torch import save  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

peak = max(contract.learning_rates)
floor = peak if schedule["shape"] == "constant" else peak * schedule["floor"]
iterations = contract.steps * contract.micro_steps
warmup = schedule["warmup_steps"] * contract.micro_steps
#: iteration whose rate an update uses: the last one of a step
updates = range(contract.micro_steps - 1, iterations, contract.micro_steps)
rates = [pretrain.get_lr(peak, iteration, warmup, iterations, floor) for iteration in updates]
llama = {
    "norm": "rms",
    "activation": "swiglu",
    "positions": "rotary",
    "biases": False,
    "attention_biases": None,
}
llama |= {"query_key_norm": False, "rope_scaling": "none", "dropout": 0.0, "transformers": None}
contract.require(
    {
        "models other than Llama's": any(shape[name] != value for name, value in llama.items()),
        "micro-batches of unequal size": contract.rows % contract.micro_batch != 0,
        "this schedule, for which its get_lr gives other rates": not all(
            math.isclose(ours, theirs, rel_tol=1e-9)
            for ours, theirs in zip(contract.learning_rates, rates, strict=True)
        ),
        "several ranks": contract.world_size > 1,
    }
)

# --- weights: a litgpt checkpoint, by its converter
config = Config(
    name=shape["name"],
    block_size=contract.sequence_length,
    vocab_size=contract.vocabulary_size,
    padded_vocab_size=contract.vocabulary_size,
    n_layer=shape["layers"],
    n_head=shape["heads"],
    n_query_groups=shape["key_value_heads"],
    n_embd=shape["dimension"],
    head_size=shape["head_dim"],
    intermediate_size=shape["hidden"],
    norm_class_name="RMSNorm",
    norm_eps=shape["norm_epsilon"],
    mlp_class_name="LLaMAMLP",
    rotary_percentage=1.0,
    rope_base=shape["rope_theta"],
    parallel_residual=False,
    bias=False,
)
checkpoint = contract.folder / "checkpoint"
checkpoint.mkdir()
state = {}
copy_weights_hf_llama(config, {}, state, contract.weights())
save(state, checkpoint / "lit_model.pth")


# --- data: the contract's sequences, one after the other
class Sequences(DataModule):
    """Data module of the contract. Its validation, which litgpt always begins with, reads the first
    micro-batch.
    """

    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
        """Take the micro-batch size that litgpt passes."""
        self.batch_size = batch_size

    def train_dataloader(self):
        """Serve all steps in order."""
        return DataLoader(
            contract.tokens.reshape(-1, contract.sequence_length + 1), batch_size=self.batch_size
        )

    def val_dataloader(self):
        """Serve one batch."""
        return DataLoader(contract.tokens[0, : self.batch_size], batch_size=self.batch_size)


# --- log: hooks on backward, and on model and optimizer once litgpt's validation is over
fit = pretrain.fit
iterate = pretrain.CycleIterator


def fit_and_watch(fabric, state, **options):
    """Run litgpt's loop, and watch it from its first training step on."""
    backward = fabric.backward

    def backward_and_log(loss, *values, **options):
        contract.loss(loss)
        backward(loss, *values, **options)

    def iterate_and_watch(loader):
        model = next(
            module for module in state["model"].modules() if isinstance(module, pretrain.GPT)
        )
        contract.watch(model, state["optimizer"].optimizer)
        return iterate(loader)

    fabric.backward = backward_and_log
    pretrain.CycleIterator = iterate_and_watch
    fit(fabric=fabric, state=state, **options)


pretrain.fit = fit_and_watch

# --- litgpt's own loop
sys.argv = ["litgpt", "pretrain", config.name]  # read when it saves its hyperparameters
# also in a SLURM job of many
one_process = {"accelerator": contract.device, "plugins": [LightningEnvironment()]}
pretrain.L.Fabric = functools.partial(pretrain.L.Fabric, **one_process)
values = {
    "lr": peak,
    "betas": (optimizer["beta1"], optimizer["beta2"]),
    "eps": optimizer["epsilon"],
    "weight_decay": optimizer["weight_decay"],
}
pretrain.setup(
    config.name,
    model_config=config,
    out_dir=contract.folder / "out",
    precision="32-true" if contract.precision == "fp32" else "bf16-mixed",
    initial_checkpoint_dir=checkpoint,
    data=Sequences(),
    train=TrainArgs(
        save_interval=None,
        global_batch_size=contract.rows,
        micro_batch_size=contract.micro_batch,
        max_tokens=contract.steps * contract.rows * contract.sequence_length,
        max_seq_length=contract.sequence_length,
        max_norm=math.inf if optimizer["clip_norm"] is None else optimizer["clip_norm"],
        min_lr=floor,
        lr_warmup_steps=schedule["warmup_steps"],
        tie_embeddings=shape["tied_embeddings"],
    ),
    eval=EvalArgs(interval=contract.steps + 1, final_validation=False),
    optimizer={"class_path": "torch.optim.AdamW", "init_args": values},
    devices=1,
    logger_name="csv",
    seed=contract.seed,
)
contract.close()
