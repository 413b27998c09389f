"""Sources in a bucket, against an S3 server on the loopback interface."""

import io

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpora import texts_of
from tokenscale.base.errors import UserError
from tokenscale.data.corpus import download
from tokenscale.data.corpus.build import build
from tokenscale.data.corpus.download import fetch_corpus
from tokenscale.settings.data import CorpusSettings, SourceSettings, find_address_problem

pytestmark = pytest.mark.slow(15)
pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def server():
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(download, "sleep", lambda seconds: None)


@pytest.fixture
def s3(server, monkeypatch, tmp_path):
    """An S3 client of a server with one bucket, which is also that of the environment."""
    import boto3

    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7PLANTED")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    fsspec.filesystem("s3").clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="texts")
    for number in range(3):
        put(client, f"raw/f{number}.parquet", [f"document {i} of file {number}" for i in range(50)])
    yield client
    found = client.list_objects_v2(Bucket="texts").get("Contents", [])
    for entry in found:
        client.delete_object(Bucket="texts", Key=entry["Key"])
    client.delete_bucket(Bucket="texts")
    fsspec.filesystem("s3").clear_instance_cache()


def put(client, key, texts):
    data = io.BytesIO()
    pq.write_table(pa.table({"body": texts}), data)
    client.put_object(Bucket="texts", Key=key, Body=data.getvalue())
    return data.getvalue()


class Reader:
    """The bucket's file system, whose reads a function sees before they happen."""

    def __init__(self, before):
        self.before = before
        self.reads = []

    def __getattr__(self, name):
        return getattr(fsspec.filesystem("s3"), name)

    def cat_file(self, address, start, end):
        end = self.before(self.reads, end)
        self.reads.append(start)
        return fsspec.filesystem("s3").cat_file(address, start=start, end=end)


def corpus_of(*files, **more):
    source = SourceSettings(kind="bucket", files=files, **{"text_column": "body", **more})
    return CorpusSettings(name="own", source=source)


def test_a_pattern_becomes_a_corpus(s3, tmp_path):
    settings = corpus_of("s3://texts/raw/*.parquet")
    manifest = fetch_corpus(settings, tmp_path / "d")
    assert [file["from"] for file in manifest["files"]] == [
        f"s3://texts/raw/f{n}.parquet" for n in range(3)
    ]
    built = build(settings, tmp_path / "c", downloads=tmp_path / "d")
    assert built["cleaning"]["documents"]["kept"] == 150 and built["source"]["kind"] == "bucket"
    assert set(texts_of(tmp_path / "c")) < {
        f"document {i} of file {n}" for i in range(50) for n in range(3)
    }
    assert not any(
        b"planted-secret" in path.read_bytes()
        for path in (tmp_path / "d").rglob("*")
        if path.is_file()
    )


