"""Child processes of a run: started, waited for with a bound, restarted when they die, ended with the parent.

A child says that it is ready by writing one JSON object to the file named in `--ready-file`. Its output goes to
a log file, and the end of that log is what an error shows.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leyden.base.errors import LearningError

READY_S = 60.0
"""Longest wait for a child: a cold import on a busy two-core machine takes up to ten seconds."""
MAX_RESTARTS = 5
"""A child that died more often than this will die again; the run stops and shows its log."""
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel (Linux) to send SIGTERM to this process when its parent ends, even by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == 1:  # the parent was gone before the request
            os.kill(os.getpid(), signal.SIGTERM)


def write_ready(path: Path | None, facts: Mapping[str, Any]) -> None:
    """Tell the parent that we serve; whole or not at all."""
    if path is not None:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(facts), encoding="utf-8")
        temporary.replace(path)


class Child:
    """One supervised process."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.facts: dict[str, Any] = {}
        self.num_restarts = 0
        self.log = folder / f"{name}.log"
        self._arguments = list(arguments)
        self._ready = folder / f"{name}.ready"
        self._env = dict(env)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, extra: Sequence[str] = ()) -> dict[str, Any]:
        """Start and wait until it is ready; what it said then. Raises LearningError with the end of its log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "leyden.cli.main", *self._arguments, *extra, "--ready-file", str(self._ready)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # own session: Ctrl-C reaches the parent only, which ends it in order
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env, start_new_session=True
            )
        deadline = time.monotonic() + READY_S
        while not self._ready.exists():
            if self._process.poll() is not None:
                raise LearningError(f"the {self.name} process ended with {self._process.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                self.stop(0)
                raise LearningError(f"the {self.name} process was not ready after {READY_S:.0f} s:\n{self.tail()}")
            time.sleep(0.02)
        self.facts = json.loads(self._ready.read_text(encoding="utf-8"))
        return self.facts

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def check(self, extra: Sequence[str] = ()) -> bool:
        """Restart it if it died; whether it had. Raises LearningError when it died too often."""
        if self._process is None or self._process.poll() is None:
            return False
        self.num_restarts += 1
        if self.num_restarts > MAX_RESTARTS:
            raise LearningError(
                f"the {self.name} process died {self.num_restarts} times (last exit {self._process.returncode}); "
                f"end of {self.log}:\n{self.tail()}"
            )
        self.start(extra)
        return True

    def tail(self, size: int = 2000) -> str:
        """The end of its log."""
        if not self.log.exists():
            return "(no output)"
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - size))
            return log.read().decode("utf-8", "replace").strip() or "(no output)"

    def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM, wait up to `grace_s`, then SIGKILL. Idempotent."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)
        self._ready.unlink(missing_ok=True)
