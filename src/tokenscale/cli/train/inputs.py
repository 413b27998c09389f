"""Inputs of a run, built if they are missing: corpus, tokenizer and stores, each where the workflow
puts it.

Existing inputs that match the settings are used; others are built by the commands of the workflow's
rules.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json, read_json, remove_tree, sha256_file, write_text
from tokenscale.base.wording import format_duration
from tokenscale.cli.library_weights import count_library_weights
from tokenscale.cli.main import load_command
from tokenscale.cli.pretokenize_file import reword_for_flags
from tokenscale.cli.train.request import (
    TEKKEN_VOCABULARY,
    Request,
    check_run,
    shorten_warmup,
    vocabulary_error,
)
from tokenscale.costs import schedule
from tokenscale.costs.flops import Convention, hardware_flops_per_token
from tokenscale.data.corpus.files import describe
from tokenscale.data.corpus.raw_text import RawText, read_corpus_manifest
from tokenscale.data.stores.manifest import open_store, read_store_manifest
from tokenscale.data.tokenizers.base import read_tokenizer_manifest as read_tokenizer
from tokenscale.runs.launch.start import check_memory
from tokenscale.runs.records.provenance import count_gpus, measure_matrix_rate, read_lines
from tokenscale.settings import flags
from tokenscale.settings import manifests as paths
from tokenscale.settings.data import CorpusSettings, StoreSettings, TokenizerSettings
from tokenscale.settings.options import decode, to_dict
from tokenscale.settings.registry import BATCHES, OBJECTIVES, SOURCES
from tokenscale.settings.run import RunSettings

Log = Callable[[str], None]
say = partial(print, flush=True)
#: a step that takes longer is announced: nothing is printed before its end
LONG_STEP_S = 20
#: fewer FLOPs are never long, so that the rate of this machine need not be measured
LONG_STEP_FLOPS = 4e11


@dataclass(frozen=True)
class PreparedRun:
    """A run with existing inputs: its settings, its done.json, and its manifests by role."""

    run: RunSettings
    output: Path
    manifests: dict[str, Path]


def prepare(request: Request, log: Log = say) -> PreparedRun:
    """Build the missing inputs of a run, and set what depends on them: steps of epochs, and whether
    it validates.

    `log` receives a line for each input built. Raise UserError for inputs that cannot be obtained
    or do not fit.
    """
    kind = request.run.tokenizer.kind
    size = request.run.tokenizer.vocabulary_size
    entries = TEKKEN_VOCABULARY if kind == "tekken" else size
    check_memory(count_library_weights(request.run, vocabulary_size=entries), vocabulary=entries)
    for note in request.notes:
        log(note)
    if request.store is not None:
        run = request.run
        manifests = _open_pretokenized(request, store=request.store)
    else:
        run, manifests = _prepare_from_corpus(request, log)
    if request.epochs is not None:
        steps = count_steps(
            request.epochs,
            run,
            manifests=manifests,
        )
        run = shorten_warmup(
            flags.replace_values(run, values={"budget.steps": steps}), stated=request.stated
        )
        log(f"{request.epochs:g} epochs are {steps:,} steps")
    check_run(run)
    if text := describe_long_step(run, manifests):
        log(text)
    note_folder(request.output_dir)
    return PreparedRun(
        run=run, output=request.output_dir / run.identity / "done.json", manifests=manifests
    )


def note_folder(folder: Path) -> None:
    """List a folder of runs for `status`, unless it is the workflow's."""
    if (place := folder.resolve()) != Path("results/runs").resolve():
        names = dict.fromkeys([*read_lines(Path(paths.RUN_FOLDERS)), str(place)])
        write_text(paths.RUN_FOLDERS, text="".join(f"{name}\n" for name in names))


def describe_long_step(run: RunSettings, manifests: dict[str, Path]) -> str | None:
    """Return how long a step on the CPU takes at least, by its FLOPs and a measured rate; None if
    that is short.
    """
    if (run.device != "cpu" and count_gpus()) or run.model.transformers is not None:
        return None
    entries = run.model.vocabulary_size
    if entries is None and "tokenizer" in manifests:
        entries = read_tokenizer(manifests["tokenizer"].parent)["vocabulary_size"]
    elif entries is None:
        entries = read_store_manifest(manifests["store"])["vocabulary_size"]
    model = run.model.with_vocabulary(entries).with_positions(run.sequence_length)
    options = (Convention.CAUSAL, run.activation_checkpointing, run.objective)
    flops = (
        run.global_batch
        * run.sequence_length
        * hardware_flops_per_token(model, run.sequence_length, *options)
    )
    if flops < LONG_STEP_FLOPS:
        return None
    rate = measure_matrix_rate()
    took = (
        f"{flops / 1e12:,.1f} TFLOP, of which matrix products here reach {rate / 1e12:,.2f} a "
        "second"
    )
    return (
        f"a step takes at least {format_duration(flops / rate)}: {took}"
        if flops > LONG_STEP_S * rate
        else None
    )


