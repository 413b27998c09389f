"""nanoGPT: its train.py, unchanged, on the contract's batches and weights.

Batches are `train.bin`, nanoGPT's own format, with one sequence of T + 1 tokens after the other;
`torch.randint`, by which its loader chooses sequences, returns the contract's order. Weights come
in through its resume path. Losses and times are taken from hooks, because its log has four digits.
"""

import os
import sys

import numpy as np
import torch
from contract import Contract

contract = Contract()
shape = contract.shape
optimizer = contract.optimizer
schedule = contract.schedule
contract.require(
    {
        "models other than GPT-2": shape["norm"] != "layer"
        or shape["activation"] != "gelu"
        or not shape["biases"],
        "a head of its own": not shape["tied_embeddings"],
        "a vocabulary above 65,536 (uint16)": contract.vocabulary_size > 1 << 16,
        "micro-batches of unequal size": contract.rows % contract.micro_batch != 0,
        "another epsilon than 1e-8": optimizer["epsilon"] != 1e-8,
        "another norm_epsilon than 1e-5": shape["norm_epsilon"] != 1e-5,
        "a linear schedule": schedule["shape"] == "linear",
        "warm-up, which divides by steps + 1": schedule["warmup_steps"] > 0,
        "several ranks without GPUs": contract.world_size > 1 and contract.device == "cpu",
    }
)
sys.path.insert(0, str(contract.source))
from model import GPT, GPTConfig  # noqa: E402

# --- data: train.bin, in the order of the steps; nanoGPT reads one batch ahead, which after the
# last one is never used
data = contract.folder / "data/run"
data.mkdir(parents=True)
rows = contract.tokens.reshape(-1, contract.sequence_length + 1)
rows.astype(np.uint16).tofile(data / "train.bin")
starts = iter(range(len(rows)))


def next_sequences(limit, size):
    """Stand for torch.randint in get_batch: the offsets of the next sequences."""
    found = [next(starts, 0) for _ in range(size[0])]
    return torch.tensor([start * (contract.sequence_length + 1) for start in found])


torch.randint = next_sequences

# --- weights: a checkpoint at step 0, as nanoGPT writes them
arguments = {
    "n_layer": shape["layers"],
    "n_head": shape["heads"],
    "n_embd": shape["dimension"],
    "block_size": shape["maximum_positions"],
    "bias": True,
    "vocab_size": contract.vocabulary_size,
    "dropout": 0.0,
}
model = GPT(GPTConfig(**arguments))
state = model.state_dict()
for name, weight in contract.weights().items():
    # Conv1D in transformers
    turned = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    state[name] = weight.t().contiguous() if turned else weight
state["lm_head.weight"] = state["transformer.wte.weight"]
model.load_state_dict(state)
betas = optimizer["beta1"], optimizer["beta2"]
fresh = model.configure_optimizers(
    optimizer["weight_decay"], contract.learning_rates[0], betas, contract.device
)
checkpoint = {"model": model.state_dict(), "optimizer": fresh.state_dict(), "model_args": arguments}
torch.save(
    checkpoint | {"iter_num": 0, "best_val_loss": 1e9, "config": {}}, contract.folder / "ckpt.pt"
)

# --- log: hooks on the model and the optimizer that train.py makes
configure = GPT.configure_optimizers
forward = GPT.forward


def configure_and_watch(self, *values):
    """Make nanoGPT's optimizer, and watch it with its model."""
    made = configure(self, *values)
    contract.watch(self, made)
    return made


def forward_and_log(self, idx, targets=None):
    """Take the loss of each micro-batch."""
    logits, loss = forward(self, idx, targets)
    if loss is not None and self.training:
        contract.loss(loss / contract.micro_steps)
    return logits, loss


GPT.configure_optimizers = configure_and_watch
GPT.forward = forward_and_log

# --- nanoGPT's own loop
peak = max(contract.learning_rates)
settings = {
    "out_dir": ".",  # the working directory: configurator.py splits at every "="
    "init_from": "resume",
    "dataset": "run",
    "eval_iters": 0,
    "eval_interval": contract.steps + 1,
    "batch_size": contract.micro_batch,
    "block_size": contract.sequence_length,
    "gradient_accumulation_steps": contract.micro_steps * contract.world_size,
    "max_iters": contract.steps - 1,
    "learning_rate": peak,
    "weight_decay": optimizer["weight_decay"],
    "beta1": optimizer["beta1"],
    "beta2": optimizer["beta2"],
    "grad_clip": optimizer["clip_norm"] or 0.0,
    "decay_lr": schedule["shape"] == "cosine",
    "warmup_iters": 0,
    "lr_decay_iters": contract.steps - 1,
    "min_lr": peak * schedule["floor"],
    "device": contract.device,
    "dtype": "float32" if contract.precision == "fp32" else "bfloat16",
    "compile": contract.compile,
}
os.chdir(contract.folder)
(contract.folder / "configurator.py").write_text((contract.source / "configurator.py").read_text())
sys.argv = ["train.py", *(f"--{name}={value}" for name, value in settings.items())]
source = (contract.source / "train.py").read_text()
exec(compile(source, "train.py", "exec"), {"__name__": "__main__"})
contract.close()
