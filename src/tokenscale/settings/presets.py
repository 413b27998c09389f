"""Model presets by name. Read by the host; a run's settings contain the resulting shape."""

from typing import Any

from tokenscale.settings.model import ModelSettings

EIGHT: dict[str, Any] = {"key_value_heads": 8}
#: kind of model → its facts, of the published config.json where there is one
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    # what the source studies call GPT-2: RMSNorm, rotary positions, SwiGLU
    "study": {"tied_embeddings": True, "rope_theta": 10_000.0, "norm_epsilon": 1e-6},
    "llama-3.1": EIGHT | {"vocabulary_size": 128_256, "rope_scaling": "llama3", "rope_factor": 8.0},
    "llama-3.2": EIGHT
    | {"vocabulary_size": 128_256, "rope_scaling": "llama3", "tied_embeddings": True},
    "mistral": EIGHT | {"vocabulary_size": 32_768, "rope_theta": 1e6},
    "qwen3": EIGHT
    | {"vocabulary_size": 151_936, "tied_embeddings": True, "query_key_norm": True}
    | {"rope_theta": 1e6, "norm_epsilon": 1e-6},
    # Radford et al. 2019: LayerNorm, learned positions, GELU, biases
    "gpt2": {
        "tied_embeddings": True,
        "norm": "layer",
        "positions": "learned",
        "activation": "gelu",
        "biases": True,
    },
    # Devlin et al. 2019; Sanh et al. 2019; models of the library `transformers`
    "bert": {"transformers": "bert"},
    "distilbert": {"transformers": "distilbert"},
}
#: kinds in which each head has its own keys and values, and the feed-forward layer is four times as
#: wide
FULL = ("study", "gpt2", "bert", "distilbert")
GPT2: dict[str, Any] = {"vocabulary_size": 50_257, "maximum_positions": 1024}
BERT: dict[str, Any] = {"vocabulary_size": 30_522, "maximum_positions": 512, "dropout": 0.1}
#: vocabulary of Mistral-Nemo
NEMO: dict[str, Any] = {"vocabulary_size": 131_072}


def _preset(
    name: str, kind: str, dimension: int, layers: int, heads: int, **shape: Any
) -> ModelSettings:
    facts = KINDS[kind] | (
        {"key_value_heads": heads, "hidden": 4 * dimension} if kind in FULL else {}
    )
    return ModelSettings(
        name=name,
        dimension=dimension,
        layers=layers,
        heads=heads,
        **(facts | shape),
    )


#: Small sizes for CPUs and workstations; then models of the source studies, then published models
#: with CPU sizes. The studies call the two `study` models "124M" and "355M"; with GPT-2's
#: vocabulary they have 152 and 454 million weights, because of the three matrices of SwiGLU.
PRESETS = {
    m.name: m
    for m in (
        _preset(
            "llama-micro",
            kind="llama",
            dimension=32,
            layers=2,
            heads=2,
            key_value_heads=1,
            hidden=96,
        ),
        _preset(
            "llama-tiny",
            kind="llama",
            dimension=64,
            layers=2,
            heads=4,
            key_value_heads=2,
            hidden=192,
        ),
        _preset(
            "llama-mini",
            kind="llama",
            dimension=64,
            layers=4,
            heads=4,
            key_value_heads=2,
            hidden=192,
        ),
        _preset(
            "llama-small",
            kind="llama",
            dimension=256,
            layers=4,
            heads=8,
            key_value_heads=4,
            hidden=768,
        ),
        _preset(
            "llama-150m",
            kind="llama",
            dimension=768,
            layers=12,
            heads=12,
            key_value_heads=4,
            hidden=2048,
        ),
        _preset(
            "study-small",
            kind="study",
            dimension=768,
            layers=12,
            heads=12,
        ),
        _preset(
            "study-medium",
            kind="study",
            dimension=1024,
            layers=24,
            heads=16,
        ),
        _preset(
            "llama-1.4b-nemo",
            kind="llama",
            dimension=2048,
            layers=16,
            heads=16,
            key_value_heads=4,
            hidden=7168,
            **NEMO,
        ),
        _preset(
            "llama-8b-nemo",
            kind="llama",
            dimension=4096,
            layers=32,
            heads=32,
            key_value_heads=8,
            hidden=14_336,
            **NEMO,
        ),
        _preset(
            "llama-3.2-1b",
            kind="llama-3.2",
            dimension=2048,
            layers=16,
            heads=32,
            hidden=8192,
        ),
        _preset(
            "llama-3.2-3b",
            kind="llama-3.2",
            dimension=3072,
            layers=28,
            heads=24,
            hidden=8192,
        ),
        _preset(
            "llama-3.1-8b",
            kind="llama-3.1",
            dimension=4096,
            layers=32,
            heads=32,
            hidden=14_336,
        ),
        _preset(
            "mistral-7b-v0.3",
            kind="mistral",
            dimension=4096,
            layers=32,
            heads=32,
            hidden=14_336,
        ),
        _preset(
            "qwen3-0.6b",
            kind="qwen3",
            dimension=1024,
            layers=28,
            heads=16,
            hidden=3072,
            head_dim=128,
        ),
        _preset(
            "gpt2-micro",
            kind="gpt2",
            dimension=32,
            layers=2,
            heads=2,
        ),
        _preset(
            "gpt2-tiny",
            kind="gpt2",
            dimension=64,
            layers=2,
            heads=4,
        ),
        _preset(
            "gpt2-mini",
            kind="gpt2",
            dimension=64,
            layers=4,
            heads=4,
        ),
        _preset(
            "gpt2-124m",
            kind="gpt2",
            dimension=768,
            layers=12,
            heads=12,
            **GPT2,
        ),
        _preset(
            "gpt2-355m",
            kind="gpt2",
            dimension=1024,
            layers=24,
            heads=16,
            **GPT2,
        ),
        _preset(
            "gpt2-774m",
            kind="gpt2",
            dimension=1280,
            layers=36,
            heads=20,
            **GPT2,
        ),
        _preset(
            "distilbert-tiny",
            kind="distilbert",
            dimension=64,
            layers=2,
            heads=4,
        ),
        _preset(
            "bert-tiny",
            kind="bert",
            dimension=64,
            layers=2,
            heads=4,
        ),
        _preset(
            "distilbert-base",
            kind="distilbert",
            dimension=768,
            layers=6,
            heads=12,
            **BERT,
        ),
        _preset(
            "bert-base",
            kind="bert",
            dimension=768,
            layers=12,
            heads=12,
            **BERT,
        ),
    )
}
