"""Export of a tokenizer for `transformers`: tokenizer.json and tokenizer_config.json.

As in training, each text begins with BOS and is not truncated or padded by default. The text of a special token stays
text (`split_special_tokens`), except for masked models, whose texts contain the mask token.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.files import write_json, write_text
from tokenscale.data.tokenizers import backends
from tokenscale.data.tokenizers.base import Tokenizer, read_tokenizer_manifest
from tokenscale.data.tokenizers.engines.tokenizers import import_library
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.data.tokenizers.tekken import control_names


def export_tokenizer(
    directory: Path, folder: Path, sequence_length: int, masked: bool = False
) -> dict[str, int | None]:
    """Write both files to `folder` and return the ids of bos, eos and pad, and of mask for a masked model.

    `directory` holds a tokenizer of any kind but `numbers`, whose ids are not text. The written file is loaded and
    compared with the tokenizer on fuzz texts. Raises UserError for a damaged tokenizer, ValueError for different ids.
    """
    directory = Path(directory)
    tokenizer = load_tokenizer(directory)
    data = _load_json(directory)
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    if masked:
        ids["mask"] = _add_mask(directory, data)
    names = {
        i: text for text, i in import_library(tokenizer.kind).Tokenizer.from_str(json.dumps(data)).get_vocab().items()
    }
    tokens = {role: names[i] for role, i in ids.items() if i is not None}
    data |= {"truncation": None, "padding": None, "post_processor": _bos_template(tokens["bos"], ids["bos"])}
    write_text(folder / "tokenizer.json", json.dumps(data, ensure_ascii=False) + "\n")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{role}_token": text for role, text in tokens.items()},
            "model_max_length": sequence_length,
            "padding_side": "right",
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": not masked,  # the mask token occurs in the text
        },
    )
    _compare(tokenizer, folder / "tokenizer.json", list(tokens.values()))
    return ids


def _load_json(directory: Path) -> dict[str, Any]:
    """Read the tokenizer.json of a folder and add the control tokens that its table lacks (Tekken)."""
    manifest = read_tokenizer_manifest(directory)
    data = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    data["added_tokens"] = data.get("added_tokens") or []
    if "control_ids" in manifest:
        names = control_names(json.loads((directory / manifest["file"]["name"]).read_text(encoding="utf-8")))
        data["model"]["vocab"] |= {name: i for i, name in enumerate(names)}
        data["added_tokens"] = [_special_token(i, name) for i, name in enumerate(names)]
    return data


def _add_mask(directory: Path, data: dict[str, Any]) -> int:
    """Return the id of the mask token. Without one, add a token after all ids, as masked training does."""
    manifest = read_tokenizer_manifest(directory)
    if "mask_id" in manifest:
        return manifest["mask_id"]
    used_names = {*data["model"]["vocab"], *(token["content"] for token in data["added_tokens"])}
    name = next(name for name in ("[MASK]", "<mask>", "<|mask|>") if name not in used_names)
    data["added_tokens"].append(_special_token(manifest["vocabulary_size"], name))
    return manifest["vocabulary_size"]


def _special_token(number: int, text: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": text, **flags}


def _bos_template(token: str, number: int) -> dict[str, Any]:
    """Return the template that puts BOS before a text and before each text of a pair."""

    def part(name: str, kind: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": token, "type_id": kind}}, {"Sequence": {"id": name, "type_id": kind}}]

    return {
        "type": "TemplateProcessing",
        "single": part("A", 0),
        "pair": part("A", 0) + part("B", 1),
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _compare(tokenizer: Tokenizer, path: Path, control: list[str]) -> None:
    exported = import_library(tokenizer.kind).Tokenizer.from_file(str(path))
    exported.encode_special_tokens = True
    texts = backends.make_fuzz_texts(control)
    found = [encoded.ids for encoded in exported.encode_batch(texts)]
    for text, ids, expected in zip(texts, found, tokenizer.encode_batch(texts), strict=True):
        if not np.array_equal(ids, [tokenizer.bos_id, *expected]):
            raise ValueError(f"the exported tokenizer gives other ids for {text!r}: {ids} for {expected.tolist()}")
