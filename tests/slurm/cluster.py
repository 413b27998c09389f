"""A SLURM cluster on this machine: four nodes of four GPUs each, which live in one folder and end
with it.

Real daemons of SLURM, on the loopback interface, under the user who starts them. What the nodes
have is made up: CPUs and memory are only counted, GPUs are links to /dev/null, so that a job is
told which of them are its own. Nobody is authenticated: any process of this machine can give these
daemons orders. Its accounting is SLURM's own, over a MariaDB that only this cluster uses.
"""

import contextlib
import os
import pwd
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from tests.slurm.missing import find_database_tables, found

NODES = [f"nid{number:06}" for number in range(1, 5)]
GPUS = 4
CPUS = 64
MEMORY_MB = 256_000
#: the account that the user of the cluster has, the only one
ACCOUNT = "test"
#: in the environment of every process of a cluster: its folder
MARK = "TOKENSCALE_SLURM_CLUSTER"
#: put into the cluster's `bin` where this machine has them
CLIENTS = [
    "sacct",
    "sacctmgr",
    "salloc",
    "sbatch",
    "scancel",
    "scontrol",
    "sinfo",
    "sprio",
    "squeue",
    "srun",
    "sshare",
    "sstat",
]
#: variables that change what a client does, or make it believe that it is in a job
OUTSIDE = (
    "SLURM_",
    "SLURMD_",
    "SBATCH_",
    "SALLOC_",
    "SQUEUE_",
    "SINFO_",
    "SCANCEL_",
    "SPRIO_",
    "SACCT_",
)
#: states that a job does not leave
ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}
#: of the queue, by squeue's letters
JOB_FIELDS = {
    "id": "%i",
    "state": "%T",
    "reason": "%r",
    "comment": "%k",
    "nodes": "%N",
    "workdir": "%Z",
}
#: of the accounting
RECORD_FIELDS = {
    "id": "JobIDRaw",
    "state": "State",
    "submitted": "Submit",
    "ended": "End",
    "comment": "Comment",
    "workdir": "WorkDir",
}
#: a name or a comment may hold any character that one can type
SEPARATOR = "\x1f"

CONFIGURATION = """
ClusterName=tokenscale
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
# loopback only
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={host}
AccountingStoragePort={accounting_port}
AccountingStorageTRES=gres/gpu
# an unknown account is refused
AccountingStorageEnforce=associations,limits,qos
# the executor writes there what a job is
AccountingStoreFlags=job_comment

StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/%n.log

# no cgroups: a job's processes are its process groups, its memory is what a sample of each second finds
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
KillWait=60

# a node has what stands here, whatever this machine has
SlurmdParameters=config_overrides
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=512
ReturnToService=2

# a job that cannot run is refused, one whose node is lost has failed, and a finished one is still shown
EnforcePartLimits=ALL
JobRequeue=1
MinJobAge=3600
# a job's ranks meet at a port by its number: two clusters beside each other may not number alike
FirstJobId={first_job}

SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
EpilogMsgTime=1
# longer than this project waits for an answer
MessageTimeout=20
SlurmctldTimeout=30
SlurmdTimeout=300
InactiveLimit=0

# a job that may not start again is cancelled
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE

{nodes}
PartitionName=DEFAULT Nodes=ALL MaxTime=24:00:00 DefaultTime=00:10:00 State=UP
PartitionName=normal Default=YES PriorityTier=2 PreemptMode=OFF
# its jobs end where those of `normal` need their place
PartitionName=low PriorityTier=1
"""
ACCOUNTING = """
AuthType=auth/none
DbdHost={host}
DbdPort={accounting_port}
SlurmUser={user}
# loopback only, where this machine's name means that
CommunicationParameters=NoInAddrAny
PidFile={root}/run/slurmdbd.pid
LogFile={root}/log/slurmdbd.log
StorageType=accounting_storage/mysql
# over the socket that the environment names
StorageHost=localhost
StorageLoc=slurm
"""
#: clusters, accounts and users, as sacctmgr loads them
ASSOCIATIONS = """
Cluster - 'tokenscale'
Parent - 'root'
Account - '{account}'
Parent - '{account}'
User - '{user}':DefaultAccount='{account}'
"""
#: Nothing is kept, so nothing is written twice or waited for. Who can open the socket may do all.
DATABASE = """
--no-defaults
--skip-networking
--skip-grant-tables
--skip-log-bin
--performance-schema=OFF
--innodb-buffer-pool-size=16M
--innodb-log-file-size=4M
--innodb-file-per-table=OFF
--innodb-doublewrite=OFF
--innodb-flush-log-at-trx-commit=0
--innodb-flush-method=nosync
--innodb-stats-persistent=OFF
--innodb-fast-shutdown=2
"""