def _open_pretokenized(request: Request, store: Path) -> dict[str, Path]:
    run = request.run
    known = request.tokenizer if run.tokenizer.kind != "unknown" else None
    facts: dict[str, Any] = {
        "tokenizer_name": run.tokenizer.name,
        "vocabulary_size": run.model.vocabulary_size,
    }
    sha256 = read_tokenizer(known)["file"]["sha256"] if known else None
    assert run.store is not None  # the file is one
    open_store(
        store,
        expected=run.store,
        requested_by="the run",
        tokenizer_sha256=sha256,
        **facts,
    )
    manifests = {"store": store}
    if request.tokenizer is not None and run.reads_tokenizer:
        manifests["tokenizer"] = request.tokenizer / "manifest.json"
    if request.tokenizer is None and OBJECTIVES[run.objective].special_ids:
        what = (
            f"the objective {run.objective} needs the tokenizer, but the tokenizer of this file "
            "is not here."
        )
        next_step = "--tokenizer-name FOLDER names the tokenizer that made the file"
        raise UserError(what, flag=f"--objective {run.objective}", file=store, next=next_step)
    validation = run.validation_store
    if run.validation.rows:
        assert validation is not None  # as of every run that validates
        held_out = Path(
            paths.store_manifest(run.corpus.name, run.tokenizer.name, validation.directory)
        )
        if not held_out.is_file():
            what = (
                "a pretokenized file holds no validation documents, and there is no validation "
                "store."
            )
            next_step = (
                "leave --validation.rows out, or train on a corpus, which holds out documents"
            )
            raise UserError(what, flag="--validation.rows", expected=held_out, next=next_step)
        manifests["validation_store"] = held_out
    return manifests


def _prepare_from_corpus(request: Request, log: Log) -> tuple[RunSettings, dict[str, Path]]:
    run = request.run
    if run.labels == "target" and not run.corpus.source.pairs:
        what = f"documents of the corpus {run.corpus.name} are not pairs: they have no target."
        next_step = "--target-column NAME names the translations, or leave --labels out"
        raise UserError(what, flag="--labels target", next=next_step)
    corpus = ensure_corpus(run.corpus)
    tokenizer = ensure_tokenizer(run.tokenizer, given=request.tokenizer)
    size = read_tokenizer(tokenizer.parent)["vocabulary_size"]
    if run.model.vocabulary_size is not None and size > run.model.vocabulary_size:
        raise vocabulary_error(run.model, tokenizer=run.tokenizer.name, size=size)
    held_out = read_corpus_manifest(corpus.parent)["splits"]["validation"]["rows"]
    if run.validation.rows and held_out == 0 and "validation.rows" not in request.stated:
        log("no validation: the corpus holds out no documents")
        run = flags.replace_values(run, values={"validation.rows": 0})
    if run.validation.bleu and held_out == 0:
        what = "BLEU needs held-out documents, and the corpus holds out none."
        next_step = (
            "give the corpus a `validation_share` or `validation_files`, or leave "
            "--validation.bleu out"
        )
        raise UserError(what, flag="--validation.bleu", corpus=corpus, next=next_step)
    return run, _build_inputs(run, corpus, tokenizer=tokenizer)


def _build_inputs(run: RunSettings, corpus: Path, tokenizer: Path) -> dict[str, Path]:
    """Return role → manifest of what a run reads; records and stores that are missing are built."""
    manifests = {}
    if run.online and RawText(corpus.parent).needs_records:
        call("corpus", "--records", output=corpus.parent / "records/manifest.json")
    if run.reads_text:
        manifests["corpus"] = corpus
    if run.reads_tokenizer:
        manifests["tokenizer"] = tokenizer
    for role, store in (("store", run.store), ("validation_store", run.validation_store)):
        if store is not None:
            manifests[role] = ensure_store(store, corpus, tokenizer=tokenizer)
    return manifests


def call(command: str, *words: str, output: Path) -> Path:
    """Run a command that writes this manifest, and return its path. A folder that is new is removed
    if it fails.
    """
    module = load_command(command)
    folder = output.parent
    parser = argparse.ArgumentParser()
    new = not folder.exists()
    module.add_arguments(parser)
    # what another process builds is not built a second time, under its readers
    options = {} if command == "download" else {"wait": False}
    try:
        module.run(parser.parse_args([*words, "--output", str(output)]), **options)
    except BaseException as error:
        # another process may have begun meanwhile
        if new and "lock" not in getattr(error, "facts", ()):
            remove_tree(folder)
        if isinstance(error, UserError):
            raise reword_for_flags(error) from None
        raise
    return output


