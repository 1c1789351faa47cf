"""What a trace says to an optimiser of prompts: its exchanges, its result, and which slots were found. Pure."""

from collections.abc import Mapping, Sequence

from leyden.base.records import Call, Outcome, Trace
from leyden.base.tasks import Demo
from leyden.learning.algorithms.prompts.base import Exchange


def shares_of(traces: Sequence[Trace], policy: str) -> dict[str, float]:
    """Share of the calls in which each slot was found, as the gateway recorded it."""
    records = [call.slots for trace in traces for call in trace.calls if call.policy == policy and call.slots]
    names = {name for record in records for name in (*record.get("filled", ()), *record.get("unmatched", ()))}
    return {name: sum(name in record.get("filled", ()) for record in records) / len(records) for name in names}


def approved_of(demos: Sequence[Demo], val_ids: set[str]) -> list[Exchange]:
    """The demonstrations of `tasks.demos`, those of validation tasks left out."""
    return [
        Exchange(
            messages=[
                {"role": str(message["role"]), "content": _words(message["content"])}
                for message in demo.messages[:-1]
                if message["role"] not in ("system", "developer")
            ],
            answer=_words(demo.messages[-1]["content"]),
        )
        for demo in demos
        if demo.task not in val_ids
    ]


def exchanges_of(trace: Trace, policy: str) -> list[Exchange]:
    """The answered calls of a policy, in order."""
    return [_exchange(call) for call in trace.calls if call.policy == policy and call.status == "ok" and call.choices]


def _exchange(call: Call) -> Exchange:
    """A call without its system messages, whatever its dialect."""
    said = call.request.get("messages") or call.request.get("input") or call.request.get("prompt") or ()
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
    kept = [
        {"role": str(message.get("role", "user")), "content": _words(message.get("content"))}
        for message in messages
        if isinstance(message, Mapping) and message.get("role") not in ("system", "developer")
    ]
    return Exchange(messages=kept, answer=call.choices[0].text, filled=tuple(call.slots.get("filled", ())))


def _words(content: object) -> str:
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else ()
    return "\n".join(str(block["text"]) for block in blocks if isinstance(block, Mapping) and "text" in block)


def feedback_of(trace: Trace) -> str:
    """How a rollout ended and what it earned, in one line."""
    outcome = trace.rollout.outcome or Outcome.CANCELLED
    parts = [str(outcome)]
    parts += [f"{reward.name} = {reward.value:g}" for reward in trace.rewards if reward.call_id is None]
    if trace.rollout.reward is not None:
        parts.append(f"reward {trace.rollout.reward:g}")
    if outcome != Outcome.COMPLETED and trace.attempt.detail:
        parts.append(trace.attempt.detail)
    return ", ".join(parts)
