"""Model presets by name. Read by the host; a run's settings contain the resulting shape."""

from tokenscale.settings.model import ModelSettings


def _preset(name: str, **shape) -> ModelSettings:
    return ModelSettings(name=name, **shape)


def _study(name: str, **shape) -> ModelSettings:
    """Return the model that a source study calls GPT-2: RMSNorm, rotary positions, SwiGLU, tied head."""
    heads, hidden = shape["heads"], 4 * shape["dimension"]
    facts = {"key_value_heads": heads, "hidden": hidden, "tied_embeddings": True}
    return _preset(name, **shape, **facts, rope_theta=10_000.0, norm_epsilon=1e-6)


def _llama32(name: str, **shape) -> ModelSettings:
    """Return a Llama 3.2 model (its config.json): head width 64 or 128, tied head, scaled rotary frequencies."""
    facts = {"key_value_heads": 8, "vocabulary_size": 128_256, "tied_embeddings": True, "rope_scaling": "llama3"}
    return _preset(name, **shape, **facts)


def _published(name: str, **shape) -> ModelSettings:
    """Return a published model of 32 layers and 4096 wide, with eight key and value heads (its config.json)."""
    facts = {"dimension": 4096, "layers": 32, "heads": 32, "key_value_heads": 8, "hidden": 14_336}
    return _preset(name, **facts, **shape)


def _gpt2(name: str, **shape) -> ModelSettings:
    """Return a GPT-2 model (Radford et al. 2019): LayerNorm, learned positions, GELU, biases, tied head."""
    facts = {"key_value_heads": shape["heads"], "hidden": 4 * shape["dimension"], "tied_embeddings": True}
    kind = {"norm": "layer", "positions": "learned", "activation": "gelu", "biases": True}
    return _preset(name, **shape, **facts, **kind)


def _gpt2_published(name: str, **shape) -> ModelSettings:
    return _gpt2(name, **shape, vocabulary_size=50_257, maximum_positions=1024)


def _bert(name: str, kind: str, **shape) -> ModelSettings:
    """Return a BERT model (Devlin et al. 2019; DistilBERT, Sanh et al. 2019) of the library `transformers`."""
    facts = {"key_value_heads": shape["heads"], "hidden": 4 * shape["dimension"]}
    return _preset(name, **shape, **facts, transformers=kind)


def _bert_published(name: str, kind: str, **shape) -> ModelSettings:
    sizes = {"dimension": 768, "heads": 12, "vocabulary_size": 30_522, "maximum_positions": 512, "dropout": 0.1}
    return _bert(name, kind, **sizes, **shape)


#: Small sizes for CPUs and workstations; then models of the source studies, then published models with CPU sizes.
#: The studies call the two `study` models "124M" and "355M"; with GPT-2's vocabulary they have 152 and 454 million
#: weights, because of the three matrices of SwiGLU. The two `nemo` models have the vocabulary of Mistral-Nemo.
PRESETS = {
    m.name: m
    for m in (
        _preset("llama-micro", dimension=32, layers=2, heads=2, key_value_heads=1, hidden=96),
        _preset("llama-tiny", dimension=64, layers=2, heads=4, key_value_heads=2, hidden=192),
        _preset("llama-mini", dimension=64, layers=4, heads=4, key_value_heads=2, hidden=192),
        _preset("llama-small", dimension=256, layers=4, heads=8, key_value_heads=4, hidden=768),
        _preset("llama-150m", dimension=768, layers=12, heads=12, key_value_heads=4, hidden=2048),
        _study("study-small", dimension=768, layers=12, heads=12),
        _study("study-medium", dimension=1024, layers=24, heads=16),
        _preset(
            "llama-1.4b-nemo",
            dimension=2048,
            layers=16,
            heads=16,
            key_value_heads=4,
            hidden=7168,
            vocabulary_size=131_072,
        ),
        _preset(
            "llama-8b-nemo",
            dimension=4096,
            layers=32,
            heads=32,
            key_value_heads=8,
            hidden=14_336,
            vocabulary_size=131_072,
        ),
        _llama32("llama-3.2-1b", dimension=2048, layers=16, heads=32, hidden=8192),
        _llama32("llama-3.2-3b", dimension=3072, layers=28, heads=24, hidden=8192),
        _published("llama-3.1-8b", vocabulary_size=128_256, rope_scaling="llama3", rope_factor=8.0),
        _published("mistral-7b-v0.3", vocabulary_size=32_768, rope_theta=1e6),
        _preset(
            "qwen3-0.6b",
            dimension=1024,
            layers=28,
            heads=16,
            key_value_heads=8,
            head_dim=128,
            hidden=3072,
            vocabulary_size=151_936,
            tied_embeddings=True,
            query_key_norm=True,
            rope_theta=1e6,
            norm_epsilon=1e-6,
        ),
        _gpt2("gpt2-micro", dimension=32, layers=2, heads=2),
        _gpt2("gpt2-tiny", dimension=64, layers=2, heads=4),
        _gpt2("gpt2-mini", dimension=64, layers=4, heads=4),
        _gpt2_published("gpt2-124m", dimension=768, layers=12, heads=12),
        _gpt2_published("gpt2-355m", dimension=1024, layers=24, heads=16),
        _gpt2_published("gpt2-774m", dimension=1280, layers=36, heads=20),
        _bert("distilbert-tiny", "distilbert", dimension=64, layers=2, heads=4),
        _bert("bert-tiny", "bert", dimension=64, layers=2, heads=4),
        _bert_published("distilbert-base", "distilbert", layers=6),
        _bert_published("bert-base", "bert", layers=12),
    )
}
