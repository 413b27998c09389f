"""Paths of the manifests of corpora, tokenizers, stores and runs: the interfaces between workflow rules."""

from tokenscale.settings.run import OURS, RunSettings


def corpus_manifest(name: str) -> str:
    return f"results/corpus/{name}/manifest.json"


def corpus_records(name: str) -> str:
    """Return the path of the manifest of a corpus's records files, which approaches that tokenize read."""
    return f"results/corpus/{name}/records/manifest.json"


def tokenizer_manifest(name: str) -> str:
    return f"results/tokenizers/{name}/manifest.json"


def store_manifest(corpus: str, tokenizer: str, store: str) -> str:
    return f"results/tokens/{corpus}/{tokenizer}/{store}/manifest.json"


def mixture_manifest(name: str, tokenizer: str | None = None, store: str | None = None) -> str:
    """Return the path of the manifest of a mixture's corpora, or of its token stores if `store` is given."""
    return "/".join(["results/mixtures", name, *filter(None, (tokenizer, store)), "manifest.json"])


def arm_record(name: str) -> str:
    return f"results/arms/{name}/environment.json"


def certificate_file(run_id: str, over: str) -> str:
    """Return the path of the parity certificate of a run, compared with another one."""
    return f"results/parity/{run_id}/over/{over}.json"


def done_file(run_id: str) -> str:
    return f"results/runs/{run_id}/done.json"


def list_manifests(run: RunSettings) -> dict[str, str]:
    """Return role → manifest of a run's inputs: corpus, tokenizer, store, validation_store, arm."""
    corpus, tokenizer = run.corpus.name, run.tokenizer.name
    found = {}
    mixed = run.mixture is not None
    if run.reads_text:
        found["corpus"] = mixture_manifest(corpus) if mixed else corpus_manifest(corpus)
    if run.reads_tokenizer:
        found["tokenizer"] = tokenizer_manifest(tokenizer)
    for role in ("store", "validation_store"):
        store = getattr(run, role)
        if store is not None:
            found[role] = (mixture_manifest if mixed else store_manifest)(corpus, tokenizer, store.directory)
    if run.arm != OURS:
        found["arm"] = arm_record(run.arm)
    return found
