"""`python -m tokenscale …` in a fork of a process that has imported its packages: of a short job
imports are most.

A folder with a `python` of its own stands first in PATH. What it is asked to run of these modules
it hands, with its folder, environment and open files, to the server; anything else is the real
Python's. The server is a fork of that of `forks.py`, which has imported packages only, so that each
job runs the tokenscale of its own PYTHONPATH.

Whoever names a folder in the environment as SERVED_JOBS finds there, for each job, a file of its
process's number that holds its arguments, and one of that number and `.ended` behind it.
"""

import atexit
import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import traceback
from pathlib import Path

from tests.forks import context

MODULES = ("tokenscale", "snakemake", "tests.slurm.polled", "torch.distributed.run")
#: its first line makes the real Python start without its packages, which takes a hundredth of a
#: second
CLIENT = """#!{python} -IS
import os, signal, socket, sys

asked = sys.argv[2:] if sys.argv[1:2] == ["-u"] else sys.argv[1:]
if asked[:1] != ["-m"] or asked[1] not in {modules!r}:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
import json

server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
asked = json.dumps([asked[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
server.sendall(asked)
job = int.from_bytes(server.recv(4), "big")
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(job, number))
status = server.recv(4)
code = int.from_bytes(status, "big", signed=True) if status else 1
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
_folders: list[str] = []


def python() -> str:
    """Path of the `python` whose server this process has; the server is started when first asked
    for.
    """
    if not _folders:
        folder = Path(tempfile.mkdtemp(prefix="served-"))
        address = str(folder / "socket")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen(64)
        (folder / "bin").mkdir()
        client = folder / "bin/python"
        client.write_text(CLIENT.format(python=sys.executable, address=address, modules=MODULES))
        client.chmod(0o755)
        context.Process(target=_serve, args=(listener, str(client)), daemon=True).start()
        listener.close()
        _folders.append(str(client))
    return _folders[0]


def _serve(listener: socket.socket, client: str) -> None:
    """Fork for each who connects, until the tests' process ends and takes this one with it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _answer(connection, client)
        connection.close()


def _answer(connection: socket.socket, client: str) -> None:
    """Start the job, say its number, wait for its end, say how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, files, _, _ = socket.recv_fds(connection, 8, 3)
    length = int.from_bytes(head, "big")
    text = b""
    while head and len(text) < length and (more := connection.recv(length - len(text))):
        text += more
    if not head or len(text) < length:  # whoever asked was killed while asking
        os._exit(0)
    job = os.fork()
    if job == 0:
        connection.close()
        _run(json.loads(text), files, client)
    announced = _announced(json.loads(text), job)
    with contextlib.suppress(BrokenPipeError):  # was killed before the answer: `_follow` sees it
        connection.sendall(job.to_bytes(4, "big"))
    ended = threading.Event()
    threading.Thread(target=_follow, args=(connection, job, ended), daemon=True).start()
    # its number stays its own until the end is told
    os.waitid(os.P_PID, job, os.WEXITED | os.WNOWAIT)
    ended.set()
    _, status = os.waitpid(job, 0)
    if announced:
        announced.with_name(f"{job}.ended").touch()
    try:
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
    finally:
        os._exit(0)


def _announced(asked: tuple[list[str], str, dict[str, str]], job: int) -> Path | None:
    arguments, _, environment = asked
    if "SERVED_JOBS" not in environment:
        return None
    path = Path(environment["SERVED_JOBS"], str(job))
    path.with_name(f".{job}").write_text(json.dumps(arguments[1:]))
    return path.with_name(f".{job}").rename(path)


def _follow(connection: socket.socket, job: int, ended: threading.Event) -> None:
    """A job whose caller is gone ends with it, and with all that is of its process group."""
    if not connection.recv(1) and not ended.is_set():
        try:
            os.killpg(job, signal.SIGKILL)
        except ProcessLookupError:  # it has no group of its own yet
            os.kill(job, signal.SIGKILL)


def _run(asked: tuple[list[str], str, dict[str, str]], files: list[int], client: str) -> None:
    arguments, folder, environment = asked
    os.setsid()
    multiprocessing.current_process().daemon = False  # it may start processes of its own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.executable = client
    sys.argv = arguments
    code = 0
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
