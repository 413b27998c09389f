"""Run an experiment on rented machines through a bucket: stage its inputs, and with --worker train
its runs there.

Objects in the bucket: `tokenscale.json` identifies the project, `experiments/NAME/ranks=N.json` is
a plan of runs and their input files, `inputs/SHA256` is one input file, `runs/RUN_ID/…` is a run's
folder without superseded attempts.
"""

import argparse
import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenscale.base.bucket import Bucket
from tokenscale.base.errors import UserError, as_typed, find_nearest, redact_credentials
from tokenscale.base.files import (
    canonical_json,
    check_file_name,
    check_relative_path,
    check_types,
    create_inside,
    open_inside,
    parse_json,
    pretty_json,
    read_json,
    sha256_file,
    sha256_text,
)
from tokenscale.cli import main
from tokenscale.settings.data import find_address_problem
from tokenscale.settings.extensions import FOLDER, verify_extensions

if TYPE_CHECKING:
    from tokenscale.runs.launch.attempts import Identity
    from tokenscale.settings.config import Config
    from tokenscale.settings.run import RunSettings

MARKER = "tokenscale.json"
#: named settings that must mean the same to everyone who uses a bucket
NAMED = ("corpora", "mixtures", "tokenizers")
#: seconds between two looks at a run's folder for new checkpoints; logs are pushed every `--every`
#: seconds
TICK_S = 0.5
CHECKPOINT = "checkpoint.json"
#: keys of a plan; modules are there where runs have own ones
PLAN = {"files": dict, "runs": list, "modules": dict}
#: digits of the digest of own modules, which a worker's command names
CODE_DIGITS = 16
#: folders of results that hold inputs of runs
INPUT_FOLDERS = ("corpus", "tokens", "tokenizers", "mixtures", "arms")
NEXT_BUCKET = "use another prefix of the bucket, or the configuration of its project"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s EXPERIMENT --ranks N --bucket s3://… [options]"
    parser.add_argument("experiment", help="name of an experiment")
    parser.add_argument(
        "--bucket", required=True, metavar="s3://BUCKET/PREFIX", help="bucket, and a folder in it"
    )
    parser.add_argument("--ranks", required=True, type=int, help="world size of the runs")
    parser.add_argument(
        "--worker", action="store_true", help="train the staged runs here, on one machine"
    )
    parser.add_argument(
        "--code",
        metavar="DIGEST",
        help="with --worker: take own modules (extensions/) from the bucket, if they have this "
        "digest; staging prints it",
    )
    parser.add_argument(
        "--every", type=float, default=60, help="seconds between two uploads of logs; default 60"
    )
    main.add_configuration_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Stage the experiment's inputs, or train its staged runs."""
    if arguments.every <= 0:
        raise UserError("--every must be above 0.", found=arguments.every, next="--every 60")
    if arguments.worker:
        return work(
            arguments.bucket,
            experiment=arguments.experiment,
            ranks=arguments.ranks,
            every_s=arguments.every,
            code=arguments.code,
        )
    config = main.load_configuration(arguments)
    for line in stage(
        arguments.bucket,
        experiment=arguments.experiment,
        ranks=arguments.ranks,
        config=config,
    ):
        print(line, flush=True)
    return 0


def open_bucket(address: str, key: str = "--bucket") -> Bucket:
    """Open a bucket. Raises UserError for an address that is incomplete or contains credentials."""
    if (problem := find_address_problem(address, kind="bucket")) is not None:
        raise UserError(
            f"{problem}.", key=key, next="name a bucket and a folder in it: s3://BUCKET/PREFIX"
        )
    return Bucket(address)


# --- staging
# -------------------------------------------------------------------------------------------------------


