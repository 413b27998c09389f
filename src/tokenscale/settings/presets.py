"""Presets of decoders, with the names users know. Read by the host; a run carries its shape."""

from tokenscale.settings.model import ModelSettings


def _preset(name: str, **shape) -> ModelSettings:
    return ModelSettings(name=name, **shape)


def _study(name: str, **shape) -> ModelSettings:
    """A shape that a source study calls GPT-2: RMSNorm, rotary positions, SwiGLU of 4 x the width, tied head."""
    heads, hidden = shape["heads"], 4 * shape["dimension"]
    facts = {"key_value_heads": heads, "hidden": hidden, "tied_embeddings": True}
    return _preset(name, **shape, **facts, rope_theta=10_000.0, norm_epsilon=1e-6)


#: Two CPU sizes and one for a workstation; then the shapes of the source studies. The two named `study` go by "124M"
#: and "355M" there; the three matrices of their SwiGLU make them 152 and 454 million weights with GPT-2's vocabulary.
#: The last two have the vocabulary of Mistral-Nemo.
PRESETS = {
    m.name: m
    for m in (
        _preset("llama-micro", dimension=32, layers=2, heads=2, key_value_heads=1, hidden=96),
        _preset("llama-tiny", dimension=64, layers=2, heads=4, key_value_heads=2, hidden=192),
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
    )
}