def ensure_corpus(settings: CorpusSettings) -> Path:
    """Return the manifest of a corpus. Download and build it if it is missing or has other settings
    or files.
    """
    output = Path(paths.corpus_manifest(settings.name))
    if _is_current(settings, directory=output.parent):
        return output
    words = ["--settings", canonical_json(to_dict(replace(settings, parts=1)))]
    if SOURCES[settings.source.kind].downloaded:
        downloads = call(
            "download", *words, output=Path("results/downloads", settings.name, "manifest.json")
        )
        words += ["--downloads", str(downloads)]
    return call("corpus", *words, output=output)


def _is_current(settings: CorpusSettings, directory: Path) -> bool:
    """Return whether the corpus in a folder was built with these settings and, for source files,
    from their content.
    """
    if not (directory / "manifest.json").is_file():
        return False
    manifest = read_corpus_manifest(directory)
    if (directory / "build.json").is_file():  # missing if the corpus was copied
        before = read_json(directory / "build.json", what="record of the corpus").get(
            "settings", {}
        )
        try:
            before = decode(CorpusSettings, values=before)
        except UserError:  # written by a version with other settings
            return False
        if to_dict(before, science_only=True) != to_dict(settings, science_only=True):
            return False
    return settings.source.kind != "files" or describe(settings.source) == manifest["source"]


def ensure_tokenizer(settings: TokenizerSettings, given: Path | None = None) -> Path:
    """Return the manifest of a tokenizer. Build it if it is missing; for kind bpe also the corpus
    it learns from.
    """
    corpus = ensure_corpus(settings.learnt_from) if settings.learnt_from is not None else None
    path = given / "manifest.json" if given else Path(paths.tokenizer_manifest(settings.name))
    if path.is_file():
        found = read_tokenizer(path.parent)
        accepted = found.get("accepted_loss", TokenizerSettings.accepted_loss)
        if found["kind"] != settings.kind:
            facts = {"has": f"kind {found['kind']}", "requested": f"kind {settings.kind}"}
            what = f"the existing tokenizer {settings.name} is of another kind."
            raise UserError(
                what,
                tokenizer=path,
                **facts,
                next="remove its folder, or give the new one another name",
            )
        same = corpus is None or found["corpus_manifest_sha256"] == sha256_file(corpus)
        if same and (given or accepted == settings.accepted_loss):
            return path
    words = [
        "--settings",
        canonical_json(to_dict(settings)),
        *(["--corpus", str(corpus)] if corpus else []),
    ]
    return call("tokenizer", *words, output=path)


def ensure_store(store: StoreSettings, corpus: Path, tokenizer: Path) -> Path:
    """Return the manifest of a token store. Write it if it is missing or has another corpus or
    tokenizer.
    """
    made = read_tokenizer(tokenizer.parent)
    path = Path(
        paths.store_manifest(
            read_corpus_manifest(corpus.parent)["name"], made["name"], store.directory
        )
    )
    if path.is_file():
        read_store_manifest(path)  # a store of a newer tokenscale is an error, not overwritten
        hashes = {
            "tokenizer_sha256": made["file"]["sha256"],
            "corpus_manifest_sha256": sha256_file(corpus),
        }
        with suppress(UserError):
            open_store(
                path,
                expected=store,
                tokenizer_name=made["name"],
                **hashes,
            )
            return path
    words = ["--store", store.directory, "--corpus", str(corpus), "--tokenizer", str(tokenizer)]
    return call("pretokenize", *words, output=path)


def count_steps(epochs: float, run: RunSettings, manifests: dict[str, Path]) -> int:
    """Return the optimizer steps of `epochs` passes over the data: all rows or, of a stream, all
    tokens.
    """
    if run.approach == "padded":
        rows = read_corpus_manifest(manifests["corpus"].parent)["splits"]["train"]["rows"]
        return schedule.count_steps(epochs, rows, run.global_batch)
    manifest = read_store_manifest(manifests["store"])
    rows = manifest["rows"]
    if BATCHES[run.approach].streams:
        rows = Fraction(manifest["tokens_total"], run.sequence_length)
    return schedule.count_steps(epochs, rows, run.global_batch)


def print_summary(directory: Path) -> None:
    """Print status, loss and throughput of a sealed run; only its status where the report's
    packages are missing.
    """
    try:
        from tokenscale.analysis.live import summary_lines
    except ImportError as error:
        outcome = read_json(directory / "run.json", what="record of the run")["outcome"]
        print(f"run    {directory}  {outcome['status']} after {outcome['steps']} steps")
        print(
            f"       loss and speed need the package {error.name}, which is not installed",
            flush=True,
        )
    else:
        print("\n".join(summary_lines(directory)), flush=True)


def report_failure(output: Path) -> int:
    """Return 0 for a run that is complete. Of any other, say how it ended and return 1: what
    follows in a script finds no model.
    """
    status = read_json(output, what="record of the run's end")["status"]
    if status == "complete":
        return 0
    error = UserError(
        f"the run has ended, but it is not complete: {status}.",
        run=output.parent,
        next="lower the learning rate, warm up for longer, or clip gradients, if its loss was no number",
    )
    print(error.render(), file=sys.stderr)
    return 1
