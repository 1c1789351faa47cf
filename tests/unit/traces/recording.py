"""Intents, completions and a recording house for tests of recorder, reader and privacy."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from leyden.base.records import (
    Attempt,
    CallCompletion,
    CallIntent,
    Choice,
    IntArray,
    Provenance,
    Rollout,
    Task,
)
from leyden.store import queue
from leyden.store.base import Store

BOUND_S = 20.0


def intent(number: int, request: Mapping[str, Any], *, attempt_id: str | None = "att_1", **changes: Any) -> CallIntent:
    values: dict[str, Any] = {
        "call_id": f"call_{number}",
        "rollout_id": "ro_1" if attempt_id else None,
        "attempt_id": attempt_id,
        "seq": number,
        "digest": f"digest-{number}",
        "occurrence": 0,
        "origin": "rollout" if attempt_id else "live",
        "dialect": "openai_chat",
        "alias": "main",
        "policy": "main",
        "policy_version": 3,
        "engine": "http://e",
        "stream": False,
        "request": request,
        "sampling": {"asked": {"temperature": 0.2}, "used": {"temperature": 1.0}},
        "rewrites": ["temperature"],
        "started_at": 10.0 + number,
    }
    return CallIntent(**{**values, **changes})


def choice(ids: Sequence[int], index: int = 0, text: str = "hello") -> Choice:
    """A choice whose log-probabilities are exact in float32."""
    return Choice(
        index=index,
        completion_ids=np.asarray(ids, np.int32),
        logprobs=np.linspace(-len(ids), -1, len(ids), dtype=np.float32),
        finish_reason="stop",
        text=text,
    )


def completion(number: int, prompt: Sequence[int] | IntArray = (), *choices: Choice, **changes: Any) -> CallCompletion:
    values: dict[str, Any] = {
        "call_id": f"call_{number}",
        "status": "ok",
        "http_status": 200,
        "response": {"id": f"r{number}"},
        "provenance": Provenance.SERVED,
        "prompt_ids": np.asarray(prompt, np.int32),
        "choices": choices,
        "usage": {"prompt_tokens": len(prompt)},
        "template_hash": "t",
        "latency_ms": 5.0,
        "first_byte_ms": 1.0,
        "ended_at": 20.0 + number,
    }
    return CallCompletion(**{**values, **changes})


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    """A chat request whose messages alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(contents)]
    return {"model": "main", "messages": messages, **fields}


def done(*futures: "Future[Any]") -> None:
    """All of them are durable."""
    for future in futures:
        future.result(BOUND_S)


def started(store: Store, rollout_id: str = "ro_1", *, purpose: str = "train") -> Attempt:
    """The running attempt of a new rollout."""
    rollout = Rollout(id=rollout_id, task=Task(id="t", purpose=purpose), created_at=1.0)

    def job(connection: Any) -> Attempt:
        queue.enqueue(connection, store, [rollout])
        return queue.start_attempt(connection, store, rollout_id, "runner", 2.0)[0]

    return store.write(job).result(BOUND_S)
