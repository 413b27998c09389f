"""Compare decoders of random shapes with the same models of `transformers`, on the CPU in fp32.

    python tests/benchmarks/model_parity.py --shapes 50 --seed 0

Each shape is drawn as a configuration of llama, mistral, qwen2, qwen3 or gpt2 and built by the
library with random weights. The weights are imported, and exported again: every bit must return.
Logits and gradients of the mean loss are compared as the largest difference over the largest size
of that tensor. Ends with exit code 1 if a limit is exceeded.
"""

import argparse
import random
import sys
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from tokenscale.train.models.convert_hf import from_hf, to_hf
from tokenscale.train.models.decoder import Decoder

LENGTH = 32
ROWS = 2
#: relative to the largest element: fp32 rounding through at most four layers, summed in another
#: order
LIMIT = 1e-5


def draw_config(generator: random.Random) -> dict[str, Any]:
    """Return a random configuration, with the keys of the library's config.json."""
    choice = generator.choice
    kind = generator.choice(["llama", "mistral", "qwen2", "qwen3", "gpt2"])
    heads = choice([1, 2, 4, 6])
    vocabulary = generator.randrange(40, 200)
    layers = generator.randrange(1, 5)
    tied = choice([True, False])
    epsilon = choice([1e-5, 1e-6])
    if kind == "gpt2":
        width = heads * choice([8, 12, 16])
        return {
            "model_type": kind,
            "vocab_size": vocabulary,
            "n_positions": LENGTH,
            "n_embd": width,
            "n_layer": layers,
            "n_head": heads,
            "n_inner": choice([None, 3 * width]),
            "activation_function": choice(["gelu_new", "gelu_pytorch_tanh"]),
            "layer_norm_epsilon": epsilon,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "tie_word_embeddings": tied,
        }
    head_width = choice([8, 16, 24])
    found: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": vocabulary,
        "hidden_size": heads * choice([head_width, 8, 20]),
        "intermediate_size": generator.randrange(16, 128),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "head_dim": head_width,
        "max_position_embeddings": choice([LENGTH, 4096]),
        "rms_norm_eps": epsilon,
        "rope_theta": choice([10_000.0, 500_000.0, 1e6]),
        "tie_word_embeddings": tied,
    }
    if kind == "llama":
        attention = choice([True, False])
        found |= {"attention_bias": attention, "mlp_bias": attention and choice([True, False])}
    if kind in ("llama", "qwen3") and choice([True, False]):
        factors = {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        found["rope_scaling"] = {"rope_type": "llama3", "factor": choice([8.0, 32.0]), **factors}
    if kind == "qwen3":
        found["attention_bias"] = choice([True, False])
    return found | ({"sliding_window": None} if kind == "mistral" else {})


def compare(config: dict[str, Any], seed: int) -> dict[str, float | bool]:
    """Return whether every bit returned, and the relative differences of logits and gradients."""
    torch.manual_seed(seed)
    library = transformers.AutoModelForCausalLM.from_config(
        transformers.CONFIG_MAPPING[config["model_type"]](**config)
    ).eval()
    with torch.no_grad():
        for weight in library.parameters():  # norms and biases, too
            weight.add_(torch.randn_like(weight), alpha=0.1)
    theirs = dict(library.named_parameters())
    shape, imported = from_hf(
        library.config.to_dict(), {name: w.detach() for name, w in theirs.items()}
    )
    ours = Decoder(shape, LENGTH).eval()
    named = dict(ours.named_parameters())
    assert set(named) == set(imported), set(named) ^ set(imported)
    with torch.no_grad():
        for name, weight in imported.items():
            named[name].copy_(weight)
    _, exported = to_hf(ours.settings, {name: w.detach() for name, w in named.items()}, LENGTH)
    same = set(exported) == set(theirs) and all(
        torch.equal(exported[name], w) for name, w in theirs.items()
    )
    tokens = torch.randint(0, config["vocab_size"], (ROWS, LENGTH))
    labels = torch.randint(0, config["vocab_size"], (ROWS * LENGTH,))
    logits = ours(tokens)
    expected = library(input_ids=tokens).logits
    for found in (logits, expected):
        F.cross_entropy(found.flatten(0, 1), labels).backward()
    _, gradients = to_hf(ours.settings, {name: w.grad for name, w in named.items()}, LENGTH)
    return {
        "bits": same,
        "logits": difference(logits, expected),
        "gradients": max(difference(gradients[name], w.grad) for name, w in theirs.items()),
    }


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def describe(config: dict[str, Any]) -> str:
    """Return what differs from shape to shape, in a line."""
    names = {
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv",
        "hidden_size": "width",
        "n_embd": "width",
    }
    names |= {
        "n_head": "heads",
        "num_hidden_layers": "layers",
        "n_layer": "layers",
        "head_dim": "head",
    }
    parts = [f"{names[key]} {value}" for key, value in config.items() if key in names]
    parts += [
        key for key in ("attention_bias", "mlp_bias", "tie_word_embeddings") if config.get(key)
    ]
    factor = (config.get("rope_scaling") or {}).get("factor")
    return ", ".join(parts + ([f"rope factor {factor:g}"] if factor else []))


def main(arguments: list[str] | None = None) -> int:
    """Print one line per shape, and the largest differences."""
    parser = argparse.ArgumentParser(
        prog="python tests/benchmarks/model_parity.py", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--shapes", type=int, default=50, help="number of shapes")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the shapes and of their weights"
    )
    options = parser.parse_args(arguments)
    # it warns of special ids that tiny vocabularies do not hold
    transformers.logging.set_verbosity_error()
    generator = random.Random(options.seed)
    worst = {"logits": 0.0, "gradients": 0.0}
    failed = 0
    for number in range(options.shapes):
        config = draw_config(generator)
        found = compare(config, options.seed * 1_000_003 + number)
        worst = {key: max(value, float(found[key])) for key, value in worst.items()}
        good = found["bits"] and max(found["logits"], found["gradients"]) <= LIMIT
        failed += not good
        print(
            f"{number:3} {config['model_type']:8} bits {'equal' if found['bits'] else 'DIFFER'}, "
            f"logits {found['logits']:.1e}, gradients {found['gradients']:.1e}  "
            f"{'' if good else 'EXCEEDS THE LIMIT  '}{describe(config)}"
        )
    print(
        f"{options.shapes - failed} of {options.shapes} shapes agree; largest relative difference: "
        f"logits {worst['logits']:.1e}, gradients {worst['gradients']:.1e} (limit {LIMIT:g})"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
