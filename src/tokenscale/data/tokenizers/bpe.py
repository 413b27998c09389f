"""Byte-level BPE trained on the training split of a corpus: a small vocabulary for small models, without a network.

The alphabet holds every byte, so any text can be encoded and decoded. Ids 0, 1, 2 are `<s>`, `</s>`, `<pad>`.
(Sennrich et al. 2016; bytes as in GPT-2, Radford et al. 2019.)
"""

from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import atomic, sha256_file
from tokenscale.data.corpus.raw_text import RawText
from tokenscale.data.tokenizers import backends
from tokenscale.data.tokenizers.engines.tokenizers import import_library
from tokenscale.settings.data import TokenizerSettings

CONTROL = ("<s>", "</s>", "<pad>")


def make(settings: TokenizerSettings, directory: Path, corpus_directory: Path | None) -> tuple[Path, dict[str, Any]]:
    """Train on all documents of the training split, in order, and return (file, manifest facts).

    Equal texts give equal files. A small corpus may give fewer entries than `settings.vocabulary_size`; the manifest
    records the actual number. Raises UserError without a corpus.
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
        special_tokens=list(CONTROL),
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


ENGINES = backends.ENGINES
load = backends.load
control_texts = backends.control_texts