def test_a_second_download_reads_nothing_and_a_changed_object_is_an_error(
    s3, tmp_path, monkeypatch
):
    settings = corpus_of("s3://texts/raw/f0.parquet")
    before = fetch_corpus(settings, tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(download.DOWNLOADS, "bucket", (download.resolve_objects, None))  # would fail
        assert fetch_corpus(settings, tmp_path) == before
    put(s3, "raw/f0.parquet", ["other"])
    (tmp_path / "raw/f0.parquet").unlink()
    with pytest.raises(UserError, match="not the one that was downloaded first"):
        fetch_corpus(settings, tmp_path)


def test_a_download_that_was_cut_is_resumed(s3, tmp_path, monkeypatch):
    whole = put(s3, "raw/long.parquet", [f"text {i} " * 50 for i in range(3000)])
    monkeypatch.setattr(download, "BUCKET_CHUNK_BYTES", 20_000)
    failing = True

    def cut(reads, end):
        if failing and len(reads) == 2:
            raise ConnectionError("cut")
        return end

    system = Reader(cut)
    monkeypatch.setattr(download, "open_system", lambda *_, **__: system)
    settings = corpus_of("s3://texts/raw/long.parquet")
    with pytest.raises(UserError, match="fails again and again") as error:
        fetch_corpus(settings, tmp_path)
    assert "cut" in error.value.facts["reason"] and not (tmp_path / "manifest.json").exists()
    failing = False
    fetch_corpus(settings, tmp_path)
    assert system.reads[:4] == [0, 20_000, 40_000, 60_000]
    assert (tmp_path / "raw/long.parquet").read_bytes() == whole
    # another version of the object is read from its beginning
    (tmp_path / "hashes.json").unlink()
    (tmp_path / "raw/long.parquet").unlink()
    failing = True
    system.reads = []
    with pytest.raises(UserError):
        fetch_corpus(settings, tmp_path)
    failing = False
    system.reads = []
    other = put(s3, "raw/long.parquet", [f"other {i} " * 50 for i in range(3000)])
    fetch_corpus(settings, tmp_path)
    assert system.reads[0] == 0 and (tmp_path / "raw/long.parquet").read_bytes() == other


def test_an_object_that_changes_while_it_is_read_is_read_again(s3, tmp_path, monkeypatch):
    whole = put(s3, "raw/long.parquet", [f"text {i} " * 50 for i in range(3000)])
    monkeypatch.setattr(download, "BUCKET_CHUNK_BYTES", len(whole) // 2)
    other = b"PAR1" + b"x" * (len(whole) - 8) + b"PAR1"

    def change(reads, end):
        if len(reads) == 1:
            s3.put_object(Bucket="texts", Key="raw/long.parquet", Body=other)
        return end - 100 * (len(reads) == 3)  # too short

    system = Reader(change)
    monkeypatch.setattr(download, "open_system", lambda *_, **__: system)
    fetch_corpus(corpus_of("s3://texts/raw/long.parquet"), tmp_path)
    assert (tmp_path / "raw/long.parquet").read_bytes() == other


@pytest.mark.parametrize(
    ("files", "message", "following"),
    [
        ("s3://text/raw/f0.parquet", "no such", "AWS_ENDPOINT_URL|list the bucket"),
        ("s3://texts/raw/f9.parquet", "has no such file", "correct the address"),
        (
            "s3://texts/raw/*.jsonl",
            "no file of the source fits",
            "did you mean s3://texts/raw/f|correct",
        ),
        ("s3://text/raw/*.parquet", "no such", "AWS_ENDPOINT_URL|correct"),
    ],
)
def test_what_is_not_there_is_one_message(s3, tmp_path, files, message, following):
    with pytest.raises(UserError, match=message) as error:
        fetch_corpus(corpus_of(files), tmp_path)
    assert any(part in error.value.facts["next"] for part in following.split("|"))
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize("lacks", ["credentials", "the package", "an answer"])
def test_what_the_environment_lacks_is_told_with_the_next_step(s3, tmp_path, monkeypatch, lacks):
    def missing(scheme):
        raise ImportError("Install s3fs to access S3")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if lacks == "credentials" else ():
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    if lacks == "an answer":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fsspec.filesystem("s3").clear_instance_cache()
    next_step = {"credentials": "AWS_PROFILE", "the package": 'pip install "tokenscale[s3]"'}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as error:
        if lacks == "the package":
            patch.setattr(fsspec, "filesystem", missing)
        fetch_corpus(corpus_of("s3://texts/raw/f0.parquet"), tmp_path)
    assert next_step.get(lacks, "AWS_ENDPOINT_URL") in error.value.facts["next"]


def test_addresses_that_are_not_complete_or_hold_credentials_are_refused():
    for address in ("s3://", "s3://texts", "s3://texts/", "s3:/texts/a", "gs://texts/a", "a.txt"):
        assert "s3://BUCKET/PATH" in find_address_problem(address, "bucket")
    for address in ("s3://me:planted@texts/a", "s3://me:planted@host:9000/texts/a"):
        problem = find_address_problem(address, "bucket")
        assert "AWS_PROFILE" in problem and "planted" not in problem

    assert not corpus_of("s3://texts/raw/*.parquet").problems()
