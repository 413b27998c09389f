"""What no result of a small project holds: settings, texts, stores and models of others, records of
few commands.

`SAMPLES` maps a kind to who makes its folder, who reads it, and whether its content is proven. What
a reader returns names no folder. Nothing proves what others wrote: other bytes are then another
text, which is no fault.
"""

import gzip
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import zstandard
from safetensors.torch import save_file

from tests.corpora import Lab
from tests.unit.convert.layouts import write_mds
from tests.unit.test_bad_input_stores import write_tiny_checkpoint
from tests.unit.test_models_convert import LENGTH, SHAPES, named, ours
from tokenscale.analysis.rows import certificate_rows
from tokenscale.arms import environments
from tokenscale.arms.prepared import read_record
from tokenscale.base.bucket import access_error
from tokenscale.base.errors import UserError
from tokenscale.base.files import (
    read_arguments,
    read_file,
    sha256_file,
    write_arguments,
    write_json,
    write_sealed,
)
from tokenscale.cli import cloud
from tokenscale.cli.convert import FOREIGN, ConvertSettings, convert
from tokenscale.cli.mixture import write_mixture
from tokenscale.cli.parity import read_recording
from tokenscale.cli.plan_prices import read_gpu_prices
from tokenscale.cli.snakemake import progress as snakemake_progress
from tokenscale.cli.snakemake import reasons as snakemake_reasons
from tokenscale.cli.status import runs as status_runs
from tokenscale.data.corpus import fingerprint
from tokenscale.data.corpus.build import build
from tokenscale.data.corpus.files import expand_patterns
from tokenscale.data.corpus.read import read_texts
from tokenscale.data.mixtures import read_mixture
from tokenscale.data.stores.manifest import read_store_manifest
from tokenscale.data.tokenizers import load
from tokenscale.parity.recorder import ParityRecorder
from tokenscale.report.packed_logs import restore
from tokenscale.settings import profile
from tokenscale.settings.claims import load_claims
from tokenscale.settings.config import load_config
from tokenscale.settings.data import (
    CorpusSettings,
    SourceSettings,
    StoreSettings,
    TokenizerSettings,
)
from tokenscale.settings.machine import load_machine
from tokenscale.settings.source_studies import load_preset_file
from tokenscale.settings.yaml_files import read_yaml
from tokenscale.train.checkpoint import Checkpoint, read_model
from tokenscale.train.checkpoint_models import read_published
from tokenscale.train.models.convert_hf import to_hf
from tokenscale.train.models.dcp import to_titan, write_dcp
from tokenscale_golden.reading import GoldenError, read

ROOT = Path(__file__).parents[2]
TEXTS = ["one line", "another\nof two", "größer 日本", "x" * 300]


class Sample(NamedTuple):
    make: Callable[[Path], object]
    read: Callable[[Path], object]
    proven: bool = False


# --- what users write


def _write_settings(folder: Path) -> None:
    for name in ("config", "profiles", "arms"):
        for path in (
            path for ending in ("yaml", "toml") for path in (ROOT / name).rglob(f"*.{ending}")
        ):
            (target := folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)


def _read_settings(folder: Path) -> object:
    environments.ARMS = folder / "arms"
    arms = [environments.load_arm(name) for name in environments.list_arms()]
    config = load_config(root=folder)
    runs = [[run.run_id for run in config.runs(name)] for name in ("demo", "frameworks")]
    files = [read_yaml(path) for path in config.available.values()]
    profiles = [
        profile.load_profile_config(path.name, folder)
        for path in sorted(folder.glob("profiles/*"))
        if path.is_dir()
    ]
    presets = [load_preset_file(str(path)) for path in sorted(folder.glob("config/presets/*"))]
    others = (
        load_claims(folder / "config/replication.yaml"),
        read_gpu_prices(folder / "config/prices.yaml"),
    )
    return repr(
        [
            runs,
            files,
            profiles,
            presets,
            arms,
            others,
            load_machine("profiles/alps/machine.toml", folder),
        ]
    )