def stage(address: str, experiment: str, ranks: int, config: "Config") -> Iterator[str]:
    """Upload the missing inputs of an experiment's runs on `ranks` ranks, then their plan. Yields
    what was done.
    """
    table = config.runs(experiment)
    runs = [row.settings for row in table if row.settings.layout.world_size == ranks]
    sizes = sorted({row.settings.layout.world_size for row in table})
    others = ", ".join(str(size) for size in sizes if size != ranks)
    if not runs:
        facts = {
            "experiment": experiment,
            "scale": config.settings.scale,
            "expected": others or "runs",
        }
        following = f"--ranks {sizes[-1]}" if sizes else "choose another experiment"
        raise UserError(f"no run of the experiment has {ranks} ranks.", **facts, next=following)
    bucket = open_bucket(address)
    files = find_input_files(runs)
    modules = find_modules(runs)
    marker = check_project(bucket, config)
    there = bucket.list("inputs/")
    missing = {
        facts["sha256"]: path
        for path, facts in (files | modules).items()
        if f"inputs/{facts['sha256']}" not in there
    }
    if changed := [
        (path, sha256) for sha256, path in missing.items() if sha256_file(path) != sha256
    ]:
        _raise_changed(Path(changed[0][0]), expected=f"sha256 {changed[0][1]}")
    bucket.write(MARKER, pretty_json(marker).encode())
    for sha256, path in missing.items():
        bucket.upload(Path(path), f"inputs/{sha256}")
    plan = {
        "schema": 1,
        "scale": config.settings.scale,
        "runs": [r.to_json() for r in _sort(runs)],
        "files": files,
    }
    if modules:
        plan["modules"] = modules
    bucket.write(_plan_key(experiment, ranks), pretty_json(plan).encode())
    size = sum(facts["bytes"] for facts in files.values())
    yield (
        f"{experiment}: {len(runs)} runs on {ranks} rank(s), {len(files)} input files with "
        f"{size:,} bytes"
    )
    yield f"  {len(missing)} of them uploaded to {bucket.address}; the others were there"
    if others:
        yield f"  not staged: {len(table) - len(runs)} runs on other numbers of ranks ({others})"
    yield as_typed(f"  next  {_spell_worker(bucket, experiment, ranks=ranks, modules=modules)}")


def check_project(bucket: Bucket, config: "Config", *, reading: bool = False) -> dict[str, Any]:
    """Return the bucket's marker with this project's names added. Raises UserError for another
    project's bucket.

    A bucket is another project's if it gives a corpus, mixture or tokenizer of this configuration
    other settings, or if it has objects without a marker. `reading`: an empty bucket is an error,
    too.
    """
    from tokenscale.settings.options import to_dict

    found = bucket.read(MARKER)
    if found is None and (reading or bucket.list()):
        what = (
            "the bucket holds no runs of tokenscale."
            if reading
            else "the bucket holds other files."
        )
        following = (
            "stage runs first: tokenscale cloud --help"
            if reading
            else "use an empty prefix of the bucket"
        )
        raise UserError(
            what, address=bucket.address, expected=f"the object {MARKER}", next=following
        )
    marker = _parse(found or b'{"schema": 1}', bucket, key=MARKER)
    differs = []
    for section in NAMED:
        named = getattr(config, section)
        theirs = marker.get(section, {})
        mine = {name: sha256_text(canonical_json(to_dict(value))) for name, value in named.items()}
        differs += [
            f"{section}.{name}"
            for name, sha256 in mine.items()
            if theirs.get(name, sha256) != sha256
        ]
        marker[section] = theirs | mine
    if differs:
        facts = {"address": bucket.address, "differs": ", ".join(differs)}
        raise UserError("the bucket holds the runs of another project.", **facts, next=NEXT_BUCKET)
    return marker


def find_input_files(runs: "list[RunSettings]") -> dict[str, dict[str, Any]]:
    """Return path → SHA-256 and bytes of the manifests that the runs read, and of all files that
    these list.

    Raises UserError for manifests that are not built, and for files that do not have their
    manifest's size.
    """
    from tokenscale.settings.manifests import corpus_records, list_manifests

    manifests: dict[str, None] = {}
    for settings in runs:
        manifests |= dict.fromkeys(list_manifests(settings).values())
        if settings.online:
            manifests |= dict.fromkeys(
                corpus_records(corpus.name) for corpus in settings.trained_corpora
            )
    if missing := [path for path in manifests if not Path(path).is_file()]:
        following = f"snakemake {' '.join(missing)}"
        raise UserError(
            "inputs of the runs are not built.", missing="\n".join(missing), next=following
        )
    files: dict[str, dict[str, Any]] = {}
    for path in manifests:
        _add_manifest(Path(path), files)
    return files


