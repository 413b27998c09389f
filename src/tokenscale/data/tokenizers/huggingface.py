"""Tokenizers with a tokenizer.json: of a folder, of the hub by name and revision, or trained on a corpus.

The file is copied into the tokenizer's folder, so that stores can be rebuilt without the hub. BOS and EOS come from
`bos` and `eos` of the settings, then from tokenizer_config.json or special_tokens_map.json, then from `CUSTOMARY`.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError, find_nearest
from tokenscale.base.files import atomic, read_json, sha256_file, write_json, write_text
from tokenscale.data.corpus.raw_text import RawText
from tokenscale.data.tokenizers import backends
from tokenscale.data.tokenizers.backends import import_library
from tokenscale.data.tokenizers.base import Tokenizer, read_tokenizer_manifest
from tokenscale.data.tokenizers.tekken import control_names
from tokenscale.settings.data import TokenizerSettings
from tokenscale.settings.registry import TOKENIZERS

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


def train_bpe(
    settings: TokenizerSettings, directory: Path, corpus_directory: Path | None
) -> tuple[Path, dict[str, Any]]:
    """Train a byte-level BPE on all documents of the training split, in order, and return (file, manifest facts).

    The alphabet holds every byte, so any text can be encoded and decoded. Ids 0, 1, 2 are `<s>`, `</s>`, `<pad>`.
    (Sennrich et al. 2016; bytes as in GPT-2, Radford et al. 2019.) Equal texts give equal files. A small corpus may
    give fewer entries than `settings.vocabulary_size`; the manifest records the actual number. Raises UserError without
    a corpus.
    """
    if corpus_directory is None:
        raise UserError(
            f"the tokenizer {settings.name} of kind bpe is trained on a corpus, and --corpus is missing.",
            next=f"--corpus results/corpus/{settings.corpus}/manifest.json",
        )
    tokenizers = import_library("bpe")
    text = RawText(corpus_directory, "train")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=settings.vocabulary_size,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.batches(), trainer=trainer, length=len(text))
    path = directory / "tokenizer.json"
    with atomic(path) as temporary:
        tokenizer.save(str(temporary), pretty=True)
    facts = {
        "vocabulary_size": tokenizer.get_vocab_size(),
        "bos_id": tokenizer.token_to_id("<s>"),
        "eos_id": tokenizer.token_to_id("</s>"),
        "pad_id": tokenizer.token_to_id("<pad>"),
        "corpus_manifest_sha256": sha256_file(Path(corpus_directory) / "manifest.json"),
    }
    return path, facts


def load(path: Path, manifest: dict[str, Any], engine: str = "auto") -> backends.EngineTokenizer:
    """Load a tokenizer.json without its template, truncation and padding."""

    def decode(ids: list[int]) -> str:
        tokenizer = import_library(manifest["kind"]).Tokenizer.from_file(str(path))
        return tokenizer.decode(ids, skip_special_tokens=False)

    return backends.EngineTokenizer(path.parent, manifest, decode, engine)


def control_texts(path: Path) -> list[str]:
    """Return the texts of the control tokens of a tokenizer.json."""
    added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens") or []
    return [token["content"] for token in added if token.get("special")]


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


#: folder of the tokenizers built by the workflow
BUILT = Path("results/tokenizers")
#: lower-case names on the hub with the vocabulary of Tekken: 131,072 entries, equal ids for equal text
NEMO = (
    "unsloth/mistral-nemo-base-2407-bnb-4bit",
    "mistralai/mistral-nemo-base-2407",
    "mistralai/mistral-nemo-instruct-2407",
)


@dataclass(frozen=True)
class ResolvedTokenizer:
    """Settings of a tokenizer, its folder if it is already built, and an optional note for the user."""

    settings: TokenizerSettings
    directory: Path | None = None
    note: str | None = None


def resolve_tokenizer(text: str, built: Path = BUILT) -> ResolvedTokenizer:
    """Resolve the value of `--tokenizer-name`.

    Tries in order: a folder with a tokenscale manifest; a name below `built`; `tekken` and the names of Mistral-Nemo,
    which uses Tekken; a folder with tokenizer.json; `org/name@revision` of the Hugging Face hub. The names of the last
    two end in a part of the file hash or revision. Raises UserError for anything else.
    """
    for folder in (Path(text), built / text):
        path = folder / "manifest.json"
        if path.is_file() and "kind" in read_json(path, "manifest"):  # corpora and stores also have manifests
            manifest = read_tokenizer_manifest(folder)
            return ResolvedTokenizer(
                make_settings(manifest["name"], manifest["kind"], manifest["vocabulary_size"], manifest), folder
            )
    if text.lower() == "tekken":
        return ResolvedTokenizer(TokenizerSettings(name="tekken", kind="tekken"))
    if text.lower() in NEMO:
        note = f"{text}: the same vocabulary as Tekken, which is read offline from the package mistral_common"
        return ResolvedTokenizer(TokenizerSettings(name="tekken", kind="tekken"), note=note)
    if (Path(text) / "tokenizer.json").is_file():
        name = f"{_make_name(Path(text).resolve().name)}-{sha256_file(Path(text) / 'tokenizer.json')[:6]}"
        return ResolvedTokenizer(TokenizerSettings(name=name, kind="huggingface", source=text))
    if Path(text).is_dir():
        raise UserError(
            "the tokenizer's folder holds neither tokenizer.json nor a manifest of tokenscale.",
            flag="--tokenizer-name",
            folder=text,
            next="name a folder of a fast tokenizer (transformers' save_pretrained writes one)",
        )
    source, at, revision = text.partition("@")
    if at and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) and revision:
        name = f"{_make_name(source.rsplit('/')[-1])}-{_make_name(revision)[:6]}"
        return ResolvedTokenizer(TokenizerSettings(name=name, kind="huggingface", source=source, revision=revision))
    known = sorted({"tekken", *(path.parent.name for path in built.glob("*/manifest.json"))})
    near = find_nearest(text, known)
    hub = f"a name of the hub needs its revision: --tokenizer-name {source}@COMMIT"
    other = "name one of them, or a folder with tokenizer.json, or NAME@COMMIT of the Hugging Face hub"
    raise UserError(
        f"there is no tokenizer {text!r}.",
        flag="--tokenizer-name",
        known=", ".join(known),
        next=f"did you mean {near!r}?" if near else hub if "/" in text else other,
    )


def find_store_tokenizer(manifest: Path, sha256: str | None) -> Path | None:
    """Return the folder of the tokenizer with file hash `sha256` that made a store, or None if it is not found.

    Searches beside the store (where `pretokenize` puts it), in the results that hold the store, and below `BUILT`.
    """
    folders = [manifest.parent, *manifest.resolve().parents[4:5], BUILT.parent]
    for path in (path for folder in folders for path in sorted((folder / "tokenizers").glob("*/manifest.json"))):
        try:
            found = read_tokenizer_manifest(path.parent)
        except UserError:  # malformed or of another version: not the tokenizer of this store
            continue
        if sha256 is not None and found["file"]["sha256"] == sha256:
            return path.parent
    return None


def make_settings(name: str, kind: str, vocabulary_size: int, facts: dict[str, Any] | None = None) -> TokenizerSettings:
    """Return the settings of a built tokenizer from its manifest, for the identity of a run.

    `facts` may hold `source` and `revision` of a tokenizer from the hub. If the source is unknown, the name replaces
    it; the manifests that a run reads pin the contents by hash.
    """
    facts = facts or {}
    if kind == "huggingface":
        source = facts.get("source")
        source = name if source in (None, "folder") else source
        return TokenizerSettings(name=name, kind=kind, source=source, revision=facts.get("revision"))
    if kind == "bpe":
        return TokenizerSettings(name=name, kind=kind, corpus=name, vocabulary_size=vocabulary_size)
    if kind not in TOKENIZERS or "vocabulary_size" in TOKENIZERS[kind].needs:
        return TokenizerSettings(name=name, kind=kind, vocabulary_size=vocabulary_size)
    return TokenizerSettings(name=name, kind=kind)


def _make_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-") or "tokenizer"


def export_tokenizer(
    tokenizer: Tokenizer, directory: Path, folder: Path, sequence_length: int, masked: bool = False
) -> dict[str, int | None]:
    """Write both files to `folder` and return the ids of bos, eos and pad, and of mask for a masked model.

    `tokenizer` is the one in `directory`, of any kind but `numbers`, whose ids are not text. The written file is loaded
    and compared with it on fuzz texts. Raises ValueError for different ids.
    """
    directory = Path(directory)
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
