"""The small process that starts harnesses, watches over them and leaves nothing behind.

Started by `leyden.runner.local` as a program of its own, standard library only, one thread. For each
request it forks a child in a session of its own, which either executes a program or, in this warm
interpreter that has imported the preload modules, runs a Python file as `__main__`. Why a process between
the runner and the harnesses: forking from a small process without threads is safe and quick, whatever the
runner holds.

Promises:
- Each attempt's processes are gone before its end is reported. Harness and server are both "child
  subreapers": a descendant that lost its parent belongs to the harness while that lives, to this server
  afterwards. So every child of the server that is no harness is left over from an ended attempt, `setsid`
  or not, and is killed.
- When the runner goes away, however it dies, everything here is killed: its end of the socket closes. When
  this server is killed, the kernel kills the harnesses (PR_SET_PDEATHSIG).

Wire: requests over a Unix socket, 4 bytes of length (the file descriptors of stdout and stderr ride on them)
and JSON; replies are JSON lines on a pipe.
"""

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import types
from importlib.machinery import SourceFileLoader
from typing import Any, NoReturn

SWEEP_S = 2.0
"""Longest wait for killed descendants to vanish; the kernel needs a few milliseconds."""
ORPHAN_CHECK_S = 2.0
"""How often the server looks whether its runner is still its parent, should the socket be held open."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(argv: list[str]) -> int:
    """`forkserver.py REQUEST_FD REPLY_FD JSON` with JSON `{"preload": [...], "path": [...]}`."""
    server = Server(int(argv[1]), int(argv[2]), json.loads(argv[3]))
    work = server.serve()
    if work is not None:  # only in a forked child: run the harness with the server's frames gone
        run_file(work)
    return 0


class Server:
    """State of the server process: the live harnesses, by request id and by process id."""

    def __init__(self, request_fd: int, reply_fd: int, options: dict[str, Any]) -> None:
        self._socket = socket.socket(fileno=request_fd)
        self._reply_fd = reply_fd
        os.set_inheritable(reply_fd, False)
        os.set_inheritable(request_fd, False)
        self._options = options
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._parent = os.getppid()
        self._pids: dict[str, int] = {}

    def serve(self) -> dict[str, Any] | None:
        """Serve until the runner is gone; in a forked child that runs a file, return its request."""
        self._prctl(PR_SET_CHILD_SUBREAPER, 1)
        wake_r, wake_w = os.pipe()
        os.set_blocking(wake_r, False)
        os.set_blocking(wake_w, False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        error = self._preload()
        self._reply({"event": "ready", "error": error})
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(wake_r, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(ORPHAN_CHECK_S * 1000)}
            if wake_r in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_r, 65536)
            self._collect()
            if self._socket.fileno() in ready:
                message = self._receive()
                if message is None:
                    break
                request, fds = message
                if request["op"] == "signal":
                    self._signal(request["id"], request["signal"])
                elif self._start(request, fds, (wake_r, wake_w)):
                    return request
            if os.getppid() != self._parent:
                break
        self._end_all()
        return None

    def _preload(self) -> str:
        for folder in reversed(self._options["path"]):
            sys.path.insert(0, folder)
        for module in self._options["preload"]:
            try:
                importlib.import_module(module)
            except BaseException:  # noqa: BLE001 - anything an import can raise is the answer
                return f"importing {module!r} failed: {traceback.format_exc().strip().splitlines()[-1]}"
        if self._options["preload"]:
            _warm(self._options["preload"])
        if os.path.isdir("/proc/self/task") and len(os.listdir("/proc/self/task")) > 1:
            modules = self._options["preload"]
            return f"one of {modules} starts threads when it is imported, which a fork cannot keep"
        gc.collect()
        gc.freeze()
        return ""

    def _prctl(self, option: int, value: int) -> None:
        if sys.platform == "linux":
            self._libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))

    def _reply(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            try:
                data = data[os.write(self._reply_fd, data) :]
            except BrokenPipeError:  # the runner is gone; the closed socket says so next
                return

    def _receive(self) -> tuple[dict[str, Any], list[int]] | None:
        fds = array.array("i")
        head, ancillary, _, _ = self._socket.recvmsg(4, socket.CMSG_LEN(2 * fds.itemsize))
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if not head:
            return None
        size = struct.unpack("!I", head + self._exactly(4 - len(head)))[0]
        body = self._exactly(size)
        return (json.loads(body), list(fds)) if len(body) == size else None

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(size - len(parts))
            if not part:
                break
            parts += part
        return bytes(parts)

    def _start(self, request: dict[str, Any], fds: list[int], wake: tuple[int, int]) -> bool:
        """Fork; True only in a child that is to run a file."""
        status_r, status_w = os.pipe()
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            for fd in (*fds, status_r, status_w):
                os.close(fd)
            self._reply({"event": "started", "id": request["id"], "error": f"cannot fork: {error}", "infra": True})
            return False
        if pid == 0:
            os.close(status_r)
            try:
                self._become(request, fds, wake, server)
                os.close(status_w)
            except BaseException as error:  # noqa: BLE001 - the child must report and end, never go on as a server
                with contextlib.suppress(OSError):
                    os.write(status_w, f"{type(error).__name__}: {error}".encode())
                os._exit(127)
            return True
        for fd in (*fds, status_w):
            os.close(fd)
        with open(status_r, "rb") as status:  # ends at exec, or when the child closes it
            error_text = status.read().decode(errors="replace")
        if error_text:
            os.waitpid(pid, 0)
            self._reply({"event": "started", "id": request["id"], "error": error_text, "infra": False})
        else:
            self._pids[request["id"]] = pid
            self._reply({"event": "started", "id": request["id"], "pid": pid})
        return False

    def _become(self, request: dict[str, Any], fds: list[int], wake: tuple[int, int], server: int) -> None:
        """In the child: take on session, limits, files, environment; exec unless it runs a file."""
        os.setsid()
        self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(127)
        self._prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (fds[0], 1), (fds[1], 2)):
            os.dup2(source, target, inheritable=True)
        for fd in (null, *fds, *wake, self._reply_fd):
            os.close(fd)
        self._socket.close()
        if request["memory_bytes"]:
            resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"], request["memory_bytes"]))
        os.chdir(request["cwd"])
        if not request["run"]:
            # Python ignores these two; programs expect the defaults.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            os.execve(request["argv"][0], request["argv"], request["env"])
        env = request["env"]
        os.environ.clear()
        os.environ.update(env)
        if not env.keys() & {"LC_ALL", "LC_CTYPE", "LANG", "PYTHONCOERCECLOCALE"}:
            os.environ["LC_CTYPE"] = "C.UTF-8"  # as Python does when it starts in the C locale (PEP 538)

    def _signal(self, attempt: str, number: int) -> None:
        pid = self._pids.get(attempt)
        if pid is not None:  # not yet reaped, so neither process nor group can be somebody else's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def _collect(self) -> None:
        """Finish every harness that has ended."""
        for attempt, pid in list(self._pids.items()):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                self._finish(attempt, pid)

    def _finish(self, attempt: str, pid: int) -> None:
        """Kill what the harness left behind, then reap it and report."""
        survivors = self._sweep()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        survivors += self._sweep()
        _, status, usage = os.wait4(pid, 0)
        del self._pids[attempt]
        self._reply(
            {
                "event": "exited",
                "id": attempt,
                "exit_code": os.waitstatus_to_exitcode(status),
                "survivors": survivors,
                "cpu_s": usage.ru_utime + usage.ru_stime,
            }
        )

    def _sweep(self) -> int:
        """Kill and reap every child that is no harness; how many of them were still alive."""
        num_alive = 0
        known = set(self._pids.values())
        deadline = time.monotonic() + SWEEP_S
        while time.monotonic() < deadline:
            orphans = [pid for pid in _children() if pid not in known]
            if not orphans:
                break
            for pid in orphans:
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    num_alive += 1
                    os.kill(pid, signal.SIGKILL)
                    while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
                        time.sleep(0.001)
        return num_alive

    def _end_all(self) -> None:
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)
        self._pids.clear()
        self._sweep()


def _warm(modules: list[str]) -> None:
    """See `warm.py`: the folder of this file is not on the path of a harness, so it is read from where it is."""
    namespace = {"__name__": "_warm"}
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "warm.py")
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec", dont_inherit=True), namespace)
    warm: Any = namespace["warm"]
    warm(modules)


def run_file(request: dict[str, Any]) -> NoReturn:
    """Run a Python file as `python FILE ...` would, in this process; never returns."""
    preloaded = set(sys.modules)
    argv = request["argv"]
    sys.argv = list(argv)
    path = argv[0]
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:  # the standard library's generator seeds itself after a fork, numpy's does not
        numpy_random.seed()
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    vars(module)["__builtins__"] = __builtins__
    vars(module)["__cached__"] = None
    sys.modules["__main__"] = module
    code: object = 0
    try:
        with open(path, "rb") as file:
            program = compile(file.read(), path, "exec", dont_inherit=True)
        exec(program, vars(module))
    except SystemExit as error:
        code = error.code
    except BaseException as error:  # noqa: BLE001 - this is the top of the harness's program
        assert error.__traceback__ is not None
        below = error.__traceback__.tb_next  # without this function, which a plain Python does not show either
        sys.excepthook(type(error), error.with_traceback(below), below)
        code = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else 1
    _exit(code, module, preloaded)


def _exit(code: object, main_module: types.ModuleType, preloaded: set[str]) -> NoReturn:
    """End as the interpreter does: threads, exit hooks, then every object that the harness made.

    What was preloaded is left as it is: taking it apart costs 30 ms of copied pages and nobody sees the
    result.
    """
    if code is not None and not isinstance(code, int) and code is not KeyboardInterrupt:
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for name, module in reversed(list(sys.modules.items())):
        if name not in preloaded and isinstance(module, types.ModuleType):
            _clear(module)
    _clear(main_module)
    gc.collect()
    status = 0 if code is None else code
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            status = status or 120  # the exit code of a Python that cannot flush
    if status is KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    assert isinstance(status, int)
    os._exit(status & 0xFF)


def _clear(module: types.ModuleType) -> None:
    """Let go of a module's objects in Python's own order: names with one underscore first."""
    names = vars(module)
    for private in (True, False):
        for name in list(names):
            if (name.startswith("_") and not name.startswith("__")) is private and not name.startswith("__"):
                names[name] = None


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _ignore(*_: object) -> None:
    """A handler, so that SIGCHLD wakes the loop instead of being discarded."""


if __name__ == "__main__":
    sys.exit(main(sys.argv))
