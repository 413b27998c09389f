"""What a run reads, made where it is missing: corpus, tokenizer, stores, each where the workflow puts it.

What is there already and fits is used; what was made of other settings or other text is made again. Rooms are asked by
name where the run's own variant decides, as the workflow's rules do.
"""

import importlib
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenscale.base.errors import UserError
from tokenscale.base.files import locked, read_json, sha256_file
from tokenscale.base.progress import Progress
from tokenscale.cli.pretokenize_file import in_flags
from tokenscale.cli.train_request import Request, check, shortened, too_small
from tokenscale.data.corpus.build import build as build_corpus
from tokenscale.data.corpus.raw_text import RawText, read_corpus_manifest
from tokenscale.data.stores.documents import encode_documents
from tokenscale.data.stores.manifest import open_store, read_store_manifest
from tokenscale.data.stores.write import write_store
from tokenscale.data.tokenizers.build import build as build_tokenizer
from tokenscale.data.tokenizers.load import load_tokenizer
from tokenscale.data.tokenizers.manifest import read_tokenizer_manifest as read_tokenizer
from tokenscale.settings import flags
from tokenscale.settings.data import CorpusSettings, StoreSettings, TokenizerSettings
from tokenscale.settings.options import from_dict, to_dict
from tokenscale.settings.registry import BATCHES, DOWNLOADS, OBJECTIVES, SOURCES
from tokenscale.settings.run import RunSettings

RESULTS = Path("results")


@dataclass(frozen=True)
class Job:
    """A run whose inputs are there: its settings, its done.json, and its manifests by role."""

    run: RunSettings
    output: Path
    manifests: dict[str, Path]


def prepare(request: Request, log: Callable[[str], None] = print) -> Job:
    """Make what is missing for a run, and settle what depends on it: steps of epochs, and whether it can validate.

    `log` receives a line for each thing made. Raises UserError for what cannot be had or does not fit.
    """
    for note in request.notes:
        log(note)
    if request.store is not None:
        run, manifests = _of_file(request)
    else:
        run, manifests = _of_corpus(request, log)
    if request.epochs is not None:
        steps = steps_of(request.epochs, run, manifests, log)
        run = shortened(flags.replace_values(run, {"budget.steps": steps}), request.stated)
        log(f"{request.epochs:g} epochs are {steps:,} steps")
    check(run)
    return Job(run, request.output_dir / run.identity / "done.json", manifests)


def _of_file(request: Request) -> tuple[RunSettings, dict[str, Path]]:
    run = request.run
    known = request.tokenizer if run.tokenizer.kind != "unknown" else None
    open_store(
        request.store,
        run.store,
        requested_by="the run",
        tokenizer_name=run.tokenizer.name,
        tokenizer_sha256=read_tokenizer(known)["file"]["sha256"] if known else None,
        vocabulary_size=run.model.vocabulary_size,
    )
    manifests = {"store": request.store}
    if request.tokenizer is not None and run.reads_tokenizer:
        manifests["tokenizer"] = request.tokenizer / "manifest.json"
    if request.tokenizer is None and OBJECTIVES[run.objective].special_ids:
        raise UserError(
            f"the objective {run.objective} needs the tokenizer, and that of this file is not here.",
            flag=f"--objective {run.objective}",
            file=request.store,
            next="--tokenizer-name FOLDER names the tokenizer that made the file",
        )
    if run.validation.rows:
        store = _store_directory(run.corpus.name, run.tokenizer.name, run.validation_store) / "manifest.json"
        if not store.is_file():
            raise UserError(
                "a pretokenized file holds no validation documents, and there is no store of them.",
                flag="--validation.rows",
                expected=store,
                next="leave --validation.rows out, or train on a corpus, which holds some back",
            )
        manifests["validation_store"] = store
    return run, manifests


