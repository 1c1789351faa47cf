"""Splice mode: the next prompt of an attempt is built from the ids that were served, not from the text again.

Rendering and encoding a conversation anew gives other ids than were sampled whenever the tokenizer has two spellings
of a text, or the template trims, re-prints or strips an earlier turn. A spliced prompt is the prompt and completion
of the longest earlier call that the request repeats, then the end of that turn, then the new messages as the
template renders them. What the engine reads is what it reports, so nothing is guessed later.

Promises: a spliced prompt decodes to what the template says, up to white space inside earlier assistant turns and
the printing of their tool calls; where that does not hold the prompt is rendered as always, and the reason is
counted. A template for which it can never hold is refused when the model is loaded. It never edits ids and never
crosses attempts.

    no_earlier        no earlier call of the attempt ends in a turn that the request repeats
    not_appended      the template renders earlier turns differently once more messages follow
    turn_rewritten    it shows other words for the earlier turn than were sampled (reasoning stripped)
    other_end         the turn ended with another token than the template ends turns with
    stop_string       the turn was cut at a stop string or an extra stop token, so the ids say more than the message

An aborted generation is not remembered, so nothing is spliced behind it.
"""

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError

from leyden.base.errors import ModelUnusable
from leyden.base.records import IntArray
from leyden.learning.backends.embedded.chat import ChatFormat, ChatPrompt, Message, check_messages, check_tool_choice
from leyden.learning.backends.embedded.thinking import PLAIN, Style
from leyden.learning.backends.embedded.tools import parse
from leyden.learning.backends.embedded.wire import Piece

MAX_TOKENS = 16 * 1024 * 1024
"""Ids kept over all attempts, 64 MiB of them; the attempts used longest ago go first."""
MAX_SERVED = 64
"""Calls kept per attempt: best-of-n and sub-agents in between, and no harness goes back further."""