def find_modules(runs: "list[RunSettings]") -> dict[str, dict[str, Any]]:
    """Return path → SHA-256 and bytes of the own modules of runs, and of the files beside them that
    are part of their code. Raises UserError if they are not as the runs were planned.
    """
    files: dict[str, str] = {}
    for settings in runs:
        files |= verify_extensions(settings.extensions)
    return {
        str(FOLDER / name): {"sha256": sha256, "bytes": (FOLDER / name).stat().st_size}
        for name, sha256 in files.items()
    }


def _digest_modules(modules: dict[str, dict[str, Any]]) -> str:
    hashes = {path: facts["sha256"] for path, facts in modules.items()}
    return sha256_text(canonical_json(hashes))[:CODE_DIGITS]


def _spell_worker(
    bucket: Bucket, experiment: str, ranks: int, modules: dict[str, dict[str, Any]]
) -> str:
    command = f"tokenscale cloud --bucket {bucket.address} {experiment} --ranks {ranks} --worker"
    return f"{command} --code {_digest_modules(modules)}" if modules else command


def _add_manifest(path: Path, files: dict[str, dict[str, Any]]) -> None:
    """Add a manifest, its build record, and the files it lists; of a mixture, the manifests it
    lists.
    """
    if str(path) in files:
        return
    content = read_json(path, what="manifest")
    for beside in (path, path.with_name("build.json")):
        if beside.is_file():
            files[str(beside)] = {"sha256": sha256_file(beside), "bytes": beside.stat().st_size}
    for listed in _list_files(content):
        file = path.parent / check_relative_path(listed["name"])
        if not file.is_file() or file.stat().st_size != listed["bytes"]:
            _raise_changed(file, expected=f"{listed['bytes']:,} bytes ({path})")
        files[str(file)] = {
            "sha256": listed.get("sha256") or sha256_file(file),
            "bytes": listed["bytes"],
        }
    for source in content.get("sources", []):
        _add_manifest(Path(os.path.normpath(path.parent / source["manifest"])), files)


def _list_files(content: object) -> Iterator[dict[str, Any]]:
    """Yield the descriptions of files, which have a name and bytes, anywhere in a manifest."""
    if isinstance(content, dict):
        if "name" in content and "bytes" in content:
            yield content
        content = list(content.values())
    if isinstance(content, list):
        for value in content:
            yield from _list_files(value)


def _raise_changed(file: Path, expected: str) -> None:
    what = "an input file is not the one that its manifest lists."
    following = file.parent / "manifest.json"
    raise UserError(what, file=file, expected=expected, next=f"snakemake -f {following}")


def _sort(runs: "list[RunSettings]") -> "list[RunSettings]":
    """Return the runs in their order of starting, each behind the run that it resumes from."""
    from tokenscale.settings.run import parse_run_id

    writers = {settings.identity: parse_run_id(settings.resume_from or "") for settings in runs}

    def depth(run_id: str) -> int:
        writer = writers.get(run_id)
        return 1 + depth(writer) if writer else 0

    return sorted(runs, key=lambda settings: depth(settings.identity))


def _plan_key(experiment: str, ranks: int) -> str:
    return f"experiments/{experiment}/ranks={ranks}.json"


def _parse(data: bytes, bucket: Bucket, key: str) -> dict[str, Any]:
    """Return the JSON of an object with schema 1. Raises UserError for anything else."""
    with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError):
        found = parse_json(data)
        plan = (
            {name: kind for name, kind in PLAN.items() if name != "modules" or name in found}
            if key != MARKER
            else {name: dict for name in NAMED if name in found}
        )
        check_types(found, fields={"schema": int, **plan})
        for facts in (found.get("files", {}) | found.get("modules", {})).values():
            check_types(facts, fields={"sha256": str, "bytes": int})
            check_file_name(facts["sha256"])
        if found["schema"] == 1 and all(isinstance(run, str) for run in found.get("runs", [])):
            return found
    what = "an object of the bucket is not what this version of tokenscale writes."
    address = f"{bucket.address}/{key}"
    raise UserError(what, address=address, expected="JSON with schema 1", next=NEXT_BUCKET)


# --- reports
# -------------------------------------------------------------------------------------------------------


