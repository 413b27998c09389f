"""Install the packages that the image of train.toml lacks (requirements.txt), and record both.

Run once, on a compute node, by the image's own Python; README.md has the command. It uses nothing
but Python's library. Not yet run on Alps.

The packages go into a virtual environment over those of the image, CSCS's own way
(docs.cscs.ch, PyTorch): what the image has stays, above all its torch. The record beside them is
written last: `ready` and the first submission look for it, and every run states the image's digest.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
#: packages of the image that no other version may replace: builds of NVIDIA's
KEPT = re.compile(r"torch|torchvision|torchao|(?:pytorch[-_])?triton|flash[-_]attn|numpy")
#: what to do where a registry states no digest
BY_HAND = (
    "give it: profiles/alps/prepare.sh --digest sha256:…, as `podman pull IMAGE` and "
    "`podman image inspect IMAGE --format '{{.Digest}}'` print it on a compute node"
)
#: what a registry may hold behind a tag
TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--digest", help="digest of the image, where its registry states none")
    given = parser.parse_args()
    machine = tomllib.loads((HERE / "machine.toml").read_text())
    record = PROJECT / machine["container_record"]
    image = tomllib.loads((HERE / "train.toml").read_text())["image"]
    try:
        digest = given.digest or find_digest(image)
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"the registry of {image} states no digest: {error}\n{BY_HAND}") from None
    record.unlink(missing_ok=True)
    python = create_environment(PROJECT / machine["python"])
    install(python, HERE / "requirements.txt")
    check_imports(python, machine["container_packages"])
    installed = run(python, "-m", "pip", "list", "--format=freeze").split()
    lines = [line.strip() for line in (HERE / "requirements.txt").read_text().splitlines()]
    state = {
        "image": image,
        "digest": digest,
        "requirements": [line for line in lines if line and not line.startswith("#")],
        "installed": installed,
    }
    part = record.with_suffix(".part")
    part.write_text(json.dumps(state, indent=1) + "\n")
    part.replace(record)
    print(f"{record}: {image}, {digest}, {len(installed)} packages")


def find_digest(image: str, scheme: str = "https") -> str:
    """Return the digest of an image's tag, as its registry states it (OCI distribution
    specification).
    """
    host, _, name = image.replace("#", "/", 1).partition("/")
    name, _, tag = name.rpartition(":")
    url = f"{scheme}://{host}/v2/{name}/manifests/{tag}"
    headers = {"Accept": ", ".join(TYPES)}
    try:
        answer = urlopen(Request(url, headers=headers, method="HEAD"), timeout=60)
    except HTTPError as error:
        challenge = dict(re.findall(r'(\w+)="([^"]*)"', error.headers.get("WWW-Authenticate", "")))
        if error.code != 401 or "realm" not in challenge:
            raise
        realm = challenge.pop("realm")
        with urlopen(f"{realm}?{urlencode(challenge)}", timeout=60) as reply:
            token = json.load(reply)
        headers["Authorization"] = f"Bearer {token.get('token') or token['access_token']}"
        answer = urlopen(Request(url, headers=headers, method="HEAD"), timeout=60)
    digest = answer.headers.get("Docker-Content-Digest", "")
    if not re.fullmatch("sha256:[0-9a-f]{64}", digest):
        raise ValueError(f"{url} has no Docker-Content-Digest")
    return digest


def create_environment(python: Path) -> Path:
    """Create the virtual environment anew and return its Python."""
    folder = python.parents[1]
    if folder.exists() and not (folder / "pyvenv.cfg").is_file():
        raise SystemExit(f"{folder} is there already, and is no virtual environment")
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", "--system-site-packages", folder)
    return python


def install(python: Path, requirements: Path) -> None:
    """Install the requirements. Fails where a package of the image would have to be replaced."""
    names = {found.metadata["Name"]: found.version for found in distributions()}
    kept = {
        name: version for name, version in names.items() if KEPT.fullmatch((name or "").lower())
    }
    constraints = python.parents[1] / "kept.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in kept.items()))
    # NVIDIA's own list of versions (PIP_CONSTRAINT) holds packages back that its image does not have
    pip = [python, "-m", "pip", "install", "--no-cache-dir", "--constraint", constraints]
    run(*pip, "-r", requirements, PIP_CONSTRAINT="")
    local = run(python, "-m", "pip", "list", "--local", "--format=freeze").split()
    replaced = sorted({line.partition("==")[0] for line in local} & set(kept))
    if replaced:
        raise SystemExit(f"pip replaced packages of the image: {', '.join(replaced)}")


def check_imports(python: Path, packages: list[str]) -> None:
    """Import every package, and compare torch and NumPy with the bounds of pyproject.toml. Only
    numbers count: NVIDIA's 2.9.0a0+5228986 is taken for 2.9.
    """
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    bounds = [
        match.groups()
        for line in project["dependencies"]
        if (match := re.fullmatch(r"(torch|numpy)>=([\d.]+),<([\d.]+)", line))
    ]
    program = "of = lambda text: tuple(int(part) for part in (text + '.0').split('.')[:2])\n"
    program += "".join(f"import {package}\n" for package in packages)
    for name, low, high in bounds:
        program += f"assert of({low!r}) <= of({name}.__version__) < of({high!r}), {name}\n"
    program += "assert torch.version.cuda, 'not the torch of the image'\n"
    run(python, "-c", program)


def run(*command: object, **variables: str) -> str:
    """Run a command and return its output. What it writes to stderr is shown."""
    words = [str(word) for word in command]
    done = subprocess.run(words, env=os.environ | variables, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout[-4000:]}\nfailed: {' '.join(words)}")
    return done.stdout


if __name__ == "__main__":
    main()
