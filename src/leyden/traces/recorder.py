"""The only road into the trace tables: redact, check, encode, append. Every method returns when the row is
queued; its future is done when the row is durable.

Requests and prompts are stored as differences to an earlier durable call of the same attempt, so T turns that
only append cost O(T). A call of which a redaction changed any text, or whose tokens may not be kept, is
`altered`: its ids and log-probabilities are text in other letters and are not stored.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from sqlalchemy import Table, select

from leyden.base.errors import RecordError
from leyden.base.records import CallCompletion, CallIntent, Choice, Provenance, Reward, Span, check_reward
from leyden.store import schema
from leyden.store.base import Receipt, Row, Store, promise, resolve, started
from leyden.traces.numbers import Numbers, Sampling, insert_numbered
from leyden.traces.prefixes import Body, Link, Prefixes, Prompt
from leyden.traces.privacy import KEEP, Privacy
from leyden.traces.privacy.redact import WITHHELD, redact, strip_tokens
from leyden.traces.rows import (
    REPEATED_FIELDS,
    call_row,
    canonical,
    choice_rows,
    completion_row,
    first_completion,
    live_row,
    messages_field,
    span_row,
)

MAX_OPEN = 65_536
"""Calls between intent and completion that are remembered; far more than can be in flight."""
MAX_PURPOSES = 65_536
"""Rollouts whose purpose is remembered."""
REFUSAL = "altered"
"""Why the tokens of a changed call are refused for training."""

_NO_IDS = np.zeros(0, np.int32)
_NO_LOGPROBS = np.zeros(0, np.float32)


class _Open(NamedTuple):
    """What a completion must know of its intent."""

    attempt_id: str | None
    allowed: frozenset[str]
    altered: bool


class Recorder:
    """Writes what happened. One per process; thread-safe."""

    def __init__(self, store: Store, privacy: Privacy = KEEP) -> None:
        self._store = store
        self._privacy = privacy
        self._prefixes = Prefixes()
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._purposes: OrderedDict[str, str | None] = OrderedDict()
        self._lock = threading.Lock()

    def intent(self, intent: CallIntent) -> "Future[None]":
        """Record that a request is about to be sent. In the future: Conflict for an id or an occurrence that
        exists."""
        future, receipt = promise()
        self.hand_in_intent(intent, receipt)
        self._store.flush()
        return future

    def hand_in_intent(self, intent: CallIntent, receipt: Receipt, *, lazily: bool = False) -> None:
        """Like `intent`, with a receipt instead of a future, and durable after `Store.flush` only; `lazily` as in
        `Store.hand_in`."""
        row, done = self._intent_row(intent)
        parts: list[tuple[Table, Sequence[Row]]] = [(schema.calls, [row])]
        if intent.live is not None:
            parts.append((schema.live_calls, [live_row(intent.call_id, intent.live)]))
        self._store.hand_in(parts, _then(done, receipt), lazily=lazily)

    def numbered_intent(self, intent: CallIntent, sampling: Sampling) -> "Future[Numbers]":
        """Like `intent` for a call of an attempt whose place and occurrence are given by the store, and returned; what
        the intent says of them does not count. `sampling` makes the sampling parameters of the place."""
        future: Future[Numbers] = started()
        told: list[Numbers] = []
        self.hand_in_numbered(
            intent, sampling, told.append, lambda failure: resolve(future, told[-1] if told else None, failure)
        )
        self._store.flush()
        return future

    def hand_in_numbered(
        self, intent: CallIntent, sampling: Sampling, tell: Callable[[Numbers], None], receipt: Receipt, *,
        lazily: bool = False,
    ) -> None:  # fmt: skip
        """Like `numbered_intent`, with a receipt; before it comes, `tell` gets the numbers, those of the last call
        counting, since a transaction may be repeated."""
        row, done = self._intent_row(intent)

        def kept(seq: int) -> Mapping[str, Any]:
            made = sampling(seq)
            return made if self._privacy.redactor is None else self._cleaned(made, True)[0]

        self._store.hand_in_job(
            lambda connection: tell(insert_numbered(connection, row, kept)), _then(done, receipt), lazily=lazily
        )

    def _intent_row(self, intent: CallIntent) -> tuple[dict[str, Any], Callable[[], None]]:
        """(the row of an intent, what to do once it is durable)."""
        allowed = self._allowed(intent.rollout_id)
        request, altered = self._cleaned(intent.request, "request" in allowed)
        if intent.slots:  # what the engine read instead holds what the request held
            slots, changed = self._cleaned(intent.slots, "request" in allowed)
            intent, altered = structs.replace(intent, slots=slots), altered or changed
        body = _body(intent.call_id, request)
        attempt_id = intent.attempt_id
        link = Link() if attempt_id is None else self._prefixes.body_parent(attempt_id, body)
        if self._privacy.redactor is not None:
            sampling, _ = self._cleaned(intent.sampling, True)  # a stop text is text as well
            intent = structs.replace(intent, sampling=sampling)
        row = call_row(intent, _difference(request, link), link.parent, link.num_messages)
        with self._lock:
            self._open[intent.call_id] = _Open(attempt_id, allowed, altered)
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return row, lambda: self._prefixes.add_body(attempt_id, body) if attempt_id is not None else None

    def completion(self, completion: CallCompletion) -> "Future[None]":
        """Record how a call ended, with every choice, all or nothing.

        Raises RecordError if ids and log-probabilities of a choice do not belong together. In the future:
        Conflict if the call has a completion, NotFound if it has no intent.
        """
        future, receipt = promise()
        self.hand_in_completion(completion, receipt)
        self._store.flush()
        return future

    def hand_in_completion(self, completion: CallCompletion, receipt: Receipt) -> None:
        """Like `completion`, with a receipt instead of a future, and durable after `Store.flush` only."""
        with self._lock:
            known = self._open.pop(completion.call_id, None)
        completion = self._checked(completion, known)
        attempt_id = known.attempt_id if known else None
        parent, shared = None, 0
        if attempt_id is not None and len(completion.prompt_ids):
            parent, shared = self._prefixes.prompt_parent(attempt_id, completion.prompt_ids)
        parts: list[tuple[Table, Sequence[Row]]] = [
            (schema.completions, [completion_row(completion, parent, shared)]),
            (schema.choices, choice_rows(completion.call_id, completion.choices)),
        ]
        prompt: Prompt | None = None
        if attempt_id is not None and len(completion.prompt_ids):
            seen = np.concatenate([completion.prompt_ids, first_completion(completion.choices)])
            prompt = Prompt(completion.call_id, seen.astype(np.int32, copy=False))

        def remember() -> None:
            if attempt_id is not None and prompt is not None:
                self._prefixes.add_prompt(attempt_id, prompt)

        self._store.hand_in(parts, _then(remember, receipt))

    def span(self, span: Span) -> "Future[None]":
        """Record anything that is no call. In the future: Conflict for an id that exists."""
        attributes, _ = self._cleaned(span.attributes, "spans" in self._allowed(span.rollout_id))
        return self._store.append(schema.spans, [span_row(replace(span, name=self._text(span.name, True)), attributes)])

    def rewards(
        self,
        rollout_id: str,
        attempt_id: str,
        rewards: Sequence[Reward],
        *,
        version: str = "",
        once: str | None = None,
    ) -> "Future[None]":
        """Record rewards, all or nothing. Raises RecordError if any value is no finite number.

        With `once`, their ids follow from it and their times: in the future Conflict if they were recorded before.
        """
        now, ticks = time.time(), time.time_ns()
        if once is not None:
            ticks = max((int(reward.created_at * 1e9) for reward in rewards), default=0)
        rows = [
            {
                # Sorts in order of arrival, also within one instant.
                "reward_id": f"rew_{ticks:016x}{number:04x}{_suffix(once)}",
                "rollout_id": rollout_id,
                "attempt_id": attempt_id,
                "call_id": reward.call_id,
                "name": reward.name,
                "value": check_reward(reward.name, reward.value),
                "source": reward.source,
                "reward_version": version,
                "created_at": float(reward.created_at or now),
            }
            for number, reward in enumerate(rewards)
        ]
        return self._store.append(schema.rewards, rows)

    def _allowed(self, rollout_id: str | None) -> frozenset[str]:
        """Fields that may be stored; asks the store for the purpose of a rollout once, and only if that
        matters."""
        if not self._privacy.by_purpose:
            return self._privacy.default
        if rollout_id is None:
            return self._privacy.allowed("live")
        with self._lock:
            if rollout_id in self._purposes:
                return self._privacy.allowed(self._purposes[rollout_id])
        query = select(schema.rollouts.c.purpose).where(schema.rollouts.c.rollout_id == rollout_id)
        purpose = self._store.read(lambda connection: connection.execute(query).scalar_one_or_none())
        with self._lock:
            self._purposes[rollout_id] = purpose
            if len(self._purposes) > MAX_PURPOSES:
                self._purposes.popitem(last=False)
        return self._privacy.allowed(purpose)

    def _cleaned(self, body: Mapping[str, Any], allowed: bool) -> tuple[Mapping[str, Any], bool]:
        """(what may be stored of a body, whether that is something else)."""
        if not allowed:
            return {}, bool(body)
        if self._privacy.redactor is None:
            return body, False
        cleaned, changed = redact(body, self._privacy.redactor)
        return cleaned, changed

    def _checked(self, completion: CallCompletion, known: _Open | None) -> CallCompletion:
        """The completion as it may be stored."""
        prompt_ids = np.asarray(completion.prompt_ids)
        if prompt_ids is not completion.prompt_ids:
            completion = structs.replace(completion, prompt_ids=prompt_ids)
        for choice in completion.choices:
            if completion.refusal is None and len(choice.completion_ids) != len(choice.logprobs):
                raise RecordError(
                    f"choice {choice.index} of call {completion.call_id} has "
                    f"{len(choice.completion_ids)} ids and {len(choice.logprobs)} log-probabilities; "
                    "record it with a refusal, or find the rest"
                )
        if self._privacy.keeps_all:
            return completion
        # An intent that is not remembered may have been redacted, so nothing that spells it is kept.
        allowed, altered = (known.allowed, known.altered) if known else (frozenset(), True)
        response, changed = self._cleaned(completion.response, "response" in allowed)
        texts = [self._text(choice.text, "response" in allowed) for choice in completion.choices]
        error = None if completion.error is None else self._text(completion.error, "response" in allowed)
        kept = structs.replace(completion, response=response, error=error)
        altered = altered or changed or texts != [choice.text for choice in completion.choices]
        if not altered and "tokens" in allowed:
            return kept
        return structs.replace(
            kept,
            response=strip_tokens(response),
            provenance=Provenance.ALTERED,
            refusal=REFUSAL,
            prompt_ids=_NO_IDS,
            choices=[
                Choice(
                    index=choice.index,
                    completion_ids=_NO_IDS,
                    logprobs=_NO_LOGPROBS,
                    finish_reason=choice.finish_reason,
                    text=text,
                )
                for choice, text in zip(completion.choices, texts, strict=True)
            ],
        )

    def _text(self, text: str, allowed: bool) -> str:
        if not allowed:
            return WITHHELD if text else text
        return text if self._privacy.redactor is None else self._privacy.redactor(text)


def _suffix(once: str | None) -> str:
    """What makes an id of a reward unlike others: chance, or what it must be the only one for."""
    return secrets.token_hex(4) if once is None else blake2b(once.encode(), digest_size=10).hexdigest()


def _then(done: Callable[[], None], receipt: Receipt) -> Receipt:
    """A receipt that first does something, if all went well."""

    def durable(failure: BaseException | None) -> None:
        if failure is None:
            done()
        receipt(failure)

    return durable


def _body(call_id: str, request: Mapping[str, Any]) -> Body:
    """Hashes by which requests are compared. The order of keys counts, so that a rebuilt request is the same
    text.
    """
    name = messages_field(request)
    messages = tuple([hash(canonical(message)) for message in request[name]]) if name else ()
    fields = {field: hash(canonical(request[field])) for field in REPEATED_FIELDS if field in request}
    return Body(call_id, name, messages, fields)


def _difference(request: Mapping[str, Any], link: Link) -> object:
    """What is stored: the body without the messages it shares; if fields are left out too, a pair with their
    names."""
    body = {key: value for key, value in request.items() if key not in link.fields}
    name = messages_field(request)
    if name and link.num_messages:
        body[name] = body[name][link.num_messages :]
    return [body, list(link.fields)] if link.fields else body
