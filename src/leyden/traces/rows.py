"""The bytes of the trace tables: records to rows and back. Imported by recorder and reader only.

Bodies are JSON as orjson writes it, compressed with zlib at level 1 unless they are tiny. What orjson cannot
carry exactly (whole numbers beyond 64 bits, lone surrogates) is written by the standard library behind a mark.
Arrays are little-endian: int32 ids, float32 log-probabilities. Bodies came over the wire, where a parser has
refused NaN already: they are not searched for it again. Attributes of spans are. Letters of shapes: P = prompt
tokens, R = completion tokens.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
from sqlalchemy import Row

from leyden.base.errors import RecordError
from leyden.base.records import (
    CallCompletion,
    CallIntent,
    Choice,
    FloatArray,
    IntArray,
    LiveOrigin,
    Reward,
    Span,
)
from leyden.store.columns import dump
from leyden.store.schema import SCHEMA_VERSION

_EXACT = b"j"
"""First byte of a body of the standard library; the first byte of zlib is another one, for its low half is
8."""
_PLAIN = b"p"
"""First byte of a body that is too small to be worth compressing."""
_TINY_BYTES = 128
"""Up to here zlib saves a few bytes at the price of 6 microseconds."""
_INT32 = np.dtype("<i4")
_SMALL_BYTES = 8192
"""Up to here a window of 8 KiB holds the body: as small as with the largest, and six times faster, because
zlib's time for a few hundred bytes is the clearing of its tables."""


def pack_json(value: object, what: str) -> bytes:
    """`value` as compressed JSON. RecordError if it is no JSON."""
    try:
        return _compressed(orjson.dumps(value))
    except TypeError:
        # ensure_ascii carries lone surrogates, which UTF-8 cannot.
        try:
            text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise RecordError(f"{what} cannot be stored as JSON ({error}); use text keys and JSON values") from error
        return _EXACT + zlib.compress(text.encode("ascii"), 1)


def _compressed(data: bytes) -> bytes:
    if len(data) <= _TINY_BYTES:
        return _PLAIN + data
    if len(data) > _SMALL_BYTES:
        return zlib.compress(data, 1)
    small = zlib.compressobj(1, zlib.DEFLATED, 13, 6)
    return small.compress(data) + small.flush()


def unpack_json(blob: bytes) -> Any:
    """What `pack_json` was given."""
    first = blob[:1]
    if first == _PLAIN:
        return orjson.loads(blob[1:])
    if first == _EXACT:
        return json.loads(zlib.decompress(blob[1:]))
    return orjson.loads(zlib.decompress(blob))


def pack_ids(ids: IntArray) -> bytes:
    """Token ids of shape (P,) or (R,) as bytes. RecordError for what is no array of int32."""
    array = np.asarray(ids)
    if array.dtype == _INT32 and array.ndim == 1:
        return array.tobytes()
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RecordError(f"token ids have shape {array.shape} and type {array.dtype}; give one row of whole numbers")
    narrow = array.astype(_INT32)
    if not np.array_equal(narrow, array):
        raise RecordError(f"token ids go up to {array.max()}, beyond 32 bits; such a vocabulary is not supported")
    return narrow.tobytes()


def unpack_ids(blob: bytes) -> IntArray:
    """Token ids; a read-only view of `blob`."""
    return np.frombuffer(blob, "<i4")


def pack_logprobs(logprobs: FloatArray) -> bytes:
    """Log-probabilities of shape (R,) as bytes."""
    return np.asarray(logprobs, dtype="<f4").tobytes()


def unpack_logprobs(blob: bytes) -> FloatArray:
    """Log-probabilities; a read-only view of `blob`."""
    return np.frombuffer(blob, "<f4")


