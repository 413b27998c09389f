"""Staging an experiment in a bucket, and fetching its runs, against an S3 server on the loopback
interface.
"""

import hashlib
import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.unit.test_download_bucket import s3, server  # noqa: F401  (fixtures)
from tokenscale.base.bucket import Bucket
from tokenscale.base.errors import UserError
from tokenscale.cli import cloud
from tokenscale.settings.config import load_config
from tokenscale.settings.extensions import verify_extensions
from tokenscale.settings.registry import OBJECTIVES
from tokenscale.settings.run import RunSettings

pytestmark = pytest.mark.slow(25)
ADDRESS = "s3://texts/project"
CONFIG = {
    "experiments": ["own"],
    "corpora": {"small": {"source": {"kind": "files", "files": ["a.txt"]}}},
    "tokenizers": {"bpe": {"kind": "bpe", "corpus": "small", "vocabulary_size": 300}},
}
EXPERIMENT = {
    "question": "?",
    "runs": {"corpus": "small", "tokenizer": "bpe", "approach": "packed", "model": "llama-micro"},
    "factors": {"layout.data": [1, 2], "seed": [0, 1]},
}


@pytest.fixture
def project(s3, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    write("config/config.yaml", CONFIG)
    write("config/experiments/own.yaml", EXPERIMENT)
    for run in load_config().runs("own"):
        for store in (run.settings.store, run.settings.validation_store):
            if store is not None:
                make_store(Path("results/tokens/small/bpe", store.directory))
    return s3


def write(path, value):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(value))


