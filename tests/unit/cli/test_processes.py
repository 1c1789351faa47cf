"""Child processes: readiness, restarts, and the end."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from leyden.base.errors import LearningError
from leyden.cli import processes
from leyden.cli.processes import Child

READY = """\
import json, os, pathlib, signal, sys, time
path = pathlib.Path(sys.argv[sys.argv.index("--ready-file") + 1])
path.with_suffix(".tmp").write_text(json.dumps({"pid": os.getpid(), "arguments": sys.argv[1:]}))
path.with_suffix(".tmp").replace(path)
print("serving", flush=True)
time.sleep(60)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Child]:
    """A child that runs a script of ours in place of `leyden`."""
    interpreter = tmp_path / "python"

    def make(text: str) -> Child:
        script = tmp_path / "child.py"
        script.write_text(text, encoding="utf-8")
        # Drops `-m leyden.cli.main`, keeps the arguments.
        interpreter.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" -S "{script}" "$@"\n', encoding="utf-8")
        interpreter.chmod(0o755)
        return Child("thing", ["work"], tmp_path / "logs", dict(os.environ))

    monkeypatch.setattr(processes, "sys", type("Sys", (), {"executable": str(interpreter), "platform": sys.platform}))
    return make


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


def test_a_child_says_its_facts_and_ends_when_told(program: Callable[[str], Child]) -> None:
    child = program(READY)
    facts = child.start(["--more"])
    assert facts["pid"] == child.pid and facts["arguments"][:2] == ["work", "--more"]
    assert not child.check()
    child.stop()
    child.stop()
    assert child.pid is None and "serving" in child.tail()


def test_a_child_that_was_killed_is_started_again(program: Callable[[str], Child]) -> None:
    child = program(READY)
    first = child.start()["pid"]
    os.kill(first, signal.SIGKILL)
    wait_gone(first)
    assert child.check(["--port", "7"])
    assert child.facts["pid"] != first and "--port" in child.facts["arguments"]
    assert child.num_restarts == 1
    child.stop()


def test_a_child_that_keeps_dying_ends_the_run_with_its_log(
    program: Callable[[str], Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MAX_RESTARTS", 1)
    child = program(READY)
    for _ in range(2):
        pid = child.facts["pid"] if child.facts else child.start()["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_gone(pid)
        if child.num_restarts:
            break
        child.check()
    with pytest.raises(LearningError, match=r"died 2 times \(last exit -9\)(.|\n)*serving"):
        child.check()


def test_a_child_that_cannot_start_is_an_error_with_the_end_of_its_log(program: Callable[[str], Child]) -> None:
    child = program("raise SystemExit('the port is taken')")
    with pytest.raises(LearningError, match=r"ended with 1(.|\n)*the port is taken"):
        child.start()


def test_a_child_that_is_never_ready_is_ended(program: Callable[[str], Child], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "READY_S", 0.5)
    child = program("import time\ntime.sleep(60)")
    with pytest.raises(LearningError, match="was not ready after"):
        child.start()
    assert child.pid is None
