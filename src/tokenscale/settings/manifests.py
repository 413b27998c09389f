"""Where the manifests of corpora, tokenizers, stores and runs lie in a project: the files that stations meet in."""

from tokenscale.settings.run import RunSettings


def corpus_manifest(name: str) -> str:
    """Of a corpus."""
    return f"results/corpus/{name}/manifest.json"


def tokenizer_manifest(name: str) -> str:
    """Of a tokenizer."""
    return f"results/tokenizers/{name}/manifest.json"


def store_manifest(corpus: str, tokenizer: str, store: str) -> str:
    """Of a token store, by the name of its folder."""
    return f"results/tokens/{corpus}/{tokenizer}/{store}/manifest.json"


def done(run_id: str) -> str:
    """What a run leaves when it has ended."""
    return f"results/runs/{run_id}/done.json"


def manifests_of(run: RunSettings) -> dict[str, str]:
    """Role → manifest that a run reads: raw text or a token store, the tokenizer, the validation store.

    >>> sorted(manifests_of(RunSettings(approach="packed")))
    ['store', 'validation_store']
    """
    corpus, tokenizer = run.corpus.name, run.tokenizer.name
    found = {}
    if run.reads_text:
        found["corpus"] = corpus_manifest(corpus)
    if run.reads_tokenizer:
        found["tokenizer"] = tokenizer_manifest(tokenizer)
    for role in ("store", "validation_store"):
        store = getattr(run, role)
        if store is not None:
            found[role] = store_manifest(corpus, tokenizer, store.directory)
    return found
