"""Why a prompt does not extend an earlier call: the first differing position and a class. Pure; no I/O.

It promises the exact position; the class is a diagnosis, made from messages and text where they are given,
and `unknown` where they do not tell. Nothing is repaired: a diverging call is trained as what it is, at the
price of computing its prompt again.

    extends            one is a prefix of the other: nothing is different, nothing is computed twice
    retokenized        the same text in other ids
    template           the same messages rendered differently (turns re-rendered, reasoning stripped)
    compaction         the same conversation with messages rewritten, shortened or left out
    new_conversation   another first user message, or not even the first token in common
    unknown            none of these can be shown

Letters: S = prompt and completion tokens of the earlier call, P = prompt tokens of the later one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from leyden.base.records import Call, IntArray
from leyden.traces.forest import build_forest

Message = Mapping[str, Any]
Decode = Callable[[list[int]], str]


class Kind(StrEnum):
    """How a later prompt relates to an earlier call."""

    EXTENDS = "extends"
    RETOKENIZED = "retokenized"
    TEMPLATE = "template"
    COMPACTION = "compaction"
    NEW_CONVERSATION = "new_conversation"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """What one call has to do with the earlier call that it shares most with."""

    kind: Kind
    """See the module."""
    position: int
    """First place where the ids differ; the shorter length if none does."""
    earlier_call: str = ""
    """Id, where calls were compared."""
    later_call: str = ""
    """Id, where calls were compared."""


def divergence(
    earlier: IntArray,
    later: IntArray,
    *,
    earlier_prompt_len: int = 0,
    earlier_messages: Sequence[Message] | None = None,
    later_messages: Sequence[Message] | None = None,
    decode: Decode | None = None,
) -> Divergence:
    """Classify the prompt `later` (P,) against prompt and completion of one earlier call, `earlier` (S,).

    `earlier_messages` are those of the earlier request with its answer appended. Without messages, a
    difference inside the earlier completion counts as `template`, since only the rendering of that turn can
    have changed.
    """
    num = min(len(earlier), len(later))
    differs = np.flatnonzero(earlier[:num] != later[:num])
    if not differs.size:
        return Divergence(kind=Kind.EXTENDS, position=num)
    position = int(differs[0])
    kind = Kind.UNKNOWN
    # Text before the difference is common, so comparing the rest is enough, and linear.
    if decode is not None and _same_text(decode(earlier[position:].tolist()), decode(later[position:].tolist())):
        kind = Kind.RETOKENIZED
    elif earlier_messages and later_messages:
        kind = _by_messages(earlier_messages, later_messages)
    elif position == 0:
        kind = Kind.NEW_CONVERSATION
    elif 0 < earlier_prompt_len <= position:
        kind = Kind.TEMPLATE
    return Divergence(kind=kind, position=position)


def survey(calls: Sequence[Call], *, decode: Decode | None = None) -> list[Divergence]:
    """For each call of an attempt but the first with ids, how it relates to the earlier calls; in time order.

    A call extends the earlier ones if its prompt runs along a whole earlier call, or within one. Otherwise it
    is classified against the latest call among those that share the longest prefix with it. Linear in all
    tokens.
    """
    known = sorted((c for c in calls if len(c.prompt_ids)), key=lambda call: (call.seq, call.id))
    owners: list[int] = []
    rows: list[IntArray] = []
    for c, call in enumerate(known):
        for completion_ids in [choice.completion_ids for choice in call.choices] or [call.prompt_ids[:0]]:
            owners.append(c)
            rows.append(np.concatenate((call.prompt_ids, completion_ids)))
    forest = build_forest(rows)
    latest_U = np.full(len(forest.tokens_U), -1, np.int32)  # last call so far that runs through the token
    ends_U = np.zeros(len(forest.tokens_U), np.bool_)  # whether a call so far ends here
    found: list[Divergence] = []
    row = 0
    for c, call in enumerate(known):
        path = forest.paths[row][: len(call.prompt_ids)]
        if c:
            met = latest_U[path] >= 0
            common = len(path) if met.all() else int(met.argmin())
            if common == len(path) or ends_U[path].any():
                found.append(
                    Divergence(
                        kind=Kind.EXTENDS,
                        position=common,
                        earlier_call=known[int(latest_U[path[common - 1]])].id,
                        later_call=call.id,
                    )
                )
            else:
                earlier = int(latest_U[path[common - 1]]) if common else c - 1
                found.append(_between(known[earlier], call, common, decode))
        while row < len(rows) and owners[row] == c:
            latest_U[forest.paths[row]] = c
            ends_U[forest.paths[row][-1]] = True
            row += 1
    return found


def _between(earlier: Call, later: Call, common: int, decode: Decode | None) -> Divergence:
    """Classify `later` against the choice of `earlier` that it shares `common` tokens with."""
    choices: list[tuple[IntArray, Message | None]] = [
        (np.concatenate((earlier.prompt_ids, choice.completion_ids)), _answer(earlier, place))
        for place, choice in enumerate(earlier.choices)
    ] or [(earlier.prompt_ids, None)]
    ids, answer = next(
        (pair for pair in choices if np.array_equal(pair[0][:common], later.prompt_ids[:common])), choices[0]
    )
    before = _messages(earlier)
    if earlier.dialect == "anthropic" and before and before[-1].get("role") == "assistant":
        before.pop()  # an answer that was begun comes back as one message with what was sampled
    result = divergence(
        ids,
        later.prompt_ids,
        earlier_prompt_len=len(earlier.prompt_ids),
        earlier_messages=[*before, answer] if before and answer else before,
        later_messages=_messages(later),
        decode=decode,
    )
    return Divergence(kind=result.kind, position=result.position, earlier_call=earlier.id, later_call=later.id)


def _messages(call: Call) -> list[Message]:
    messages = call.request.get("messages")
    return [m for m in messages if isinstance(m, Mapping)] if isinstance(messages, list) else []


def _answer(call: Call, place: int) -> Message | None:
    choices = (call.response or {}).get("choices")
    if not isinstance(choices, list) or place >= len(choices) or not isinstance(choices[place], Mapping):
        return None
    message = choices[place].get("message")
    return message if isinstance(message, Mapping) else None


def _essence(message: Message) -> tuple[str, str, str]:
    """What a message says, without what SDKs add or leave out on the way (nulls, annotations, reasoning)."""
    tool_calls = message.get("tool_calls") or []
    return str(message.get("role")), str(message.get("content") or ""), str(tool_calls)


def _same_text(earlier: str, later: str) -> bool:
    return bool(earlier) and later.startswith(earlier)


def _by_messages(earlier: Sequence[Message], later: Sequence[Message]) -> Kind:
    old, new = [_essence(m) for m in earlier], [_essence(m) for m in later]
    if new[: len(old)] == old:
        return Kind.TEMPLATE
    if _first(old, "user") != _first(new, "user"):
        return Kind.NEW_CONVERSATION
    return Kind.COMPACTION if _first(old, "system") == _first(new, "system") else Kind.UNKNOWN


def _first(messages: Sequence[tuple[str, str, str]], role: str) -> str | None:
    return next((content for who, content, _ in messages if who == role), None)
