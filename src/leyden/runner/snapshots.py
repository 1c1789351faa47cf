"""The state of an attempt's environment, before and after it: files, rows of databases, whatever a function says.

Each state is a span of kind `state_before` or `state_after`; its name is `workspace`, the name of the query in
`[harness.snapshots]`, or `callable`. Everything is bounded in rows, bytes and seconds, and what was left out is
counted. A state that cannot be taken before the attempt is a broken environment (HarnessError); after it, the span
says so under `error`, for the agent may be what broke it.
"""

import contextlib
import fnmatch
import json
import math
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from leyden.base.command import clean_environment, fill
from leyden.base.config import Config, PostgresSnapshot, SnapshotsConfig, SqliteSnapshot
from leyden.base.errors import HarnessError, VerifierError
from leyden.base.records import Attempt, Span, Task, new_id
from leyden.rewards import postgres
from leyden.rewards.evidence import task_dict
from leyden.rewards.state import WORKSPACE
from leyden.runner.workspace import snapshot

CALLABLE = "callable"
"""Name of the state that the user's function gives."""
CAPTURE = Path(__file__).with_name("capture_main.py")
MAX_STATE_BYTES = 1 << 20
"""Longest JSON text of a state; a span must stay small beside the calls of its attempt."""
STEPS_PER_CHECK = 10_000

States = Mapping[str, Mapping[str, Any]]
"""Name of a state to its content."""


class Snapshots:
    """Takes the states that a configuration names."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._settings = config.harness.snapshots

    def take(self, task: Task, folder: Path, *, before: bool) -> States:
        """Every state now. Raises HarnessError when one cannot be taken before the attempt."""
        states: dict[str, Mapping[str, Any]] = {WORKSPACE: self._files(folder)}
        for name, work in self._works(task, folder):
            try:
                states[name] = work()
            except (HarnessError, sqlite3.Error, OSError, ValueError) as error:
                if before:
                    raise HarnessError(f"harness.snapshots: {name!r} cannot be taken: {error}") from None
                states[name] = {"error": str(error) or type(error).__name__}
        return states

    def _works(self, task: Task, folder: Path) -> Iterable[tuple[str, Callable[[], dict[str, Any]]]]:
        for name, lite in self._settings.sqlite.items():
            yield name, lambda lite=lite: _sqlite_rows(lite, task, folder, self._settings)  # type: ignore[misc]
        for name, post in self._settings.postgres.items():
            yield name, lambda post=post: _postgres_rows(post, self._settings)  # type: ignore[misc]
        if self._settings.callable:
            yield CALLABLE, lambda: self._call(task, folder)

    def _files(self, folder: Path) -> dict[str, Any]:
        state = snapshot(folder)
        for path, entry in state["files"].items():
            if any(fnmatch.fnmatchcase(path, pattern) for pattern in self._settings.content):
                entry.update(_content(folder / path, self._settings.max_content_bytes))
        return state

    def _call(self, task: Task, folder: Path) -> dict[str, Any]:
        file, function = callable_of(self._config)
        limit_s = self._settings.timeout_s
        try:
            done = subprocess.run(
                [sys.executable, "-P", str(CAPTURE), str(file), function],
                input=json.dumps({"task": task_dict(task), "workspace": str(folder)}).encode(),
                capture_output=True,
                timeout=limit_s,
                env=clean_environment(self._config, os.environ),
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise HarnessError(f"{function} took more than {limit_s:g} s") from None
        if done.returncode:
            raise HarnessError(done.stderr.decode(errors="replace").strip()[-500:] or f"exit code {done.returncode}")
        if len(done.stdout) > MAX_STATE_BYTES:
            raise HarnessError(f"{function} returned {len(done.stdout)} bytes of JSON; keep it under {MAX_STATE_BYTES}")
        return {"value": json.loads(done.stdout)}


def spans_of(attempt: Attempt, before: States, begun_at: float, after: States) -> list[Span]:
    """The states of an attempt as spans."""
    return [
        Span(
            id=new_id("span"), rollout_id=attempt.rollout_id, attempt_id=attempt.id, name=name, kind=kind,
            attributes=state, started_at=at, ended_at=at,
        )
        for kind, states, at in (("state_before", before, begun_at), ("state_after", after, time.time()))
        for name, state in states.items()
    ]  # fmt: skip


def check_snapshots(config: Config) -> None:
    """Raise HarnessError for snapshots that could never be taken. Runs before the first rollout."""
    settings = config.harness.snapshots
    names = [WORKSPACE, CALLABLE, *settings.sqlite, *settings.postgres]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise HarnessError(f"harness.snapshots: the name {twice!r} is taken; give the query another one")
    for name, lite in settings.sqlite.items():
        if not lite.path or not lite.query:
            raise HarnessError(f"harness.snapshots.sqlite.{name} needs path and query")
    for name, post in settings.postgres.items():
        if not post.url_env or not post.query:
            raise HarnessError(f"harness.snapshots.postgres.{name} needs url_env and query")
        if not os.environ.get(post.url_env):
            raise HarnessError(f"harness.snapshots.postgres.{name}.url_env names {post.url_env}, which is not set")
        try:
            postgres.load()
        except VerifierError as error:
            raise HarnessError(f"harness.snapshots.postgres.{name}: {error}") from None
    if settings.callable:
        callable_of(config)


def callable_of(config: Config) -> tuple[Path, str]:
    """(file, function) of `harness.snapshots.callable`. Raises HarnessError."""
    value = config.harness.snapshots.callable
    name, _, function = value.rpartition(":")
    file = config.resolve(name)
    if not name.endswith(".py") or not function.isidentifier() or not file.is_file():
        raise HarnessError(f"harness.snapshots.callable = {value!r} is not file.py:function, or there is no {file}")
    return file, function


def _content(path: Path, max_bytes: int) -> dict[str, Any]:
    """The text of a small regular file; nothing for others."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= max_bytes:
            return {"text": path.read_text(encoding="utf-8")}
    return {}


