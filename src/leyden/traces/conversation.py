"""The conversation of a request for people and verifiers, whichever API it came through. Pure.

Content stays in the form of its API (text, parts, blocks, items); only where the messages stand is evened out.
"""

from collections.abc import Mapping
from typing import Any


def messages_of(request: Mapping[str, Any]) -> list[Any]:
    """The messages of a request, instructions first; empty for a plain prompt."""
    messages = request.get("messages")
    if isinstance(messages, list):
        return [*_instructions(request.get("system")), *messages]
    given = request.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if isinstance(given, list):
        return [*_instructions(request.get("instructions")), *given]
    return []


def _instructions(given: Any) -> list[Any]:
    return [{"role": "system", "content": given}] if given else []
