"""Which recorded call a report is."""

import numpy as np
import pytest

from leyden.base.records import Call, Choice, Provenance, Span
from leyden.traces.telemetry import Report, ReportedCall, Said
from leyden.traces.telemetry.matching import CLOCKS_S, Recorded

IDS, LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


def call(call_id: str, *, at: float = 100.0, text: str = "yes", answer: str | None = None, model: str = "m") -> Call:
    return Call(
        id=call_id, rollout_id="r", attempt_id="a", seq=0, dialect="openai_chat", alias=model, policy=model,
        policy_version=0, provenance=Provenance.SERVED, request={}, sampling={}, prompt_ids=IDS, status="ok",
        response={"usage": {"completion_tokens": 3}} | ({"id": answer} if answer else {}), delivered=True, refusal=None,
        choices=[Choice(index=0, completion_ids=IDS, logprobs=LOGPROBS, finish_reason="stop", text=text)],
        started_at=at, latency_ms=1000.0,
    )  # fmt: skip


def report(scope: str = "one", at: float = 100.0, named: str | None = None) -> Report:
    return Report(
        trace_id="1" * 32, span_id="2" * 16, name="chat", scope=scope, started_at=at, ended_at=at + 1.0,
        attributes={"leyden.call": named} if named else {},
    )  # fmt: skip


def told(text: str = "yes", answer: str | None = None, tokens: int | None = None, model: str = "m") -> ReportedCall:
    usage = {} if tokens is None else {"completion_tokens": tokens}
    return ReportedCall(model=model, choices=[Said(message={"content": text})], usage=usage, response_id=answer)


def test_the_header_of_the_answer_decides_before_anything_else() -> None:
    known = Recorded([call("c1", text="other", at=0.0)])
    assert known.same(report(named="c1"), told()) == "c1"
    assert known.same(report(named="unknown"), told()) is None


@pytest.mark.parametrize(
    ("said", "at", "same"),
    [
        (told(answer="x"), 100.0, True),
        (told(answer="x", model="renamed"), 100.0, True),
        (told(answer="y"), 100.0, False),
        (told(answer="x", text="no"), 100.0, False),
        (told(answer="x", text=""), 100.0, True),
        (told(answer="x", tokens=3), 100.0, True),
        (told(answer="x", tokens=4), 100.0, False),
        (told(answer="x"), 100.0 + 1.0 + CLOCKS_S, True),
        (told(answer="x"), 100.1 + 1.0 + CLOCKS_S, False),
        (told(answer="x"), 99.9 - 1.0 - CLOCKS_S, False),
        (told(), 100.0, True),
        (told(model="renamed"), 100.0, False),
    ],
)
def test_a_call_is_known_by_its_answer_unless_the_two_contradict_each_other(
    said: ReportedCall, at: float, same: bool
) -> None:
    known = Recorded([call("c1", answer="x")])
    assert known.same(report(at=at), said) == ("c1" if same else None)


def test_every_scope_claims_a_call_once_where_there_is_no_id() -> None:
    known = Recorded([call("c1"), call("c2")])
    for scope in ("one", "two"):
        found = []
        for _ in range(3):
            call_id = known.same(report(scope), told())
            found.append(call_id)
            if call_id is not None:
                known.claim(call_id, scope)
        assert found == ["c1", "c2", None]


def test_a_call_that_comes_later_is_free_for_scopes_that_asked_before() -> None:
    known = Recorded()
    assert known.same(report(), told()) is None
    known.add(call("c1"))
    known.claim("c1", "two")
    assert known.same(report(), told()) == "c1" and known.same(report("two"), told()) is None


def test_claims_are_read_back_from_the_spans_that_made_them() -> None:
    span = Span(
        id="s",
        rollout_id="r",
        attempt_id="a",
        name="chat",
        kind="call",
        attributes={"call": "c1", "otel": {"scope": "one"}},
    )
    known = Recorded([call("c1")], [span])
    assert known.same(report(), told()) is None and known.same(report("two"), told()) == "c1"
