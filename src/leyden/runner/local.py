"""Harnesses as processes of this machine, started by a small server process (`forkserver.py`).

`LocalLauncher()` executes any program. `LocalLauncher(preload=[...])` runs `python FILE ...` in a fork of an
interpreter that has imported those modules; limits, signals and exit codes are the same. Differences that
remain with preload: variables that Python reads when it starts (PYTHON*) are those of the launcher (`env`),
and hash randomisation is shared by the attempts.

Output is read as it comes; only the tail is kept, so a flood costs time but no memory.
"""

import array
import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leyden.base.errors import HarnessError
from leyden.base.records import new_id
from leyden.runner.base import Finished, LaunchSpec

GRACE_S = 2.0
"""Between SIGTERM and SIGKILL."""
READY_S = 120.0
"""Longest wait for the server process, which imports the preload modules first."""
KILL_S = 15.0
"""Longest wait for the end of processes that were sent SIGKILL; more means one hangs in the kernel."""
DRAIN_S = 2.0
"""Longest wait for the rest of the output after the end; only a stranger to the attempt can hold it open."""
SERVER = Path(__file__).with_name("forkserver.py")


class LocalLauncher:
    """Runs harnesses on this machine. Belongs to the event loop in which it is used."""

    def __init__(
        self,
        *,
        preload: Sequence[str] = (),
        path: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        term_grace_s: float = GRACE_S,
    ) -> None:
        """`path` comes first on `sys.path` of preloaded programs; `env` is the server's environment."""
        self._preload = list(preload)
        self._path = list(path)
        self._env = dict(os.environ if env is None else env)
        self._grace_s = term_grace_s
        self._server: _Server | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the server process if it does not run. Raises HarnessError when a preload module fails."""
        async with self._starting:
            if self._server is not None and self._server.lost:
                await self._server.stop()
                self._server = None
            if self._server is None:
                self._server = await _Server.start(self._preload, self._path, self._env)

    async def launch(self, spec: LaunchSpec) -> Finished:
        """See `Launcher.launch`."""
        await self.start()
        assert self._server is not None
        server, attempt = self._server, new_id("launch")
        stdout, stderr = _Tail(spec.output_bytes), _Tail(spec.output_bytes)
        exited = server.expect("exited", attempt)
        try:
            started = await self._begin(server, attempt, spec, stdout, stderr)
            if "error" in started:
                if started.get("infra", True):
                    return Finished(exit_code=None, fault=started["error"])
                raise HarnessError(f"{spec.argv[0]} cannot be started: {started['error']}")
            begun = time.monotonic()
            timed_out = await self._watch(server, attempt, exited, spec.timeout_s)
            end: Mapping[str, Any] = (
                exited.result() if exited.done() else {"error": f"not dead {KILL_S:.0f} s after SIGKILL"}
            )
            duration_s = time.monotonic() - begun
            await _drain(stdout, stderr)
        finally:
            server.forget(attempt)
            stdout.close()
            stderr.close()
        return Finished(
            exit_code=end.get("exit_code"),
            timed_out=timed_out,
            stdout_tail=stdout.text(),
            stderr_tail=stderr.text(),
            num_stdout_bytes=stdout.num_bytes,
            num_stderr_bytes=stderr.num_bytes,
            duration_s=duration_s,
            cpu_s=end.get("cpu_s", 0.0),
            num_survivors=end.get("survivors", 0),
            fault=end.get("error", ""),
        )

    async def close(self) -> None:
        """See `Launcher.close`."""
        async with self._starting:
            if self._server is not None:
                await self._server.stop()
                self._server = None

    async def _begin(
        self, server: "_Server", attempt: str, spec: LaunchSpec, stdout: "_Tail", stderr: "_Tail"
    ) -> Mapping[str, Any]:
        started = server.expect("started", attempt)
        run = bool(self._preload)
        request = {
            "op": "start",
            "id": attempt,
            "run": run,
            "argv": list(spec.argv[1:] if run else spec.argv),
            "path": self._path,
            "cwd": str(spec.cwd),
            "env": dict(spec.env),
            "memory_bytes": spec.memory_bytes,
        }
        out_w, err_w = await stdout.open(), await stderr.open()
        try:
            sending = asyncio.ensure_future(asyncio.to_thread(server.send, request, (out_w, err_w)))
            try:
                await asyncio.shield(sending)
                async with asyncio.timeout(READY_S):  # wait_for of Python 3.11 can lose a cancellation
                    return await asyncio.shield(started)
            except asyncio.CancelledError:
                await asyncio.wait([sending])
                await asyncio.wait([started], timeout=READY_S)
                if started.done() and "error" not in started.result():
                    await self._end(server, attempt, server.expect("exited", attempt))
                raise
        except TimeoutError:
            return {"error": f"the process that starts harnesses gave no answer for {READY_S:.0f} s"}
        finally:
            os.close(out_w)
            os.close(err_w)

    async def _watch(
        self, server: "_Server", attempt: str, exited: "asyncio.Future[dict[str, Any]]", timeout_s: float
    ) -> bool:
        """Wait for the end, enforce the time limit; whether it was needed."""
        try:
            await asyncio.wait([exited], timeout=timeout_s)
            if exited.done():
                return False
            await self._end(server, attempt, exited)
            return True
        except asyncio.CancelledError:
            await self._end(server, attempt, exited)
            raise

    async def _end(self, server: "_Server", attempt: str, exited: "asyncio.Future[dict[str, Any]]") -> None:
        for number, wait_s in ((signal.SIGTERM, self._grace_s), (signal.SIGKILL, KILL_S)):
            if not exited.done():
                await asyncio.to_thread(server.send, {"op": "signal", "id": attempt, "signal": int(number)})
                await asyncio.wait([exited], timeout=wait_s)


class _Server:
    """The server process, seen from the runner."""

    def __init__(self, process: "subprocess.Popen[bytes]", channel: socket.socket) -> None:
        self._process = process
        self._channel = channel
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None
        self._transport: asyncio.BaseTransport | None = None
        self.lost = False
        """Whether the process is gone."""

    @classmethod
    async def start(cls, preload: list[str], path: list[str], env: dict[str, str]) -> "_Server":
        ours, theirs = socket.socketpair()
        reply_r, reply_w = os.pipe()
        options = json.dumps({"preload": preload, "path": path})
        try:
            # -P: the folder of the server's own file must not be on the path of a harness.
            process = subprocess.Popen(
                [sys.executable, "-P", str(SERVER), str(theirs.fileno()), str(reply_w), options],
                pass_fds=(theirs.fileno(), reply_w),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=env,
            )
        finally:
            theirs.close()
            os.close(reply_w)
        server = cls(process, ours)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        server._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reply_r, "rb", buffering=0)
        )
        ready = server.expect("ready", "")
        server._reading = asyncio.create_task(server._read(reader))
        try:
            async with asyncio.timeout(READY_S):
                error = (await ready).get("error")
        except TimeoutError:
            error = f"not ready after {READY_S:.0f} s"
        except asyncio.CancelledError:
            await server.stop()
            raise
        if error:
            await server.stop()
            raise HarnessError(f"harness.preload = {preload}: {error}; mend or remove it" if preload else error)
        return server

    def expect(self, event: str, attempt: str) -> "asyncio.Future[dict[str, Any]]":
        """The future of one reply."""
        future = self._waiting.get((event, attempt))
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._waiting[event, attempt] = future
            if self.lost:
                future.set_result({"error": "the process that starts harnesses is gone"})
        return future

    def forget(self, attempt: str) -> None:
        """Drop the futures of an attempt that is over."""
        for event in ("started", "exited"):
            self._waiting.pop((event, attempt), None)

    def send(self, request: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Hand a request to the server; blocks while it is busy. A lost server shows in the futures."""
        body = json.dumps(request).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with self._lock:
            try:
                self._channel.sendmsg([struct.pack("!I", len(body))], rights)
                self._channel.sendall(body)
            except OSError:  # closed by its death; `_read` sees the end of the replies and tells everybody
                return

    async def stop(self) -> None:
        """Close the channel, which makes the server kill everything and end."""
        self._channel.close()
        try:
            await asyncio.to_thread(self._process.wait, KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait, KILL_S)
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=DRAIN_S)
            self._reading.cancel()
        if self._transport is not None:
            self._transport.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            reply = json.loads(line)
            future = self._waiting.get((reply["event"], reply.get("id", "")))
            if future is not None and not future.done():
                future.set_result(reply)
        self.lost = True
        code = await asyncio.to_thread(self._process.wait)
        for future in self._waiting.values():
            if not future.done():
                future.set_result({"error": f"the process that starts harnesses died with exit code {code}"})


class _Tail(asyncio.Protocol):
    """The last bytes that came through a pipe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()
        self._transport: asyncio.BaseTransport | None = None
        self.num_bytes = 0
        """All that came."""
        self.ended = asyncio.Event()
        """Set when nobody can write any more."""

    async def open(self) -> int:
        """Make the pipe; its writing end."""
        reading, writing = os.pipe()
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: self, os.fdopen(reading, "rb", buffering=0))
        return writing

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._data += data
        if len(self._data) > 2 * self._max_bytes:
            del self._data[: -self._max_bytes]

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def text(self) -> str:
        """The tail; bytes that are no UTF-8 and NUL, which no store keeps, are shown as U+FFFD."""
        tail = bytes(self._data[-self._max_bytes :]).decode(errors="replace")
        return tail.replace("\0", "\N{REPLACEMENT CHARACTER}")


async def _drain(*tails: _Tail) -> None:
    waits = [asyncio.ensure_future(tail.ended.wait()) for tail in tails]
    _, late = await asyncio.wait(waits, timeout=DRAIN_S)
    for wait in late:
        wait.cancel()
