"""Start a run: its command lines, its processes on this machine or by srun, and its end in
`done.json`.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenscale.base.errors import UserError, few
from tokenscale.base.files import REPLACE, open_file, read_json, remove_tree, write_arguments
from tokenscale.base.wording import format_bytes
from tokenscale.costs.flops import UncountedModelError
from tokenscale.costs.memory import largest_memory, memory
from tokenscale.runs.launch import attempts, failure_hints, lock, ranks
from tokenscale.runs.launch.image import describe_image
from tokenscale.runs.launch.job import Job, job_id, load_job
from tokenscale.runs.launch.ranks import THREADS
from tokenscale.runs.records import provenance
from tokenscale.settings.closure import training_code
from tokenscale.settings.layout import Geometry, geometry
from tokenscale.settings.machine import Machine, load_machine
from tokenscale.settings.manifests import done_file
from tokenscale.settings.run import OURS, RunSettings, parse_run_id

NO_JOB = "this machine starts processes by srun, but this process is not in a SLURM job."
GIB = 1 << 30
#: rendezvous ports, chosen by the numbers of job and run because nodes may be shared; below Linux's
#: range of ephemeral ports
PORTS = range(20000, 32768)


def rank_argv(
    machine: Machine,
    shape: Geometry,
    *,
    run: str,
    directory: Path,
    attempt: int,
    manifests: dict[str, Path],
) -> list[str]:
    """Return the command of a rank, equal for all ranks of a run. `run` is its settings as
    canonical JSON.
    """
    argv = [_find_python(machine), "-m", "tokenscale", "rank", "--settings", run]
    argv += [
        "--directory",
        str(directory),
        "--attempt",
        str(attempt),
        "--hang-s",
        str(machine.hang_s),
    ]
    for role, path in manifests.items():
        argv += [f"--{role.replace('_', '-')}", str(path)]
    if machine.starter == "srun":
        argv += ["--srun"]
    if machine.gpus_per_node is not None:
        argv += ["--nodes", str(shape.nodes)]
    if machine.network is not None and shape.nodes > 1:
        argv += ["--network", machine.network]
    if machine.least_links:
        argv += ["--least-links", json.dumps(machine.least_links, separators=(",", ":"))]
    if machine.environment_by_local_rank:
        argv += [
            "--by-local-rank",
            json.dumps(machine.environment_by_local_rank, separators=(",", ":")),
        ]
    return argv


def _find_python(machine: Machine) -> str:
    """Return the Python of the ranks: in a container it is the container's."""
    return machine.python or ("python" if machine.container else sys.executable)