def _write_texts(folder: Path) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    found = {"lines.jsonl": lines, "lines.jsonl.zst": zstandard.compress(lines)}
    found |= {
        "lines.jsonl.gz": gzip.compress(lines, mtime=0),
        "array.json": json.dumps([{"text": "a"}]).encode(),
    }
    found |= {"rows.tsv": b"text\tn\none\t1\ntwo\t2\n", "plain.txt": "\n".join(TEXTS).encode()}
    for name, content in found.items():
        (folder / name).write_bytes(content)
    pq.write_table(pa.table({"text": TEXTS}), folder / "rows.parquet")
    write_mds(folder / "mds", [[{"text": text} for text in TEXTS]], {"text": "str"})


def _read_texts(folder: Path) -> object:
    names = (
        "lines.jsonl lines.jsonl.zst lines.jsonl.gz array.json rows.tsv plain.txt rows.parquet "
        "mds/shard.00000.mds"
    )
    paths = expand_patterns(tuple(f"{folder / name}" for name in names.split()))
    return [list(read_texts(path, SourceSettings("files", files=(path.name,)))) for path in paths]


def _build_corpus(folder: Path) -> object:
    with tempfile.TemporaryDirectory() as made:
        source = SourceSettings("files", files=(f"{folder}/lines*", f"{folder}/rows.parquet"))
        return build(CorpusSettings(name="mine", source=source), Path(made))["splits"]


def _write_losses(folder: Path) -> None:
    rows = [(step, f"{4 - step / 9:.4f}") for step in range(1, 20)]
    for ending, head, row in (("txt", "step loss\n", "{} {}\n"), ("csv", "step,loss\n", "{},{}\n")):
        (folder / f"losses.{ending}").write_text(
            head + "".join(row.format(*values) for values in rows)
        )
    (folder / "losses.jsonl").write_text(
        "".join(f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in rows)
    )


def _read_losses(folder: Path) -> object:
    try:
        return [repr(read(folder / f"losses.{ending}")) for ending in ("txt", "csv", "jsonl")]
    except GoldenError as error:
        raise UserError(str(error)) from None


# --- what other programs write


def _lab(folder: Path) -> Lab:
    load.compare_engines = lambda *_, **__: {}  # which starts threads, and takes long
    return Lab(folder, TEXTS, vocabulary_size=262)


def _write_store(kind: str, folder: Path, record: bool) -> None:
    with tempfile.TemporaryDirectory() as made:
        store = _lab(Path(made)).store(StoreSettings("token-list"))
        convert(ConvertSettings(to=kind), store, folder / "store.bin", print)
    if not record:
        FOREIGN[kind].record_path(folder / "store.bin").unlink()


def _read_store(kind: str, folder: Path, record: bool) -> object:
    known = {} if record else {"vocabulary_size": 262, "bos_id": 0, "eos_id": 1}
    with tempfile.TemporaryDirectory() as made:
        settings = ConvertSettings(to="token-list", from_format=kind, **known)
        convert(settings, folder / "store.bin", Path(made, "store"), print)
        manifest = read_store_manifest(Path(made, "store"))
    return [
        manifest[name]
        for name in ("ids_digest", "bos_id", "eos_id", "vocabulary_size", "tokenizer")
    ]


def _store(kind: str, record: bool = False) -> Sample:
    return Sample(
        lambda f: _write_store(kind, f, record), lambda f: _read_store(kind, f, record), record
    )


def _write_model(folder: Path, dcp: bool) -> None:
    model = ours(SHAPES["llama"])
    config, weights = to_hf(model.settings, named(model), LENGTH)
    write_json(folder / "config.json", config)
    if dcp:
        write_dcp(folder, to_titan(config, weights))
    else:
        save_file(weights, folder / "model.safetensors")


def _read_model(folder: Path) -> object:
    shape, weights, *facts = read_published(folder)
    return repr([shape, facts]), _digest(weights)


