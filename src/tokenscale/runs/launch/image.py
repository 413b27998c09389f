"""Container image of the ranks, and the record of the packages that were installed beside it."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json
from tokenscale.settings.machine import Machine

#: names of two files beside an environment definition file: what prepares a user's account for it,
#: and the packages that its image lacks
PREPARE = "prepare.sh"
REQUIREMENTS = "requirements.txt"
DIGEST = re.compile("sha256:[0-9a-f]{64}")


def read_image(container: str | Path) -> str | None:
    """Return the image that an environment definition file names; None if it names none or cannot
    be read.
    """
    try:
        image = tomllib.loads(Path(container).read_text("utf-8")).get("image")
    except (OSError, ValueError):
        return None
    return image if isinstance(image, str) else None


def read_requirements(file: Path) -> list[str]:
    """Return the requirements in pip's format, one a line, without comments."""
    lines = (line.partition("#")[0].strip() for line in file.read_text("utf-8").splitlines())
    return [line for line in lines if line]


def describe_image(machine: Machine) -> dict[str, str]:
    """Return what a run's record states of its image: its name, and its digest if it is known."""
    if machine.container is None:
        return {}
    found: dict[str, str] = {}
    if image := read_image(machine.container):
        found["container_image"] = image
    record = _read_record(machine)
    if record is not None and record.get("image") == image:
        found["container_digest"] = str(record.get("digest"))
    return found


def find_image_error(machine: Machine) -> UserError | None:
    """Return why trainings cannot start in the container: the file of its image is missing, or its
    packages are not installed, or were for another image or from other requirements; None if they
    can.
    """
    container = machine.container
    if container is None:
        return None
    file = os.path.expandvars(read_image(container) or "")
    # `$`: a variable without a value, this is another site
    if file.startswith(("/", "./")) and "$" not in file and not Path(file).exists():
        following = f"import it again, or name an image of a registry in {container}"
        what = "the file of the image is missing."
        return UserError(what, file=file, key="image", next=following)
    facts: dict[str, Any] = {"file": machine.container_record, "key": "container_record"}
    if machine.container_record is None:
        what = f"no record of the image of {container} is named."
        return UserError(what, key="container_record", next="name it in the machine's file")
    script = Path(container).with_name(PREPARE)
    following = f"{script}" if script.is_file() else "write it as profiles/alps/install.py does"
    if not Path(machine.container_record).is_file():
        what = f"the packages that the image of {container} lacks are not installed."
        return UserError(what, **facts, next=following)
    record = _read_record(machine)
    if record is None or not DIGEST.fullmatch(str(record.get("digest"))):
        what = "the record of the image states no digest (sha256: and 64 hex digits)."
        return UserError(what, **facts, next=following)
    if record.get("image") != (image := read_image(container)):
        what = "the packages were installed for another image."
        return UserError(what, **facts, found=record.get("image"), expected=image, next=following)
    requirements = Path(container).with_name(REQUIREMENTS)
    if requirements.is_file() and record.get("requirements") != read_requirements(requirements):
        what = f"the installed packages are not those of {requirements}."
        return UserError(what, **facts, next=following)
    return None


def _read_record(machine: Machine) -> dict[str, Any] | None:
    """Return the record of the image; None if it is missing or unreadable."""
    path = Path(machine.container_record or "")
    if not path.is_file():
        return None
    try:
        record = read_json(path, what="record of the image")
    except UserError:
        return None
    return record if isinstance(record, dict) else None