Skip = Literal["no_earlier", "not_appended", "turn_rewritten", "other_end", "stop_string"]
_RENDER_FAULTS = (TemplateError, TypeError, KeyError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a model's chat template does, seen from a conversation of two turns."""

    turn_end: str
    """What follows the words of an assistant turn; begins with the token that ends a generation."""
    end_id: int
    """That token."""
    strips_reasoning: bool
    """Whether thoughts of earlier turns are left out; such turns are then not spliced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A prompt, and what has to be known to splice the next one."""

    prompt: ChatPrompt
    """What the engine reads; `num_shared` of its ids were served before."""
    text: str
    """The rendering of all its messages."""
    facts: tuple[str, ...]
    """One text per message that says all of it."""
    tools: str
    """The tools on offer, as text."""
    skip: Skip | None
    """Why it is not spliced; None if it is."""
    begun: bool = False
    """Whether its last message is the beginning of the answer."""


@dataclass(frozen=True, slots=True)
class _Served:
    """One answered call."""

    facts: tuple[str, ...]
    """Of its messages and of the answer."""
    tools: str
    text: str
    """The rendering of its prompt."""
    ids: IntArray
    """Prompt and completion."""
    num_prompt: int
    ended_by: int | None
    """The end token that was sampled; None where the length ended it."""
    is_cut: bool
    """Whether a stop string or an extra stop token ended it."""


@dataclass(slots=True)
class Counts:
    """What splicing did since the start; read for reports only."""

    num_spliced: int = 0
    """Prompts built from served ids."""
    num_drift_prevented: int = 0
    """Those of them that rendering anew would have given other ids."""
    num_shared_tokens: int = 0
    """Served ids at the beginning of spliced prompts."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Prompts that were rendered instead, by reason."""


class Splicer:
    """Remembers served conversations by attempt and builds prompts from them. Thread-safe."""

    def __init__(self, chat: ChatFormat, tool_parser: str = "none", max_tokens: int = MAX_TOKENS) -> None:
        """Raises ModelUnusable if the template of the model can never be spliced."""
        self.chat, self.tool_parser = chat, tool_parser
        self.probe = probe(chat)
        self.counts = Counts()
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._attempts: OrderedDict[str, list[_Served]] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(
        self,
        attempt: str,
        messages: Any,
        tools: Sequence[Message] | None = None,
        tool_choice: Any = None,
        style: Style = PLAIN,
    ) -> Prepared:
        """The prompt for the next assistant turn of an attempt, spliced where it can be. Raises RequestRefused."""
        check_tool_choice(tool_choice, tools)
        checked = check_messages(messages)
        prompt, text = self.chat.encode_checked(checked, tools, style)
        facts = tuple(_fact(message) for message in checked)
        tools_text = json.dumps(list(tools or ()), sort_keys=True)
        ids, skip = self._splice(attempt, checked, tools, facts, tools_text, text)
        with self._lock:
            if ids is None:
                self.counts.skipped[skip or ""] += 1
            else:
                num_shared, made = ids
                self.counts.num_spliced += 1
                self.counts.num_drift_prevented += made != prompt.ids
                self.counts.num_shared_tokens += num_shared
                prompt = replace(prompt, ids=made, num_shared=num_shared)
        return Prepared(prompt=prompt, text=text, facts=facts, tools=tools_text, skip=skip, begun=style.begun)

    def remember(self, attempt: str, prepared: Prepared, piece: Piece) -> None:
        """Keep a whole answer that was given; an aborted one is forgotten."""
        if piece.finish_reason == "abort" or not piece.ids:
            return
        last, is_cut = piece.ids[-1], piece.stop_reason is not None
        served = _Served(
            facts=_facts_after(prepared, piece),
            tools=prepared.tools,
            text=prepared.text,
            ids=np.asarray([*prepared.prompt.ids, *piece.ids], np.int32),
            num_prompt=len(prepared.prompt.ids),
            ended_by=last if last in self.chat.loaded.eos_ids and not is_cut else None,
            is_cut=is_cut,
        )
        with self._lock:
            known = self._attempts.setdefault(attempt, [])
            self._attempts.move_to_end(attempt)
            known.append(served)
            self._num_tokens += len(served.ids)
            while len(known) > MAX_SERVED:
                self._num_tokens -= len(known.pop(0).ids)
            while self._num_tokens > self._max_tokens and len(self._attempts) > 1:
                _, gone = self._attempts.popitem(last=False)
                self._num_tokens -= sum(len(one.ids) for one in gone)

    def _splice(
        self,
        attempt: str,
        checked: list[dict[str, Any]],
        tools: Sequence[Message] | None,
        facts: tuple[str, ...],
        tools_text: str,
        text: str,
    ) -> tuple[tuple[int, list[int]] | None, Skip | None]:
        """((served ids at the beginning, all ids), None), or (None, why not)."""
        served = self._longest(attempt, facts, tools_text)
        if served is None:
            return None, "no_earlier"
        if served.is_cut:
            return None, "stop_string"
        if served.ended_by is not None and served.ended_by != self.probe.end_id:
            return None, "other_end"
        num = len(served.facts)
        try:
            turn = self.chat.render_checked(checked[:num], tools, add_generation_prompt=False)
        except _RENDER_FAULTS:
            return None, "not_appended"
        end = self.probe.turn_end
        if not (text.startswith(turn) and turn.startswith(served.text) and turn.endswith(end)):
            return None, "not_appended"
        shown = turn[len(served.text) : len(turn) - len(end)]
        if not self._says_the_same(shown, served):
            return None, "turn_rewritten"
        # The end token stands at a border that no token crosses, so what follows can be encoded with it alone.
        tail = self.chat.loaded.encode(end + text[len(turn) :])
        if tail[:1] != [self.probe.end_id]:
            return None, "other_end"
        ids = served.ids.tolist()
        return (len(ids), ids + (tail if served.ended_by is None else tail[1:])), None

    def _longest(self, attempt: str, facts: tuple[str, ...], tools_text: str) -> _Served | None:
        """The served conversation that covers most of the request's messages, the newest of equals."""
        with self._lock:
            known = list(self._attempts.get(attempt, ()))
        fitting = [
            one
            for one in known
            if len(one.facts) < len(facts) and one.tools == tools_text and one.facts == facts[: len(one.facts)]
        ]
        return max(reversed(fitting), key=lambda one: len(one.facts), default=None)

    def _says_the_same(self, shown: str, served: _Served) -> bool:
        """Whether the template's words for a turn are the sampled ones but for white space and printing of calls."""
        sampled = self.chat.loaded.decode(served.ids[served.num_prompt :].tolist(), skip_special=True)
        if _words(shown) == _words(sampled):
            return True
        calls = _calls(shown, self.tool_parser)
        return calls is not None and calls == _calls(sampled, self.tool_parser)


@dataclass(slots=True)
class Turn:
    """One request of an attempt while it is answered."""

    splicer: Splicer
    attempt: str
    prepared: Prepared
    said: dict[int, Piece] = field(default_factory=dict)
    """Of each choice, everything so far."""

    def hear(self, piece: Piece) -> None:
        """Grow the answer of a choice; at its end the next prompt of the attempt can be built on it."""
        so_far = self.said.setdefault(piece.index, Piece(piece.index, "", [], [], []))
        so_far.text += piece.text
        so_far.reasoning += piece.reasoning
        so_far.calls += piece.calls
        so_far.ids = [*so_far.ids, *piece.ids]
        if piece.finish_reason is not None:
            so_far.finish_reason, so_far.stop_reason = piece.finish_reason, piece.stop_reason
            self.splicer.remember(self.attempt, self.prepared, so_far)


def probe(chat: ChatFormat) -> Probe:
    """What the chat template does with turns. Raises ModelUnusable, by name, for one that cannot be spliced."""
    asked: list[dict[str, Any]] = [{"role": "user", "content": "first"}]
    said = [*asked, {"role": "assistant", "content": "second"}]
    more = [*said, {"role": "user", "content": "third"}]
    where = f"policies.NAME.splice = true, but the chat template of {chat.loaded.source}"
    advice = "set splice = false, or policies.NAME.chat_template to one that appends"
    try:
        prompt = chat.render_checked(asked, None, add_generation_prompt=True)
        turn = chat.render_checked(said, None, add_generation_prompt=False)
        whole = chat.render_checked(more, None, add_generation_prompt=True)
        strips_reasoning = chat.strips_reasoning()
    except _RENDER_FAULTS as error:
        raise ModelUnusable(f"{where} cannot render a conversation of two turns: {error}; {advice}") from error
    if not (whole.startswith(turn) and turn.startswith(prompt + "second")):
        raise ModelUnusable(
            f"{where} is not prefix-preserving: a finished turn begins {turn!r}, the prompt it answered is "
            f"{prompt!r}, and with a next turn it is {whole!r}; {advice}"
        )
    end = turn[len(prompt) + len("second") :]
    ids = chat.loaded.encode(end) if end else []
    if not ids or ids[0] not in chat.loaded.eos_ids:
        raise ModelUnusable(
            f"{where} does not end an assistant turn with the token that ends a generation "
            f"(ids {list(chat.loaded.eos_ids)}); it ends {end!r}; {advice}"
        )
    return Probe(turn_end=end, end_id=ids[0], strips_reasoning=strips_reasoning)


def _fact(message: Mapping[str, Any]) -> str:
    """All of a checked message that a template can show, as one text."""
    return json.dumps(message, sort_keys=True, ensure_ascii=False)


def _facts_after(prepared: Prepared, piece: Piece) -> tuple[str, ...]:
    """The facts of a conversation with its answer, once a harness sends it back: one message with what began it."""
    before, begun = prepared.facts, ""
    if prepared.begun:
        begun, before = json.loads(before[-1])["content"], before[:-1]
    message: dict[str, Any] = {"role": "assistant", "content": begun + piece.text}
    if piece.reasoning:
        message["reasoning_content"] = piece.reasoning
    if piece.calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in piece.calls
        ]
    return (*before, _fact(message))


def _words(text: str) -> str:
    return "".join(text.split())


def _calls(text: str, parser: str) -> tuple[str, list[tuple[str, Any]]] | None:
    """(words outside of calls, calls) of a turn; None if it has no calls."""
    content, calls, malformed = parse(text, parser)
    if not calls or malformed:
        return None
    return _words(content), [(call.name, json.loads(call.arguments)) for call in calls]