def _digest(tensors: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (n, hashlib.sha256(tensors[n].float().numpy().tobytes()).hexdigest())
        for n in sorted(tensors)
    ]


def _write_tokenizer(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        shutil.copy(_lab(Path(made)).tokenizer / "tokenizer.json", folder)
    write_json(
        folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    )
    write_json(folder / "special_tokens_map.json", {"pad_token": "<pad>"})


def _read_tokenizer(folder: Path) -> object:
    load.compare_engines = lambda *_, **__: {}
    with tempfile.TemporaryDirectory() as made:
        settings = TokenizerSettings(name="mine", kind="huggingface", source=str(folder))
        load.build(settings, Path(made), log=print)
        tokenizer = load.load_tokenizer(Path(made), "tokenizers")
        ids = [array.tolist() for array in tokenizer.encode(TEXTS)]
        return ids, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id


def _write_bucket(folder: Path) -> None:
    (folder / "inputs").mkdir()
    (folder / "inputs/manifest").write_text("{}")
    facts = {"sha256": sha256_file(folder / "inputs/manifest"), "bytes": 2}
    (folder / "inputs/manifest").rename(folder / "inputs" / facts["sha256"])
    plan = {"schema": 1, "files": {"results/corpus/a/manifest.json": facts}, "runs": []}
    write_json(folder / "experiments/own/ranks=1.json", plan)
    write_json(folder / "runs/one/run.json", {})
    write_json(folder / "runs/one/done.json", {})


def _read_bucket(folder: Path) -> object:
    """`report` of a project whose runs lie in a bucket, and a worker's inputs."""

    names = [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    ]
    bucket = SimpleNamespace(
        address="s3://bucket", list=lambda prefix="": [n for n in names if n.startswith(prefix)]
    )
    bucket.read = lambda key: (folder / key).read_bytes() if (folder / key).is_file() else None

    def download(key: str, file: IO[bytes]) -> None:
        try:
            # a bucket has objects only, no devices
            file.write(read_file(folder / key))
        except (OSError, UserError) as error:  # as of a client
            raise access_error(f"s3://bucket/{key}", error) from None

    bucket.download = download
    config = SimpleNamespace(
        settings=SimpleNamespace(bucket="s3://bucket"), all_runs=lambda names: ["one"]
    )
    cloud.open_bucket = lambda *_, **__: bucket
    cloud.check_project = lambda *_, **__: None
    with tempfile.TemporaryDirectory() as made:
        os.chdir(made)
        cloud.work("s3://bucket", "own", 1, 1.0)
        shutil.rmtree("results", ignore_errors=True)
        said = cloud.pull(config, ["own"])
        return said, sorted(
            (p.as_posix(), p.read_bytes()) for p in Path().rglob("*") if p.is_file()
        )


# --- our own records


def _read_checkpoint(folder: Path) -> object:
    shape, weights = read_model(folder / "step=00000001")
    found = Checkpoint(folder / "step=00000001")
    return repr(shape), _digest(weights), found.record


def _write_recording(folder: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = ParityRecorder(folder, model, optimizer)
    for step in range(3):
        tokens = torch.arange(8).reshape(2, 4) + step % 2
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        recorder.loss(loss)
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()


def _read_recording(folder: Path) -> object:
    found = read_recording(folder)
    return repr([found.facts, found.steps]), _digest(found.trace), _digest(found.details)


def _write_certificates(folder: Path) -> None:
    facts: dict[str, Any] = {
        "steps": 3,
        "first_difference": None,
        "cause": None,
        "schema_version": 1,
    }
    steps = [{"loss": {"difference": 1e-7, "floor": 2e-7}}]
    write_sealed(
        folder / "one/over/two.json", facts | {"verdict": "equal to rounding", "by_step": steps}
    )


def _read_certificates(folder: Path) -> object:
    rows = certificate_rows([folder / "one/over/two.json"])
    return [
        {name: value for name, value in row.items() if name != "certificate_sha256"} for row in rows
    ]


def _write_environment(folder: Path) -> None:
    files = {"adapter.py": "0" * 64}
    packages = {"torch": "2.9.0"}
    write_sealed(
        folder / "environment.json",
        {"schema": 1, "error": None, "files": files, "packages": packages},
    )


def _read_environment(folder: Path) -> object:
    return read_record(folder / "environment.json")


def _write_mixture(folder: Path) -> None:
    for name in ("one", "two"):
        write_json(folder / f"corpus/{name}/manifest.json", {"name": name})
    manifests = {name: folder / f"corpus/{name}/manifest.json" for name in ("one", "two")}
    write_mixture(manifests, folder / "mixtures/both/manifest.json")


def _read_mixture(folder: Path) -> object:
    found = read_mixture(folder / "mixtures/both/manifest.json")
    return [(name, path.relative_to(folder)) for name, path in found.items()]


def _write_notes(folder: Path) -> None:
    """What is remembered to save time, and what only `status` shows."""
    write_json(folder / "hashes.json", {"a": {"stamp": [1, 2], "sha256": "0" * 64}})
    times = {"rule": "train", "starttime": 1.0, "endtime": 9.0}
    write_json(
        folder / "jobs/a", times | {"log": ["a.log"], "input_checksums": {"a.json": "sha256:0"}}
    )
    write_json(folder / "run/status.json", {"t_unix_s": 5.0, "step": 4})
    write_json(folder / "run/run.json", {"outcome": {"ended_unix_s": 5.0}, "started_unix_s": 1.0})


def _read_notes(folder: Path) -> object:
    snakemake_reasons.RECORDS = folder / "jobs"
    hashes = fingerprint._hash_files({"a": Path(__file__)}, folder / "hashes.json")
    found = [
        snakemake_progress.read_recorded_jobs(folder / "jobs"),
        hashes,
        snakemake_reasons._read_recorded_hashes(),
    ]
    found.append(status_runs._read_status(folder / "run", None))
    return repr([*found, snakemake_reasons._read_last_seconds(folder / "run/run.json")])


def read_logs(folder: Path) -> object:
    with tempfile.TemporaryDirectory() as output:
        experiments = restore(folder / "logs.json.xz", Path(output))
        return experiments, [
            sha256_file(path) for path in sorted(Path(output).rglob("*")) if path.is_file()
        ]


SAMPLES = {
    "settings": Sample(_write_settings, _read_settings),
    "texts": Sample(_write_texts, _read_texts),
    "corpora of texts": Sample(_write_texts, _build_corpus),
    "golden losses": Sample(_write_losses, _read_losses),
    **{f"{kind} stores": _store(kind) for kind in FOREIGN},
    **{f"{kind} stores with a record": _store(kind, True) for kind in ("megatron", "mds")},
    "models of transformers": Sample(lambda folder: _write_model(folder, False), _read_model),
    "models of DCP": Sample(lambda folder: _write_model(folder, True), _read_model),
    "tokenizers of others": Sample(_write_tokenizer, _read_tokenizer),
    "buckets": Sample(_write_bucket, _read_bucket),
    "checkpoints": Sample(
        lambda folder: write_tiny_checkpoint(folder / "step=00000001"), _read_checkpoint, True
    ),
    "recordings": Sample(_write_recording, _read_recording, True),
    "certificates": Sample(_write_certificates, _read_certificates, True),
    "arm environments": Sample(_write_environment, _read_environment, True),
    "mixtures": Sample(_write_mixture, _read_mixture, True),
    "notes": Sample(_write_notes, _read_notes),
    "packed logs": Sample(
        lambda folder: shutil.copy(ROOT / "evidence/cpu-2-cores-2026-11-24/logs.json.xz", folder),
        read_logs,
        True,
    ),
    "arguments": Sample(
        lambda folder: write_arguments(folder / "words.json", ["a", "--b"]),
        lambda folder: read_arguments([f"@{folder}/words.json"]),
    ),
}
