"""The contract of a built-in verifier: a plain function, its settings, and what it says about itself.

Every member promises: finite numbers; no answer of an agent, however bad, raises; equal evidence gives equal
numbers. What the *task* lacks raises VerifierError: a task without an answer is the set-up's fault, not the
agent's. One conformance suite (`tests/contract/test_reward_library.py`) runs over all members.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from leyden.base.errors import VerifierError

MAX_TEXT_BYTES = 1 << 20
"""Longest text that a member reads of an agent; more is cut, for it decides nothing and costs time."""


class Settings(BaseModel):
    """Settings of a member; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TextSettings(Settings):
    """Settings of a member that looks at what the agent said."""

    source: str = "final_text"
    """`final_text` (the last answer of the model), `stdout` (of the harness), or `file:NAME` in the workspace."""


class AnswerSettings(TextSettings):
    """Settings of a member that compares with the task's answer."""

    answer: str = ""
    """Key of the task's answer to compare with; empty means the whole answer."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that a member may look at."""

    task: Mapping[str, Any]
    """As a verifier function gets it."""
    trace: Mapping[str, Any]
    """As a verifier function gets it."""
    workspace: Path
    """As the agent left it."""
    base_dir: Path = Path(".")
    """Folder of the configuration, for files that settings name."""

    def text(self, source: str) -> str:
        """What the agent said, by `TextSettings.source`; empty when there is nothing to read."""
        if source == "final_text":
            return str(self.trace.get("final_text") or "")[:MAX_TEXT_BYTES]
        if source == "stdout":
            return str(self.trace.get("stdout_tail") or "")[:MAX_TEXT_BYTES]
        return read_text(self.workspace, source.removeprefix("file:"))

    def wanted(self, key: str) -> Any:
        """The task's answer, or its field `key`. Raises VerifierError when there is none."""
        answer = self.task.get("answer")
        if key:
            answer = answer.get(key) if isinstance(answer, Mapping) else None
        if answer is None or answer == "" or answer == []:
            what = f"no {key!r} in its answer" if key else "no answer"
            raise VerifierError(f"task {self.task.get('id')!r} has {what}; there is nothing to compare with")
        return answer


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member(Generic[S]):
    """A built-in verifier."""

    name: str
    """The word after `builtin:`."""
    says: str
    """What it measures, in one line for the docs."""
    settings: type[S]
    """What `[rewards.settings.NAME]` may hold."""
    score: Callable[[Evidence, S], dict[str, float]]
    """Components of one attempt; all their names begin with or equal the member's own."""
    components: tuple[str, ...]
    """Names that `score` gives, always all of them."""
    answer_key: Callable[[S], str | None] = lambda settings: None
    """The key of the answer that it needs, empty for the whole answer; None when it needs no answer."""

    def read(self, tree: Mapping[str, Any]) -> S:
        """Checked settings. Raises VerifierError that names the key and the value."""
        try:
            return self.settings.model_validate(dict(tree))
        except ValidationError as error:
            said = "; ".join(
                f"{'.'.join(map(str, item['loc'])) or self.name} = {item['input']!r}: {item['msg']}"
                for item in error.errors()
            )
            known = ", ".join(self.settings.model_fields) or "none"
            raise VerifierError(f"rewards.settings.{self.name}: {said} (keys: {known})") from None


def read_text(folder: Path, name: str) -> str:
    """A regular file of the workspace as text, empty when there is none; never outside, never through a link."""
    path = folder / name
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
        if not inside or path.is_symlink() or not path.is_file():  # opening a pipe would wait for a writer
            return ""
        with path.open("rb") as file:
            return file.read(MAX_TEXT_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def check_source(source: str) -> None:
    """Raise ValueError for a source that no text comes from."""
    if source in ("final_text", "stdout"):
        return
    name = source.removeprefix("file:")
    if not source.startswith("file:") or not name or name.startswith("/") or ".." in Path(name).parts:
        raise ValueError(f"source {source!r} is none of final_text, stdout, file:NAME (inside the workspace)")


def check_pattern(pattern: str) -> None:
    """Raise ValueError for a regular expression that does not compile."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
