"""Export a checkpoint, with its tokenizer, to a folder that transformers or
torch.distributed.checkpoint loads.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tokenscale.base.errors import UserError
from tokenscale.base.files import atomic, read_json, remove_tree, sync, sync_tree, write_json
from tokenscale.data.tokenizers.base import read_tokenizer_manifest
from tokenscale.data.tokenizers.huggingface import export_tokenizer
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.settings.model import ModelSettings
from tokenscale.settings.options import decode
from tokenscale.settings.registry import OBJECTIVES
from tokenscale.settings.run import RunSettings
from tokenscale.train.checkpoint import PARTIAL, RECORD, read_model
from tokenscale.train.checkpoint_models import check_weights
from tokenscale.train.models import library
from tokenscale.train.models.build import build
from tokenscale.train.models.convert_hf import to_hf

Log = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="such as …/checkpoints/final",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="a new folder, or an empty one"
    )
    text = (
        "hf: for from_pretrained of transformers; dcp: torch.distributed.checkpoint, as for "
        "torchtitan"
    )
    parser.add_argument("--format", choices=("hf", "dcp"), default="hf", help=text)
    text = "the training's tokenizer, such as results/tokenizers/NAME, for a checkpoint without one"
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help=text)


def run(arguments: argparse.Namespace) -> None:
    export(
        arguments.checkpoint,
        output=arguments.output,
        tokenizer=arguments.tokenizer,
        format=arguments.format,
    )


def export(
    checkpoint: Path,
    output: Path,
    tokenizer: Path | None = None,
    log: Log = print,
    format: str = "hf",
) -> None:
    """Write config.json, the weights, generation_config.json and the tokenizer's files to a new
    folder.

    `tokenizer` is the folder of the training's tokenizer, for a checkpoint without a copy of it; a
    model of ids that are not text has none. Weights keep their number format. Raise UserError for a
    folder that is not empty, for architectures that transformers lacks (such as masked decoders),
    and for a tokenizer with more ids than the model.
    """
    _check_output(output)
    shape, weights = read_model(checkpoint)
    record = read_json(checkpoint / RECORD, what="checkpoint's record")
    if shape.transformers is not None and format == "dcp":
        raise UserError(
            "a model of transformers has its own format.",
            checkpoint=checkpoint,
            next="use --format hf",
        )
    if shape.transformers is None and not OBJECTIVES[record["objective"]].causal:
        what = (
            f"a decoder of the {record['objective']} objective cannot be exported: transformers "
            "has no such encoder."
        )
        next_step = "train with `model.transformers: distilbert` or `bert` to export a masked model"
        raise UserError(what, checkpoint=checkpoint, next=next_step)
    run = decode(RunSettings, values=record["run"])
    with torch.device("meta"):
        check_weights(
            checkpoint,
            model=build(shape, run.sequence_length, objective=run.objective, kernel="sdpa"),
            weights=weights,
        )
    vocabulary = shape.resolved_vocabulary_size
    folder = _find_tokenizer(checkpoint, stated=tokenizer, vocabulary=vocabulary)
    partial = output.with_name(output.name + PARTIAL)
    remove_tree(partial)
    partial.mkdir(parents=True)
    try:
        ids = {}
        if folder is not None:
            masked = run.objective == "masked"
            found = export_tokenizer(
                load_tokenizer(folder),
                directory=folder,
                folder=partial,
                sequence_length=run.sequence_length,
                masked=masked,
            )
            ids = {f"{role}_token_id": number for role, number in found.items()}
        if shape.transformers is None:
            name = _write_decoder(
                shape,
                weights,
                length=run.sequence_length,
                ids=ids,
                folder=partial,
                format=format,
            )
        else:
            name = library.save(
                shape,
                run.objective,
                weights=weights,
                folder=partial,
                ids=ids,
            )
        if OBJECTIVES[run.objective].causal:
            write_json(
                partial / "generation_config.json", value={"_from_model_config": True, **ids}
            )
        if output.exists():
            output.rmdir()  # empty: _check_output made sure
        sync_tree(partial)
        partial.rename(output)
        sync(output.parent)
    finally:
        remove_tree(partial)
    log(f"{output}: {name}, {sum(weight.numel() for weight in weights.values()):,} weights")
    if folder is None:
        why = (
            "its ids are numbers, not text"
            if (checkpoint / "tokenizer").is_dir()
            else "the checkpoint holds none"
        )
        log(f"  no tokenizer: {why}; --tokenizer FOLDER names one")


def _write_decoder(
    shape: ModelSettings,
    weights: dict[str, Tensor],
    length: int,
    ids: dict[str, Any],
    folder: Path,
    format: str,
) -> str:
    """Write config.json and the weights of a decoder, without transformers. Return the name of its
    class.
    """
    config, renamed = to_hf(shape, weights, sequence_length=length)
    # versions 4 and 5 read it
    config["torch_dtype"] = str(next(iter(renamed.values())).dtype).removeprefix("torch.")
    write_json(folder / "config.json", value=config | ids)
    if format == "dcp":
        from tokenscale.train.models.dcp import to_titan, write_dcp

        write_dcp(folder, weights=to_titan(config, weights=renamed))
    else:
        with atomic(folder / "model.safetensors") as temporary:
            save_file(renamed, str(temporary), metadata={"format": "pt"})
    return config["architectures"][0]


def _check_output(output: Path) -> None:
    if output.is_dir() and not any(output.iterdir()):
        return
    blocking = next(
        (parent for parent in output.parents if parent.exists() and not parent.is_dir()), None
    )
    if blocking is not None:
        what = "the output folder lies below a file."
        raise UserError(what, output=output, file=blocking, next="name a folder elsewhere")
    if output.exists():
        what = "the output folder is not empty." if output.is_dir() else "the output is a file."
        raise UserError(what, output=output, next="name a new folder, or remove this one")


def _find_tokenizer(checkpoint: Path, stated: Path | None, vocabulary: int) -> Path | None:
    """Return the given tokenizer folder or the checkpoint's copy; None if there is none or its ids
    are not text.
    """
    held = checkpoint / "tokenizer"
    if stated is not None:
        folder = stated
    elif held.is_dir():
        folder = held
    else:
        folder = None
    if folder is None:
        return None
    manifest = read_tokenizer_manifest(folder)
    if manifest["vocabulary_size"] > vocabulary:
        has = {"tokenizer": f"{folder} has {manifest['vocabulary_size']}"}
        has["model"] = f"{checkpoint} has vocabulary_size {vocabulary}"
        next_step = "name the tokenizer that the model was trained with"
        raise UserError(
            "the tokenizer has more entries than the model's embedding.", **has, next=next_step
        )
    trained = read_tokenizer_manifest(held) if stated is not None and held.is_dir() else None
    if trained is not None and trained["file"] != manifest["file"]:
        made = ((folder, manifest), (held, trained))
        names = [
            f"{where}: {of['name']}, sha256 {of['file']['sha256'][:12]}…" for where, of in made
        ]
        what = "the tokenizer is not the one that the model was trained with."
        following = "leave --tokenizer out: the checkpoint holds it"
        raise UserError(what, tokenizer=names[0], checkpoint=names[1], next=following)
    return None if manifest["kind"] == "numbers" else folder
