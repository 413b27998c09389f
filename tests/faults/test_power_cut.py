"""The power fails at any moment: what a manifest, a record or a checkpoint names is complete,
whatever was not synced.

`test_every_sync_is_needed` takes away the syncs of each line in turn, and finds a disk that breaks
the promise.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.corpora import Lab, make_corpus, small_run
from tests.faults.powercut import Recording, lay
from tokenscale.base.errors import UserError
from tokenscale.base.files import canonical_json, read_json, sha256_file, sha256_text
from tokenscale.data.corpus import parts as corpus_parts
from tokenscale.data.corpus.raw_text import write_text_records
from tokenscale.data.stores.foreign.shards import replace_folder
from tokenscale.data.stores.writing import merge_store, write_store
from tokenscale.runs.launch.attempts import Identity, prepare_attempt, write_done_file
from tokenscale.runs.records.provenance import read_sealed
from tokenscale.settings.data import CorpusSettings, SourceSettings, StoreSettings
from tokenscale.settings.run import CheckpointSettings, ScheduleSettings, ValidationSettings
from tokenscale.train.checkpoint import Checkpoint
from tokenscale.train.loop import train
from tokenscale.train.parallel.world import World

TEXTS = [f"{number} words of a text, {'again ' * (number % 9)}" for number in range(60)]
OTHER_TEXTS = [f"another text {number}" for number in range(50)]


def files_of(value) -> list[dict]:
    if isinstance(value, list):
        return [file for inner in value for file in files_of(inner)]
    if not isinstance(value, dict):
        return []
    own = [value] if {"name", "bytes"} <= value.keys() else []
    return own + [
        file for key, inner in value.items() if key != "source" for file in files_of(inner)
    ]


def broken_manifest(path: Path) -> list[str]:
    if not path.is_file():
        return [f"{path} is missing"]
    found = []
    manifest = read_json(path)
    for file in files_of(manifest):
        beside = path.parent / file["name"]
        if not beside.is_file() or beside.stat().st_size != file["bytes"]:
            found.append(f"{beside} is not as {path} names it")
        elif "sha256" in file and sha256_file(beside) != file["sha256"]:
            found.append(f"{beside} has other content than {path} says")
    build = path.with_name("build.json")
    record = read_json(build) if build.is_file() else {}
    named = record.get("manifest_sha256")
    if named not in (None, sha256_text(canonical_json(manifest))):
        found.append(f"{build} is of another manifest")
    return found


def broken(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.rglob("*.json")):
        try:
            json.loads(path.read_text())
        except ValueError:
            return [f"{path} is no JSON"]
    for path in folder.rglob("*manifest.json"):
        if "checkpoints" not in path.parts:
            found += broken_manifest(path)
    for path in folder.rglob("index.json"):
        shards = [path.parent / name for name in read_json(path)]
        found += [
            f"{path} without {shard}"
            for shard in shards
            if not (shard.is_file() and shard.stat().st_size)
        ]
    for path in folder.rglob("run.json"):
        if "seal" in read_json(path):
            record = read_sealed(path)
            for name, sha256 in record["outcome"]["logs"].items():
                log = path.parent / name
                if not log.is_file() or sha256_file(log) != sha256:
                    found.append(f"{log} is not what {path} seals")
    for path in folder.rglob("done.json"):
        record = read_sealed(path.with_name("run.json"))
        if record is None or record["seal"] != read_json(path)["seal"]:
            found.append(f"{path} without its record")
    for directory in folder.rglob("checkpoints"):
        states = sorted(path.parent for path in directory.glob("step=*/checkpoint.json"))
        sealed = read_sealed(directory.with_name("run.json")) is not None
        weights = [directory / name for name in ("best", "final") if (directory / name).exists()]
        # of states, the newest; none once the run has ended
        for path in weights + ([] if sealed else states[-1:]):
            try:
                Checkpoint(path)
            except UserError as error:
                found.append(f"{path}: {error.what}")
            found += broken_manifest(path / "tokenizer/manifest.json")
    return found


def build_corpora(folder: Path, lab: Lab) -> None:
    """A corpus with its records files, then another one in its place, and one in two parts."""
    for texts in (TEXTS, OTHER_TEXTS):
        make_corpus(folder / "corpus", texts, name=f"of-{len(texts)}")
        write_text_records(folder / "corpus")
    sources = lab.directory / "sources"
    sources.mkdir(exist_ok=True)
    for number, texts in enumerate((TEXTS, TEXTS[30:] + OTHER_TEXTS)):
        (sources / f"{number}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
    source = SourceSettings(kind="files", files=(str(sources / "*.jsonl"),))
    settings = CorpusSettings(name="parts", source=source, parts=2)
    for number in range(2):
        corpus_parts.build_part(settings, number, folder / f"two/parts/{number:05d}")
    corpus_parts.merge_parts(settings, folder / "two")


def build_stores(folder: Path, lab: Lab) -> None:
    """A store of each format, each a second time from another corpus, a store in two parts, a
    folder with an index.
    """
    other = Lab(lab.directory / "other", OTHER_TEXTS)
    for name in ("padded-sequence_length=32", "token-list", "packed-sequence_length=32"):
        for corpus in (lab.corpus, other.corpus):
            write_store(StoreSettings.parse(name), corpus, lab.tokenizer, folder / name)
    store = StoreSettings.parse("token-list")
    for number in range(2):
        write_store(
            store, lab.corpus, lab.tokenizer, folder / f"two/parts/{number:05d}", part=(number, 2)
        )
    merge_store(store, lab.corpus, folder / "two", 2)
    for _ in range(2):
        with replace_folder(folder / "shards") as building:
            (building / "shard").write_bytes(b"tokens")
            (building / "index.json").write_text('["shard"]')


def train_run(folder: Path, lab: Lab) -> None:
    asked = {
        "validation": ValidationSettings(rows=2, every=1),
        "schedule": ScheduleSettings(warmup_steps=1),
    }
    keep = CheckpointSettings(every=2, keep_last=1, best=True, final=True)
    run = small_run(steps=4, global_batch=2, checkpoints=keep, **asked)
    directory = folder / run.identity
    identity = Identity({"code": "a"}, {"store": "b"})
    inputs = lab.inputs(run)
    number = prepare_attempt(directory, run, identity)
    train(run, inputs, directory, World(0, 1, 0, torch.device("cpu")), number)
    assert write_done_file(directory, directory / "done.json", identity, run)


SCENARIOS = {"corpora": build_corpora, "stores": build_stores, "run": train_run}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> dict[str, Recording]:
    base = tmp_path_factory.mktemp("recorded")
    lab = Lab(base / "lab", TEXTS, validation_share=0.2)
    found = {}
    for name, scenario in SCENARIOS.items():
        scenario(base / f"{name}-before", lab) if name == "run" else None
        (base / name).mkdir()
        found[name] = Recording(base / name)
        with found[name].on():
            scenario(base / name, lab)
    return found


def complete(folder: Path) -> set[str]:
    names = ("manifest.json", "done.json", "run.json", "checkpoint.json", "index.json")
    return {str(path.relative_to(folder)) for name in names for path in folder.rglob(name)}


def first_broken(recording: Recording, scratch: Path, without: str | None = None) -> str | None:
    for disk, ended in recording.disks(without):
        lay(disk, scratch)
        if problems := broken(scratch):
            return problems[0]
        if ended and (lost := complete(recording.root) - complete(scratch)):
            return f"lost after the end: {sorted(lost)}"
    return None


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_is_named_is_complete_whenever_the_power_fails(recordings, tmp_path, name):
    assert first_broken(recordings[name], tmp_path / "disk") is None


def test_every_sync_is_needed(recordings, tmp_path):
    sites = {(name, site) for name, recording in recordings.items() for site in recording.sites()}
    needed = {
        site for name, site in sites if first_broken(recordings[name], tmp_path / "disk", site)
    }
    assert {site for _, site in sites} - needed == set()
