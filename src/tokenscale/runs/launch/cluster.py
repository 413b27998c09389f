"""What a cluster offers and what a profile requests: accounts, partitions, purged folders, quotas.

Each check returns what is wrong as a UserError, None if nothing is or if the cluster does not say.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenscale.base.errors import UserError
from tokenscale.settings.machine import Machine

#: sinfo's options for `parse_partitions`
SINFO = ["--noheader", "--format=%P|%G|%l|%c|%m"]
#: share of a quota from which on jobs are likely to exceed it
FULL_PERCENT = 95.0
#: seconds that a cluster's program may take
TIMEOUT_S = 30


class Partition(NamedTuple):
    """Largest values of a partition's nodes; 0 if sinfo states none, such as for no time limit."""

    gpus: int
    minutes: int
    cores: int
    memory_mb: int


def parse_partitions(text: str) -> dict[str, Partition]:
    """Return the partitions of sinfo's output (`SINFO`), which has a line for each kind of node."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        name, *fields = line.strip().split("|")
        if len(fields) != 4:
            continue
        resources, limit, cores, memory = fields
        gpus = sum(int(count) for count in re.findall(r"gpu:(?:[^,:()]+:)?(\d+)", resources))
        sizes = (int(re.sub(r"\D", "", size) or 0) for size in (cores, memory))
        kind = Partition(gpus, _parse_minutes(limit), *sizes)
        name = name.rstrip("*")
        found[name] = Partition(*map(max, kind, found.get(name, kind)))
    return found


def _parse_minutes(text: str) -> int:
    """Return the minutes of SLURM's [days-][hours:]minutes:seconds; 0 for `infinite`.

    >>> [_parse_minutes(text) for text in ("30:00", "1:30:00", "1-00:00:00", "infinite")]
    [30, 90, 1440, 0]
    """
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):\d+", text.strip())
    if match is None:
        return 0
    days, hours, minutes = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + minutes


def query_partitions() -> dict[str, Partition]:
    """Return the cluster's partitions; none where sinfo is missing or fails."""
    return parse_partitions(_run("sinfo", *SINFO))


def account_error(account: object, machine: Machine) -> UserError | None:
    """Return the error for an account that is none of the user's groups, where accounts are."""
    if machine.accounts != "groups" or not account or "$" in str(account):
        return None
    groups = _run("id", "-Gn").split()
    if not groups or str(account) in groups:
        return None
    return UserError(
        f"the account {account} is none of your groups, which name the projects here.",
        found=", ".join(groups),
        next="choose one of them: slurm_account of the profile, or the variable that it names",
    )


def partition_errors(
    profile: Mapping[str, Any],
    resources: Mapping[str, Any],
    machine: Machine,
    *,
    partitions: Mapping[str, Partition],
    file: str,
) -> Iterator[UserError]:
    """Yield what a profile asks for beyond its partition. `profile` is its `config.yaml`,
    `resources` its default resources, and `file` its path.
    """
    wanted = resources.get("slurm_partition")
    if not partitions or not wanted:
        return
    if wanted not in partitions:
        following = f"slurm_partition: one of {', '.join(partitions)}, in {file}"
        yield UserError(f"the cluster has no partition {wanted}.", file=file, next=following)
        return
    offered = partitions[wanted]
    site = f"{machine.name}'s machine.toml"
    requested = {
        "gpus": [(machine.gpus_per_node or 0, f"gpus_per_node of {site}")],
        "minutes": [
            (machine.minutes, f"minutes of {site}"),
            *_list_requested(profile, name="runtime"),
        ],
        "cores": [
            ((machine.cores_per_rank or 0) * (machine.gpus_per_node or 1), f"cores of {site}"),
            *_list_threads(profile),
        ],
        "memory_mb": [
            (machine.memory_mb, f"memory_mb of {site}"),
            *_list_requested(profile, name="mem_mb"),
        ],
    }
    for kind, values in requested.items():
        most, where = max(values)
        there = getattr(offered, kind)
        if 0 < there < most:
            what = f"{where} asks for {most:,}, and the partition {wanted} has {there:,}."
            following = f"at most {there} there, or another partition in {file}"
            yield UserError(what, file=file, key=kind, next=following)


def _list_requested(profile: Mapping[str, Any], name: str) -> Iterator[tuple[int, str]]:
    """Yield whole numbers of a resource in a profile, with where they stand."""
    of_rules = profile.get("set-resources")
    maps = {f"set-resources: {rule}": values for rule, values in _as_map(of_rules).items()}
    maps["default-resources"] = profile.get("default-resources")
    for where, values in maps.items():
        value = _as_map(values).get(name)
        if str(value).isdecimal():
            yield int(str(value)), f"{name} of {where}"


def _list_threads(profile: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    for rule, count in _as_map(profile.get("set-threads")).items():
        if str(count).isdecimal():
            yield int(str(count)), f"set-threads: {rule}"


def _as_map(values: object) -> Mapping[str, Any]:
    """Return a map of a profile, which may be a list of `key=value`, the keys of rules with `:`."""
    if isinstance(values, Mapping):
        return values
    found: dict[str, Any] = {}
    for text in values if isinstance(values, list) else []:
        key, _, value = str(text).partition("=")
        rule, colon, name = key.partition(":")
        found |= {rule: {**found.get(rule, {}), name: value}} if colon else {key: value}
    return found


def purge_error(machine: Machine, folders: Iterable[Path], hours: float) -> UserError | None:
    """Return the error for results in a folder that is purged in less than the plan takes.

    `hours` is the plan's time from its first job to its last, at the least.
    """
    for folder in folders:
        where = folder.resolve()
        for prefix, days in machine.purged_days.items():
            if where.is_relative_to(prefix) and hours > 24 * days:
                return UserError(
                    f"{folder} is purged before the plan ends.",
                    found=f"{where}, where files are deleted {days} days after their last access",
                    needed=f"{hours / 24:.3g} days",
                    next="link it to another folder, raise `jobs` of the profile, or run fewer",
                )
    return None


def quota_errors(folders: Iterable[Path]) -> Iterator[UserError]:
    """Yield the file systems of these folders whose quota of bytes or files is nearly used up, as
    CSCS's command `quota` prints them.
    """
    places = [folder.resolve() for folder in folders]
    for line in _run("quota").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        # the page of home is not the path under which it is mounted
        directory = Path(re.sub(r"^/(?:vast|capstor)/users/\w+/", "/users/", cells[0]))
        if not cells[0].startswith("/") or not any(p.is_relative_to(directory) for p in places):
            continue
        full = [float(cell) for cell in cells[1:] if re.fullmatch(r"\d+\.\d+", cell)]
        if max(full, default=0.0) >= FULL_PERCENT:
            what = f"the quota of {directory} is used up to {max(full):g} %."
            yield UserError(what, next="delete or archive files (`quota` lists bytes and files)")


def _run(*command: str) -> str:
    """Return a command's output; nothing if it is missing, fails or does not end in time."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
