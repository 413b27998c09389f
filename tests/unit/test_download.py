"""Downloads against a server on the loopback interface: cut, busy, changed, wrong; and the hub
through its client.
"""

import gzip
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import time
from email.utils import formatdate

import pytest
import zstandard

from tests.corpora import texts_of
from tests.web import Server
from tokenscale.base.errors import UserError
from tokenscale.base.facts import list_unknown
from tokenscale.base.files import write_json
from tokenscale.data.corpus import download
from tokenscale.data.corpus.build import build
from tokenscale.data.corpus.download import fetch_corpus
from tokenscale.data.corpus.raw_text import RawText
from tokenscale.settings.data import CorpusSettings, SourceSettings
from tokenscale.settings.options import to_dict

CONTENT = "<|endoftext|>".join(
    f"Story {i}: " + "once upon a time " * 40 for i in range(200)
).encode()
SHA256 = hashlib.sha256(CONTENT).hexdigest()
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def web():
    with Server() as web:
        web.files[URL] = CONTENT
        yield web


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(download, "sleep", lambda seconds: None)


def corpus_of(*files, **more) -> CorpusSettings:
    return CorpusSettings(
        name="web",
        source=SourceSettings(kind="url", files=files, separator="<|endoftext|>", **more),
    )


URL = "/a/stories.txt"


def check_download(web, folder, content=CONTENT, sha256=None):
    manifest = fetch_corpus(
        corpus_of(web.address + URL + (f"#sha256={sha256}" if sha256 else "")), folder
    )
    assert (folder / "stories.txt").read_bytes() == content
    return manifest


def begin_download(web, folder, sha256=None):
    """A download that ended after 70,000 bytes."""
    web.cut[URL] = [70_000] + [0] * 20
    with pytest.raises(UserError, match="fails again and again") as error:
        check_download(web, folder, sha256=sha256)
    assert "70,000 bytes" in error.value.facts["kept"] and not (folder / "manifest.json").exists()
    web.cut.clear()
    web.requests.clear()


def ranges(web):
    return [r for method, path, r in web.requests if method == "GET"]


def test_a_download_becomes_a_corpus_and_a_second_one_asks_for_nothing(web, tmp_path):
    manifest = check_download(web, tmp_path / "d", sha256=SHA256)
    listed = {
        "name": "stories.txt",
        "from": web.address + URL,
        "bytes": len(CONTENT),
        "sha256": SHA256,
    }
    assert manifest["files"] == [listed]
    assert {p.name for p in (tmp_path / "d").iterdir()} == {
        ".lock",
        "hashes.json",
        "manifest.json",
        "stories.txt",
    }
    asked = len(web.requests)
    (tmp_path / "d/manifest.json").unlink()
    assert (
        check_download(web, tmp_path / "d", sha256=SHA256) == manifest
        and len(web.requests) == asked
    )
    settings = corpus_of(f"{web.address}{URL}#sha256={SHA256}")
    assert (
        build(settings, tmp_path / "c", downloads=tmp_path / "d")["cleaning"]["documents"]["kept"]
        == 200
    )
    assert RawText(tmp_path / "c").text(0).startswith("Story 0: once")


def test_a_cut_connection_is_continued_where_it_broke(web, tmp_path):
    web.cut[URL] = [1000, 50_000, 0]
    web.redirects["/moved.txt"] = URL
    assert (
        fetch_corpus(corpus_of(f"{web.address}/moved.txt"), tmp_path)["files"][0]["name"]
        == "moved.txt"
    )
    assert (tmp_path / "moved.txt").read_bytes() == CONTENT
    assert [r for _, path, r in web.requests if path == URL] == [
        None,
        "bytes=1000-",
        *["bytes=51000-"] * 2,
    ]


