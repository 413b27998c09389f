"""picotron: its train.py, unchanged, on the contract's batches and weights.

Its data loader serves the contract's sequences in place of a tokenized data set. It reads a model's
safetensors file and then draws random weights: the drawing is replaced by the weights of that file.
Losses are taken from cross-entropy, because its log has four digits.
"""

import functools
import json
import os
import socket
import sys
import types

import torch
import torch.nn.functional as F
import transformers  # before the stubs, which it takes for installed packages  # noqa: F401
from contract import Contract

contract = Contract()
shape = contract.shape
optimizer = contract.optimizer
on_cpu = contract.device == "cpu"
llama = {
    "norm": "rms",
    "activation": "swiglu",
    "positions": "rotary",
    "biases": False,
    "attention_biases": None,
}
llama |= {
    "query_key_norm": False,
    "rope_scaling": "none",
    "dropout": 0.0,
    "transformers": None,
    "head_dim": None,
}
contract.require(
    {
        "models other than Llama's": any(shape[name] != value for name, value in llama.items()),
        "tied embeddings": shape["tied_embeddings"],
        "micro-batches of unequal size": contract.rows % contract.micro_batch != 0,
        "a learning rate that changes": len(set(contract.learning_rates)) > 1,
        "other betas than 0.9 and 0.999": (optimizer["beta1"], optimizer["beta2"]) != (0.9, 0.999),
        "another epsilon than 1e-8": optimizer["epsilon"] != 1e-8,
        "another weight_decay than its 0.01, or 0": optimizer["weight_decay"] not in (0.0, 0.01),
        "clipping": optimizer["clip_norm"] is not None,
        "compile": contract.compile,
        "bf16 on the CPU": on_cpu and contract.precision == "bf16",
        "fp32 on a GPU": not on_cpu and contract.precision == "fp32",
    }
)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
for name, value in ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} | address).items():
    os.environ.setdefault(name, value)  # a launcher sets them for several ranks
# of the rotary angles
os.environ["DTYPE"] = "float32" if contract.precision == "fp32" else "bfloat16"
os.environ["HF_HUB_OFFLINE"] = "1"


# --- packages that this run does not use: GPU kernels, data sets, an online log
def stub(name, *contents):
    """Register a module with empty contents."""
    sys.modules[name] = types.ModuleType(name)
    for content in contents:
        setattr(sys.modules[name], content, None)


stub("flash_attn")
stub("flash_attn.flash_attn_interface", "flash_attn_func")
stub("flash_attn.layers")
stub("flash_attn.layers.rotary", "apply_rotary_emb")
stub("flash_attn.ops")
stub("flash_attn.ops.triton")
stub("flash_attn.ops.triton.layer_norm", "layer_norm_fn")
stub("datasets", "Features", "Sequence", "Value", "load_dataset")
stub("wandb")
sys.path.insert(0, str(contract.source))
from picotron import checkpoint, data, utils  # noqa: E402


# --- data: this rank's sequences; picotron's sampler gives a rank every n-th
class Sequences:
    """Data set in which every rank finds its own sequences."""

    rows = contract.tokens.reshape(-1, contract.sequence_length + 1)

    def __len__(self):
        """Return the number of sequences, over all ranks."""
        return len(self.rows) * contract.world_size

    def __getitem__(self, number):
        """Return one sequence, as picotron's collation reads it."""
        return {"input_ids": self.rows[number // contract.world_size].astype("int64")}


data.load_dataset = lambda *values, **options: None
data.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda name: None)
data.MicroBatchDataLoader.tokenize_dataset = lambda *values: Sequences()

# --- weights: picotron finds this file where it downloads models to
(contract.folder / "hf_model_safetensors").symlink_to(contract.weights_folder)
rename = checkpoint.InitializationManager.convert_safetensors_to_hf_name
watched = []


def load_weights(self):
    """Load all weights, in place of drawing them."""
    self.model.load_state_dict(
        {rename(self, name): weight for name, weight in contract.weights().items()}
    )
    watched.append(self.model)


checkpoint.InitializationManager.init_model_parameters = load_weights

# --- log: hooks on the model and the optimizer that train.py makes
AdamW = torch.optim.AdamW
cross_entropy = F.cross_entropy


@functools.wraps(AdamW)
def make_and_watch(*values, **options):
    """Make picotron's optimizer, and watch it with its model."""
    made = AdamW(*values, **options)
    contract.watch(watched[0], made)
    return made


def cross_entropy_and_log(*values, **options):
    """Take the loss of each micro-batch."""
    loss = cross_entropy(*values, **options)
    contract.loss(loss / contract.micro_steps)
    return loss


torch.optim.AdamW = make_and_watch
F.cross_entropy = cross_entropy_and_log
if on_cpu:  # its count of parameters, for the log, is a tensor on a GPU
    utils.get_num_params = lambda model: sum(parameter.numel() for parameter in model.parameters())

# --- picotron's own loop
threads = os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads()))
settings = {
    "distributed": {
        "tp_size": 1,
        "cp_size": 1,
        "pp_size": 1,
        "dp_size": contract.world_size,
        "use_cpu": on_cpu,
    },
    "model": {"name": str(contract.weights_folder), "use_fused_adam": True},
    "training": {
        "seed": contract.seed,
        "learning_rate": contract.learning_rates[0],
        "total_train_steps": contract.steps,
        "seq_length": contract.sequence_length,
        "micro_batch_size": contract.micro_batch,
        "gradient_accumulation_steps": contract.micro_steps,
        "max_tokens": None,
    },
    "dataset": {"name": "", "num_workers": 0, "num_proc": 1},
    "checkpoint": {
        "save_dir": "checkpoints",
        "save_frequency": contract.steps + 1,
        "load_path": "",
    },
    "logging": {"use_wandb": False},
    "environment": {
        "OMP_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "FLASH_ATTEN": "0",
        "HF_TOKEN": "-",
    },
}
os.chdir(contract.folder)
(contract.folder / "picotron.json").write_text(json.dumps(settings))
sys.argv = ["train.py", "--config", "picotron.json"]
exec(
    compile((contract.source / "train.py").read_text(), "train.py", "exec"),
    {"__name__": "__main__"},
)
contract.close()
