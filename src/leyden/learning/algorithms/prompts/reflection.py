"""The reflection model: asked over the OpenAI wire format, within its budgets, each reply written down once.

Promises: budgets (calls, tokens, money) are looked at before each call, so at most one call goes past them; a busy or
absent model is asked again a bounded number of times and then stops the search with a LearningError; every reply is in
the journal before it is used, so a search that is gone through again pays for nothing twice. The journal counts towards
the budgets. Does not judge replies; who asked does.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyden.base.config import PriceConfig, PromptsConfig
from leyden.base.errors import LearningError
from leyden.base.posting import Answered, post
from leyden.learning.order import digest

BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Answers after which the same question may be asked again."""
MAX_PAUSE_S = 30.0
"""Longest pause between two tries."""


@dataclass(slots=True)
class Spent:
    """What the reflection model has cost so far."""

    calls: int = 0
    """Replies, those of the journal included."""
    tokens: int = 0
    """Of prompts and replies."""
    usd: float = 0.0
    """By the price of its alias; 0 without one."""


class Reflector:
    """One reflection model and its journal."""

    def __init__(
        self,
        settings: PromptsConfig,
        journal: Path,
        *,
        base_url: Callable[[], str],
        key: str,
        model: str,
        price: PriceConfig | None = None,
        stop_requested: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`base_url` ends before `/chat/completions` and is asked for each time: a gateway may come back elsewhere.

        `stop_requested` raises when the user wants to stop; `check` looks after whoever answers, before each try.
        """
        self._settings = settings
        self._journal = journal
        self._base_url = base_url
        self._key = key
        self._model = model
        self._price = price or PriceConfig()
        self._stop_requested = stop_requested
        self._check = check
        self._replies: dict[str, list[dict[str, Any]]] = {}
        self._asked: dict[str, int] = {}
        self.spent = Spent()
        for row in _rows(journal):
            self._replies.setdefault(row["key"], []).append(row)

    async def ask(self, prompt: str) -> str | None:
        """The reply, empty if it could not be read; None when a budget is used up. Raises LearningError."""
        key = digest(self._model, prompt)
        number = self._asked.get(key, 0)
        known = self._replies.get(key, [])
        if number < len(known):
            row = known[number]
        elif self._exhausted():
            return None
        else:
            row = {"key": key, "prompt": prompt, **await self._reply(prompt)}
            self._replies.setdefault(key, []).append(row)
            with self._journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self._asked[key] = number + 1
        self._count(row)
        text: str = row["reply"]
        return text

    def _exhausted(self) -> bool:
        limits, spent = self._settings, self.spent
        return (
            spent.calls >= limits.max_reflections
            or spent.tokens >= limits.max_reflection_tokens
            or (limits.max_reflection_usd is not None and spent.usd >= limits.max_reflection_usd)
        )

    def _count(self, row: dict[str, Any]) -> None:
        self.spent.calls += 1
        self.spent.tokens += row["prompt_tokens"] + row["completion_tokens"]
        self.spent.usd += self._price.usd(row["prompt_tokens"], row["completion_tokens"])

    async def _reply(self, prompt: str) -> dict[str, Any]:
        """What is written down of a reply. Raises LearningError when no try succeeded."""
        settings = self._settings
        for number in range(settings.reflection_tries):
            self._stop_requested()
            self._check()
            answer = await asyncio.to_thread(self._post, prompt)
            if answer.status == 200:
                return _read(answer, prompt)
            if answer.status is not None and answer.status not in BUSY:
                break
            if number + 1 < settings.reflection_tries:
                await asyncio.sleep(min(settings.reflection_backoff_s * 2**number, MAX_PAUSE_S))
        raise LearningError(
            f"the reflection model {self._model!r} at {self._base_url()} gave no reply in {number + 1} tries: "
            f"{answer}. Everything so far is recorded; go on with "
            f"`leyden train --resume {self._journal.parent}` when it is back"
        )

    def _post(self, prompt: str) -> Answered:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self._settings.reflection_max_tokens,
            "temperature": self._settings.reflection_temperature,
        }
        url = self._base_url().rstrip("/") + "/chat/completions"
        return post(url, body, key=self._key, timeout_s=self._settings.reflection_timeout_s)


def _read(answer: Answered, prompt: str) -> dict[str, Any]:
    """Text and usage of an answer. Where a model reports no usage, four characters count as a token.

    An unreadable answer is an empty reply, which whoever asked counts as garbage.
    """
    text, tree = answer.text() or "", answer.tree()
    usage = tree.get("usage") if isinstance(tree, dict) else None
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")] if isinstance(usage, dict) else []
    known = [count if type(count) is int and count >= 0 else None for count in counts] or [None, None]
    return {
        "reply": text,
        "prompt_tokens": known[0] if known[0] is not None else len(prompt) // 4 + 1,
        "completion_tokens": known[1] if known[1] is not None else len(text) // 4 + 1,
        "time": round(time.time(), 3),
    }


def _rows(journal: Path) -> list[dict[str, Any]]:
    """Whole lines of the journal; one that a killed process left half-written is cut off."""
    if not journal.exists():
        return []
    raw = journal.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        journal.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]