def _sqlite_rows(lite: SqliteSnapshot, task: Task, folder: Path, settings: SnapshotsConfig) -> dict[str, Any]:
    path = folder / fill(lite.path, task.input, "harness.snapshots.sqlite path")
    if not path.is_file():
        raise HarnessError(f"no database {path}")
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=settings.timeout_s)
    deadline = time.monotonic() + settings.timeout_s
    try:
        connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS_PER_CHECK)
        return _rows(connection.execute(lite.query), settings.max_rows)
    finally:
        connection.close()


def _postgres_rows(post: PostgresSnapshot, settings: SnapshotsConfig) -> dict[str, Any]:
    url = os.environ.get(post.url_env, "")
    try:
        answer = postgres.ask(url, post.query, max_rows=settings.max_rows, timeout_s=settings.timeout_s)
    except VerifierError as error:
        raise HarnessError(str(error)) from None
    if answer.rows is None:
        raise HarnessError(answer.error)
    return _rows(answer.rows, settings.max_rows, num_more=answer.num_rows - len(answer.rows))


def _rows(cursor: Iterable[Any], max_rows: int, *, num_more: int = 0) -> dict[str, Any]:
    """Rows as lists of JSON values, the first within `max_rows` and MAX_STATE_BYTES; the rest counted."""
    rows: list[list[Any]] = []
    num_rows, left_bytes = num_more, MAX_STATE_BYTES
    for row in cursor:
        num_rows += 1
        if len(rows) < max_rows and left_bytes > 0:
            plain = [_plain(value) for value in row]
            left_bytes -= len(json.dumps(plain))
            if left_bytes >= 0:
                rows.append(plain)
    state: dict[str, Any] = {"rows": rows, "num_rows": num_rows}
    if num_rows > len(rows):
        state["num_unlisted"] = num_rows - len(rows)
    return state


def _plain(value: Any) -> Any:
    """A JSON value: bytes in hexadecimal, what else JSON does not know (decimals, NaN, infinity) as text."""
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
