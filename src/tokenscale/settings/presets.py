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
    return ModelSettings(name, dimension, layers, heads, **(facts | shape))


#: Small sizes for CPUs and workstations; then models of the source studies, then published models
#: with CPU sizes. The studies call the two `study` models "124M" and "355M"; with GPT-2's
#: vocabulary they have 152 and 454 million weights, because of the three matrices of SwiGLU.
PRESETS = {
    m.name: m
    for m in (
        _preset("llama-micro", "llama", 32, 2, 2, key_value_heads=1, hidden=96),
        _preset("llama-tiny", "llama", 64, 2, 4, key_value_heads=2, hidden=192),
        _preset("llama-mini", "llama", 64, 4, 4, key_value_heads=2, hidden=192),
        _preset("llama-small", "llama", 256, 4, 8, key_value_heads=4, hidden=768),
        _preset("llama-150m", "llama", 768, 12, 12, key_value_heads=4, hidden=2048),
        _preset("study-small", "study", 768, 12, 12),
        _preset("study-medium", "study", 1024, 24, 16),
        _preset("llama-1.4b-nemo", "llama", 2048, 16, 16, key_value_heads=4, hidden=7168, **NEMO),
        _preset("llama-8b-nemo", "llama", 4096, 32, 32, key_value_heads=8, hidden=14_336, **NEMO),
        _preset("llama-3.2-1b", "llama-3.2", 2048, 16, 32, hidden=8192),
        _preset("llama-3.2-3b", "llama-3.2", 3072, 28, 24, hidden=8192),
        _preset("llama-3.1-8b", "llama-3.1", 4096, 32, 32, hidden=14_336),
        _preset("mistral-7b-v0.3", "mistral", 4096, 32, 32, hidden=14_336),
        _preset("qwen3-0.6b", "qwen3", 1024, 28, 16, hidden=3072, head_dim=128),
        _preset("gpt2-micro", "gpt2", 32, 2, 2),
        _preset("gpt2-tiny", "gpt2", 64, 2, 4),
        _preset("gpt2-mini", "gpt2", 64, 4, 4),
        _preset("gpt2-124m", "gpt2", 768, 12, 12, **GPT2),
        _preset("gpt2-355m", "gpt2", 1024, 24, 16, **GPT2),
        _preset("gpt2-774m", "gpt2", 1280, 36, 20, **GPT2),
        _preset("distilbert-tiny", "distilbert", 64, 2, 4),
        _preset("bert-tiny", "bert", 64, 2, 4),
        _preset("distilbert-base", "distilbert", 768, 6, 12, **BERT),
        _preset("bert-base", "bert", 768, 12, 12, **BERT),
    )
}
