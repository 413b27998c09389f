"""Paths of the manifests of corpora, tokenizers, stores and runs: the interfaces between workflow
rules.
"""

from tokenscale.settings.run import OURS, READERS, RunSettings

corpus_manifest = "results/corpus/{}/manifest.json".format
#: manifest of a corpus's records files, which approaches that tokenize read
corpus_records = "results/corpus/{}/records/manifest.json".format
tokenizer_manifest = "results/tokenizers/{}/manifest.json".format
#: (corpus, tokenizer, store) → manifest
store_manifest = "results/tokens/{}/{}/{}/manifest.json".format
arm_record = "results/arms/{}/environment.json".format
#: (run id, run id that it is compared with) → parity certificate
certificate_file = "results/parity/{}/over/{}.json".format
done_file = "results/runs/{}/done.json".format
#: list of other folders of runs, one a line: those of `train --output-dir`
RUN_FOLDERS = "results/run-folders.txt"


def mixture_manifest(name: str, tokenizer: str | None = None, store: str | None = None) -> str:
    """Return the path of the manifest of a mixture's corpora, or of its token stores if `store` is
    given.
    """
    return "/".join(["results/mixtures", name, *filter(None, (tokenizer, store)), "manifest.json"])


def list_manifests(run: RunSettings) -> dict[str, str]:
    """Return role → manifest of a run's inputs: corpus, tokenizer, store, validation_store, arm."""
    names = (run.corpus.name, run.tokenizer.name)
    mixed = run.mixture is not None
    found = {}
    if run.reads_text:
        found["corpus"] = (mixture_manifest if mixed else corpus_manifest)(names[0])
    if run.reads_tokenizer:
        found["tokenizer"] = tokenizer_manifest(names[1])
    for role in ("store", "validation_store"):
        if (store := getattr(run, role)) is not None:
            found[role] = (mixture_manifest if mixed else store_manifest)(*names, store.directory)
    if run.arm not in (OURS, *READERS):
        found["arm"] = arm_record(run.arm)
    return found
