"""Task files and demonstration files: JSON Lines in, checked records out.

A task file that cannot be used is refused as a whole; the message names the file, the line and the field.
Nothing is skipped but empty lines, which carry nothing. Does not decide which split is used for what.
"""

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from leyden.base.errors import RecordError, TaskError
from leyden.base.records import Split, Task, check_id, to_json

TASK_KEYS = ("id", "split", "domain", "input", "answer", "purpose")
"""Keys of a line of a task file."""
DEMO_KEYS = ("task", "messages", "policy")
"""Keys of a line of a demonstration file."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a message of a demonstration may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """One approved demonstration."""

    task: str
    """Id of the task it solves."""
    messages: Sequence[Mapping[str, Any]]
    """The conversation; the last message is the assistant's and not empty."""
    policy: str = ""
    """Whose words the last message are to be."""


def load_tasks(path: Path, *, split: Split | None = None) -> list[Task]:
    """Tasks of a JSON Lines file, in its order.

    `split` is what the file is used for: a line without one belongs to it (to `train` when None), a line of
    another split is refused. Raises TaskError.
    """
    tasks: list[Task] = []
    lines: dict[str, int] = {}
    for number, row in _rows(path, "task"):
        where = f"{path}, line {number}"
        _check_keys(row, TASK_KEYS, where)
        task = _task(row, where, split)
        if task.id in lines:
            raise TaskError(f"{where}: id {task.id!r} is also on line {lines[task.id]}; ids are unique within a file")
        lines[task.id] = number
        tasks.append(task)
    return tasks


def load_demos(path: Path, trained: Sequence[str] = ()) -> list[Demo]:
    """Demonstrations of a JSON Lines file, in its order. Raises TaskError.

    `trained` are the policies that may learn from them: every one is then for one of these, and one that says for whom
    only where there are several.
    """
    demos: list[Demo] = []
    for number, row in _rows(path, "demonstration"):
        where = f"{path}, line {number}"
        _check_keys(row, DEMO_KEYS, where)
        task = row.get("task")
        task_id = task.get("id") if isinstance(task, Mapping) else task
        if not isinstance(task_id, str) or not task_id:
            raise TaskError(f"{where}: 'task' is {task!r}; give the id of the task, or an object with one")
        policy = row.get("policy", "")
        if not isinstance(policy, str):
            raise TaskError(f"{where}: 'policy' is {policy!r}; give the name of a policy")
        messages = _messages(row.get("messages"), where)
        demos.append(Demo(task=task_id, messages=messages, policy=_learner(policy, trained, where)))
    return demos


def _learner(policy: str, trained: Sequence[str], where: str) -> str:
    """Which of the policies that are trained a demonstration is for."""
    if not trained or policy in trained:
        return policy
    names = ", ".join(trained)
    if policy:
        raise TaskError(
            f"{where}: 'policy' is {policy!r}, which this run does not train (it trains {names}); name one that it "
            "trains, or remove the line"
        )
    if len(trained) > 1:
        raise TaskError(
            f"{where}: 'policy' is missing, and {names} are trained together; say which of them imitates it"
        )
    return trained[0]


def check_splits(train: Sequence[Task], holdout: Sequence[Task]) -> None:
    """Raise TaskError when a task stands in both, by id or by identical input."""
    ids = {task.id for task in train}
    inputs = {to_json(task.input): task.id for task in train}
    for task in holdout:
        if task.id in ids:
            raise TaskError(f"task {task.id!r} is in the training tasks and in the holdout; take it out of one of them")
        twin = inputs.get(to_json(task.input))
        if twin is not None:
            raise TaskError(
                f"holdout task {task.id!r} has the same input as training task {twin!r}; what was trained on "
                "cannot show a gain: take it out of one of them"
            )


def fingerprint(tasks: Iterable[Task]) -> str:
    """Hash of what is asked and how it is checked: ids, splits, domains, inputs and answers, in any order."""
    lines = sorted(to_json([task.id, task.split, task.domain, dict(task.input), task.answer]) for task in tasks)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _rows(path: Path, what: str) -> list[tuple[int, Mapping[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskError(f"no {what} file {path}; paths are relative to the configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read as UTF-8 text: {error}") from error
    rows: list[tuple[int, Mapping[str, Any]]] = []
    # Not splitlines(): it also cuts at U+2028 and its like, which JSON allows inside strings.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
        except ValueError as error:
            reason = (
                str(error) if not isinstance(error, json.JSONDecodeError) else f"{error.msg} at column {error.colno}"
            )
            raise TaskError(f"{path}, line {number}: not JSON ({reason}); each line is one object") from None
        if not isinstance(row, dict):
            raise TaskError(f"{path}, line {number}: a {type(row).__name__}, not an object; each line is one object")
        rows.append((number, row))
    if not rows:
        raise TaskError(f"{path} holds no {what}; write one JSON object per line")
    return rows


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} appears twice in one object")
    return row


def _check_keys(row: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in row:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise TaskError(f"{where}: unknown key {key!r}; {hint}")


def _task(row: Mapping[str, Any], where: str, split: Split | None) -> Task:
    for key in ("id", "input"):
        if key not in row:
            raise TaskError(f"{where}: 'id' and 'input' are needed, {key!r} is missing")
    try:
        task_id = check_id(row["id"], "id")
    except RecordError as error:
        raise TaskError(f"{where}: {error}") from None
    if not isinstance(row["input"], dict):
        raise TaskError(f"{where}: 'input' is a {type(row['input']).__name__}; give an object of named fields")
    for key in ("domain", "purpose"):
        if not isinstance(row.get(key, ""), str):
            raise TaskError(f"{where}: {key!r} is {row[key]!r}; give a string")
    return Task(
        id=task_id,
        split=_split(row.get("split"), where, split),
        domain=row.get("domain", ""),
        input=row["input"],
        answer=row.get("answer"),
        purpose=row.get("purpose", "train"),
    )


def _split(value: object, where: str, used_as: Split | None) -> Split:
    names: tuple[Literal["train", "val", "holdout"], ...] = get_args(Split)
    if value is None:
        return used_as or "train"
    for name in names:
        if value == name and used_as in (None, name):
            return name
    if value in names:
        raise TaskError(f"{where}: 'split' is {value!r}, but this file is used as {used_as!r}; mend one of the two")
    raise TaskError(f"{where}: 'split' is {value!r}; it is one of {', '.join(names)}")


def _messages(value: object, where: str) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list) or not value:
        raise TaskError(f"{where}: 'messages' is no list of messages; give at least one, the last from the assistant")
    for position, message in enumerate(value):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise TaskError(f"{where}: messages[{position}] has no 'role' out of {', '.join(ROLES)}: {message!r}")
    last = value[-1]
    if last["role"] != "assistant":
        raise TaskError(
            f"{where}: the last message is from {last['role']!r}; a demonstration ends with the assistant's"
        )
    if not last.get("content") and not last.get("tool_calls"):
        raise TaskError(f"{where}: the assistant's last message is empty; there is nothing to learn from it")
    return value
