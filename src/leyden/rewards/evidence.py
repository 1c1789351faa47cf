"""What a verifier is shown of a task and of an attempt, as plain JSON.

Promises: the same trace gives the same evidence; text, tool calls and messages come out alike whatever dialect
the harness speaks; the judge's own calls are not part of it. Does not score.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from leyden.base.records import Call, Task, Trace
from leyden.traces.conversation import messages_of
from leyden.traces.tool_calls import tool_calls


def task_dict(task: Task) -> dict[str, Any]:
    """What a verifier is told about the task, the answer included."""
    return {
        "id": task.id,
        "split": task.split,
        "domain": task.domain,
        "input": dict(task.input),
        "answer": task.answer,
    }


def trace_dict(trace: Trace, *, judge: str = "") -> dict[str, Any]:
    """What a verifier is told about the trace: counts, calls, the last conversation, the final text, the spans.

    Calls of the policy `judge` are left out: they are not the agent's.
    """
    calls = [call for call in trace.calls if not judge or call.policy != judge]
    last = next((call for call in reversed(calls) if call.response is not None), None)
    return {
        "num_calls": len(calls),
        "num_prompt_tokens": sum(num_prompt_tokens(call) for call in calls),
        "num_completion_tokens": sum(num_completion_tokens(call) for call in calls),
        "messages": messages_of(last.request) if last is not None else [],
        "final_text": text_of(last) if last is not None else "",
        "outcome": trace.attempt.outcome,
        "exit_code": trace.attempt.exit_code,
        "stdout_tail": trace.attempt.stdout_tail,
        "duration_s": trace.attempt.duration_s,
        "calls": [_call(call) for call in calls],
        "spans": [{"name": span.name, "kind": span.kind, "attributes": dict(span.attributes)} for span in trace.spans],
    }


def text_of(call: Call) -> str:
    """The text of the first answer of a call, empty when it has none."""
    if call.choices and call.choices[0].text:
        return call.choices[0].text
    response = call.response or {}
    if isinstance(response.get("choices"), list) and response["choices"]:
        first = response["choices"][0]
        message = first.get("message") or {}
        return _joined(message.get("content")) or str(first.get("text") or "")
    if isinstance(response.get("output"), list):
        return "".join(_joined(item.get("content")) for item in response["output"] if isinstance(item, dict))
    return _joined(response.get("content"))


def num_prompt_tokens(call: Call) -> int:
    """As the engine counted them; a provider tells only in its usage."""
    return len(call.prompt_ids) or _usage(call, "prompt_tokens", "input_tokens")


def num_completion_tokens(call: Call) -> int:
    """As the engine sampled them; a provider tells only in its usage."""
    return call.num_sampled or _usage(call, "completion_tokens", "output_tokens")


def _call(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "policy": call.policy,
        "status": call.status,
        "text": text_of(call),
        "tool_calls": [{"id": t.id, "name": t.name, "arguments": t.arguments} for t in tool_calls(call)],
        "num_prompt_tokens": num_prompt_tokens(call),
        "num_completion_tokens": num_completion_tokens(call),
        "latency_ms": call.latency_ms,
    }


def _usage(call: Call, *names: str) -> int:
    usage = (call.response or {}).get("usage") or {}
    found = next((usage[name] for name in names if isinstance(usage.get(name), int)), 0)
    return int(found)


def _joined(content: Any) -> str:
    """Text of a content that is a string or a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return ""