def test_a_server_that_falls_silent_is_asked_again_for_the_rest(web, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tokenscale.data.corpus.download.TIMEOUT_S", (5.0, 0.3))
    web.silent[URL], web.silent_s = [4000], 3.0
    check_download(web, tmp_path)
    assert ranges(web) == [None, "bytes=4000-"]
    assert "timed out (4,000 bytes" in capsys.readouterr().out


def test_what_came_before_the_end_is_kept_for_a_later_call(web, tmp_path):
    begin_download(web, tmp_path)
    check_download(web, tmp_path)
    assert ranges(web) == ["bytes=70000-"]


@pytest.mark.parametrize("killed", [False, True])
def test_a_file_that_changed_meanwhile_is_begun_anew(web, tmp_path, monkeypatch, killed):
    begin_download(web, tmp_path)
    web.files[URL] = CONTENT[::-1]

    def die(path, value):
        write_json(path, value)
        raise KeyboardInterrupt

    if killed:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(download, "write_json", die)
            check_download(web, tmp_path)
    check_download(web, tmp_path, CONTENT[::-1])


@pytest.mark.parametrize("other", [CONTENT[::-1], CONTENT[::-1] + b"more"])
def test_a_begun_file_of_another_address_is_not_continued(web, tmp_path, other):
    web.etags = False
    web.files["/b/stories.txt"] = other
    begin_download(web, tmp_path, SHA256)
    declared = hashlib.sha256(other).hexdigest()
    fetch_corpus(corpus_of(f"{web.address}/b/stories.txt#sha256={declared}"), tmp_path)
    assert (tmp_path / "stories.txt").read_bytes() == other


@pytest.mark.parametrize("held_out", ["stories.txt", "validation_files-stories.txt"])
def test_no_file_replaces_another_of_the_same_name(web, tmp_path, held_out):
    web.files[f"/b/{held_out}"], web.files["/a/validation_files-stories.txt"] = (
        b"held out",
        b"trained",
    )
    files = [f"{web.address}/a/{name}" for name in ("stories.txt", "validation_files-stories.txt")]
    fetch_corpus(corpus_of(*files, validation_files=(f"{web.address}/b/{held_out}",)), tmp_path)
    found = json.loads((tmp_path / "manifest.json").read_text())
    names = [file["name"] for key in ("files", "validation_files") for file in found[key]]
    assert [(tmp_path / name).read_bytes() for name in names] == [CONTENT, b"trained", b"held out"]


def test_a_part_longer_than_the_file_is_begun_anew(web, tmp_path):
    (tmp_path / "stories.txt.part").write_bytes(b"x" * (len(CONTENT) + 5))
    check_download(web, tmp_path, sha256=SHA256)


#: of a file with the tag "one", its first bytes
CUT = (200, {"Content-Length": str(len(CONTENT)), "ETag": '"one"'}, CONTENT[:1000])
OTHER = CONTENT[::-1]
#: answers to a request of its bytes from 1,000 on
ANSWERS = {
    "another start": (206, {"Content-Range": f"bytes 0-499/{len(OTHER)}"}, OTHER[:500]),
    "another tag": (
        206,
        {"Content-Range": f"bytes 1000-1999/{len(OTHER)}", "ETag": '"two"'},
        OTHER[1000:2000],
    ),
    "another size": (206, {"Content-Range": f"bytes 1000-1999/{len(OTHER) + 1}"}, OTHER[1000:2000]),
    "no range": (206, {}, OTHER[1000:2000]),
    "too short": (416, {"Content-Range": f"bytes */{len(OTHER)}"}, b""),
    "whole and cut": (200, {"ETag": '"two"', "Content-Length": str(len(OTHER))}, OTHER[:2000]),
    "gzip and cut": (
        200,
        {"Content-Encoding": "gzip", "Content-Length": "900"},
        gzip.compress(OTHER)[:500],
    ),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_bytes_of_another_file_are_never_appended(web, tmp_path, answer):
    web.files[URL] = OTHER
    web.canned[URL] = [CUT, answer]
    check_download(web, tmp_path, OTHER)
    assert not list(tmp_path.glob("*.part*"))


def test_a_range_that_ends_early_is_continued(web, tmp_path):
    ends = [(1000, 2000, len(CONTENT)), (2000, 3000, len(CONTENT)), (3000, len(CONTENT), "*")]
    web.canned[URL] = [CUT] + [
        (206, {"ETag": '"one"', "Content-Range": f"bytes {a}-{b - 1}/{of}"}, CONTENT[a:b])
        for a, b, of in ends
    ]
    check_download(web, tmp_path)
    assert ranges(web)[-1] == "bytes=3000-"


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip"])
def test_a_file_is_kept_as_it_is_however_it_was_sent(web, tmp_path, encoding):
    sent = gzip.compress(CONTENT, mtime=0)
    for name, kept in (("a.txt", CONTENT), ("a.gz", sent)):
        web.canned[f"/{name}"] = [(200, {"Content-Encoding": encoding}, sent)]
        fetch_corpus(corpus_of(f"{web.address}/{name}"), tmp_path / name)
        assert (tmp_path / name / name).read_bytes() == kept


@pytest.mark.parametrize(
    "prepare, what",
    [
        (lambda web: web.files.clear(), "does not give a file"),
        (lambda web: web.content_types.update({URL: "text/html; charset=utf-8"}), "web page"),
        (lambda web: web.canned.update({URL: [(200, {"Content-Encoding": "br"}, b"?")]}), "br"),
    ],
)
def test_what_is_no_file_is_told_at_once(web, tmp_path, prepare, what):
    prepare(web)
    with pytest.raises(UserError) as error:
        check_download(web, tmp_path)
    assert len(web.requests) == 1 and what in str(error.value)


@pytest.mark.parametrize(
    "status, wait, least, most",
    [(503, "7", 7, 7), (429, "100000", 600, 600), (500, "in a while", 1, 1), (503, None, 30, 40)],
)
def test_a_busy_server_is_asked_again_after_the_pause_that_it_demands(
    web, tmp_path, monkeypatch, status, wait, least, most
):
    pauses = []
    monkeypatch.setattr(download, "sleep", pauses.append)
    web.canned[URL] = [
        (status, {"Retry-After": wait or formatdate(time.time() + 40, usegmt=True)}, b"")
    ]
    check_download(web, tmp_path)
    assert least <= pauses[0] <= most and len(pauses) == 1


@pytest.mark.parametrize("status", [404, 500, None])
def test_the_signature_of_a_redirect_is_in_no_message_and_no_record(web, tmp_path, capsys, status):
    host = web.address if status else "http://127.0.0.1:9"  # where nobody listens
    web.redirects["/moved.txt"] = f"{host}/signed.txt?X-Amz-Signature=planted&Expires=9"
    web.canned["/signed.txt"] = [(status, {}, b"")] * 9
    with pytest.raises(UserError) as error:
        fetch_corpus(corpus_of(f"{web.address}/moved.txt"), tmp_path)
    assert f"{web.address}/moved.txt" in str(error.value)
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "planted" not in str(error.value) + written + "".join(capsys.readouterr())


def test_the_hashes_of_many_files_are_not_written_for_each(web, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(download, "write_json", lambda path, value: written.append(path.name))
    web.files |= {f"/{n}.txt": b"text %d" % n for n in range(30)}
    web.canned["/29.txt"] = [(404, {}, b"")]
    with pytest.raises(UserError):
        fetch_corpus(corpus_of(*(f"{web.address}/{n}.txt" for n in range(30))), tmp_path)
    assert written.count("hashes.json") == 1  # also after an error


def test_a_wrong_hash_is_refused_and_nothing_is_kept(web, tmp_path):
    with pytest.raises(UserError, match="declared") as error:
        check_download(web, tmp_path, sha256="0" * 64)
    assert SHA256 in error.value.facts["found"] and "0" * 64 in error.value.facts["expected"]
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_the_first_hash_is_recorded_and_later_ones_must_match(web, tmp_path):
    check_download(web, tmp_path)
    assert json.loads((tmp_path / "hashes.json").read_text()) == {web.address + URL: SHA256}
    (tmp_path / "stories.txt").unlink()
    (tmp_path / "manifest.json").unlink()
    web.files[URL] = CONTENT[:-1] + b"?"
    with pytest.raises(UserError, match="downloaded first") as error:
        check_download(web, tmp_path)
    assert "hashes.json" in error.value.facts["next"] and not (tmp_path / "stories.txt").exists()
    web.files[URL] = CONTENT
    check_download(web, tmp_path)


def test_a_damaged_file_is_downloaded_again(web, tmp_path):
    check_download(web, tmp_path)
    (tmp_path / "stories.txt").write_bytes(b"half")
    with pytest.raises(UserError, match="has changed"):
        build(corpus_of(web.address + URL), tmp_path / "c", downloads=tmp_path)
    check_download(web, tmp_path)


def test_a_link_in_the_place_of_a_file_is_downloaded_again(web, tmp_path):
    """Whatever it leads to: no reader follows it."""
    check_download(web, tmp_path)
    (tmp_path / "stories.txt").rename(tmp_path / "elsewhere.txt")
    (tmp_path / "stories.txt").symlink_to("elsewhere.txt")
    check_download(web, tmp_path)
    assert not (tmp_path / "stories.txt").is_symlink()


def test_a_source_brings_its_own_validation_file(web, tmp_path):
    web.files["/b/stories.txt"] = (
        b"Held out.<|endoftext|>Story 0: " + b"once upon a time " * 39 + b"once upon a time"
    )
    settings = corpus_of(web.address + URL, validation_files=(f"{web.address}/b/stories.txt",))
    names = [file["name"] for file in fetch_corpus(settings, tmp_path / "d")["validation_files"]]
    assert names == ["validation_files-stories.txt"]
    manifest = build(settings, tmp_path / "c", downloads=tmp_path / "d")
    assert (
        manifest["splits"]["train"]["rows"] == 200
        and manifest["cleaning"]["documents"]["duplicates"] == 1
    )
    assert texts_of(tmp_path / "c", "validation") == ["Held out."]  # the other one is trained on


def test_random_cuts_never_give_another_file(web, tmp_path):
    draw = random.Random(5)
    for n in range(12):
        web.cut[URL] = [9000, *(draw.randrange(0, 60_000) for _ in range(3))]
        web.etags = n % 2 == 0
        web.ranges = n % 4 < 2
        check_download(web, tmp_path / str(n))


def hub(*files, **more) -> CorpusSettings:
    source = SourceSettings(
        kind="hub", repository="people/tales", revision=COMMIT, files=files, **more
    )
    return CorpusSettings(name="tales", source=source)


#: in a process of its own: the hub's client reads its environment when it is imported
DOWNLOAD = (
    "import json, sys; from tokenscale.cli.main import main; print([main(w) for w in "
    "json.loads(sys.argv[1])])"
)


def run_download(folder, *settings, **environment) -> subprocess.CompletedProcess:
    """The verb for each of these settings. Prints the exit codes."""
    output = ["--output", str(folder / "manifest.json")]
    words = [["download", "--settings", json.dumps(to_dict(each)), *output] for each in settings]
    env = os.environ | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"} | environment
    command = [sys.executable, "-c", DOWNLOAD, json.dumps(words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def dataset(web, tmp_path):
    files = {
        "train/0.txt": b"zero",
        "train/1.txt": b"one",
        "valid.txt": b"held out",
        "README.md": b"about",
    }
    web.add_dataset("people/tales", COMMIT, files)
    return {"HF_ENDPOINT": web.address, "HF_HOME": str(tmp_path / "hub")}


def test_a_dataset_of_the_hub_at_its_commit_becomes_a_corpus(dataset, tmp_path):
    settings = hub("train/*.txt", validation_files=("valid.txt",))
    done = run_download(tmp_path / "d", settings, **dataset)
    assert done.stdout.endswith("[0]\n"), done.stderr
    manifest = json.loads((tmp_path / "d/manifest.json").read_text())
    assert manifest["revision"] == COMMIT and [f["name"] for f in manifest["files"]] == [
        "train/0.txt",
        "train/1.txt",
    ]
    build(settings, tmp_path / "c", downloads=tmp_path / "d")
    assert [RawText(tmp_path / "c").text(i) for i in range(2)] == ["zero", "one"]


@pytest.mark.parametrize("files, later", [("train/1.txt", "e"), ("train/*.txt", "d")])
def test_offline_the_hubs_cache_or_the_earlier_download_serves(
    dataset, web, tmp_path, files, later
):
    assert run_download(tmp_path / "d", hub(files), **dataset).stdout.endswith("[0]\n")
    before = (tmp_path / "d/manifest.json").read_bytes()
    asked = len(web.requests)
    done = run_download(tmp_path / later, hub(files), **dataset | {"HF_HUB_OFFLINE": "1"})
    assert done.stdout.endswith("[0]\n"), done.stderr
    assert (tmp_path / later / "manifest.json").read_bytes() == before and len(
        web.requests
    ) == asked


def test_what_the_hub_does_not_give_is_one_message(dataset, tmp_path):
    done = run_download(tmp_path / "d", hub("train/0.txt"), **dataset | {"HF_HUB_OFFLINE": "1"})
    assert (
        done.stdout.endswith("[2]\n")
        and "HF_HUB_OFFLINE" in done.stderr
        and "HF_HOME" in done.stderr
    )
    settings = [hub("no.txt"), hub("trian/*.txt"), hub(f"train/0.txt#sha256={'1' * 64}")]
    done = run_download(tmp_path / "d", *settings, **dataset)
    assert done.stdout.endswith("[2, 2, 2]\n") and "Traceback" not in done.stderr, done.stderr
    words = [["no.txt", "people/tales", COMMIT], ["trian/*.txt", "train/0.txt"]]
    words += [["1" * 64, hashlib.sha256(b"zero").hexdigest()]]
    for message, of_message in zip(done.stderr.split("tokenscale: ")[1:], words, strict=True):
        assert all(word in message for word in of_message)
    assert not (tmp_path / "d/manifest.json").exists()


UNFRAMED = {"Content-Length": None, "Connection": "close"}


def test_a_length_that_no_server_states_is_unknown_in_the_manifest_and_stays_so(web, tmp_path):
    web.canned[URL] = [(200, UNFRAMED, CONTENT)]
    begun = check_download(web, tmp_path / "d")
    assert list(list_unknown(begun)) == [("files.length", "the server states none")]
    assert check_download(web, tmp_path / "d") == begun, "already here"
    settings = corpus_of(f"{web.address}{URL}")
    made = build(settings, tmp_path / "c", downloads=tmp_path / "d")
    assert dict(list_unknown(made)) == {"source.files.length": "the server states none"}
    assert list(list_unknown(check_download(web, tmp_path / "other"))) == []


@pytest.mark.parametrize("ending", [".gz", ".zst"])
@pytest.mark.parametrize("share", [0.3, 0.999, 1])
@pytest.mark.parametrize("stated", [False, True])
def test_a_compressed_file_that_no_hash_proves_must_unpack_to_its_end(
    ending, share, stated, web, tmp_path
):
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[ending]
    packed = pack(CONTENT)
    sent = packed[: int(share * len(packed))]
    web.canned[f"/a.txt{ending}"] = [(200, {} if stated else UNFRAMED, sent)]
    address = f"{web.address}/a.txt{ending}"
    if share == 1:
        fetch_corpus(corpus_of(address), tmp_path / "d")
    else:
        with pytest.raises(UserError, match="is not the whole of such a file"):
            fetch_corpus(corpus_of(address), tmp_path / "d")
    assert (tmp_path / f"d/a.txt{ending}").exists() is (share == 1)
    assert (tmp_path / "d/hashes.json").exists() is (share == 1)


WHOLE = {
    "a.parquet": b"PAR1" + b"x" * 40 + b"PAR1",
    "a.jsonl": b'{"text": "one"}\n{"text": "two"}\n',
    "a.jsonl.gz": b"\x1f\x8b\x08",
    "a.txt": b"anything",
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_file_that_begins_and_ends_as_its_name_says_is_whole(name):
    file = io.BufferedReader(io.BytesIO(WHOLE[name]))
    download.check_form(f"https://example.org/x/{name}?token=1", file)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("a.parquet", b"rate limit exceeded"),
        ("a.parquet", WHOLE["a.parquet"][:30]),
        ("a.parquet", b""),
        ("a.jsonl", b'{"text": "one"}\n{"text": "tw'),
        ("a.jsonl.gz", b"busy"),
        ("a.zst", b"<xml/>"),
        ("a.txt", b""),
        ("a.csv", b"\n<!DOCTYPE html>\n<html></html>"),
        ("a.tsv", b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        ("a.jsonl", b'{"message": "API rate limit exceeded"}\n'),
        ("a.jsonl", b"[" * 100_000),
    ],
)
def test_a_servers_message_and_a_cut_file_are_refused_and_removed(name, sent, web, tmp_path):
    web.files[f"/x/{name}"] = sent
    with pytest.raises(UserError, match="is not the whole of such a file"):
        fetch_corpus(corpus_of(f"{web.address}/x/{name}"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    declared = f"#sha256={hashlib.sha256(sent).hexdigest()}"
    if name == "a.txt":  # a hash proves what may be a text
        fetch_corpus(corpus_of(f"{web.address}/x/{name}{declared}"), tmp_path)
        assert (tmp_path / name).read_bytes() == sent