def pull(config: "Config", experiments: list[str]) -> str:
    """Fetch records and logs of finished runs from the configured bucket, and the manifests of
    their inputs.

    Runs whose `done.json` is equal here are not fetched again. Returns a line on what was fetched.
    Raises UserError for a run that has ended here, too, with another record.
    """
    assert config.settings.bucket is not None  # see the only call, in workflow/rules/common.smk
    bucket = open_bucket(config.settings.bucket, key="bucket")
    check_project(bucket, config, reading=True)
    files: dict[str, dict[str, Any]] = {}
    for key in [key for name in experiments for key in bucket.list(f"experiments/{name}/")]:
        files |= _parse(bucket.read(key) or b"", bucket, key=key)["files"]
    for path, facts in files.items():
        if Path(path).name in ("manifest.json", "build.json") and not Path(path).exists():
            fetch_input(bucket, name=path, facts=facts)
    listed = bucket.list("runs/")
    fetched = 0
    ended = [
        run_id for run_id in config.all_runs(experiments) if f"runs/{run_id}/done.json" in listed
    ]
    for prefix in (f"runs/{run_id}/" for run_id in ended):
        done = Path("results", prefix, "done.json")
        if done.is_file() and done.read_bytes() == bucket.read(f"{prefix}done.json"):
            continue
        if done.is_file():
            facts = {"folder": done.parent, "address": f"{bucket.address}/{prefix}"}
            following = f"rm -r {done.parent} takes the bucket's, another folder keeps both"
            raise UserError(
                "a run has ended here and in the bucket, with different records.",
                **facts,
                next=following,
            )
        keys = [
            k for k in listed if k.startswith(prefix) and not k.startswith(f"{prefix}checkpoints/")
        ]
        # the mark of the end comes last
        for key in sorted(keys, key=lambda key: key == f"{prefix}done.json"):
            _download(bucket, key=key, root=Path("results"), name=key)
        fetched += 1
    return f"{bucket.address}: {len(ended)} finished runs, {fetched} of them fetched"


@contextlib.contextmanager
def _open(root: Path, name: str) -> Iterator[BufferedReader | None]:
    """Yield the file below a folder that has a name of the bucket; None if there is none."""
    try:
        with _report_outside(name):
            descriptor = open_inside(root, name)
    except FileNotFoundError:
        yield None
        return
    with open(descriptor, "rb") as file:
        yield file


def _find_facts(root: Path, name: str) -> os.stat_result | None:
    """Return time, size and more of a file that `_open` opens; None if there is none."""
    with _open(root, name) as file:
        return os.fstat(file.fileno()) if file else None


def _download(bucket: Bucket, key: str, root: Path, name: str, sha256: str | None = None) -> None:
    """Download an object to a name below a folder. The file appears complete or not at all. Raises
    UserError if it has another hash.
    """
    with _report_outside(name), create_inside(root, name) as file:
        bucket.download(key, file)
        file.seek(0)
        if sha256 is not None and hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            following = "delete that object, and stage the experiment again"
            raise UserError(
                "an input file of the bucket is damaged.",
                address=f"{bucket.address}/{key}",
                next=following,
            )


@contextlib.contextmanager
def _report_outside(name: str) -> Iterator[None]:
    """Turn the error of a name that leads out of its folder into a message."""
    try:
        yield
    except ValueError as error:
        raise UserError(
            "a path in the bucket leads out of this folder.",
            path=name,
            reason=error,
            next=NEXT_BUCKET,
        ) from None


def _find_name_in_results(name: str) -> str:
    """Return the name below `results` of an input that a bucket names. Raises UserError for a path
    outside of the folders of inputs: whoever writes to the bucket must not write code here.
    """
    folder, _, rest = name.partition("/")
    if folder != "results" or rest.partition("/")[0] not in INPUT_FOLDERS:
        raise UserError(
            "the bucket names a file that is no input of runs.",
            path=name,
            expected=f"results/{{{','.join(INPUT_FOLDERS)}}}/…",
            next=NEXT_BUCKET,
        )
    return rest


# --- workers
# -------------------------------------------------------------------------------------------------------


