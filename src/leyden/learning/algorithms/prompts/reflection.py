"""The reflection model: asked over the OpenAI wire format, within its budgets, each reply written down once.

Promises: budgets (calls, tokens, money) are looked at before each call, so at most one call goes past them; a busy or
absent model is asked again a bounded number of times and then stops the search with a LearningError; every reply is in
the journal before it is used, so a search that is gone through again pays for nothing twice. The journal counts towards
the budgets. Does not judge replies; who asked does.
"""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leyden.base.config import PromptsConfig
from leyden.base.errors import LearningError
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
    cost: float = 0.0
    """In the currency of the prices."""


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
            or spent.cost >= limits.max_reflection_cost
        )

    def _count(self, row: dict[str, Any]) -> None:
        self.spent.calls += 1
        self.spent.tokens += row["prompt_tokens"] + row["completion_tokens"]
        prices = self._settings.reflection_input_price, self._settings.reflection_output_price
        self.spent.cost += (row["prompt_tokens"] * prices[0] + row["completion_tokens"] * prices[1]) / 1e6

    async def _reply(self, prompt: str) -> dict[str, Any]:
        """What is written down of a reply. Raises LearningError when no try succeeded."""
        settings = self._settings
        for number in range(settings.reflection_tries):
            self._stop_requested()
            self._check()
            status, raw = await asyncio.to_thread(self._post, prompt)
            if status == 200:
                return _read(raw, prompt)
            if status is not None and status not in BUSY:
                break
            if number + 1 < settings.reflection_tries:
                await asyncio.sleep(min(settings.reflection_backoff_s * 2**number, MAX_PAUSE_S))
        what = "did not answer" if status is None else f"answered status {status}"
        raise LearningError(
            f"the reflection model {self._model!r} at {self._base_url()} {what} in {number + 1} tries: "
            f"{raw[:300].decode('utf-8', 'replace')}. Everything so far is recorded; go on with "
            f"`leyden train --resume {self._journal.parent}` when it is back"
        )

    def _post(self, prompt: str) -> tuple[int | None, bytes]:
        """(status, body) of one try; status None without an answer."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self._settings.reflection_max_tokens,
            "temperature": self._settings.reflection_temperature,
        }
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        url = self._base_url().rstrip("/") + "/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self._settings.reflection_timeout_s) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except (OSError, ValueError) as error:
            return None, str(error).encode()


def _read(raw: bytes, prompt: str) -> dict[str, Any]:
    """Text and usage of an answer. Where a model reports no usage, four characters count as a token."""
    text: Any = ""
    usage: Any = None
    try:
        tree = json.loads(raw)
        text = tree["choices"][0]["message"]["content"]
        usage = tree.get("usage")
    except (ValueError, KeyError, IndexError, TypeError):
        pass  # an unreadable answer is an empty reply, which whoever asked counts as garbage
    text = text if isinstance(text, str) else ""
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