def make_store(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = folder.name.encode() * 100
    (folder / "tokens.bin").write_bytes(data)
    file = {"name": "tokens.bin", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(
        json.dumps({"files": [file], "tokenizer": {"name": "bpe"}})
    )


def stage(ranks=2, experiment="own", address=ADDRESS, **overrides):
    return list(cloud.stage(address, experiment, ranks, load_config(overrides=overrides)))


def keys(client) -> set[str]:
    found = client.list_objects_v2(Bucket="texts").get("Contents", [])
    return {entry["Key"] for entry in found if not entry["Key"].startswith("raw/")}


def test_inputs_are_staged_once_by_their_hash(project):
    first = stage()
    staged = keys(project)
    plan = json.loads(
        project.get_object(Bucket="texts", Key="project/experiments/own/ranks=2.json")[
            "Body"
        ].read()
    )
    assert {f"project/inputs/{facts['sha256']}" for facts in plan["files"].values()} < staged
    assert len([RunSettings.from_json(text) for text in plan["runs"]]) == 2
    assert "4 of them uploaded" in first[1] and "2 runs on other numbers of ranks (1)" in first[2]
    assert "0 of them uploaded" in stage()[1] and "0 of them uploaded" in stage(ranks=1)[1]
    for path, facts in plan["files"].items():
        before = Path(path).read_bytes()
        Path(path).unlink()
        cloud.fetch_input(Bucket(ADDRESS), path, facts)
        assert Path(path).read_bytes() == before
    assert keys(project) == staged | {"project/experiments/own/ranks=1.json"}
    project.put_object(
        Bucket="texts", Key=f"project/inputs/{facts['sha256']}", Body=b"x" * facts["bytes"]
    )
    with pytest.raises(UserError, match="is damaged"):
        cloud.fetch_input(Bucket(ADDRESS), "results/tokens/new/x.bin", facts)
    assert not [*Path("results/tokens/new").iterdir()]


MODULE = """
from extensions import parts
from tokenscale.settings.extensions import objective


@objective()
class Own:
    scale = parts.SCALE
"""


@pytest.fixture
def own(project):
    """The project with an own objective, whose module imports another; and one that no run uses."""
    Path("extensions").mkdir()
    Path("extensions/loss.py").write_text(MODULE)
    Path("extensions/parts.py").write_text("SCALE = 2.0\n")
    Path("extensions/other.py").write_text("SCALE = 3.0\n")
    runs = EXPERIMENT["runs"] | {"objective": "loss:Own"}
    write("config/experiments/own.yaml", EXPERIMENT | {"runs": runs})
    yield project
    for name in [name for name in OBJECTIVES if "." in name]:
        del OBJECTIVES[name]


def worker_command(lines) -> list[str]:
    return shlex.split(lines[-1].partition("next ")[2])


def test_own_modules_are_staged_and_taken_with_their_digest_alone(own, monkeypatch):
    """A worker without them gets the files that are part of the code, and no other."""
    trained = []
    monkeypatch.setattr(cloud, "train_run", lambda _, run, **__: trained.append(run) or 0)
    command = worker_command(stage())
    assert command[-2] == "--code" and "worker" in command[-3]
    Path("extensions").rename("elsewhere")
    for code in (None, "0" * 16):
        with pytest.raises(UserError) as error:
            cloud.work(ADDRESS, "own", 2, 60, code=code)
        assert command[-1] in error.value.facts["next"] and not Path("extensions").exists()
    assert cloud.work(ADDRESS, "own", 2, 60, code=command[-1]) == 0 and len(trained) == 2
    found = {path.name: path.read_text() for path in Path("extensions").iterdir()}
    assert found == {n: Path("elsewhere", n).read_text() for n in ("loss.py", "parts.py")}
    verify_extensions(trained[0].extensions)
    # what is here needs no digest, and is not overwritten
    assert cloud.work(ADDRESS, "own", 2, 60) == 0 and len(trained) == 4
    Path("extensions/parts.py").write_text("SCALE = 4.0\n")
    with pytest.raises(UserError, match="an own module here is another one"):
        cloud.work(ADDRESS, "own", 2, 60, code=command[-1])
    assert Path("extensions/parts.py").read_text() == "SCALE = 4.0\n" and len(trained) == 4
    # and another code has another digest
    assert worker_command(stage())[-1] != command[-1]


def test_own_modules_that_the_bucket_changes_are_refused(own):
    """Neither in the plan, nor in the object, nor out of the folder."""
    command = worker_command(stage())
    Path("extensions").rename("elsewhere")
    key = "project/experiments/own/ranks=2.json"
    plan = json.loads(own.get_object(Bucket="texts", Key=key)["Body"].read())
    modules = plan["modules"]
    other = plan | {"modules": {"config/config.yaml": modules["extensions/loss.py"]}}
    own.put_object(Bucket="texts", Key=key, Body=json.dumps(other).encode())
    for code in (command[-1], cloud._digest_modules(other["modules"])):
        with pytest.raises(UserError, match="another digest than --code|not in its folder"):
            cloud.work(ADDRESS, "own", 2, 60, code=code)
    own.put_object(Bucket="texts", Key=key, Body=json.dumps(plan).encode())
    sha256 = modules["extensions/loss.py"]["sha256"]
    own.put_object(Bucket="texts", Key=f"project/inputs/{sha256}", Body=b"import os")
    with pytest.raises(UserError, match="is damaged"):
        cloud.work(ADDRESS, "own", 2, 60, code=command[-1])
    assert not [*Path("extensions").iterdir()]


def test_own_modules_that_changed_since_the_plan_are_not_staged(own):
    runs = own_runs()
    Path("extensions/parts.py").write_text("SCALE = 4.0\n")
    with pytest.raises(UserError, match="has changed since this was planned"):
        cloud.find_modules(runs)


def own_runs():
    return [run.settings for run in load_config().runs("own")]


def change_input(client, change=lambda data: data[:-1] + b"?"):
    file = next(Path("results/tokens").rglob("tokens.bin"))
    file.write_bytes(change(file.read_bytes()))


def put_other_files(client):
    client.put_object(Bucket="texts", Key="project/thesis.pdf", Body=b"-")


def put_other_project(client):
    stage()
    for entry in keys(client):
        if not entry.endswith("tokenscale.json"):
            client.delete_object(Bucket="texts", Key=entry)
    write(
        "config/config.yaml",
        CONFIG | {"corpora": {"small": {"source": {"kind": "files", "files": ["b.txt"]}}}},
    )


@pytest.mark.parametrize(
    ("prepare", "changes", "message", "following"),
    [
        (None, {"experiment": "owm"}, "unknown experiment 'owm'", "did you mean 'own'"),
        (None, {"ranks": 3}, "has 3 ranks", "--ranks 2"),
        (None, {"address": "s3://text/project"}, "no such bucket", "AWS_ENDPOINT_URL"),
        (None, {"address": "s3://me:planted@texts/a"}, "no password", "s3://BUCKET/PREFIX"),
        (None, {"address": "texts"}, "is not an address in a bucket", "s3://BUCKET/PREFIX"),
        (
            lambda client: shutil.rmtree("results"),
            {},
            "not built",
            "snakemake results/tokens/small",
        ),
        (change_input, {}, "not the one that its manifest lists", "snakemake -f results/tokens"),
        (
            lambda client: change_input(client, lambda _: b"?"),
            {},
            "not the one that its",
            "snakemake -f results/tok",
        ),
        (put_other_files, {}, "holds other files", "empty prefix"),
        (put_other_project, {}, "runs of another project.*\n.*\n.*corpora.small", "another prefix"),
    ],
)
def test_what_cannot_be_staged_is_one_message_and_uploads_nothing(
    project, prepare, changes, message, following
):
    if prepare is not None:
        prepare(project)
    before = keys(project)
    with pytest.raises(UserError, match=message) as error:
        stage(**changes)
    assert following in error.value.facts["next"] and "planted" not in error.value.render()
    assert keys(project) == before


@pytest.mark.parametrize("lacks", ["credentials", "the client"])
def test_without_credentials_or_the_client_nothing_is_uploaded(project, monkeypatch, lacks):
    def missing(scheme, **options):
        raise ImportError("Install s3fs to access S3")

    with monkeypatch.context() as patch:
        if lacks == "the client":
            patch.setattr("fsspec.filesystem", missing)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with pytest.raises(UserError, match="refuses access|need the package s3fs") as error:
            stage()
    following = {"credentials": "AWS_PROFILE", "the client": 'pip install "tokenscale[cloud]"'}
    assert following[lacks] in error.value.facts["next"] and not keys(project)


def test_a_text_with_a_secret_is_not_uploaded(project, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_TOKEN", "hf_abcdefghijkl")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    bucket = Bucket(ADDRESS)
    (tmp_path / "dirty.diff").write_text("+token = 'hf_abcdefghijkl'")
    with pytest.raises(UserError, match="contains a secret") as error:
        bucket.upload(tmp_path / "dirty.diff", "runs/a/dirty.diff")
    assert "MY_TOKEN" in error.value.facts["found"] and "hf_abc" not in error.value.render()
    bucket.write("runs/a/run.json", b'{"parallel": false}')
    assert keys(project) == {"project/runs/a/run.json"}


def test_a_worker_that_cannot_begin_says_why(project, monkeypatch):
    stage()
    for name in ("NNODES", "SKYPILOT_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="not staged for this number of ranks") as error:
        cloud.work(ADDRESS, "own", 4, 60)
    assert f"cloud --bucket {ADDRESS} own --ranks 4" in error.value.facts["next"]
    for name, value in (("NNODES", "2"), ("NNODES", "two"), ("SKYPILOT_NUM_NODES", "2")):
        with monkeypatch.context() as patch, pytest.raises(UserError, match="on one node") as error:
            patch.setenv(name, value)
            cloud.work(ADDRESS, "own", 2, 60)
        assert "SkyPilot's multi-node runs" in error.value.facts["next"]


def pull():
    return cloud.pull(load_config(overrides={"bucket": ADDRESS}), ["own"])


def test_finished_runs_are_fetched_once(project):
    stage()
    run_id = own_runs()[0].identity
    for name in (
        "run.json",
        "attempt=00/rank=00000/steps.jsonl",
        "checkpoints/final/a.safetensors",
        "done.json",
    ):
        project.put_object(
            Bucket="texts", Key=f"project/runs/{run_id}/{name}", Body=b'{"seal": "a"}'
        )
    project.put_object(
        Bucket="texts", Key="project/runs/packed-unfinished-w1-0123456789/run.json", Body=b"{}"
    )
    shutil.rmtree("results")
    assert pull() == f"{ADDRESS}: 1 finished runs, 1 of them fetched"
    run = Path("results/runs", run_id)
    fetched = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    assert fetched == ["attempt=00/rank=00000/steps.jsonl", "done.json", "run.json"], (
        "weights stay in the bucket"
    )
    assert (
        sorted(path.name for path in Path("results/tokens").rglob("*.*")) == ["manifest.json"] * 2
    )
    assert [path.name for path in Path("results/runs").iterdir()] == [run_id]
    assert pull() == f"{ADDRESS}: 1 finished runs, 0 of them fetched"
    (run / "done.json").write_text('{"seal": "b"}')
    with pytest.raises(UserError, match="with different records") as error:
        pull()
    assert (
        f"rm -r {run}" in error.value.facts["next"]
        and (run / "done.json").read_text() == '{"seal": "b"}'
    )


def test_an_empty_bucket_and_a_path_out_of_the_folder_are_refused(project):
    with pytest.raises(UserError, match="holds no runs") as error:
        pull()
    assert "stage runs first" in error.value.facts["next"]
    stage()
    for name in ("../../../out.json", "done.json"):
        key = f"project/runs/{own_runs()[0].identity}/{name}"
        project.put_object(Bucket="texts", Key=key, Body=b"{}")
    with pytest.raises(UserError, match="leads out of this folder"):
        pull()


def test_a_worker_writes_inputs_of_runs_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("results/tokens").mkdir(parents=True)
    Path("results/corpus").symlink_to(tmp_path)
    Path("results/tokens/link").symlink_to(tmp_path)
    for name in (
        *("Makefile", "src/tokenscale/x.py", ".git/hooks/pre-commit", "config/config.yaml"),
        *(".venv/lib/evil.pth", "results/runs/x", "results/x", "results", "results/", "", "/x"),
        *(
            "results/tokens/../../x",
            "results/tokens/link/x",
            "results/corpus/x",
            "Results/tokens/x",
        ),
        *("results/tokens/.", "results/tokens//x", "results//tokens/x", "./results/tokens/x"),
    ):
        with pytest.raises(UserError, match="bucket"):
            cloud.fetch_input(Fetched(), name, FACTS)
    cloud.fetch_input(Fetched(), "results/tokens/a/b", FACTS)
    assert Path("results/tokens/a/b").read_bytes() == CONTENT
    (tmp_path / "x").write_bytes(CONTENT)
    Path("results/tokens/y").symlink_to(tmp_path / "x")
    with pytest.raises(UserError, match="not a regular file"):
        cloud.fetch_input(Fetched(), "results/tokens/y", FACTS)


CONTENT = b"an input"
FACTS = {"bytes": len(CONTENT), "sha256": hashlib.sha256(CONTENT).hexdigest()}


class Fetched:
    """A bucket that has one object."""

    address = ADDRESS

    def download(self, key, file):
        file.write(CONTENT)


class Recorded:
    def __init__(self):
        self.objects = {}
        self.order = []

    def list(self, prefix=""):
        return {key: len(data) for key, data in self.objects.items() if key.startswith(prefix)}

    def write(self, key, data):
        self.objects[key] = data
        self.order.append(key.rpartition("w1-0123456789/")[2])

    def upload(self, path, key):
        if path.suffix == ".diff":
            raise UserError("a file contains a secret and is not uploaded.")
        self.write(key, path.read_bytes())

    def delete(self, keys):
        for key in keys:
            del self.objects[key]

    def download(self, key, file):
        file.write(self.objects[key])


@pytest.fixture
def run_folder(tmp_path):
    """A run's folder with a log, a record and two states, one of which is being written."""
    folder = tmp_path / "results/runs/packed-w1-0123456789"
    write(folder / "attempt=00/attempt.json", {})
    write(folder / "attempt=00/rank=00000/steps.jsonl", {"step": 3})
    write(folder / "run.json", {"outcome": {"status": "running"}})
    for name in ("step=00000004", "step=00000008.partial"):
        write(folder / f"checkpoints/{name}/rank=00000.json", {})
        write(folder / f"checkpoints/{name}/rank=00000.safetensors", {})
    write(folder / "checkpoints/step=00000004/checkpoint.json", {"ranks": {"rank=00000.json": {}}})
    return folder


def mirror_of(bucket, folder):
    run = SimpleNamespace(
        identity=folder.name, checkpoints=RunSettings(approach="packed").checkpoints
    )
    return cloud.Mirror(bucket, run, folder)


def test_a_state_is_complete_in_the_bucket_only_with_all_its_files_and_logs(run_folder):
    bucket = Recorded()
    mirror = mirror_of(bucket, run_folder)
    mirror._push_checkpoints()
    state = "checkpoints/step=00000004/"
    assert bucket.order[-1] == f"{state}checkpoint.json"
    before = {
        f"{state}rank=00000.json",
        f"{state}rank=00000.safetensors",
        "attempt=00/rank=00000/steps.jsonl",
    }
    assert before < set(bucket.order[:-1]) and not any("00000008" in key for key in bucket.order)
    bucket.order.clear()
    mirror._push_checkpoints()
    mirror._push_logs()
    assert bucket.order == [], "what has not changed is not pushed again"
    write(run_folder / "attempt=00/rank=00000/steps.jsonl", {"step": 12})
    mirror._push_logs()
    assert bucket.order == ["attempt=00/rank=00000/steps.jsonl"]


def test_a_state_with_a_missing_file_and_a_sealed_record_stay_here(run_folder):
    bucket = Recorded()
    ranks = {"rank=00000.json": {}, "rank=00001.json": {}}
    write(run_folder / "checkpoints/step=00000004/checkpoint.json", {"ranks": ranks})
    mirror_of(bucket, run_folder)._push_checkpoints()
    assert not [key for key in bucket.objects if key.endswith("checkpoint.json")]
    write(run_folder / "run.json", {"seal": "a"})
    bucket.order.clear()
    mirror_of(bucket, run_folder)._push_logs()
    assert "run.json" not in bucket.order and bucket.order


def test_a_file_with_a_secret_is_reported_once_and_the_others_are_pushed(run_folder, capsys):
    bucket = Recorded()
    for text in ("+a", "+b"):
        (run_folder / "dirty.diff").write_text(text * len(text))
        mirror = mirror_of(bucket, run_folder)
        mirror._push_logs()
        mirror._push_logs()
        assert capsys.readouterr().out.count("contains a secret") == 1
    assert "run.json" in bucket.order and "dirty.diff" not in bucket.order


def test_states_of_superseded_code_are_deleted_before_a_new_attempt(run_folder):
    bucket = Recorded()
    mirror_of(bucket, run_folder)._push_checkpoints()
    other = mirror_of(bucket, run_folder.parents[1] / "new" / run_folder.name)
    other.fetch()
    assert other._newest.is_dir()
    other.begin()
    kept = set(bucket.objects)
    assert any("step=00000004/checkpoint.json" in key for key in kept), (
        "it can still be resumed from"
    )
    shutil.rmtree(other._newest.parents[1])  # moved to superseded/ by the launcher
    other.begin()
    assert not bucket.objects


def test_a_longer_log_here_stays(run_folder):
    bucket = Recorded()
    mirror_of(bucket, run_folder)._push_logs()
    write(run_folder / "attempt=00/rank=00000/steps.jsonl", {"step": 3, "more": 1})
    mirror = mirror_of(bucket, run_folder)
    mirror.fetch()
    assert "more" in (run_folder / "attempt=00/rank=00000/steps.jsonl").read_text()
    (run_folder / "attempt=00/rank=00000/steps.jsonl").write_text("")
    mirror.fetch()
    assert (run_folder / "attempt=00/rank=00000/steps.jsonl").read_text() == '{"step": 3}'