def work(address: str, experiment: str, ranks: int, every_s: float, code: str | None = None) -> int:
    """Train the staged runs on this machine and return the exit code. `code` is the digest of the
    own modules that are taken from the bucket.

    Runs that have ended in the bucket are left out; others go on from the newest resume state
    there. A failed run does not stop the others; exit code 75 means that a signal ended the worker
    and another one can go on.
    """
    from tokenscale.runs.launch.attempts import RESUME_EXIT_CODE
    from tokenscale.settings.run import RunSettings

    if (nodes := os.environ.get("NNODES") or os.environ.get("SKYPILOT_NUM_NODES") or "1") != "1":
        following = "set num_nodes: 1, or use SkyPilot's multi-node runs: "
        following += "torchrun -m tokenscale train in a shared folder"
        found = f"{nodes} nodes (NNODES or SKYPILOT_NUM_NODES)"
        raise UserError("a worker trains its runs on one node.", found=found, next=following)
    bucket = open_bucket(address)
    key = _plan_key(experiment, ranks)
    if (data := bucket.read(key)) is None:
        facts = {
            "address": bucket.address,
            "has": find_nearest(key, words=bucket.list("experiments/")),
        }
        following = (
            f"tokenscale cloud --bucket {bucket.address} {experiment} --ranks {ranks}, in the "
            "project"
        )
        what = "the experiment is not staged for this number of ranks."
        raise UserError(what, experiment=experiment, ranks=ranks, **facts, next=following)
    plan = _parse(data, bucket, key=key)
    failed = {}
    if modules := plan.get("modules", {}):
        command = _spell_worker(bucket, experiment, ranks=ranks, modules=modules)
        fetch_modules(bucket, modules, code=code, command=command)
    for path, facts in plan["files"].items():
        fetch_input(bucket, name=path, facts=facts)
    for settings in map(RunSettings.from_json, plan["runs"]):
        if (exit_code := train_run(bucket, settings, every_s=every_s)) == RESUME_EXIT_CODE:
            return exit_code
        if exit_code:
            failed[settings.identity] = exit_code
    for run_id, exit_code in failed.items():
        print(f"tokenscale: {run_id} failed with exit code {exit_code}", flush=True)
    return next(iter(failed.values()), 0)


def fetch_modules(
    bucket: Bucket, modules: dict[str, dict[str, Any]], code: str | None, command: str
) -> None:
    """Fetch the own modules that `extensions` lacks. Raises UserError for one that differs here, and
    for missing ones unless all have the digest `code`: whoever writes to the bucket must not write
    code here.
    """
    missing: dict[str, str] = {}
    for path, facts in modules.items():
        name = _find_name_below(path, FOLDER.name)
        with _open(FOLDER, name) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest() if file else None
        if found is None:
            missing[path] = name
        elif found != facts["sha256"]:
            raise UserError(
                "an own module here is another one than that of the staged runs.",
                module=path,
                next="start the worker in an empty folder, or stage the runs again",
            )
    if missing and code != _digest_modules(modules):
        what = "the staged runs need own modules, and no code is taken from a bucket unasked."
        if code is not None:
            what = "the own modules in the bucket have another digest than --code."
        raise UserError(
            what,
            address=bucket.address,
            missing=", ".join(missing),
            expected="the digest that staging printed",
            next=f"if it printed this one: {command}",
        )
    for path, name in missing.items():
        FOLDER.mkdir(exist_ok=True)
        sha256 = modules[path]["sha256"]
        _download(
            bucket,
            key=f"inputs/{sha256}",
            root=FOLDER,
            name=name,
            sha256=sha256,
        )


def _find_name_below(path: str, folder: str) -> str:
    """Return the name below a folder of a path that a bucket names. Raises UserError for others."""
    first, _, rest = path.partition("/")
    if first != folder or not rest:
        raise UserError(
            "the bucket names a module that is not in its folder.",
            path=path,
            expected=f"{folder}/…",
            next=NEXT_BUCKET,
        )
    return rest


def fetch_input(bucket: Bucket, name: str, facts: dict[str, Any]) -> None:
    """Fetch an input file unless it is here, and verify its hash."""
    results = Path("results")
    name = _find_name_in_results(name)
    with _open(results, name) as file:
        if (
            file
            and os.fstat(file.fileno()).st_size == facts["bytes"]
            and hashlib.file_digest(file, "sha256").hexdigest() == facts["sha256"]
        ):
            return
    _download(
        bucket,
        key=f"inputs/{facts['sha256']}",
        root=results,
        name=name,
        sha256=facts["sha256"],
    )