def _of_corpus(request: Request, log: Callable[[str], None]) -> tuple[RunSettings, dict[str, Path]]:
    run = request.run
    if run.labels == "target" and not run.corpus.source.pairs:
        raise UserError(
            f"documents of corpus {run.corpus.name} are no pairs: they have no target.",
            flag="--labels target",
            next="--target-column NAME names the translations, or leave --labels out",
        )
    corpus = corpus_of(run.corpus, log)
    tokenizer = tokenizer_of(run.tokenizer, log, request.tokenizer)
    size = read_tokenizer(tokenizer.parent)["vocabulary_size"]
    if run.model.vocabulary_size is not None and size > run.model.vocabulary_size:
        raise too_small(run.model, run.tokenizer.name, size)
    held_out = read_corpus_manifest(corpus.parent)["splits"]["validation"]["rows"]
    if run.validation.rows and held_out == 0 and "validation.rows" not in request.stated:
        log("no validation: no document of the corpus is held out")
        run = flags.replace_values(run, {"validation.rows": 0})
    if run.validation.bleu and held_out == 0:
        raise UserError(
            "there is nothing to translate: no document of the corpus is held out.",
            flag="--validation.bleu",
            corpus=corpus,
            next="give the corpus a `validation_share` or `validation_files`, or leave --validation.bleu out",
        )
    manifests = {}
    if run.store is not None:
        manifests["store"] = store_of(run.store, corpus, tokenizer, log)
    if run.reads_text:
        manifests["corpus"] = corpus
    if run.reads_tokenizer:
        manifests["tokenizer"] = tokenizer
    if run.validation_store is not None:
        manifests["validation_store"] = store_of(run.validation_store, corpus, tokenizer, log)
    return run, manifests


def corpus_of(settings: CorpusSettings, log: Callable[[str], None] = print) -> Path:
    """The manifest of a corpus, built (and first downloaded) where it is missing or of other settings or files."""
    directory = RESULTS / "corpus" / settings.name
    if _is_current(settings, directory):
        return directory / "manifest.json"
    downloads = None
    if settings.source.kind in DOWNLOADS:
        downloads = RESULTS / "downloads" / settings.name
        # by name: only what lies elsewhere needs the modules that fetch
        importlib.import_module("tokenscale.data.corpus.download").fetch_corpus(settings, downloads)
    with _making(directory, f"the corpus {settings.name}"):
        progress = Progress(f"corpus {settings.name}")
        try:
            manifest = build_corpus(settings, directory, progress, downloads)
        except UserError as error:
            raise in_flags(error) from None
        finally:
            progress.close()
        rows = ", ".join(f"{name} {split['rows']:,}" for name, split in manifest["splits"].items())
        log(f"{progress.line()}; {rows}")
    return directory / "manifest.json"


def _is_current(settings: CorpusSettings, directory: Path) -> bool:
    """Whether the corpus in a folder was built with these settings and, where it is of files, of their content."""
    if not (directory / "manifest.json").is_file():
        return False
    manifest = read_corpus_manifest(directory)
    if (directory / "build.json").is_file():  # not there where a corpus was copied
        before = read_json(directory / "build.json", "record of the corpus").get("settings", {})
        try:
            before = from_dict(CorpusSettings, before)
        except UserError:  # written when settings were others
            return False
        if to_dict(before, science_only=True) != to_dict(settings, science_only=True):
            return False
    if settings.source.kind != "files":
        return True
    return importlib.import_module(SOURCES["files"].module).describe(settings.source) == manifest["source"]


def tokenizer_of(
    settings: TokenizerSettings, log: Callable[[str], None] = print, directory: Path | None = None
) -> Path:
    """The manifest of a tokenizer, built where it is missing; of kind bpe, after the corpus that it learns from."""
    corpus = corpus_of(settings.learnt_from, log) if settings.learnt_from is not None else None
    directory = directory or RESULTS / "tokenizers" / settings.name
    path = directory / "manifest.json"
    if path.is_file():
        found = read_tokenizer(directory)
        if found["kind"] != settings.kind:
            raise UserError(
                f"the tokenizer {settings.name} that is there is another.",
                tokenizer=path,
                has=f"kind {found['kind']}",
                requested=f"kind {settings.kind}",
                next="remove its folder, or give the new one another name",
            )
        if corpus is None or found["corpus_manifest_sha256"] == sha256_file(corpus):
            return path
    with _making(directory, f"the tokenizer {settings.name}"):
        manifest = build_tokenizer(settings, directory, corpus.parent if corpus else None)
        log(f"tokenizer {settings.name} ({settings.kind}): {manifest['vocabulary_size']:,} ids")
    return path