def torchrun_argv(rank: list[str], shape: Geometry) -> list[str]:
    """Return the torchrun command on one node. Its rendezvous is a file: an address would listen on
    every interface.
    """
    python, _, *module = rank
    argv = [
        python,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={shape.world_size}",
    ]
    return [*argv, "--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "-m", *module]


def srun_argv(
    rank: list[str],
    shape: Geometry,
    machine: Machine,
    *,
    name: str,
    outputs: Path | None,
    root: Path,
    share: int = 1,
) -> list[str]:
    """Return the srun command: one task and one GPU per rank, block distribution, nothing left to
    the job.

    Each rank writes to its own file in `outputs`, or without it to srun's output. With `share` > 1,
    several runs have steps in this job at the same time.
    """
    gpus = [f"--gpus-per-node={shape.ranks_per_node}", "--gpu-bind=none"]
    argv = [
        *("srun", f"--job-name={name}", f"--nodes={shape.nodes}", f"--ntasks={shape.world_size}"),
        *(f"--ntasks-per-node={shape.ranks_per_node}", "--distribution=block:block"),
        f"--cpus-per-task={machine.cores_per_rank or 1}",
        *(["--gpus-per-task=1"] if machine.gpu_bind == "task" else gpus),
        f"--cpu-bind={machine.cpu_bind}",
    ]
    if machine.mem_bind is not None:
        argv += [f"--mem-bind={machine.mem_bind}"]
    if share > 1:  # without these a step takes all of the job, and the next one waits for it
        argv += ["--exact", "--mem=0"]
    argv += ["--kill-on-bad-exit=1"]
    if outputs is not None:
        argv += [f"--output={outputs / 'rank=%5t.log'}"]
    if machine.container is not None:
        argv += [f"--{machine.container_option}={(root / machine.container).resolve()}"]
    return [*argv, *machine.srun_options, *rank]


def srun_environment(
    machine: Machine,
    *,
    name: str = "",
    outputs: Path,
    root: Path,
    address: str | None = None,
    job: str | None = None,
) -> dict[str, str]:
    """Return the variables that srun passes to all ranks of the run `name`; the machine's own take
    precedence.
    """
    found = dict.fromkeys(THREADS, str(machine.cores_per_rank or 1))
    found["TOKENSCALE_ROOT"] = str(root)  # where the container's file finds the project
    if address is not None:
        number = int(re.sub(r"\D", "", job or "") or 0)
        number += zlib.crc32(name.encode())  # runs of one job stand side by side
        found |= {"MASTER_ADDR": address, "MASTER_PORT": str(PORTS[number % len(PORTS)])}
    # NCCL ends where it is not there, and says in its log that it is
    if machine.network is not None:
        found |= {
            "NCCL_NET": machine.network,
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET",
        }
        found |= {"NCCL_DEBUG_FILE": str(outputs / "nccl.%h.%p.log")}
    if machine.container is not None:  # the code is this project's, not what an image may hold
        found["PYTHONPATH"] = str(Path(__file__).resolve().parents[3])
    return found | machine.environment


#: SLURM variables that srun needs to find job and cluster
KEPT_VARIABLES = {*("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF", "SLURM_CLUSTER_NAME")}
KEPT_VARIABLES |= {"SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST"}


def _step_environment(base: dict[str, str]) -> dict[str, str]:
    """Return variables for an srun step, which does not inherit the job's request: its geometry is
    explicit.
    """
    request = ("SLURM_", "SRUN_", "SBATCH_")
    return {n: v for n, v in base.items() if n in KEPT_VARIABLES or not n.startswith(request)}


def find_job(machine: Machine) -> Job | None:
    """Return the SLURM job of this process if the machine starts ranks by srun, else None."""
    identity = job_id()
    return (
        load_job(identity)
        if machine.starter == "srun" and identity and shutil.which("scontrol")
        else None
    )


@dataclass(frozen=True)
class Launch:
    """Run on a machine, within a SLURM job if there is one."""

    run: RunSettings
    machine: Machine
    directory: Path
    share: int = 1
    job: Job | None = None

    @property
    def shape(self) -> Geometry:
        return geometry(self.run.layout.world_size, gpus_per_node=self.machine.gpus_per_node)

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "machine": self.machine.name,
            "starter": self.machine.starter,
            "share": self.share,
        }
        found |= describe_image(self.machine)
        if self.job is None:
            return found
        job = self.job.record()
        here = Path.cwd()
        if job["log"] and Path(job["log"]).is_relative_to(here):  # the project may be moved
            job["log"] = str(Path(job["log"]).relative_to(here))
        return found | {"job": job}

    def command(self, attempt: int, manifests: dict[str, Path]) -> tuple[list[str], dict[str, str]]:
        """Return (argv, additional variables) of the command: srun's, torchrun's, or that of each
        rank (`here`).
        """
        machine = self.machine
        shape = self.shape
        outputs = self.outputs(attempt)
        what: dict[str, Any] = {
            "run": self.run.to_json(),
            "directory": self.directory,
            "attempt": attempt,
        }
        rank = rank_argv(machine, shape, manifests=manifests, **what)
        if machine.starter == "here":
            return rank, machine.environment
        if machine.starter == "torchrun":
            return torchrun_argv(rank, shape), machine.environment
        places: dict[str, Any] = {"outputs": outputs, "root": Path.cwd()}
        argv = srun_argv(
            rank,
            shape,
            machine=machine,
            name=self.run.identity,
            share=self.share,
            **places,
        )
        job: dict[str, Any] = {"address": self.job.address, "job": self.job.id} if self.job else {}
        return argv, srun_environment(machine, name=self.run.identity, **places, **job)

    def outputs(self, attempt: int) -> Path:
        return self.attempt_directory(attempt) / "output"

    def attempt_directory(self, attempt: int) -> Path:
        return self.directory / f"attempt={attempt:02d}"

    def go(self, attempt: int, manifests: dict[str, Path], keep: tuple[int, ...] = ()) -> int:
        """Start the ranks, wait for them and return their exit code. Ranks inherit the file
        descriptors `keep`.
        """
        world_size = self.shape.world_size
        argv, variables = self.command(attempt, manifests)
        rank = argv.index("--settings")
        argv = [
            *argv[:rank],
            write_arguments(self.attempt_directory(attempt) / "arguments.json", words=argv[rank:]),
        ]
        if self.machine.starter == "here":
            return ranks.run_ranks(
                argv,
                world_size,
                device=self.run.device,
                variables=variables,
                keep=keep,
            )
        base = ranks.rank_environment(
            self.machine.cores_per_rank or ranks.threads_per_rank(world_size),
            device=self.run.device,
        )
        if self.machine.starter == "torchrun":
            # else it listens
            base |= ranks.local_rendezvous(base, world_size)
            base["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        else:
            base = _step_environment(base) | ranks.new_secret()
            self.outputs(attempt).mkdir(parents=True, exist_ok=True)
            print(f"output of the ranks: {self.outputs(attempt)}/rank=*.log", flush=True)
            print(f"srun is called {_process_age_s():.2f} s after this launcher was", flush=True)
            command = [(argv, base | variables)]
            output = open_file(
                self.outputs(attempt) / failure_hints.SRUN, flags=REPLACE, follow=False
            )
            with open(output, "w", encoding="utf-8") as errors:
                return ranks.run_processes(
                    command, stderr=errors, end_signal=signal.SIGUSR1, keep=keep
                )
        return ranks.run_processes([(argv, base | variables)], keep=keep)

    def printed(self, manifests: dict[str, Path]) -> str:
        argv, variables = self.command(0, manifests)
        if self.machine.starter == "here" and self.shape.world_size > 1:
            size = self.shape.world_size
            variables = {"RANK": f"0…{size - 1}", "WORLD_SIZE": str(size), **variables}
        if self.machine.starter == "srun" and self.job is None:
            variables = {
                "MASTER_ADDR": "<the job's first node>",
                "MASTER_PORT": "<by the job's number>",
                **variables,
            }
        lines = [f"{name}={shlex.quote(value)} \\" for name, value in variables.items()]
        return "\n".join([*lines, shlex.join(argv)])

    def check(self) -> None:
        """Raise UserError if srun has no job or too few nodes, before any file is written."""
        shape = self.shape
        needs = f"{self.run.identity} wants {shape.nodes} x {shape.ranks_per_node} ranks"
        if self.machine.starter != "srun":
            if shape.nodes == 1:
                return
            what = "the run needs several nodes, which only srun can start."
            found = self.machine.gpus_per_node
            following = 'set starter = "srun" in the machine file, or use a smaller layout'
            raise UserError(
                what,
                run=needs,
                machine=f"{self.machine.name}: gpus_per_node {found}",
                next=following,
            )
        if self.job is None:
            following = f"snakemake --profile {self.machine.name} {self.directory / 'done.json'}"
            raise UserError(NO_JOB, machine=self.machine.name, next=following)
        if len(self.job.nodes) < shape.nodes:
            job = few(self.job.nodes)
            following = "do not set `nodes` in the profile, or request as many"
            what = "the job has fewer nodes than the run needs."
            raise UserError(what, run=needs, job=f"{self.job.id} has {job}", next=following)


def check_memory(
    run: RunSettings, machine: Machine | None = None, *, vocabulary: int | None = None
) -> None:
    """Raise UserError if a run's predicted memory (`costs.memory`, a lower bound) exceeds that of a
    node or a GPU.

    On a CPU all ranks of a node share its memory, what a control group allows, or the `memory_mb`
    that a job requests. `vocabulary` is the size of the tokenizer, for settings that do not state
    it; a run whose memory is not predicted passes.
    """
    machine = machine or Machine()
    entries = run.model.vocabulary_size or run.tokenizer.vocabulary_size or vocabulary
    if run.arm != OURS or entries is None:
        return
    on_gpus = run.device != "cpu" and _has_gpus(machine)
    if on_gpus:
        ranks = 1
        room = machine.gpu_memory_gib and machine.gpu_memory_gib * GIB
    else:
        ranks = geometry(run.layout.world_size, gpus_per_node=machine.gpus_per_node).ranks_per_node
        room = _find_node_memory(machine)
    if room is None:
        return
    try:
        whole = replace(run, model=run.model.with_vocabulary(entries))
        most = largest_memory(whole, device="cuda" if on_gpus else "cpu")
        needed = most.total if on_gpus else sum(memory(whole, rank).total for rank in range(ranks))
    except UncountedModelError:
        return
    if needed > room:
        raise _memory_error(
            run,
            machine,
            entries=entries,
            ranks=ranks,
            on_gpus=on_gpus,
            needed=needed,
            room=room,
            parts=most.parts | {"for a moment in a pass": most.transient},
        )


def _memory_error(
    run: RunSettings,
    machine: Machine,
    *,
    entries: int,
    ranks: int,
    on_gpus: bool,
    needed: int,
    room: float,
    parts: dict[str, int | None],
) -> UserError:
    part, size = max(parts.items(), key=lambda item: item[1] or 0)
    shape = f"{run.micro_batch} x {run.sequence_length} tokens at a time"
    next_step = "lower micro_batch or sequence_length, choose a tokenizer with fewer entries or a "
    next_step += "smaller model"
    if ranks > 1:
        next_step += ", or use fewer ranks"
    if room == machine.memory_mb << 20:
        next_step += f"; or raise memory_mb = {machine.memory_mb} of the machine"
    return UserError(
        f"the run needs more memory than {'a GPU' if on_gpus else 'this machine'} has.",
        run=f"{run.model.name}, {entries:,} vocabulary entries, {shape}",
        needed=(
            f"{format_bytes(needed)} on {ranks} rank{'s' * (ranks > 1)}; {part}: "
            f"{format_bytes(size or 0)} a rank"
        ),
        found=format_bytes(int(room)),
        next=next_step,
    )


def _has_gpus(machine: Machine) -> bool:
    return bool(machine.gpus_per_node or provenance.count_gpus())


def _find_node_memory(machine: Machine) -> int | None:
    """Return the bytes that the ranks of a node share: what this machine has, its control group
    allows and the machine's file states, or what a job requests.
    """
    submitted = machine.starter == "srun"
    known = [] if submitted else [provenance.read_memory()[0], provenance.cgroup_limits()[1]]
    if submitted or machine.memory_mb != Machine.memory_mb:
        known.append(machine.memory_mb << 20)
    return min(filter(None, known), default=None)


def _process_age_s() -> float:
    """Return seconds since this process started, including Python's start and imports. Linux
    only.
    """
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


#: raises UserError for a run whose inputs, by role, do not suit it
Check = Callable[[RunSettings, dict[str, Path]], None]


@contextmanager
def open_run(
    run: RunSettings,
    output: Path,
    manifests: dict[str, Path],
    *,
    launch: dict[str, Any] | None = None,
    wait: bool = False,
    check: Check | None = None,
) -> Iterator[tuple[attempts.Identity, int | None, int]]:
    """Lock the folder of `output` for a run and yield (identity, number of the next attempt, lock's
    descriptor).

    The number is None if the run is already sealed with this identity; `output` then exists. Raises
    UserError for a missing manifest, and for a folder that another process writes, unless `wait` is
    set. `check` may refuse a run that is not sealed yet, from its settings and manifests.
    """
    for role, path in manifests.items():
        if not path.is_file():
            what = f"the manifest of the {role.replace('_', ' ')} is missing."
            raise UserError(what, path=path, next=f"snakemake {path}")
    state = _find_resume_record(run)
    directory = output.parent
    with lock.hold_run_folder(directory, what=run.identity, wait=wait) as held:
        # hash after locking: waiting may have taken hours
        identity = attempts.hash_identity(
            [Path(file) for file in training_code(run)], inputs=manifests, state=state
        )
        if check is not None and not attempts.read_final(directory, identity):
            check(run, manifests)
        attempt = attempts.prepare_attempt(
            directory,
            run,
            identity,
            launch=launch,
        )
        if attempt is None:
            print(
                f"{run.identity} has ended already, with this code and data; remove {directory} "
                "to train it again"
            )
            attempts.write_done_file(
                directory,
                output,
                identity,
                run=run,
            )
            for folder in (
                directory.glob("checkpoints/step=*")
                if not run.checkpoints.keep_resume_state
                else ()
            ):
                # the run may have been killed before it did so itself
                remove_tree(folder)
        yield identity, attempt, held


def start_run(
    run: RunSettings,
    output: Path,
    manifests: dict[str, Path],
    *,
    machine: Machine | None = None,
    share: int = 1,
    wait: bool = False,
    check: Check | None = None,
) -> int:
    """Train the run in `output`'s folder unless it is already sealed, write `output` and return the
    exit code.

    `manifests` are the run's inputs by role (corpus, tokenizer, store, validation_store). `share`
    is the number of runs that use the nodes at the same time. Exit code 75: the run was stopped
    (time limit, preemption) and can be resumed. Raises UserError as `open_run` does, and if the
    job's nodes do not suit the run.
    """
    machine = machine or Machine()
    launched = Launch(
        run=run,
        machine=machine,
        directory=output.parent,
        share=share,
        job=find_job(machine),
    )
    launched.check()
    tokenizer = (
        read_json(manifests["tokenizer"], what="tokenizer's manifest")
        if "tokenizer" in manifests
        else {}
    )
    check_memory(run, machine, vocabulary=tokenizer.get("vocabulary_size"))
    opened = open_run(
        run,
        output,
        manifests=manifests,
        launch=launched.record(),
        wait=wait,
        check=check,
    )
    with opened as (identity, attempt, held):
        if attempt is None:
            return 0
        exit_code = launched.go(attempt, manifests, keep=(held,))
        if attempts.write_done_file(
            output.parent,
            output,
            identity,
            run=run,
        ):
            if exit_code:  # results were on disk before the processes were torn down
                text = f"{run.identity} is sealed; its processes then ended with {exit_code}."
                print(f"tokenscale: {text}", file=sys.stderr)
            return 0
        if (step := attempts.find_interrupted_step(output.parent, attempt)) is not None:
            print(
                f"tokenscale: {run.identity} was stopped after step {step}; the next attempt "
                "goes on from there."
            )
            return attempts.RESUME_EXIT_CODE
        if exit_code == 128 + signal.SIGINT:
            cause = f"Ctrl-C twice; {attempts.describe_saved_state(output.parent)}"
            error = UserError(
                f"{run.identity} was ended at once.", cause=cause, next="repeat the command"
            )
            print(error.render(), file=sys.stderr)
            return exit_code
        if report := failure_hints.describe_hang(
            launched.attempt_directory(attempt), run.layout.world_size
        ):
            print(report, file=sys.stderr, flush=True)
        if machine.starter == "srun":
            print(
                failure_hints.describe_failure(launched.outputs(attempt)),
                file=sys.stderr,
                flush=True,
            )
        return exit_code or 1


def _find_resume_record(run: RunSettings) -> Path | None:
    """Return the record of the state that a run resumes from. Raises UserError if it is missing."""
    if run.resume_from is None:
        return None
    record = Path(run.resume_from) / "checkpoint.json"
    writer = parse_run_id(run.resume_from)
    if not record.is_file():
        again = f"rm -r results/runs/{writer}, and snakemake {done_file(writer)} trains it again"
        following = again if writer else "set resume_from to an existing state"
        raise UserError("the resume state of this run is missing.", path=record, next=following)
    return record


def build_argv(machine: Machine, arguments: list[str], root: Path) -> list[str]:
    """Return the srun command of `tokenscale ARGUMENTS` with the Python of the machine's ranks."""
    command = [_find_python(machine), "-m", "tokenscale", *arguments]
    return srun_argv(
        command,
        shape=geometry(1, gpus_per_node=machine.gpus_per_node),
        machine=machine,
        name=arguments[0],
        outputs=None,
        root=root,
    )


def run_on_site(site: str | None, words: list[str], *, arguments_file: Path) -> int | None:
    """Run the command `words` on a GPU by srun and return its exit code, if the machine's file
    `site` starts ranks by srun; else None: the caller is to run it here.

    All words but the command's name go into `arguments_file`, which has room for them. Raises
    UserError outside of a SLURM job.
    """
    machine = load_machine(site)
    if machine.starter != "srun":
        return None
    if job_id() is None:
        following = "run snakemake with this machine's profile, or remove --site to measure here"
        raise UserError(NO_JOB, machine=machine.name, next=following)
    root = Path.cwd()
    base = _step_environment(ranks.rank_environment(machine.cores_per_rank or 1))
    variables = srun_environment(machine, outputs=root / "results/logs", root=root)
    command = [words[0], write_arguments(arguments_file, words=words[1:])]
    return subprocess.run(
        build_argv(machine, arguments=command, root=root), env=base | variables, cwd=os.getcwd()
    ).returncode
