"""Running a verifier: after the agent, in another process, with a time limit.

A pool of persistent worker processes (`worker.py`), started fresh and without our keys; each verifies one
attempt at a time. A worker that exceeds the limit or dies is replaced. What a verifier returns is checked
here; whatever it does wrong is a VerifierError, never a reward. Does not weigh components
(`components.py`).
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from leyden.base.command import clean_environment, has_placeholder, parse_command
from leyden.base.config import Config
from leyden.base.errors import HarnessError, RecordError, VerifierError
from leyden.base.records import Call, Task, Trace, check_reward
from leyden.rewards.components import SINGLE, check_rewards
from leyden.traces.conversation import messages_of

WORKER = Path(__file__).with_name("worker.py")
START_S = 60.0
"""Longest wait for a worker that imports the verifier."""
MAX_REPLY_BYTES = 4 << 20
"""Longest line of a worker; a reply holds numbers or one message."""
_CALLABLE = re.compile(r"(?P<file>[^\s:]+\.py):(?P<function>[A-Za-z_]\w*)")


class Verifier(Protocol):
    """Says how good an attempt was."""

    async def verify(self, task: Task, trace: Trace, workspace: Path) -> Mapping[str, float] | None:
        """Components of the reward, or None where there is no reward. Raises VerifierError."""

    async def close(self) -> None:
        """End its processes. Idempotent."""


def verifier_words(config: Config) -> list[str]:
    """Arguments of a worker for `rewards.verifier`. Raises VerifierError."""
    verifier = config.rewards.verifier
    match = _CALLABLE.fullmatch(verifier)
    if match is None:
        if has_placeholder(verifier):
            raise VerifierError(
                f"rewards.verifier = {verifier!r}: the task comes on standard input, not in the command"
            )
        try:
            command = parse_command(verifier, config.resolve("."), "rewards.verifier")
        except HarnessError as error:
            raise VerifierError(str(error)) from None
        return ["command", *command.words]
    file = config.resolve(match["file"])
    if not file.is_file():
        raise VerifierError(f"rewards.verifier = {verifier!r}: no file {file}; paths are relative to the configuration")
    return ["callable", str(file), match["function"]]


def verifier_file(config: Config) -> Path | None:
    """The file that holds the verifier: the callable's, or the last file named in the command."""
    if not config.rewards.verifier:
        return None
    words = verifier_words(config)
    if words[0] == "callable":
        return Path(words[1])
    files = [Path(word) for word in words[1:] if word.startswith("/") and Path(word).is_file()]
    return files[-1] if files else None


def check_verifier(config: Config) -> None:
    """Raise VerifierError when the verifier cannot even be loaded. Runs before the first rollout."""
    check_rewards(config.rewards)
    if not config.rewards.verifier:
        return
    words = verifier_words(config)
    if words[0] == "command":
        return
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(WORKER), *words, "--check"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START_S,
            env=clean_environment(config, os.environ),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise VerifierError(f"importing {words[1]} took more than {START_S:.0f} s") from None
    _check_ready(config.rewards.verifier, done.stdout.splitlines()[0] if done.stdout else b"", done.stderr)


def open_verifier(config: Config, *, num_workers: int) -> "VerifierPool | None":
    """The verifier of a configuration; None when `rewards.verifier` is empty. Raises VerifierError."""
    if not config.rewards.verifier:
        return None
    return VerifierPool(
        config.rewards.verifier,
        verifier_words(config),
        env=clean_environment(config, os.environ),
        num_workers=num_workers,
        timeout_s=config.rewards.timeout_s,
    )