def store_of(store: StoreSettings, corpus: Path, tokenizer: Path, log: Callable[[str], None] = print) -> Path:
    """The manifest of a token store, written where it is missing or made of others than this corpus and tokenizer."""
    corpus_name = read_corpus_manifest(corpus.parent)["name"]
    tokenizer_facts = read_tokenizer(tokenizer.parent)
    directory = _store_directory(corpus_name, tokenizer_facts["name"], store)
    path = directory / "manifest.json"
    if path.is_file():
        read_store_manifest(path)  # what a newer tokenscale wrote is told, not written over
        try:
            open_store(
                path,
                store,
                tokenizer_name=tokenizer_facts["name"],
                tokenizer_sha256=tokenizer_facts["file"]["sha256"],
                corpus_manifest_sha256=sha256_file(corpus),
                verify=False,  # each rank verifies
            )
            return path
        except UserError:
            pass
    with _making(directory, f"the store {store.directory}"):
        rows = read_corpus_manifest(corpus.parent)["splits"][store.split]["rows"]
        progress = Progress(f"store {store.directory}", total=rows)
        manifest = write_store(store, corpus.parent, tokenizer.parent, directory, progress, log=log)
        progress.close()
        log(f"{progress.line()}; {manifest['rows']:,} rows, fill {manifest['fill']:.2%}")
    return path


def steps_of(epochs: float, run: RunSettings, manifests: dict[str, Path], log: Callable[[str], None] = print) -> int:
    """Optimizer steps that train `epochs` times on everything: on all rows, or, of a stream, on all tokens."""
    if run.approach == "padding-free":
        log("counting tokens: --epochs of a stream that is tokenized while training costs one pass over the text")
        tokens = _tokens_of(run, manifests)
    elif run.approach == "padded":
        rows = read_corpus_manifest(manifests["corpus"].parent)["splits"]["train"]["rows"]
        return max(1, math.ceil(epochs * rows / run.global_batch))
    else:
        manifest = read_store_manifest(manifests["store"])
        if not BATCHES[run.approach].streams:
            return max(1, math.ceil(epochs * manifest["rows"] / run.global_batch))
        tokens = manifest["tokens_total"]
    return max(1, math.ceil(epochs * tokens / (run.global_batch * run.sequence_length)))


def _tokens_of(run: RunSettings, manifests: dict[str, Path]) -> int:
    text, tokenizer = RawText(manifests["corpus"].parent, "train"), load_tokenizer(manifests["tokenizer"].parent)
    progress, tokens = Progress("counting", total=len(text)), 0
    for texts in text.batches():
        tokens += sum(len(document) for document in encode_documents(tokenizer, texts, run.eos, text.pairs))
        progress(len(texts), sum(len(t.encode("utf-8")) for t in texts))
    progress.close()
    return tokens


def print_summary(directory: Path) -> None:
    """Print status, loss and throughput of a sealed run; only its status where the report's packages are missing."""
    try:
        from tokenscale.analysis.live import summary_lines
    except ImportError as error:
        outcome = read_json(directory / "run.json", "record of the run")["outcome"]
        print(f"run    {directory}  {outcome['status']} after {outcome['steps']} steps")
        print(f"       loss and speed are left out: the package {error.name} is not installed", flush=True)
    else:
        print("\n".join(summary_lines(directory)), flush=True)


def _store_directory(corpus: str, tokenizer: str, store: StoreSettings) -> Path:
    return RESULTS / "tokens" / corpus / tokenizer / store.directory


@contextmanager
def _making(directory: Path, what: str) -> Iterator[None]:
    """Hold a folder while something is made in it. What fails leaves no folder behind that was not there before."""
    new = not directory.exists()
    with locked(directory, what):
        try:
            yield
        except BaseException:
            if new:
                shutil.rmtree(directory, ignore_errors=True)
            raise