def json_text(value: Mapping[str, Any] | Sequence[str], what: str) -> str:
    """Small JSON as text: like `dump`, which is slower and takes what orjson does not."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:
        return dump(dict(value) if isinstance(value, Mapping) else list(value), what)


def call_row(intent: CallIntent, request: object, request_parent: str | None, shared_messages: int) -> dict[str, Any]:
    """The row of an intent whose request is stored as `request` plus what it shares with `request_parent`."""
    return {
        "call_id": intent.call_id,
        "rollout_id": intent.rollout_id,
        "attempt_id": intent.attempt_id,
        "seq": int(intent.seq),
        "digest": intent.digest,
        "occurrence": int(intent.occurrence),
        "origin": intent.origin,
        "dialect": intent.dialect,
        "alias": intent.alias,
        "policy": intent.policy,
        "policy_version": int(intent.policy_version),
        "engine": intent.engine,
        "stream": bool(intent.stream),
        "request": pack_json(request, f"the request of call {intent.call_id}"),
        "request_parent": request_parent,
        "shared_messages": shared_messages,
        "sampling": json_text(intent.sampling, f"the sampling parameters of call {intent.call_id}"),
        "rewrites": json_text(intent.rewrites, f"the rewrites of call {intent.call_id}"),
        "started_at": float(intent.started_at),
        "schema_version": SCHEMA_VERSION,
        "slots": pack_json(intent.slots, f"the slots of call {intent.call_id}") if intent.slots else None,
    }


def live_row(call_id: str, live: LiveOrigin) -> dict[str, Any]:
    """The row of who is behind a live call."""
    return {
        "call_id": call_id, "service": live.service, "session": live.session, "subject": live.subject,
        "purpose": live.purpose,
    }  # fmt: skip


def live_of(row: Row[Any]) -> LiveOrigin:
    """A row of `live_calls` as a record."""
    return LiveOrigin(service=row.service, session=row.session, subject=row.subject, purpose=row.purpose)


def completion_row(completion: CallCompletion, prompt_parent: str | None, shared_tokens: int) -> dict[str, Any]:
    """The row of a completion whose prompt begins with `shared_tokens` of `prompt_parent`."""
    return {
        "call_id": completion.call_id,
        "status": completion.status,
        "http_status": int(completion.http_status),
        "response": pack_json(completion.response, f"the response of call {completion.call_id}"),
        "provenance": completion.provenance.value,
        "refusal": completion.refusal,
        "prompt_parent": prompt_parent,
        "shared_tokens": shared_tokens,
        "prompt_tail": pack_ids(completion.prompt_ids[shared_tokens:]),
        "usage": json_text(completion.usage, f"the usage of call {completion.call_id}"),
        "template_hash": completion.template_hash,
        "delivered": bool(completion.delivered),
        "retry_count": int(completion.retry_count),
        "error": completion.error,
        "latency_ms": float(completion.latency_ms),
        "first_byte_ms": None if completion.first_byte_ms is None else float(completion.first_byte_ms),
        "ended_at": float(completion.ended_at),
        "schema_version": SCHEMA_VERSION,
    }


def choice_rows(call_id: str, choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """One row per sampled answer."""
    return [
        {
            "call_id": call_id,
            "choice_index": int(choice.index),
            "completion_ids": pack_ids(choice.completion_ids),
            "logprobs": pack_logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            # A text cut inside a character holds half a surrogate pair, which no database takes as text.
            "text": choice.text.encode("utf-8", "backslashreplace").decode(),
        }
        for choice in choices
    ]


def choice_of(row: Row[Any]) -> Choice:
    """A row of `choices` as a record."""
    return Choice(
        index=row.choice_index,
        completion_ids=unpack_ids(row.completion_ids),
        logprobs=unpack_logprobs(row.logprobs),
        finish_reason=row.finish_reason,
        text=row.text,
    )


def span_row(span: Span, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a span with these attributes."""
    _refuse_nan(attributes, span.name)
    return {
        "span_id": span.id,
        "rollout_id": span.rollout_id,
        "attempt_id": span.attempt_id,
        "name": span.name,
        "kind": span.kind,
        "attributes": pack_json(dict(attributes), f"the attributes of span {span.name!r}"),
        "started_at": float(span.started_at),
        "ended_at": None if span.ended_at is None else float(span.ended_at),
        "schema_version": SCHEMA_VERSION,
    }


def span_of(row: Row[Any]) -> Span:
    """A row of `spans` as a record."""
    return Span(
        id=row.span_id,
        rollout_id=row.rollout_id,
        attempt_id=row.attempt_id,
        name=row.name,
        kind=row.kind,
        attributes=unpack_json(row.attributes),
        started_at=row.started_at,
        ended_at=row.ended_at,
    )


def reward_of(row: Row[Any]) -> Reward:
    """A row of `rewards` as a record."""
    return Reward(
        name=row.name, value=row.value, source=row.source, call_id=row.call_id, created_at=row.created_at,
        version=row.reward_version,
    )  # fmt: skip


def _refuse_nan(value: Any, where: str) -> None:
    """orjson writes NaN as null, which would be another value; attributes are made by people, so they are
    checked."""
    if isinstance(value, float) and not math.isfinite(value):
        raise RecordError(f"an attribute of span {where!r} is {value}; use a finite number, or leave it out")
    if isinstance(value, Mapping):
        for item in value.values():
            _refuse_nan(item, where)
    elif isinstance(value, list | tuple):
        for item in value:
            _refuse_nan(item, where)


REPEATED_FIELDS = ("tools", "system", "instructions", "functions", "response_format", "text")
"""Fields of request bodies that a harness sends again with every call; equal ones are stored once."""


def messages_field(request: Mapping[str, Any]) -> str | None:
    """The field that holds the conversation, if there is one: it grows from call to call."""
    return next((name for name in ("messages", "input") if isinstance(request.get(name), list)), None)


def canonical(value: object) -> bytes:
    """Bytes that are equal for equal JSON with keys in equal order."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return _EXACT + json.dumps(value, ensure_ascii=True, default=repr).encode("ascii")


def first_completion(choices: Sequence[Choice]) -> IntArray:
    """Ids of choice 0, which the next turn of a conversation extends; empty if there is none. Shape (R,)."""
    for choice in choices:
        if choice.index == 0:
            return np.asarray(choice.completion_ids)
    return np.zeros(0, np.int32)


def restore_request(stored: Any, parent: Mapping[str, Any] | None, shared_messages: int) -> dict[str, Any]:
    """The request of which `stored` is what it does not share with the request of its parent."""
    body, same = stored if isinstance(stored, list) else (stored, [])
    name = messages_field(body)
    if parent is not None:
        body = {**body, **{field: parent[field] for field in same}}
        if name and shared_messages:
            body[name] = parent[name][:shared_messages] + body[name]
    return dict(body)