def train_run(bucket: Bucket, settings: "RunSettings", every_s: float) -> int:
    """Train one run on this machine's ranks while its folder is pushed to the bucket. Return the
    exit code.
    """
    from tokenscale.data.batches.repetitions import check_repetitions
    from tokenscale.runs.launch import attempts
    from tokenscale.runs.launch.failure_hints import describe_hang
    from tokenscale.runs.launch.start import Launch, open_run
    from tokenscale.settings.machine import Machine
    from tokenscale.settings.manifests import done_file, list_manifests
    from tokenscale.settings.run import parse_run_id

    output = Path(done_file(settings.identity))
    manifests = {role: Path(path) for role, path in list_manifests(settings).items()}
    launch = Launch(run=settings, machine=Machine(), directory=output.parent)
    record = launch.record() | {"nodes": 1}
    mirror = Mirror(bucket=bucket, settings=settings, directory=output.parent)
    if settings.resume_from is not None and (writer := parse_run_id(settings.resume_from)):
        for key in bucket.list(f"runs/{writer}/{settings.resume_from.partition(f'{writer}/')[2]}/"):
            if _find_facts(Path("results"), name=key) is None:
                _download(bucket, key=key, root=Path("results"), name=key)
    mirror.fetch()
    with open_run(
        settings,
        output,
        manifests=manifests,
        launch=record,
        check=check_repetitions,
    ) as (
        identity,
        attempt,
        held,
    ):
        if attempt is None:
            mirror.end(identity, output)
            return 0
        mirror.begin()
        with mirror.pushing(every_s):
            code = launch.go(attempt, manifests, keep=(held,))
        if mirror.end(identity, output):
            return 0
        if attempts.find_interrupted_step(output.parent, attempt) is not None:
            return attempts.RESUME_EXIT_CODE
        if report := describe_hang(
            launch.attempt_directory(attempt), world_size=settings.layout.world_size
        ):
            print(report, flush=True)
        return code or 1  # not sealed


