"""The image of trainings on Alps: what is installed beside it, its record, and what a run states of
it.
"""

import importlib.util
import json
import subprocess
import sys
import threading
import tomllib
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.machines import ROOT, write_image_record
from tokenscale.runs.launch import image
from tokenscale.runs.launch.start import Launch
from tokenscale.settings.machine import load_machine
from tokenscale.settings.run import RunSettings

ALPS = ROOT / "profiles/alps"
DIGEST = f"sha256:{'ab' * 32}"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    found = load_machine(ALPS / "machine.toml")
    return replace(found, container_record=str(tmp_path / "image.json"))


# -- the record


@pytest.mark.parametrize(
    "changes, words",
    [
        (None, "are not installed"),
        ({"digest": "latest"}, "states no digest"),
        ({"image": "nvcr.io/nvidia/pytorch:26.02-py3"}, "for another image"),
        ({"requirements": ["pydantic>=1"]}, "not those of profiles/alps/requirements.txt"),
        ({}, None),
    ],
)
def test_trainings_start_only_beside_the_packages_of_their_image(machine, changes, words):
    if changes is not None:
        write_image_record(Path(machine.container_record), **changes)
    error = image.find_image_error(machine)
    assert (error is None) == (words is None)
    if error is not None:
        assert words in error.what and error.facts["next"] == "profiles/alps/prepare.sh"


def test_a_record_that_is_damaged_or_not_named_is_none(machine):
    Path(machine.container_record).write_text('{"image": ')
    assert "states no digest" in image.find_image_error(machine).what
    assert "no record" in image.find_image_error(replace(machine, container_record=None)).what
    assert image.find_image_error(replace(machine, container=None, container_record=None)) is None


def test_an_image_that_is_a_file_is_there_or_missed(machine, monkeypatch, tmp_path):
    """CSCS deletes files on scratch that nobody accesses."""
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    container = tmp_path / "train.toml"
    container.write_text('image = "${SCRATCH}/image.sqsh"\n')
    own = replace(machine, container=str(container))
    write_image_record(Path(machine.container_record), image="${SCRATCH}/image.sqsh")
    error = image.find_image_error(own)
    assert error.facts["file"] == f"{tmp_path}/image.sqsh" and "registry" in error.facts["next"]
    (tmp_path / "image.sqsh").touch()
    assert image.find_image_error(own) is None


def test_a_run_states_the_image_and_the_digest_that_was_recorded_for_it(machine):
    run = RunSettings()
    named = tomllib.loads((ALPS / "train.toml").read_text())["image"]
    assert Launch(run, machine, Path("d")).record()["container_image"] == named
    write_image_record(Path(machine.container_record), digest=DIGEST)
    assert Launch(run, machine, Path("d")).record()["container_digest"] == DIGEST
    write_image_record(Path(machine.container_record), image="another", digest=DIGEST)
    assert "container_digest" not in Launch(run, machine, Path("d")).record()


# -- its installation


@pytest.fixture(scope="module")
def installer():
    spec = importlib.util.spec_from_file_location("install", ALPS / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def registry(headers, *, token):
    """A registry that states these headers to who has the token, which it gives to everybody."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            seen.append((self.path, self.headers["Accept"]))
            known = token is None or self.headers["Authorization"] == f"Bearer {token}"
            self.send_response(200 if known else 401)
            address = f"http://127.0.0.1:{self.server.server_port}/token"
            challenge = {"WWW-Authenticate": f'Bearer realm="{address}",service="r",scope="s"'}
            for name, value in (headers if known else challenge).items():
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"token": token}).encode())

        def log_message(self, *words):
            pass

    seen = []
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("token", [None, "t"])
@pytest.mark.parametrize("separator", "/#")
def test_the_digest_of_a_tag_is_what_its_registry_states(installer, token, separator):
    with registry({"Docker-Content-Digest": DIGEST}, token=token) as (host, seen):
        named = f"{host}{separator}group/images/ngc-pytorch:26.02-py3-alps6"
        assert installer.find_digest(named, scheme="http") == DIGEST
    path, accepted = seen[-1]
    assert path == "/v2/group/images/ngc-pytorch/manifests/26.02-py3-alps6"
    assert "application/vnd.oci.image.index.v1+json" in accepted


def test_a_registry_that_states_none_is_told(installer):
    with (
        registry({}, token=None) as (host, _),
        pytest.raises(ValueError, match="no Docker-Content"),
    ):
        installer.find_digest(f"{host}/a:b", scheme="http")


def write_wheel(folder, name, version, modules=(), requires=()):
    information = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {one}\n" for one in requires)
    files = {f"{information}/METADATA": metadata}
    files |= {f"{information}/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\n"}
    files[f"{information}/WHEEL"] += "Tag: py3-none-any\n"
    files |= {f"{module}.py": text for module, text in modules}
    files[f"{information}/RECORD"] = "".join(f"{file},,\n" for file in files)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project whose image is this Python, with numpy, and an index of two packages."""
    alps = tmp_path / "profiles/alps"
    alps.mkdir(parents=True)
    (alps / "install.py").write_text((ALPS / "install.py").read_text())
    (alps / "train.toml").write_text('image = "registry/image:1"\n')
    (alps / "machine.toml").write_text(
        'python = ".venv-alps/bin/python"\ncontainer_record = ".venv-alps/image.json"\n'
        'container_packages = ["torch", "numpy", "useful"]\n'
    )
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["torch>=2.9,<2.16", "numpy>=2.1,<3"]\n'
    )
    index = tmp_path / "index"
    index.mkdir()
    torch = "__version__ = '2.9.0a0+5228986'\nclass version: cuda = '13'\n"
    modules = [("useful", ""), ("torch", torch), ("numpy", "__version__ = '2.2'\n")]
    write_wheel(index, "useful", "1.0", modules)
    write_wheel(index, "numpy", "0.9")
    write_wheel(index, "greedy", "1.0", requires=["numpy<1"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return tmp_path


def run_installer(project, *requirements):
    (project / "profiles/alps/requirements.txt").write_text("# c\n" + "\n".join(requirements))
    command = [sys.executable, "profiles/alps/install.py", "--digest", DIGEST]
    return subprocess.run(command, cwd=project, capture_output=True, text=True)


def test_a_registry_that_does_not_answer_ends_the_installation_with_the_way_by_hand(project):
    (project / "profiles/alps/train.toml").write_text('image = "127.0.0.1:1/image:1"\n')
    (project / "profiles/alps/requirements.txt").write_text("")
    command = [sys.executable, "profiles/alps/install.py"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode and "prepare.sh --digest sha256:" in done.stderr
    assert "Traceback" not in done.stderr and not (project / ".venv-alps").exists()


@pytest.mark.slow(40)
def test_packages_are_added_to_the_image_and_none_of_its_own_is_replaced(project):
    record = project / ".venv-alps/image.json"
    done = run_installer(project, "useful>=1,<2")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(record.read_text())
    assert found["image"] == "registry/image:1" and found["digest"] == DIGEST
    assert found["requirements"] == ["useful>=1,<2"] and "useful==1.0" in found["installed"]
    done = run_installer(project, "useful>=1,<2", "greedy")
    assert done.returncode and "failed:" in done.stderr and not record.exists()


@pytest.mark.long
@pytest.mark.slow(20)
def test_a_package_that_cannot_be_imported_or_is_out_of_bounds_leaves_no_record(project):
    pyproject = project / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("torch>=2.9", "torch>=2.10"))
    done = run_installer(project, "useful>=1,<2")
    assert done.returncode and "AssertionError" in done.stderr
    assert not (project / ".venv-alps/image.json").exists()