class Cluster:
    """`with Cluster(folder) as cluster:` — the nodes are idle at its first line, and everything is
    gone after its last.

    `folder` must be short, as sockets lie in it, and without spaces. It is made, and its logs stay
    there.
    """

    def __init__(self, folder: Path):
        self.root = Path(folder).resolve()
        if len(str(self.root)) > 64 or " " in str(self.root):
            raise ValueError(
                f"the folder of a cluster is too long, or has spaces in its name: {self.root}"
            )
        #: the controller's, the accounting's and each node's, below one that this object holds, so
        #: that no second cluster takes them
        self.ports: list[int] = []
        self.daemons: dict[str, subprocess.Popen] = {}
        self._ending = contextlib.ExitStack()

    def __enter__(self) -> "Cluster":
        with contextlib.ExitStack() as stack:
            for name in ("state", "spool", "run", "log", "gpu", "bin", "database/mysql"):
                (self.root / name).mkdir(parents=True)  # empty: an old state brings old jobs back
            first, holder = _free_ports(2 + len(NODES))
            stack.enter_context(holder)
            self.ports = [*range(first, first + 2 + len(NODES))]
            self._configure()
            self._watch(stack)
            stack.callback(self._end)
            self._start_database()
            self.start_accounting()
            self.run("sacctmgr", "--immediate", "load", f"file={self.root / 'associations'}")
            self.start_controller()
            for node in NODES:
                self._start(node, "slurmd", "-D", "-N", node)
            self.wait_until_idle()
            self._ending = stack.pop_all()
        return self

    def __exit__(self, *reason) -> None:
        self._ending.close()

    # -- what a test does with it

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment with the cluster's clients first in PATH, and without traces
        of other clusters.
        """
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(OUTSIDE)
        }
        return inherited | {
            "PATH": f"{self.root / 'bin'}{os.pathsep}{os.environ['PATH']}",
            MARK: str(self.root),
        }

    def run(
        self,
        *argv: str | Path,
        timeout: float = 300,
        check: bool = True,
        cwd: Path | None = None,
        variables: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess:
        """What a command says that sees this cluster; stdout and stderr apart. It is killed after
        `timeout` seconds.

        The clients of SLURM wait for ever where something is not there; so nothing is called
        without a timeout.
        """
        with subprocess.Popen(
            [str(word) for word in argv],
            cwd=cwd or self.root,
            env=self.environment | (variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:  # an interrupted test leaves nothing behind, either
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        done = subprocess.CompletedProcess(argv, process.returncode, out, err)
        if check and done.returncode:
            raise RuntimeError(
                f"{shlex.join(map(str, argv))} ended with {done.returncode}.\n{out}{err}"
            )
        return done

    def jobs(self) -> list[dict[str, str]]:
        """Every job since the start, by id, in SLURM's words; `nodes` as in
        `nid[000001-000002]`.
        """
        said = self.run(
            "squeue",
            "--states=all",
            "--noheader",
            "--sort=i",
            "--format=" + SEPARATOR.join(JOB_FIELDS.values()),
        )
        return _parse(said.stdout, JOB_FIELDS)

    def records(self) -> list[dict[str, str]]:
        """Every job as the accounting has it, the oldest first; one that was requeued is there
        once for each start. A state is as in `CANCELLED by 0`.
        """
        said = self.run(
            "sacct",
            "--starttime=now-1days",  # else those since midnight
            "--allocations",
            "--duplicates",
            "--noheader",
            "--parsable2",
            f"--delimiter={SEPARATOR}",
            "--format=" + ",".join(RECORD_FIELDS.values()),
        )
        return sorted(_parse(said.stdout, RECORD_FIELDS), key=lambda record: int(record["id"]))

    def calls(self, client: str) -> int:
        """How often a client of SLURM was started on this cluster."""
        return self._calls.read_text().split().count(client)

    def wait_for(self, job: str, state: str, timeout: float = 400) -> None:
        """Until the job is in this state. One that ended in another state is not waited for."""
        end = time.monotonic() + timeout
        while (states := {entry["id"]: entry["state"] for entry in self.jobs()}).get(job) != state:
            if states.get(job) in ENDED or time.monotonic() > end:
                raise TimeoutError(f"job {job} is not {state}: {states}\n{self.logs()}")
            time.sleep(0.1)

    def nodes(self) -> dict[str, str]:
        """Node → its state, in SLURM's words."""
        said = self.run(
            "sinfo", "--noheader", "--Node", "--partition=normal", "--format=%N %T", timeout=60
        ).stdout
        return dict(line.split() for line in said.splitlines())

    def set_node(self, name: str, state: str, reason: str = "test") -> None:
        """As an administrator does it. A node set `down` loses its jobs, and is back at once, as
        its daemon lives.
        """
        self.run("scontrol", "update", f"NodeName={name}", f"State={state}", f"Reason={reason}")

    def wait_until_idle(self) -> None:
        """Until every node is idle."""
        self._wait(lambda: self.nodes() == dict.fromkeys(NODES, "idle"), "every node is idle")

    def stop_controller(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it, or with SIGSTOP keep it from answering. Jobs go on; clients cannot reach it."""
        self._stop("slurmctld", number)

    def start_controller(self) -> None:
        """Start it, with the jobs that it had, or let it go on; until it answers."""
        self._start_again("slurmctld", self.ports[0])
        self._wait(self.nodes, "the controller answers")

    def stop_accounting(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End slurmdbd, or with SIGSTOP keep it from answering: `sacct` fails, or waits. The
        controller keeps for it what happens meanwhile.
        """
        self._stop("slurmdbd", number)

    def start_accounting(self) -> None:
        """Start slurmdbd, or let it go on, until it answers."""
        self._start_again("slurmdbd", self.ports[1])

    def logs(self) -> str:
        """The last lines of every daemon."""
        paths = sorted((self.root / "log").iterdir())
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in paths
        )

    def processes(self) -> dict[int, str]:
        """What lives of this cluster: process → its command line."""
        return {
            process: _read(process, "cmdline").replace("\0", " ").strip()
            for process in marked(self.root)
        }

    # -- start

    def _configure(self) -> None:
        controller_port, accounting_port, *node_ports = self.ports
        nodes = [
            f"NodeName={node} NodeHostname={_host()} NodeAddr=127.0.0.1 Port={port}"
            f" CPUs={CPUS} RealMemory={MEMORY_MB} Gres=gpu:{GPUS} State=UNKNOWN"
            for node, port in zip(NODES, node_ports, strict=True)
        ]
        values = {
            "root": self.root,
            "host": _host(),
            "user": _user(),
            "account": ACCOUNT,
            "controller_port": controller_port,
            "accounting_port": accounting_port,
            "first_job": 1 + 50 * controller_port % 12000,
            "nodes": "\n".join(nodes),
        }
        (self.root / "slurm.conf").write_text(CONFIGURATION.format(**values))
        (self.root / "slurmdbd.conf").write_text(ACCOUNTING.format(**values))
        (self.root / "slurmdbd.conf").chmod(0o600)  # it may hold a password
        (self.root / "associations").write_text(ASSOCIATIONS.format(**values).lstrip())
        for number in range(GPUS):
            # a regular file would be counted, and not shown
            (self.root / f"gpu/gpu{number}").symlink_to("/dev/null")
        (self.root / "gres.conf").write_text(f"Name=gpu File={self.root}/gpu/gpu[0-{GPUS - 1}]\n")
        # newer daemons want one of these even where nothing uses it: this one asks nothing of the
        # machine
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._calls.touch()
        for command in CLIENTS:
            if path := found(command):
                self._wrap(command, path)

    def _wrap(self, command: str, path: str) -> None:
        """A script before the client, as Snakemake's executor takes SLURM_CONF from the environment
        of its jobs. It counts calls.
        """
        variables = shlex.join([f"SLURM_CONF={self.root}/slurm.conf", f"{MARK}={self.root}"])
        script = self.root / "bin" / command
        script.write_text(
            f"#!/bin/sh\necho {command} >> {self._calls}\n"
            f'exec env {variables} {shlex.quote(path)} "$@"\n'
        )
        script.chmod(0o755)

    def _start_database(self) -> None:
        """A MariaDB with nothing but the table without which SLURM's procedure cannot be made."""
        (procedures,) = (
            line
            for line in find_database_tables().read_text().splitlines()
            if line.startswith("CREATE TABLE IF NOT EXISTS proc ")
        )
        first = self.root / "database.sql"
        first.write_text(f"CREATE DATABASE slurm;\nUSE mysql;\n{procedures}\n")
        self._start(
            "mariadbd",
            "mariadbd",
            *DATABASE.split(),
            f"--user={_user()}",  # it refuses to run as root unless root says so
            f"--datadir={self.root}/database",
            f"--socket={self._socket}",
            f"--pid-file={self.root}/run/mariadbd.pid",
            f"--init-file={first}",
        )
        # slurmdbd would look again after five seconds only
        self._wait(self._socket.exists, "the database listens")

    @property
    def _calls(self) -> Path:
        return self.root / "calls"

    @property
    def _socket(self) -> Path:
        return self.root / "run/database"

    def _start(self, name: str, command: str, *options: str) -> None:
        """A daemon in the foreground, as a child of this process that no Ctrl-C reaches."""
        variables = {
            "SLURM_CONF": f"{self.root}/slurm.conf",
            "MYSQL_UNIX_PORT": str(self._socket),
        }
        with (self.root / f"log/{name}.out").open("a") as out:
            self.daemons[name] = subprocess.Popen(
                [found(command), *options],
                env=self.environment | variables,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _stop(self, name: str, number: signal.Signals) -> None:
        """Until a daemon has ended, unless the signal is one that it lives on with."""
        self.daemons[name].send_signal(number)
        if number != signal.SIGSTOP:
            self.daemons.pop(name).wait(timeout=60)

    def _start_again(self, name: str, port: int) -> None:
        """Until somebody listens there: a client that finds nobody sleeps for a second."""
        if name in self.daemons:
            self.daemons[name].send_signal(signal.SIGCONT)
        else:
            self._start(name, name, "-D")
        self._wait(lambda: listens(port), f"{name} listens")

    def _wait(self, holds: Callable[[], object], what: str, timeout: float = 300) -> None:
        """Until it holds; a client that finds nobody is no answer. Fails where a daemon has
        ended.
        """
        end = time.monotonic() + timeout
        while True:
            for name, daemon in self.daemons.items():
                if daemon.poll() is not None:
                    raise RuntimeError(f"{name} ended with {daemon.returncode}.\n{self.logs()}")
            try:
                if holds():
                    return
                reason = ""
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                reason = f": {error}"
            if time.monotonic() > end:
                raise TimeoutError(f"not after {timeout:g} s: {what}{reason}\n{self.logs()}")
            time.sleep(0.05)

    def _watch(self, stack: contextlib.ExitStack) -> None:
        """A process that ends the cluster if this one is killed: then nobody holds the other end of
        its stdin.
        """
        watch = subprocess.Popen(
            [sys.executable, "-m", "tests.slurm.cluster", str(self.root)],
            cwd=Path(__file__).parents[2],
            env={name: value for name, value in os.environ.items() if name != MARK},
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        stack.callback(watch.wait)
        stack.callback(watch.stdin.close)

    # -- end

    def _end(self) -> None:
        """Jobs first; then daemons, and what is left of those. SLURM itself would give jobs time to
        end.
        """
        daemons = self.daemons.values()
        for daemon in daemons:
            daemon.send_signal(signal.SIGCONT)  # a test may have stopped one
        kill_marked(self.root, spared={daemon.pid for daemon in daemons})  # they lead their groups
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(timeout=60)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        kill_marked(self.root)


# -- processes and ports


def marked(root: Path) -> list[int]:
    """Processes of the cluster in this folder, without this one: known by the mark, or by an open
    file of `log`.

    SLURM's helpers write their title over their environment. A zombie has neither that nor open
    files, and is gone.
    """
    line = f"{MARK}={root}"
    logs = f"{root}/log/"
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return sorted(
        number
        for number in numbers
        if number != os.getpid()
        and (
            line in _read(number, "environ").split("\0")
            or any(name.startswith(logs) for name in open_files(number))
        )
    )


def kill_marked(root: Path, spared: Collection[int] = ()) -> None:
    """Kills them, and what they start meanwhile, until none is left outside of the groups of
    processes to be spared.
    """
    end = time.monotonic() + 60
    while processes := [process for process in marked(root) if _group(process) not in spared]:
        if time.monotonic() > end:
            raise RuntimeError(f"processes of {root} do not end: {processes}")
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def _group(process: int) -> int | None:
    try:
        return os.getpgid(process)
    except ProcessLookupError:
        return None


def _read(process: int, name: str) -> str:
    """A file of /proc; empty for a process that is gone, or another user's."""
    try:
        return Path(f"/proc/{process}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def open_files(process: int) -> list[str]:
    """Names of a process's open files, as far as this user may know them."""
    names = []
    with contextlib.suppress(OSError), os.scandir(f"/proc/{process}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # closed meanwhile
                names.append(os.readlink(entry.path))
    return names


def _parse(text: str, fields: dict[str, str]) -> list[dict[str, str]]:
    return [dict(zip(fields, line.split(SEPARATOR), strict=True)) for line in text.splitlines()]


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _host() -> str:
    """This machine's name as `hostname -s` has it: what the daemons compare with."""
    return socket.gethostname().partition(".")[0]


def free(port: int) -> bool:
    """Whether nobody listens there."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def listens(port: int) -> bool:
    """Whether a connection there is taken; unlike `free`, it does not take the port for a moment."""
    try:
        socket.create_connection((_host(), port), timeout=1).close()
    except OSError:
        return False
    return True


def _free_ports(count: int) -> tuple[int, socket.socket]:
    """The first of so many free ports in a row, and the socket that holds them: it listens on the
    one below.

    They lie below those that the system gives to outgoing connections, one of which might be there
    first.
    """
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for holding in range(10_000, low if low > 11_000 else 32_000, count + 1):
        try:
            holder = socket.create_server(("127.0.0.1", holding))
        except OSError:
            continue
        if all(free(holding + 1 + number) for number in range(count)):
            return holding + 1, holder
        holder.close()
    raise RuntimeError(f"no {count} free ports in a row on 127.0.0.1")


if __name__ == "__main__":  # the watch: its stdin ends with the process that started it
    sys.stdin.read()
    kill_marked(Path(sys.argv[1]))