class VerifierPool:
    """Verifications in `num_workers` processes at once; workers start when they are first needed."""

    def __init__(
        self, name: str, words: Sequence[str], *, env: Mapping[str, str], num_workers: int, timeout_s: float
    ) -> None:
        self._name = name
        self._words = list(words)
        self._env = dict(env)
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(num_workers)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()

    async def verify(self, task: Task, trace: Trace, workspace: Path) -> Mapping[str, float] | None:
        """See `Verifier.verify`."""
        request = {"task": task_dict(task), "trace": trace_dict(trace), "workspace": str(workspace)}
        line = json.dumps(request).encode() + b"\n"
        async with self._slots:
            worker = self._idle.pop() if self._idle else await _Worker.start(self._name, self._words, self._env)
            self._busy.add(worker)
            healthy = False
            try:
                reply = await worker.ask(line, self._timeout_s)
                healthy = True
            finally:
                self._busy.discard(worker)
                if healthy:
                    self._idle.append(worker)
                else:
                    await worker.kill()
        if "error" in reply:
            raise VerifierError(f"verifier {self._name!r} failed: {reply['error']}")
        return _components(self._name, reply["value"])

    async def close(self) -> None:
        """See `Verifier.close`."""
        for worker in (*self._idle, *self._busy):
            await worker.kill()
        self._idle.clear()


def task_dict(task: Task) -> dict[str, Any]:
    """What a verifier is told about the task, the answer included."""
    return {
        "id": task.id,
        "split": task.split,
        "domain": task.domain,
        "input": dict(task.input),
        "answer": task.answer,
    }


def trace_dict(trace: Trace) -> dict[str, Any]:
    """What a verifier is told about the trace: counts, the last conversation, the final text, the spans."""
    last = next((call for call in reversed(trace.calls) if call.response is not None), None)
    return {
        "num_calls": len(trace.calls),
        "num_prompt_tokens": sum(len(call.prompt_ids) for call in trace.calls),
        "num_completion_tokens": sum(call.num_sampled for call in trace.calls),
        "messages": messages_of(last.request) if last is not None else [],
        "final_text": _final_text(last),
        "outcome": trace.attempt.outcome,
        "exit_code": trace.attempt.exit_code,
        "stdout_tail": trace.attempt.stdout_tail,
        "spans": [{"name": span.name, "kind": span.kind, "attributes": dict(span.attributes)} for span in trace.spans],
    }


def _final_text(call: Call | None) -> str:
    if call is None:
        return ""
    if call.choices and call.choices[0].text:
        return call.choices[0].text
    choices = (call.response or {}).get("choices") or [{}]
    message = choices[0].get("message") or {}
    return str(message.get("content") or choices[0].get("text") or "")


def _components(name: str, value: Any) -> Mapping[str, float] | None:
    if value is None or value == {}:
        return None
    components = value if isinstance(value, dict) else {SINGLE: value}
    try:
        return {component: check_reward(component, number) for component, number in components.items()}
    except RecordError as error:
        raise VerifierError(f"verifier {name!r}: {error}") from None


def _check_ready(name: str, line: bytes, stderr: bytes = b"") -> None:
    try:
        ready = json.loads(line)
    except ValueError:
        tail = stderr.decode(errors="replace").strip()[-500:]
        raise VerifierError(
            f"the process of verifier {name!r} died while it started: {tail or 'without a word'}"
        ) from None
    if "error" in ready:
        raise VerifierError(f"verifier {name!r} cannot be loaded: {ready['error']}")


class _Worker:
    """One worker process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name = name
        self._process = process

    @classmethod
    async def start(cls, name: str, words: Sequence[str], env: Mapping[str, str]) -> "_Worker":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            str(WORKER),
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=dict(env),
            start_new_session=True,
            limit=MAX_REPLY_BYTES,
        )
        worker = cls(name, process)
        try:
            _check_ready(name, await worker._line(START_S, "load"))
        except BaseException:  # whatever stops the start, the process must not stay
            await worker.kill()
            raise
        return worker

    async def ask(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        """Send one request, give back its reply. Raises VerifierError when it hangs or dies."""
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        reply: dict[str, Any] = json.loads(await self._line(timeout_s, "answer"))
        return reply

    async def _line(self, timeout_s: float, what: str) -> bytes:
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        except TimeoutError:
            raise VerifierError(
                f"verifier {self._name!r} did not {what} within {timeout_s:g} s and was ended; "
                "make it faster or raise rewards.timeout_s"
            ) from None
        if not line:
            code = await self._process.wait()
            raise VerifierError(f"the process of verifier {self._name!r} died with exit code {code}")
        return line

    async def kill(self) -> None:
        """End the process and whatever it started in its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