class Mirror:
    """Copy of a run's folder in the bucket.

    A checkpoint is complete in the bucket when its `checkpoint.json` is there, which is pushed
    last: all files and the logs up to that step are there before.
    """

    def __init__(self, bucket: Bucket, settings: "RunSettings", directory: Path):
        self._bucket = bucket
        self._settings = settings
        self._directory = directory
        self._key = f"runs/{settings.identity}/"
        # file → its time and size when it was pushed
        self._pushed: dict[Path, tuple[int, int]] = {}
        self._newest: Path | None = None  # newest complete resume state in the bucket
        self._warned: set[str] = set()

    def fetch(self) -> None:
        """Fetch records, the logs of earlier attempts and the newest complete resume state; longer
        files here stay.
        """
        listed = self._bucket.list(self._key)
        states = sorted(
            k.split("/")[-2] for k in listed if k.endswith(f"/{CHECKPOINT}") and "/step=" in k
        )
        self._newest = self._directory / "checkpoints" / states[-1] if states else None
        for key, size in listed.items():
            name = key.removeprefix(self._key)
            path = self._directory / name
            facts = _find_facts(self._directory, name)
            here = facts.st_size if facts else -1
            if key.startswith(f"{self._key}checkpoints/"):
                wanted = self._newest is not None and self._newest in path.parents and here != size
            else:
                wanted = here < size and path.name != "done.json"
            if wanted:
                _download(self._bucket, key=key, root=self._directory, name=name)
                facts = _find_facts(self._directory, name)
            if facts and path.name != "run.json" and facts.st_size == size:
                self._pushed[path] = _stamp(facts)

    def begin(self) -> None:
        """Delete what is superseded or incomplete in the bucket, then push the records of the
        attempts.
        """
        listed = self._bucket.list(self._key)
        kept = tuple[str, ...]()
        # else it was superseded by this code or data
        if self._newest is not None and self._newest.is_dir():
            kept = tuple(
                key.removesuffix(CHECKPOINT) for key in listed if key.endswith(f"/{CHECKPOINT}")
            )
        gone = [
            key
            for key in listed
            if _find_facts(self._directory, name=key.removeprefix(self._key)) is None
        ]
        self._bucket.delete([key for key in gone if not key.startswith(kept)])
        self._push_files(sorted(self._directory.glob("attempt=*/attempt.json")))

    @contextlib.contextmanager
    def pushing(self, every_s: float) -> Iterator[None]:
        """Push in a thread while the block runs. A failed request is printed once and tried again:
        training goes on.
        """
        stop = threading.Event()

        def loop() -> None:
            waited = every_s
            while not stop.wait(min(TICK_S, every_s)):
                waited += TICK_S
                try:
                    self._push_checkpoints()
                    if waited >= every_s:
                        self._push_logs()
                        waited = 0.0
                except UserError as error:
                    self._warn(error)

        thread = threading.Thread(target=loop, name="tokenscale-bucket", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def end(self, identity: "Identity", output: Path) -> bool:
        """Push the rest, the sealed record and `done.json` of an ended run last. Return whether it
        has ended.
        """
        from tokenscale.runs.launch.attempts import write_done_file

        self._push_checkpoints()
        self._push_logs()
        if not write_done_file(
            self._directory,
            output,
            identity=identity,
            run=self._settings,
        ):
            return False
        self._push_files([self._directory / "run.json"])
        self._bucket.upload(output, f"{self._key}done.json")
        states = {} if self._settings.checkpoints.keep_resume_state else self._states()
        self._bucket.delete([key for keys in states.values() for key in keys])
        return True

    def _push_logs(self) -> None:
        """Push logs and records, but not a sealed one: `end` does that."""
        patterns = ("attempt=*/rank=*/*", "dirty.diff", "attempt=*/attempt.json")
        self._push_files(
            sorted(path for pattern in patterns for path in self._directory.glob(pattern))
        )
        record = self._directory / "run.json"
        if record.is_file() and "seal" not in read_json(record):
            self._push_files([record])

    def _push_checkpoints(self) -> None:
        """Push complete checkpoints that have changed."""
        for folder in sorted(self._directory.glob("checkpoints/*")):
            if not folder.name.endswith((".partial", ".damaged", ".old")):
                # the run has deleted or renamed it in the meantime
                with contextlib.suppress(FileNotFoundError):
                    if self._is_new(folder / CHECKPOINT):
                        self._push_checkpoint(folder)

    def _push_checkpoint(self, folder: Path) -> None:
        """Push a complete checkpoint, its `checkpoint.json` last."""
        key = f"{self._key}checkpoints/{folder.name}/"
        self._push_logs()
        self._bucket.delete(
            [f"{key}{CHECKPOINT}"] if f"{key}{CHECKPOINT}" in self._bucket.list(key) else []
        )
        self._push_files(
            sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKPOINT)
        )
        record = json.loads((folder / CHECKPOINT).read_bytes())
        there = self._bucket.list(key)
        wanted = [
            name
            for rank in record["ranks"]
            for name in (rank, rank.replace(".json", ".safetensors"))
        ]
        if all(key + name in there for name in wanted):
            self._push_files([folder / CHECKPOINT])
        states = self._states()
        newest = max(
            (name for name, keys in states.items() if any(k.endswith(CHECKPOINT) for k in keys)),
            default="",
        )
        old = [name for name in states if name < newest and not (folder.parent / name).exists()]
        self._bucket.delete([key for name in old for key in states[name]])

    def _push_files(self, paths: list[Path]) -> None:
        """Push files that have changed since they were pushed. One with a secret is reported and
        left out.
        """
        for path in filter(self._is_new, paths):
            stamp = _stamp(path.stat())  # a file that grows during the upload is pushed again
            try:
                self._bucket.upload(path, self._key + path.relative_to(self._directory).as_posix())
            except UserError as error:
                if "secret" not in error.what:
                    raise
                self._warn(error)
            self._pushed[path] = stamp

    def _is_new(self, path: Path) -> bool:
        return path.is_file() and self._pushed.get(path) != _stamp(path.stat())

    def _states(self) -> dict[str, list[str]]:
        """Return folder → keys of the resume states in the bucket, complete or not."""
        found: dict[str, list[str]] = {}
        for key in self._bucket.list(f"{self._key}checkpoints/"):
            if (name := key.split("/")[3]).startswith("step="):
                found.setdefault(name, []).append(key)
        return found

    def _warn(self, error: UserError) -> None:
        text = redact_credentials(error.render())
        if text not in self._warned:
            self._warned.add(text)
            print(text, flush=True)


def _stamp(facts: os.stat_result) -> tuple[int, int]:
    """Return time and size of a file: another pair is another content."""
    return facts.st_mtime_ns, facts.st_size
