"""Hugging Face fast tokenizers, from a folder with tokenizer.json or from the hub by name and revision.

The file is copied into the tokenizer's folder, so that stores can be rebuilt without the hub. BOS and EOS come from
`bos` and `eos` of the settings, then from tokenizer_config.json or special_tokens_map.json, then from `CUSTOMARY`.
"""

import json
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import atomic
from tokenscale.data.tokenizers import backends
from tokenscale.data.tokenizers.engines.tokenizers import import_library
from tokenscale.settings.data import TokenizerSettings

#: tokens tried in order if neither the settings nor the source files name one
CUSTOMARY = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|endoftext|>"),
    "eos": ("</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>"),
    "mask": ("[MASK]", "<mask>"),
}


def make(settings: TokenizerSettings, directory: Path, corpus_directory: Path | None) -> tuple[Path, dict[str, Any]]:
    """Read or download the tokenizer, write it to `directory`, and return (file, manifest facts).

    Raises UserError if the source is unavailable or unreadable, a configured token is not in the vocabulary, or no BOS
    token is known.
    """
    tokenizer, token_names = _fetch(settings)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    bos = _choose_token("bos", settings.bos, token_names, vocabulary, settings)
    if bos is None:
        raise UserError(
            f"nothing says which token begins a document of tokenizer {settings.name}.",
            source=settings.source,
            key="tokenizer.bos",
            next="set `bos` to the text of that token; many tokenizers without one use their end-of-text token",
        )
    eos = _choose_token("eos", settings.eos, token_names, vocabulary, settings)
    pad = _choose_token("pad", None, token_names, vocabulary, settings)
    mask = _choose_token("mask", None, token_names, vocabulary, settings)
    path = directory / "tokenizer.json"
    with atomic(path) as temporary:
        tokenizer.save(str(temporary), pretty=True)
    facts = {
        "vocabulary_size": max(vocabulary.values()) + 1,
        "bos_id": vocabulary[bos],
        "eos_id": None if eos is None else vocabulary[eos],
        # padding is identified by length, so any id serves if the tokenizer has no pad token
        "pad_id": vocabulary[pad if pad is not None else eos if eos is not None else bos],
        **({} if mask is None else {"mask_id": vocabulary[mask]}),
        "source": "folder" if Path(settings.source).is_dir() else settings.source,
        "revision": settings.revision,
    }
    return path, facts


ENGINES = backends.ENGINES
load = backends.load
control_texts = backends.control_texts


def _fetch(settings: TokenizerSettings) -> tuple[Any, dict[str, str]]:
    """Return the `tokenizers.Tokenizer` and {role: token text} from the files of the source."""
    tokenizers = import_library("huggingface")
    folder = Path(settings.source)
    if folder.is_dir():
        path = folder / "tokenizer.json"
        if not path.exists():
            raise UserError(
                "the tokenizer's folder holds no tokenizer.json.",
                key="tokenizer.source",
                folder=folder,
                next="name a folder of a fast tokenizer (transformers' save_pretrained writes one)",
            )
        try:
            return tokenizers.Tokenizer.from_file(str(path)), _read_token_names(folder)
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                "the tokenizer's file cannot be read.", file=path, reason=error, next="replace it"
            ) from None
    if settings.revision is None:
        raise UserError(
            f"the tokenizer {settings.source!r} is no folder, and a hub name needs a pinned revision.",
            key="tokenizer.revision",
            next="set `revision` to a commit of the hub repository, so that the same name stays the same tokenizer",
        )
    folder = _download_folder(settings)
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), _read_token_names(folder)


def _download_folder(settings: TokenizerSettings) -> Path:
    """Download the tokenizer's files at its revision and return their folder in the hub's cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    for name in ("special_tokens_map.json", "tokenizer_config.json", "tokenizer.json"):
        try:
            path = hf_hub_download(settings.source, name, revision=settings.revision)
        except EntryNotFoundError as error:
            if name == "tokenizer.json":
                raise _download_error(settings, error) from None
        except Exception as error:  # network or name: the client's errors have no other common base
            raise _download_error(settings, error) from None
    return Path(path).parent


def _download_error(settings: TokenizerSettings, error: Exception) -> UserError:
    return UserError(
        f"the tokenizer {settings.source!r} is unavailable: no such folder, and its download failed.",
        key="tokenizer.source",
        revision=settings.revision,
        reason=(str(error).strip().splitlines() or [type(error).__name__])[0],
        next="check the name and the network, or download it elsewhere and set `source` to its folder",
    )


def _read_token_names(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if not path.exists():
            continue
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, UnicodeDecodeError) as error:
            raise UserError(
                "a file of the tokenizer is not JSON.", file=path, reason=error, next="replace it"
            ) from None
        for role in ("bos", "eos", "pad", "mask"):
            value = values.get(f"{role}_token")
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[role] = text
    return found


def _choose_token(
    role: str,
    configured: str | None,
    token_names: dict[str, str],
    vocabulary: dict[str, int],
    settings: TokenizerSettings,
) -> str | None:
    """Return the token text of a role from the settings, the source files or `CUSTOMARY`, or None if there is none."""
    if configured is not None and configured not in vocabulary:
        raise UserError(
            f"the token {configured!r} is not in the vocabulary of tokenizer {settings.name}.",
            key=f"tokenizer.{role}",
            source=settings.source,
            next="name a token that it holds",
        )
    candidates = [configured, token_names.get(role), *CUSTOMARY[role]]
    return next((text for text in candidates if text is not None and text in vocabulary), None)
