"""The road out: whole traces in a few queries, and the truth about what is not there."""

import random

import numpy as np
import pytest
from sqlalchemy import Engine, event
from tests.unit.traces.recording import BOUND_S, chat, choice, completion, done, intent, started

from leyden.base.errors import NotFound, StoreError
from leyden.base.records import Outcome, Provenance, Reward, Rollout, RolloutState, Task
from leyden.store import queue
from leyden.store.base import Store
from leyden.store.schema import calls
from leyden.traces.reader import Reader
from leyden.traces.recorder import Recorder


def test_a_call_in_flight_when_something_died_is_open(store: Store) -> None:
    done(Recorder(store).intent(intent(0, chat("a"))))
    call = Reader(store).call("call_0")
    assert (call.status, call.refusal, call.response, call.delivered) == ("open", "open", None, False)
    assert (call.provenance, call.num_sampled, len(call.prompt_ids)) == (Provenance.ALTERED, 0, 0)
    assert call.request == chat("a")


def test_a_failed_call_keeps_the_body_of_its_error(store: Store) -> None:
    recorder = Recorder(store)
    done(recorder.intent(intent(0, chat("a"))), recorder.intent(intent(1, chat("b"))))
    body = {"error": {"message": "no"}}
    done(recorder.completion(completion(0, status="error", http_status=502, response=body, error="no")))
    done(recorder.completion(completion(1, status="aborted", response={}, delivered=False)))
    failed, aborted = Reader(store).calls_of("att_1")
    assert (failed.status, failed.http_status, failed.response, failed.error) == ("error", 502, body, "no")
    assert (aborted.status, aborted.response, aborted.delivered) == ("aborted", None, False)


def test_a_trace_is_about_the_last_attempt(store: Store) -> None:
    recorder = Recorder(store)
    first = started(store)
    done(recorder.intent(intent(0, chat("a"), attempt_id=first.id)))

    def retry(connection):  # type: ignore[no-untyped-def]
        queue.patch_status(connection, store, "ro_1", last_attempt_id="second", now=5.0)

    store.write(retry).result(BOUND_S)
    done(
        recorder.intent(intent(2, chat("c"), attempt_id="second")),
        recorder.intent(intent(1, chat("b"), attempt_id="second")),
    )
    done(recorder.rewards("ro_1", "second", [Reward(name="x", value=1.0, created_at=1.0)]))
    trace = Reader(store).trace("ro_1")
    assert trace.attempt.id == "second"
    assert [call.seq for call in trace.calls] == [1, 2]
    assert [reward.name for reward in trace.rewards] == ["x"]
    assert [call.id for call in Reader(store).calls_of(first.id)] == ["call_0"]


def test_many_traces_come_in_the_order_that_was_asked_for_and_in_few_queries(store: Store) -> None:
    recorder, futures = Recorder(store), []
    names = [f"r{number}" for number in range(60)]
    for number, name in enumerate(names):
        attempt = started(store, name)
        for turn in range(3):
            one = intent(turn, chat(name, "x", "y"[: turn + 1]), attempt_id=attempt.id, call_id=f"{name}-{turn}")
            end = completion(turn, [number, turn], choice([number]), call_id=f"{name}-{turn}")
            futures += [recorder.intent(one), recorder.completion(end)]
    done(*futures)
    random.Random(0).shuffle(names)
    statements: list[str] = []

    def count(*details: object) -> None:
        statements.append(str(details[2]))

    event.listen(Engine, "before_cursor_execute", count)
    traces = Reader(store).traces(names)
    event.remove(Engine, "before_cursor_execute", count)
    assert len(statements) < 12
    assert [trace.rollout.id for trace in traces] == names
    for trace in traces:
        assert [call.id for call in trace.calls] == [f"{trace.rollout.id}-{turn}" for turn in range(3)]
        assert [call.prompt_ids[1] for call in trace.calls] == [0, 1, 2]


def test_what_is_not_there_is_not_found(store: Store) -> None:
    reader = Reader(store)
    with pytest.raises(NotFound, match="gone"):
        reader.trace("gone")
    with pytest.raises(NotFound, match="gone"):
        reader.call("gone")
    assert reader.find_call("att_1", "d", 0) is None
    assert reader.calls_of("gone") == []
    assert reader.traces([]) == []
    assert reader.num_completion_tokens("gone") == 0


def test_a_rollout_that_was_never_tried_has_attempt_number_0(store: Store) -> None:
    rollout = Rollout(id="r", task=Task(id="t"), run_id="run")
    store.write(lambda c: queue.enqueue(c, store, [rollout])).result(BOUND_S)
    waiting = Reader(store).trace("r")
    assert (waiting.attempt.number, waiting.attempt.outcome, waiting.calls) == (0, None, [])
    store.write(lambda c: queue.cancel_unfinished(c, store, "run", 5.0)).result(BOUND_S)
    trace = Reader(store).trace("r")
    assert (trace.rollout.state, trace.attempt.outcome) == (RolloutState.FAILED, Outcome.CANCELLED)


def test_a_call_is_found_by_what_makes_it_unique(store: Store) -> None:
    recorder = Recorder(store)
    done(
        recorder.intent(intent(0, chat("a"), digest="d")),
        recorder.intent(intent(1, chat("a"), digest="d", occurrence=1)),
        recorder.intent(intent(2, chat("a"), digest="d", attempt_id="att_2")),
    )
    found = [Reader(store).find_call(*key) for key in (("att_1", "d", 0), ("att_1", "d", 1), ("att_2", "d", 0))]
    assert [call and call.id for call in found] == ["call_0", "call_1", "call_2"]
    assert Reader(store).find_call("att_1", "d", 2) is None


def test_completion_tokens_are_counted_over_all_choices(store: Store) -> None:
    recorder = Recorder(store)
    done(recorder.intent(intent(0, chat("a"))), recorder.intent(intent(1, chat("b"))))
    done(
        recorder.completion(completion(0, [1], choice([1, 2, 3]), choice([4], 1))),
        recorder.completion(completion(1, [1], choice([5, 6]))),
    )
    assert Reader(store).num_completion_tokens("att_1") == 6


def test_a_chain_as_long_as_a_long_conversation_is_rebuilt(store: Store) -> None:
    recorder, prompt = Recorder(store), np.zeros(0, np.int32)
    for turn in range(1200):
        prompt = np.append(prompt, np.int32(turn))
        # Each waits for the one before, or there would be nothing to be a difference to.
        done(recorder.intent(intent(turn, chat(*(str(n) for n in range(turn % 40 + 1))))))
        done(recorder.completion(completion(turn, prompt, choice([]))))
    calls_read = Reader(store).calls_of("att_1")
    assert [len(call.prompt_ids) for call in calls_read] == list(range(1, 1201))
    assert np.array_equal(calls_read[-1].prompt_ids, np.arange(1200))


def test_a_difference_to_a_call_that_is_gone_is_named_and_not_guessed(store: Store) -> None:
    recorder = Recorder(store)
    done(recorder.intent(intent(0, chat("a"))))
    done(recorder.intent(intent(1, chat("a", "b", "c"))))
    store.write(lambda c: c.execute(calls.delete().where(calls.c.call_id == "call_0"))).result(BOUND_S)
    with pytest.raises(StoreError, match=r"call call_1 .* 'call_0', which is gone"):
        Reader(store).calls_of("att_1")
