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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from leyden.base.command import clean_environment, has_placeholder, parse_command
from leyden.base.config import Config
from leyden.base.errors import HarnessError, RecordError, VerifierError
from leyden.base.records import Task, Trace, check_reward
from leyden.rewards import library
from leyden.rewards.components import SINGLE, check_rewards
from leyden.rewards.evidence import task_dict, trace_dict
from leyden.rewards.library.base import check_source

WORKER = Path(__file__).with_name("worker.py")
CALLS = "calls"
"""Key of a verifier's answer that holds the rewards of single calls."""
START_S = 60.0
"""Longest wait for a worker that imports the verifier."""
MAX_REPLY_BYTES = 4 << 20
"""Longest line of a worker; a reply holds numbers or one message."""
_CALLABLE = re.compile(r"(?P<file>[^\s:]+\.py):(?P<function>[A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """Everything that a verifier said about one attempt."""

    components: Mapping[str, float] | None
    """Components of the reward; None where there is no reward."""
    calls: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Step rewards: call id to components. They do not enter the total."""
    unusable: str = ""
    """Why there is no reward although somebody was asked who should have given one (the judge)."""


class Verifier(Protocol):
    """Says how good an attempt was."""

    async def assess(self, task: Task, trace: Trace, workspace: Path) -> Assessment:
        """Components of the reward and of single calls. Raises VerifierError."""

    async def verify(self, task: Task, trace: Trace, workspace: Path) -> Mapping[str, float] | None:
        """Only the components of the reward, or None where there is no reward. Raises VerifierError."""

    async def close(self) -> None:
        """End its processes. Idempotent."""


def verifier_words(config: Config) -> list[str]:
    """Arguments of a worker for `rewards.verifier`. Raises VerifierError."""
    return _words(config, config.rewards.verifier)


def _words(config: Config, verifier: str) -> list[str]:
    if verifier.startswith(library.PREFIX):
        used = library.names_in(verifier)
        settings = {name: of for name, of in config.rewards.settings.items() if name in used}
        library.make(verifier, settings, config.base_dir)
        return ["builtin", verifier, json.dumps(settings), str(config.base_dir)]
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
    if words[0] == "builtin":
        return None
    files = [Path(word) for word in words[1:] if word.startswith("/") and Path(word).is_file()]
    return files[-1] if files else None


def reward_files(config: Config) -> list[Path]:
    """Every file whose bytes decide about a reward, for `reward_version`."""
    files = [file] if (file := verifier_file(config)) else []
    if config.rewards.verifier.startswith(library.PREFIX):
        folder = Path(library.__file__).parent
        files += [folder / "base.py", *(folder / f"{n}.py" for n in library.names_in(config.rewards.verifier))]
    if config.rewards.judge.policy:
        files.append(config.resolve(config.rewards.judge.rubric))
    return files


def check_verifier(config: Config, tasks: Sequence[Task] = ()) -> None:
    """Raise VerifierError when the verifier cannot even be loaded. Runs before the first rollout.

    With `tasks`, also when it compares with an answer that some of them do not have.
    """
    rewards = config.rewards
    check_rewards(rewards)
    _check_builtin(config, tasks)
    if rewards.judge.policy and not config.resolve(rewards.judge.rubric).is_file():
        raise VerifierError(f"rewards.judge.rubric: no file {config.resolve(rewards.judge.rubric)}")
    try:
        check_source(rewards.judge.source)
    except ValueError as error:
        raise VerifierError(f"rewards.judge.source: {error}") from None
    for name in (rewards.verifier, rewards.canary_verifier):
        if name:
            _check_loads(config, name)


def _check_builtin(config: Config, tasks: Sequence[Task]) -> None:
    rewards = config.rewards
    builtin = [v for v in (rewards.verifier, rewards.canary_verifier) if v.startswith(library.PREFIX)]
    used = [name for verifier in builtin for name in library.names_in(verifier)]
    unused = sorted(set(rewards.settings) - set(used))
    if unused:
        raise VerifierError(
            f"rewards.settings.{unused[0]} is set, but no built-in verifier of that name is used "
            f"(rewards.verifier = {rewards.verifier!r}); remove it"
        )
    for verifier in builtin:
        own = {name: of for name, of in rewards.settings.items() if name in library.names_in(verifier)}
        made = library.make(verifier, own, config.base_dir)
        made.check(tasks)
        names = [name for member, _ in made.parts for name in member.components]
        if verifier == rewards.verifier and len(names) > 1 and not rewards.weights and not rewards.schedule:
            raise VerifierError(
                f"{verifier} gives {', '.join(names)} and there are no weights; set rewards.weights, for example "
                f"{{ {names[0]} = 1.0 }}"
            )
        for member, settings in made.parts:
            limit = getattr(settings, "timeout_s", 0.0)
            if limit >= rewards.timeout_s:
                raise VerifierError(
                    f"rewards.settings.{member.name}.timeout_s = {limit:g} is not below rewards.timeout_s = "
                    f"{rewards.timeout_s:g}; the verifier would be ended before it can say so"
                )


def _check_loads(config: Config, verifier: str) -> None:
    words = _words(config, verifier)
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
    _check_ready(verifier, done.stdout.splitlines()[0] if done.stdout else b"", done.stderr)


def open_verifier(config: Config, *, num_workers: int) -> "VerifierPool | None":
    """The verifier of a configuration; None when `rewards.verifier` is empty. Raises VerifierError."""
    return _open(config, config.rewards.verifier, num_workers)


def open_canary(config: Config, *, num_workers: int) -> "VerifierPool | None":
    """The hidden second verifier; None when `rewards.canary_verifier` is empty. Raises VerifierError."""
    return _open(config, config.rewards.canary_verifier, num_workers)


def _open(config: Config, verifier: str, num_workers: int) -> "VerifierPool | None":
    if not verifier:
        return None
    return VerifierPool(
        verifier,
        _words(config, verifier),
        env=clean_environment(config, os.environ),
        num_workers=num_workers,
        timeout_s=config.rewards.timeout_s,
        judge=config.rewards.judge.policy,
    )


class VerifierPool:
    """Verifications in `num_workers` processes at once; workers start when they are first needed."""

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        num_workers: int,
        timeout_s: float,
        judge: str = "",
    ) -> None:
        """Calls of the policy `judge` are not shown to the verifier."""
        self._judge = judge
        self._name = name
        self._words = list(words)
        self._env = dict(env)
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(num_workers)
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()

    async def verify(self, task: Task, trace: Trace, workspace: Path) -> Mapping[str, float] | None:
        """See `Verifier.verify`."""
        return (await self.assess(task, trace, workspace)).components

    async def assess(self, task: Task, trace: Trace, workspace: Path) -> Assessment:
        """See `Verifier.assess`."""
        evidence = trace_dict(trace, judge=self._judge)
        return await self.assess_dicts(task_dict(task), evidence, workspace)

    async def assess_dicts(self, task: Mapping[str, Any], trace: Mapping[str, Any], workspace: Path) -> Assessment:
        """The same for evidence that is made up, as probes do. Raises VerifierError."""
        request = {"task": task, "trace": trace, "workspace": str(workspace)}
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
        return _assessment(self._name, reply["value"], {call.get("id") for call in trace.get("calls") or ()})

    async def close(self) -> None:
        """See `Verifier.close`."""
        for worker in (*self._idle, *self._busy):
            await worker.kill()
        self._idle.clear()


def _assessment(name: str, value: Any, known: set[Any]) -> Assessment:
    if value is None or value == {}:
        return Assessment(components=None)
    components = dict(value) if isinstance(value, dict) else {SINGLE: value}
    calls = components.pop(CALLS, {})
    if not isinstance(calls, dict) or not all(isinstance(of, dict) for of in calls.values()):
        raise VerifierError(f"verifier {name!r} gave {calls!r} for {CALLS!r}; give {{call id: {{component: number}}}}")
    foreign = sorted(set(calls) - known)
    if foreign:
        raise VerifierError(f"verifier {name!r} rewards the call {foreign[0]!r}, which is no call of this attempt")
    try:
        return Assessment(
            components={one: check_reward(one, number) for one, number in components.items()} or None,
            calls={c: {one: check_reward(one, number) for one, number in of.items()} for c, of in calls.items()},
        )
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
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
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
