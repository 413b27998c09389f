"""What `convert` writes: a store of ours, or a foreign format with its record."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tokenscale.base.errors import UserError
from tokenscale.base.files import locked
from tokenscale.base.progress import Progress
from tokenscale.cli.convert_source import IDS, ConvertSettings, Say, Source, outside
from tokenscale.cli.convert_target import Target
from tokenscale.data.stores.foreign.record import write_record
from tokenscale.data.stores.foreign.reframe import Rule, Written


def write_store(found: Source, goal: Target, say: Say) -> None:
    """A store with the documents of the source."""
    store, path = goal.store, goal.path
    progress = Progress(f"writing {path.name}", total=len(found.documents))
    found.documents.report = progress
    found.documents.origin = replace(found.documents.origin, command=goal.command)
    with _held(goal):
        if goal.single:
            manifest = goal.module.write(store, found.documents, path.parent, single=goal.single)
        else:
            manifest = goal.module.write(store, found.documents, path)
    progress.close()
    cut = f", {manifest['tokens_cut']:,} ids of {manifest['documents_cut']:,} documents cut"
    say(
        f"{progress.line()}\n{path}: {store.directory}, {manifest['rows']:,} rows, {manifest['tokens_in_documents']:,} "
        f"ids, fill {manifest['fill']:.2%}{cut if manifest['tokens_cut'] else ''}; "
        f"ids_digest {manifest['ids_digest']['value'][:16]}"
    )


@contextmanager
def _held(goal: Target) -> Iterator[None]:
    """The target's folder, locked. What fails leaves no folder behind in which nothing was begun."""
    path = goal.path
    place = path.parent / f".{path.stem}.converting" if goal.single else path
    new = [p for p in (path.parent if goal.single else path, *path.parents) if not p.exists()]
    try:
        with locked(place, str(path)):
            yield
    except BaseException:
        if goal.single:
            shutil.rmtree(place, ignore_errors=True)
        elif new and not (path / ".building").exists():
            shutil.rmtree(path, ignore_errors=True)
        raise
    if goal.single:
        shutil.rmtree(place, ignore_errors=True)


def write_foreign(settings: ConvertSettings, found: Source, goal: Target, say: Say) -> None:
    """Files for others, and the record of what they cannot say."""
    rule, module, documents = _rule(settings, found, goal), goal.module, found.documents
    progress, count = Progress(f"writing {goal.path.name}", total=len(documents)), Written()
    documents.report = progress
    hashes = module.write(documents, goal.path, rule, count)
    origin = documents.origin
    facts = {
        "format": goal.foreign,
        "tokenizer": origin.tokenizer,
        **{name: getattr(origin, name) for name in IDS},
        "eos": found.facts["eos"],
        "documents": count.documents,
        "tokens": count.tokens,
        "bos": "keep" if rule.keep_bos else "drop",
        "document_end": rule.document_end,
        "source": found.facts,
    }
    write_record(module.record_path(goal.path), hashes, facts)  # an old one fits no new files: never believed
    progress.close()
    say(progress.line())
    size = sum(file.stat().st_size for file in hashes)
    say(f"{goal.path}: {goal.foreign}, {count.documents:,} documents, {count.tokens:,} ids, {size:,} bytes")
    if count.bos_dropped and (found.counts is None or found.counts.bos_stripped):
        say(f"  taken off: {count.bos_dropped:,} of BOS {origin.bos_id}")
    if rule.document_end is not None:
        say(f"  put behind documents: {count.document_ends_added:,} of id {rule.document_end}")
    for note in module.notes(origin, rule.document_end is not None or found.facts["eos"]):
        say(f"  {note}")


def _rule(settings: ConvertSettings, found: Source, goal: Target) -> Rule:
    """How documents leave. From one foreign format to another they keep what they had, where the format allows it."""
    origin, end = found.documents.origin, settings.document_end
    if end is None and goal.foreign == "nanogpt":
        end = found.framing.document_end if found.framing else origin.eos_id
        if end is None:
            raise UserError(
                "nanoGPT's format needs an id that ends documents, and the tokenizer has none.",
                tokenizer=origin.tokenizer["name"],
                next="--document-end ID",
            )
    if end is None and found.counts is not None and found.counts.document_ends_stripped:
        end = found.framing.document_end
    if end is not None and end >= origin.vocabulary_size:
        raise outside("--document-end", end, origin.vocabulary_size)
    keep = goal.module.KEEPS_BOS
    if keep and found.counts is not None:
        keep = found.counts.bos_stripped > 0
    return Rule(keep if settings.bos is None else settings.bos == "keep", end)
