"""Rows and rollouts for tests of the store, and a way to run a script in a process of its own."""

import os
import subprocess
import sys
from typing import Any

from leyden.base.records import Rollout, Task


def call_row(number: int, *, attempt_id: str | None = "att_1", **changes: Any) -> dict[str, Any]:
    """A row of `calls`."""
    row = {
        "call_id": f"call_{number}",
        "rollout_id": "ro_1",
        "attempt_id": attempt_id,
        "seq": number,
        "digest": f"digest-{number}",
        "occurrence": 0,
        "origin": "rollout",
        "dialect": "openai_chat",
        "alias": "main",
        "policy": "main",
        "policy_version": 3,
        "engine": "http://127.0.0.1:1",
        "stream": False,
        "request": b"r" * 300,
        "request_parent": None,
        "shared_messages": 0,
        "sampling": "{}",
        "rewrites": "[]",
        "started_at": 1.0,
        "schema_version": "0001",
    }
    return {**row, **changes}


def completion_row(number: int, **changes: Any) -> dict[str, Any]:
    """A row of `completions`."""
    row = {
        "call_id": f"call_{number}",
        "status": "ok",
        "http_status": 200,
        "response": b"r" * 300,
        "provenance": "served",
        "refusal": None,
        "prompt_parent": None,
        "shared_tokens": 0,
        "prompt_tail": b"p" * 400,
        "usage": "{}",
        "template_hash": "",
        "delivered": True,
        "retry_count": 0,
        "error": None,
        "latency_ms": 1.0,
        "first_byte_ms": None,
        "ended_at": 2.0,
        "schema_version": "0001",
    }
    return {**row, **changes}


def choice_row(number: int, index: int = 0) -> dict[str, Any]:
    """A row of `choices`."""
    return {
        "call_id": f"call_{number}",
        "choice_index": index,
        "completion_ids": b"c" * 400,
        "logprobs": b"l" * 400,
        "finish_reason": "stop",
        "text": "hello",
    }


def rollout(rollout_id: str, **changes: Any) -> Rollout:
    """A rollout of a task with an input and an answer."""
    values: dict[str, Any] = {
        "id": rollout_id,
        "task": Task(id="t1", domain="sums", input={"question": "1 + 1"}, answer={"value": 2}),
        "policy_versions": {"main": 4},
        "sampling": {"temperature": 0.5},
        "seed": 7,
        "metadata": {"note": "\u00fc"},
        "config": {"timeout_seconds": 5},
    }
    return Rollout(**{**values, **changes})


def script(code: str, *arguments: str) -> "subprocess.Popen[str]":
    """A Python process that runs `code` with this process's import path."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def finished(process: "subprocess.Popen[str]", timeout_s: float = 60) -> str:
    """Its output once it ended well."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, err
    return out
