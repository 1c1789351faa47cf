"""A second opinion on what the rules call `reasoning`: a model reads the transcript and names a category.

Promises: an answer that names no category, and a judge that fails, leave the finding of the rules as it was, and both
are counted. The judge only ever sees failures that no rule explained. Does not know how to reach a model: `ask` does.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from leyden.base.errors import EngineError
from leyden.base.records import Trace
from leyden.release.diagnosis.base import CATEGORIES, Category, Finding, shorten

Ask = Callable[[str], str]
"""Prompt in, answer out. Raises EngineError when there is none."""

MAX_CHARS = 6000
"""Of the transcript that the judge reads: its beginning and its end."""

_QUESTION = """An AI agent failed at a task. Say why, as one of these categories:
- data: what it needed was missing from what it was given or retrieved
- tool: it called the wrong tool or used one wrongly, or a tool failed
- format: what it wrote could not be used because of its form
- execution: what it produced did not run
- budget: it ran out of time, context or tokens
- infrastructure: something around the agent broke
- reasoning: it had what it needed and drew the wrong conclusion
Answer with one JSON object and nothing else: {"category": "...", "reason": "one sentence"}

Transcript:
"""


@dataclass(slots=True)
class Judge:
    """Asks, and counts what came of it."""

    ask: Ask
    """How to reach the model."""
    num_asked: int = 0
    """Failures that it was shown."""
    num_unusable: int = 0
    """Answers without a category, and failures of the judge."""

    def refine(self, trace: Trace, finding: Finding) -> Finding:
        """`finding`, or what the judge says instead of `reasoning`."""
        if finding.category != "reasoning":
            return finding
        self.num_asked += 1
        try:
            category, reason = _read(self.ask(_QUESTION + transcript(trace)))
        except (EngineError, ValueError):
            self.num_unusable += 1
            return finding
        return Finding(rule="judge", category=category, evidence=shorten(reason))


def transcript(trace: Trace) -> str:
    """What was said, for a reader: the messages of the last call and its answer, cut in the middle."""
    if not trace.calls:
        return "(no model call)"
    last = trace.calls[-1]
    messages = last.request.get("messages") or [{"role": "user", "content": last.request.get("prompt", "")}]
    lines = [f"{m.get('role', '?')}: {m.get('content')}" for m in messages if isinstance(m, dict)]
    lines += [f"assistant: {choice.text}" for choice in last.choices[:1]]
    text = "\n".join(lines)
    return text if len(text) <= MAX_CHARS else f"{text[: MAX_CHARS // 2]}\n[...]\n{text[-MAX_CHARS // 2 :]}"


def _read(answer: str) -> tuple[Category, str]:
    start, end = answer.find("{"), answer.rfind("}")
    tree = json.loads(answer[start : end + 1])
    for category in CATEGORIES:
        if tree.get("category") == category:
            return category, str(tree.get("reason") or "no reason given")
    raise ValueError(f"category {tree.get('category')!r} is none of {CATEGORIES}")
