"""Registries: names in settings → facts about them and, where only their own jobs import it, the
name of their module.

This file is not part of any job's code hash: a job hashes the modules that it uses, which are
passed by name. A new entry therefore reruns nothing. docs/extend.md defines what the module or
function of an entry must provide.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class SourceSpec(NamedTuple):
    """A kind of source."""

    description: str
    needs: tuple[str, ...] = ()  # fields of `SourceSettings` that it must have, and
    options: tuple[str, ...] = ()  # those that it may have
    # its files are fetched by `download`, so that a corpus does not depend on how they came
    downloaded: bool = False
    splittable: bool = False  # it reads files, and its functions take a part of them
    # of a user's own kind: has `describe` and `documents`, see `corpus.build.find_source`
    module: str | None = None


class TokenizerSpec(NamedTuple):
    """A kind of tokenizer."""

    needs: tuple[str, ...] = ()  # fields of `TokenizerSettings` that it must have, and
    options: tuple[str, ...] = ()  # those that it may have
    engines: tuple[str, ...] = ()  # packages that can encode its text, fastest first
    # of a user's own kind: has `make` and `load`, see `tokenizers.load.Kind`
    module: str | None = None


class Format(NamedTuple):
    """Storage format of tokens. `reader` is a class and `writer` a function, as `module:name`: in
    two modules, so that an edit of the writer reruns no training.
    """

    reader: str
    writer: str
    options: tuple[str, ...]  # fields of `StoreSettings` that apply
    # documents are read by number; the approach of this name trains on them as endless streams
    streamed: bool = False
    splittable: bool = False  # stores of corpora with several parts are written in as many
    holds_ids: bool = True  # of documents or rows, not only their lengths


class Approach(NamedTuple):
    """Data-loading strategy. `data/batches/stored.py` or `online.py` has the function that opens
    its batches.
    """

    # store format that it reads; None: raw text alone
    format: str | None = None
    online: bool = False  # it reads raw text, and tokenizes it while training
    twin: str | None = None  # approach that makes bit-identical batches from raw text
    streams: bool = False  # sequences are cut from an endless stream, at any token
    # word for the order of its samples, part of the run id; another one wherever the order changes
    order: str = ""


class ObjectiveSpec(NamedTuple):
    """Objective. Its batches are in `data/batches/objectives.py`, the class of its loss in
    `train/models/build.py`.
    """

    causal: bool = True  # each position attends to earlier positions only
    special_ids: bool = False  # it reads the tokenizer's manifest
    whole_model: bool = False  # its loss needs the whole model on each rank
    flops: float = 1.0  # per token, relative to next-token training
    # of a user's own: `module:name` of the function that opens its change of rows
    rows: str | None = None


_READ = (
    "validation_files",
    "target_files",
    "validation_target_files",
    "format",
    "text_column",
    "target_column",
    "separator",
)
_FETCHED = (*_READ, "downloaded", "published_documents")
#: source kind → its options
SOURCES = {
    "docstrings": SourceSpec(
        "docstrings of installed packages, one per document", options=("packages",)
    ),
    "files": SourceSpec(
        description="Parquet, JSONL, TSV or text files",
        needs=("files",),
        options=_READ,
        splittable=True,
    ),
    "url": SourceSpec(
        description="such files from the web",
        needs=("files",),
        options=_FETCHED,
        downloaded=True,
        splittable=True,
    ),
    "bucket": SourceSpec(
        description="such files from an S3 bucket",
        needs=("files",),
        options=_FETCHED,
        downloaded=True,
        splittable=True,
    ),
    "hub": SourceSpec(
        description="files of a Hugging Face dataset",
        needs=("repository", "revision", "files"),
        options=_FETCHED,
        downloaded=True,
        splittable=True,
    ),
    "stream": SourceSpec(
        description="documents of a Hugging Face dataset, streamed",
        needs=("repository",),
        options=(
            "revision",
            "subset",
            "split",
            "validation_split",
            "text_column",
            "target_column",
            "published_documents",
        ),
    ),
    "dummy": SourceSpec(
        description="random numbers",
        needs=("documents",),
        options=("vocabulary_size", "lengths", "seed"),
    ),
}
#: tokenizer kind → its options and engines
TOKENIZERS = {
    "tekken": TokenizerSpec(engines=("gigatoken", "tiktoken", "tokenizers", "mistral-common")),
    "huggingface": TokenizerSpec(
        needs=("source",), options=("revision", "bos", "eos"), engines=("gigatoken", "tokenizers")
    ),
    "bpe": TokenizerSpec(("corpus", "vocabulary_size"), engines=("gigatoken", "tokenizers")),
    "numbers": TokenizerSpec(("vocabulary_size",)),
}
_PARQUET = ("codec", "codec_level", "dtype", "row_group_rows")
#: store format → its reader, its writer and its options (`data/stores/manifest.py` resolves them)
FORMATS = {
    "padded": Format(
        reader="tokenscale.data.stores.parquet:PaddedStore",
        writer="tokenscale.data.stores.write_parquet:write_padded",
        options=("split", "sequence_length", "eos", *_PARQUET),
        splittable=True,
    ),
    "token-list": Format(
        reader="tokenscale.data.stores.parquet:TokenListStore",
        writer="tokenscale.data.stores.write_parquet:write_token_list",
        options=("split", "eos", *_PARQUET),
        streamed=True,
        splittable=True,
    ),
    "packed": Format(
        reader="tokenscale.data.stores.packed:PackedStore",
        writer="tokenscale.data.stores.write_packed:write_packed",
        options=("split", "sequence_length", "eos", "packing"),
        splittable=True,
    ),
    "lengths": Format(
        reader="tokenscale.data.stores.lengths:LengthsStore",
        writer="tokenscale.data.stores.write_lengths:write_lengths",
        options=("split", "eos"),
        splittable=True,
        holds_ids=False,
    ),
}
#: formats of tokens: what users write, convert and compare
TOKEN_FORMATS = tuple(name for name, form in FORMATS.items() if form.holds_ids)
#: approach → its facts
BATCHES = {
    "padded": Approach(online=True),
    "padding-free": Approach("lengths", online=True, streams=True, order="one stream"),
    "pretokenized-padded": Approach("padded", twin="padded"),
    "token-list": Approach("token-list", twin="padding-free", streams=True, order="one stream"),
    "length-bucketed": Approach("token-list", order="windows of a pass"),
    "packed": Approach("packed"),
}
for _name, _format in FORMATS.items():
    if _format.streamed:
        BATCHES.setdefault(_name, BATCHES["token-list"]._replace(format=_name))
#: training objective → its facts
OBJECTIVES = {
    "causal": ObjectiveSpec(),
    "masked": ObjectiveSpec(causal=False, special_ids=True),
}
#: methods that synchronise full replicas of a model (`layout.copies`)
REPLICATION = [
    "ddp",
]
#: file of `report/drawings` → its figures; the class of `padding_share` is `PaddingShare`
DRAWINGS = {
    "by_approach": "tokens_per_second_comparison data_stall_share padding_share batch_size_comparison",
    "tokenization_benchmark": "tokenization_benchmark",
    "loss_over_time": "loss_over_time ddp_verification_loss",
    "scaling": "scaling_throughput mfu_comparison scaling_weak training_time",
    "storage": "storage_against_entropy storage_benchmark",
    "inference": "inference_tokens_per_second",
    "validation": "time_to_target_loss translation mixture_losses",
    "over_time": "tokens_per_second_over_time step_time_breakdown",
    "parallel_methods": "memory_by_method frameworks parallel_methods pipeline_bubble",
    "scaling_model": "scaling_model",
}
#: figure → module that draws it
FIGURES = {
    name: f"tokenscale.report.drawings.{file}"
    for file, names in DRAWINGS.items()
    for name in names.split()
}
#: own figure, in names of files: module and class of the folder `extensions`
OWN_FIGURE = re.compile(r"[A-Za-z]\w*\.[A-Za-z]\w*")
#: other name of a figure, as in a source study → the figure that shows the same
ALIASES = {
    "efficiency_comparison": "scaling_throughput",
    "inference_step_time": "inference_tokens_per_second",
    "mfu_over_time": "tokens_per_second_over_time",
    "pipeline_vs_model_parallel": "pipeline_bubble",
    "scaling_mfu": "mfu_comparison",
    "split_loss_curves": "loss_over_time",
    "tflops_comparison": "mfu_comparison",
    "tokens_per_second": "scaling_throughput",
    "total_training_time": "training_time",
}


def list_figures(names: Iterable[str]) -> list[str]:
    """Return each figure once and without aliases, own ones (`module:Name`) as their files are named;
    unknown names stay.
    """
    return list(dict.fromkeys(ALIASES.get(name, name.replace(":", ".")) for name in names))


def figure_module(name: str) -> str:
    """Return the module that draws a figure or an alias."""
    found = FIGURES.get(ALIASES.get(name, name))
    return found or f"extensions.{name.partition('.')[0]}"


def drawn_figures(head: Mapping[str, Any]) -> list[str]:
    """Return the figures of an experiment's description, all where it names none; unknown names, and
    own figures whose modules are not here, are left out.
    """
    names = list_figures(head.get("figures") or FIGURES)
    own = [name for name in names if OWN_FIGURE.fullmatch(name)]
    missing = missing_figures(head)
    return [name for name in names if name in FIGURES or name in own and name not in missing]


def missing_figures(head: Mapping[str, Any]) -> dict[str, Path]:
    """Return own figure of an experiment's description → its module, where that is not here: a report
    may be built again without it.
    """
    names = filter(OWN_FIGURE.fullmatch, list_figures(head.get("figures") or ()))
    modules = {name: Path(f"{figure_module(name).replace('.', '/')}.py") for name in names}
    return {name: path for name, path in modules.items() if not path.is_file()}
