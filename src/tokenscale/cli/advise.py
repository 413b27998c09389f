"""What to do with one's own text: padding, bytes and speed in each format, from a sample; with their uncertainty."""

import argparse
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tokenscale.base.errors import UserError
from tokenscale.cli.advise_estimates import SEED, Estimator, choice, of_approaches, of_formats, of_length, of_tokenizing
from tokenscale.cli.advise_sample import FLAGS, AdviceSettings, Measured, measure
from tokenscale.cli.advise_text import Estimate
from tokenscale.cli.pretokenize_command import in_flags, unescaped
from tokenscale.costs import data as costs
from tokenscale.data.corpus.files import expand
from tokenscale.data.corpus.sample import sample
from tokenscale.data.tokenizers.base import Tokenizer
from tokenscale.data.tokenizers.build import build
from tokenscale.data.tokenizers.load import load
from tokenscale.data.tokenizers.named import BUILT, named
from tokenscale.settings import flags
from tokenscale.settings.data import SourceSettings
from tokenscale.settings.options import to_dict
from tokenscale.settings.yaml_files import read_yaml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The files, and what is known of the training."""

    parser.usage = "%(prog)s FILE … [--tokenizer NAME] [--sequence-length N] [--tokens-per-second X] [options]"
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="Parquet, JSON lines or text; also patterns ('*.jsonl')"
    )
    flags.add(parser, FLAGS)


def run(arguments: argparse.Namespace) -> None:
    """Look, print, and write the facts where asked to."""
    from tokenscale.base.files import write_json
    from tokenscale.cli.advise_text import render

    settings = AdviceSettings(**flags.stated(arguments, FLAGS))
    facts = advise(settings, tuple(arguments.files), print)
    print(render(facts))
    if settings.json:
        write_json(Path(settings.json), to_json(facts))


LENGTHS = (512, 1024, 2048, 4096, 8192)


def advise(settings: AdviceSettings, files: tuple[str, ...], say: Callable[[str], None] = print) -> dict[str, Any]:
    """Every fact, as `--json` writes it; `advice_words.render` makes text of it. `say` hears what takes long.

    Raises UserError for files and tokenizers that cannot be had, and for a data set of fewer than two documents.
    """
    source = SourceSettings(
        kind="files",
        files=files,
        text_column=settings.text_column,
        separator=None if settings.separator is None else unescaped(settings.separator),
    )
    try:
        paths = expand(files)
        found = sample(paths, source, settings.documents, SEED)
    except UserError as error:
        raise _in_flags(error) from None
    with tempfile.TemporaryDirectory(prefix="tokenscale-") as folder:
        tokenizer = _tokenizer(settings.tokenizer, Path(folder), say)
        measured = measure(found, tokenizer, settings.sequence_length, Path(folder))
    size = sum(path.stat().st_size for path in paths)
    return _facts(settings, files, [str(path) for path in paths], size, measured)


def _in_flags(error: UserError) -> UserError:
    error = in_flags(error)
    facts = {label: text for label, text in error.facts.items() if (label, text) != ("flag", "source.files")}
    what = error.what.replace("a source's", "the").replace("a source names", "the input names")
    return UserError(what.replace("a source file", "a file"), **facts)


def _tokenizer(name: str, folder: Path, say: Callable[[str], None]) -> Tokenizer:
    try:
        asked = named(name)
    except UserError as error:
        facts = {label: text.replace("--tokenizer-name", "--tokenizer") for label, text in error.facts.items()}
        raise UserError(error.what, **facts) from None
    if asked.note:
        say(asked.note)
    directory = asked.directory
    if directory is None or not (directory / "manifest.json").is_file():
        directory = folder / asked.settings.name
        say(f"making the tokenizer {asked.settings.name}: there is none in {BUILT}")
        build(asked.settings, directory)
    tokenizer = load(directory)
    for note in getattr(tokenizer, "notes", ()):  # which faster engines were passed over, and why
        say(note)
    return tokenizer


# -- measuring


def _facts(
    settings: AdviceSettings, given: tuple[str, ...], files: list[str], file_bytes: int, measured: Measured
) -> dict[str, Any]:
    estimator = Estimator(measured)
    lengths, wanted = measured.lengths, settings.sequence_length
    by_length = {t: of_length(estimator, t) for t in sorted({*LENGTHS, wanted})}
    facts: dict[str, Any] = {
        "files": files,
        "file_bytes": file_bytes,
        "sampled": {
            "documents": len(lengths),
            "text_bytes": int(measured.text_bytes.sum()),
            "where": measured.sample.where,
            "every_document": estimator.unseen == 0.0,
        },
        "tokenizer": {
            "name": measured.tokenizer.name,
            "engine": " ".join(filter(None, (measured.tokenizer.engine, measured.tokenizer.engine_version))),
        },
        "sequence_length": wanted,
        "tokens_per_second": settings.tokens_per_second,
        "epochs": settings.epochs,
        "documents": estimator.total(np.ones(len(lengths))),
        "text_bytes": estimator.total(measured.text_bytes),
        "tokens": estimator.total(lengths),
        "tokens_per_document": estimator.of(lambda w: costs.mean(lengths, w)),
        "sequence_lengths": {str(t): row for t, row in by_length.items()},
        "formats": of_formats(estimator, wanted, by_length[wanted]["fill_packed"]),
        "tokenizing": of_tokenizing(estimator, settings.tokens_per_second),
    }
    if settings.tokens_per_second:
        facts["approaches"] = of_approaches(estimator, settings, by_length[wanted]["fill_packed"].value)
    facts["choice"], facts["reason"] = choice(by_length[wanted])
    facts["configuration"] = configuration(settings, given, facts["choice"])
    facts["next"] = "make run CONFIG=mine.yaml"
    return facts


def configuration(
    settings: AdviceSettings, files: tuple[str, ...], chosen: str, root: Path = Path()
) -> dict[str, dict[str, Any]]:
    """File → values to paste: the corpus and its tokenizer, and an experiment that trains on it as advised.

    Paths stay as they were given in a project's folder, where they are looked up from, and are absolute elsewhere.
    """
    in_project = (root / "workflow/Snakefile").is_file()
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(files[0]).name.split(".")[0]).strip("._-")
    name = f"my-{stem or 'text'}"[:80]
    source: dict[str, Any] = {"files": [f if in_project else str(Path(f).resolve()) for f in files]}
    for key in ("text_column", "separator"):
        if (value := getattr(settings, key)) != getattr(AdviceSettings, key):
            source[key] = unescaped(value) if key == "separator" else value
    values: dict[str, Any] = {"corpora": {name: {"source": source}}, "experiments": [name]}
    tokenizer = named(settings.tokenizer)
    known = read_yaml(root / "config/config.yaml").get("tokenizers") or {} if in_project else {}
    if tokenizer.settings.name not in known:
        kind, described = tokenizer.settings.kind, to_dict(tokenizer.settings)
        described.pop("name", None)
        if kind == "bpe":  # what it was trained on is not known here
            kind, described = "huggingface", {"source": str(tokenizer.directory)}
        values["tokenizers"] = {tokenizer.settings.name: {"kind": kind} | described}
    experiment = {
        "question": f"How fast does llama-tiny train on {name}?",
        "runs": {
            "corpus": name,
            "tokenizer": tokenizer.settings.name,
            "approach": {"padded": "pretokenized-padded"}.get(chosen, chosen),
            "sequence_length": settings.sequence_length,
            "model": "llama-tiny",
            "budget": {"steps": 100},
        },
        "figures": ["loss_over_time", "tokens_per_second"],
    }
    return {"mine.yaml": values, f"config/experiments/{name}.yaml": experiment}


def to_json(value: Any) -> Any:
    """The facts as plain values."""
    if isinstance(value, Estimate):
        return value.to_dict()
    return {key: to_json(v) for key, v in value.items()} if isinstance(value, dict) else value
