"""The road in: durable, small, all or nothing; and what comes out of the reader is what went in."""

import json
import random
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select
from tests.unit.traces.recording import BOUND_S, chat, choice, completion, done, intent, started

from leyden.base.errors import Conflict, NotFound, RecordError
from leyden.base.records import Call, CallCompletion, CallIntent, Provenance, Reward, Span, new_id
from leyden.store import open_store, schema
from leyden.store.base import Store
from leyden.traces.prefixes import MAX_LEAVES, Body, Link, Prefixes, Prompt
from leyden.traces.reader import Reader
from leyden.traces.recorder import Recorder


def same(call: Call, given_intent: CallIntent, given_end: CallCompletion) -> None:
    """Every field of `call` is what was recorded."""
    assert json.dumps(call.request) == json.dumps(given_intent.request) or call.request == given_intent.request
    assert call.response == (given_end.response or None)
    assert call.sampling == given_intent.sampling["used"]
    assert list(call.rewrites) == list(given_intent.rewrites)
    assert np.array_equal(call.prompt_ids, given_end.prompt_ids)
    assert call.prompt_ids.dtype == np.int32
    assert len(call.choices) == len(given_end.choices)
    for read, recorded in zip(call.choices, sorted(given_end.choices, key=lambda c: c.index), strict=True):
        assert (read.index, read.finish_reason, read.text) == (
            recorded.index,
            recorded.finish_reason,
            recorded.text,
        )
        assert np.array_equal(read.completion_ids, recorded.completion_ids)
        assert read.logprobs.tobytes() == recorded.logprobs.tobytes()
    for name in (
        "rollout_id",
        "attempt_id",
        "seq",
        "dialect",
        "alias",
        "policy",
        "policy_version",
        "started_at",
    ):
        assert getattr(call, name) == getattr(given_intent, name)
    for name in (
        "status",
        "http_status",
        "provenance",
        "refusal",
        "delivered",
        "error",
        "latency_ms",
        "retry_count",
    ):
        assert getattr(call, name) == getattr(given_end, name)


def test_a_call_comes_back_as_it_was_recorded(store: Store) -> None:
    recorder = Recorder(store)
    one = intent(1, chat("hi", tools=[{"name": "search"}]))
    end = completion(
        1, [1, 2, 3], choice([4, 5]), choice([6], 1), retry_count=2, error="odd", refusal="length_mismatch"
    )
    done(recorder.intent(one), recorder.completion(end))
    same(Reader(store).call("call_1"), one, end)


def test_an_intent_is_refused_when_its_id_or_its_occurrence_exists(store: Store) -> None:
    recorder = Recorder(store)
    done(recorder.intent(intent(1, chat("hi"))))
    for again in (intent(1, chat("hi"), digest="x"), intent(2, chat("hi"), digest="digest-1")):
        with pytest.raises(Conflict):
            recorder.intent(again).result(BOUND_S)
    done(recorder.intent(intent(3, chat("hi"), digest="digest-1", occurrence=1)))


def test_a_completion_happens_once_and_only_after_its_intent(store: Store) -> None:
    recorder = Recorder(store)
    with pytest.raises(NotFound):
        recorder.completion(completion(1, [1], choice([2]))).result(BOUND_S)
    done(recorder.intent(intent(1, chat("hi"))), recorder.completion(completion(1, [1])))
    with pytest.raises(Conflict):
        recorder.completion(completion(1, [1], choice([2]))).result(BOUND_S)
    assert Reader(store).call("call_1").choices == []


def test_ids_without_their_log_probabilities_are_recorded_only_with_a_refusal(store: Store) -> None:
    recorder = Recorder(store)
    broken = choice([4, 5])
    object.__setattr__(broken, "logprobs", broken.logprobs[:1])
    done(recorder.intent(intent(1, chat("hi"))))
    with pytest.raises(RecordError, match="2 ids and 1 log-probabilities"):
        recorder.completion(completion(1, [1], broken))
    done(recorder.completion(completion(1, [1], broken, refusal="length_mismatch")))


@pytest.mark.parametrize("prompt", [[1 << 31], [[1, 2]], [0.5]])
def test_what_is_no_row_of_ids_is_refused(store: Store, prompt: list[Any]) -> None:
    recorder = Recorder(store)
    done(recorder.intent(intent(1, chat("hi"))))
    with pytest.raises(RecordError, match="token ids"):
        recorder.completion(completion(1, prompt_ids=np.asarray(prompt)))


def test_numbers_beyond_64_bits_and_halves_of_characters_survive(store: Store) -> None:
    recorder = Recorder(store)
    one = intent(1, chat("cut \ud83d", seed=10**30))
    end = completion(1, response={"text": "\udc00", "big": -(10**40)})
    done(recorder.intent(one), recorder.completion(end))
    found = Reader(store).call("call_1")
    assert (found.request, found.response) == (one.request, end.response)


def test_what_is_no_json_is_refused_by_name(store: Store) -> None:
    recorder = Recorder(store)
    with pytest.raises(RecordError, match="request of call call_1"):
        recorder.intent(intent(1, {"messages": [{"content": object()}]}))


def _stored(store: Store) -> dict[str, tuple[str | None, int, int]]:
    """Per call: parent of the request, messages shared with it, bytes of the request."""
    columns = schema.calls.c
    query = select(columns.call_id, columns.request_parent, columns.shared_messages, func.length(columns.request))
    return {row[0]: tuple(row[1:]) for row in store.read(lambda c: c.execute(query).all())}


def test_a_turn_that_appends_stores_only_what_is_new(store: Store) -> None:
    recorder, tools = (
        Recorder(store),
        [{"name": f"tool {n}", "text": random.Random(n).randbytes(40).hex()} for n in range(9)],
    )
    turns = [intent(n, chat(*(f"turn {m}" for m in range(2 * n + 1)), tools=tools)) for n in range(4)]
    ends = [completion(n, [*range(10 * n + 5)], choice([*range(10 * n + 5, 10 * n + 10)])) for n in range(4)]
    for one, end in zip(turns, ends, strict=True):
        done(recorder.intent(one))
        done(recorder.completion(end))
    found = _stored(store)
    assert [found[f"call_{n}"][:2] for n in range(4)] == [
        (None, 0),
        ("call_0", 1),
        ("call_1", 3),
        ("call_2", 5),
    ]
    assert all(found[f"call_{n}"][2] < found["call_0"][2] / 3 for n in range(1, 4))
    query = select(schema.completions.c.shared_tokens, func.length(schema.completions.c.prompt_tail))
    assert store.read(lambda c: c.execute(query).all()) == [(0, 20), (10, 20), (20, 20), (30, 20)]
    for call, one, end in zip(Reader(store).calls_of("att_1"), turns, ends, strict=True):
        same(call, one, end)


def test_a_fork_shares_what_it_shares_and_attempts_share_nothing(store: Store) -> None:
    recorder = Recorder(store)
    requests = [
        chat("a", "b", "c"),
        chat("a", "x", "y"),
        chat("a", "b", "c", "d", "e"),
        chat("a", "x", "y", "z"),
    ]
    for number, request in enumerate(requests):
        done(recorder.intent(intent(number, request)))
    done(recorder.intent(intent(9, requests[3], attempt_id="att_2")))
    done(recorder.intent(intent(10, requests[3], attempt_id=None)))
    assert {name: values[:2] for name, values in _stored(store).items()} == {
        "call_0": (None, 0),
        "call_1": ("call_0", 1),
        "call_2": ("call_0", 3),
        "call_3": ("call_1", 3),
        "call_9": (None, 0),
        "call_10": (None, 0),
    }
    for number, request in enumerate(requests):
        assert Reader(store).call(f"call_{number}").request == request
    assert Reader(store).call("call_10").request == requests[3]


def test_a_restarted_recorder_stores_whole_and_goes_on(store: Store) -> None:
    done(
        Recorder(store).intent(intent(0, chat("a"))),
    )
    again = Recorder(store)
    done(again.intent(intent(1, chat("a", "b", "c"))))
    done(
        again.completion(completion(0, [1, 2], choice([3]))),
        again.completion(completion(1, [1, 2, 3, 4], choice([5]))),
    )
    assert [values[0] for values in _stored(store).values()] == [None, None]
    assert [call.prompt_ids.tolist() for call in Reader(store).calls_of("att_1")] == [[1, 2], [1, 2, 3, 4]]


def test_a_call_that_was_refused_is_nobody_s_parent(store: Store) -> None:
    recorder = Recorder(store)
    done(recorder.intent(intent(0, chat("a"))))
    assert recorder.intent(intent(1, chat("a", "b", "c"), digest="digest-0")).exception(BOUND_S) is not None
    done(recorder.intent(intent(2, chat("a", "b", "c", "d", "e"))))
    assert _stored(store)["call_2"][:2] == ("call_0", 1)


def test_remembering_is_bounded() -> None:
    prefixes = Prefixes(max_attempts=3, max_tokens=10)

    def parent(attempt_id: str, *messages: int) -> Link:
        return prefixes.body_parent(attempt_id, Body("new", "messages", messages, {}))

    for number in range(5):
        prefixes.add_body(f"att_{number}", Body("old", "messages", (7,), {}))
    assert [parent(f"att_{number}", 7).parent for number in range(5)] == [None] * 2 + ["old"] * 3
    for number in range(MAX_LEAVES + 1):
        prefixes.add_body("att_4", Body(f"leaf {number}", "messages", (7, number), {}))
    assert parent("att_4", 7, 0).num_messages == 1
    assert parent("att_4", 7, 1) == Link("leaf 1", 2, ())
    for name in ("att_2", "att_3", "att_4"):
        prefixes.add_prompt(name, Prompt("c", np.arange(4, dtype=np.int32)))
    assert prefixes.prompt_parent("att_2", np.arange(4, dtype=np.int32)) == (None, 0)
    assert prefixes.prompt_parent("att_4", np.arange(9, dtype=np.int32)) == ("c", 4)


def _conversation(turns: int) -> list[tuple[CallIntent, CallCompletion]]:
    """An agent's trace of text of words and ids without a pattern: 60-word observations, 70-word answers."""
    words = random.Random(1)
    vocabulary = ["".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=words.randint(2, 9))) for _ in range(5000)]
    rng = np.random.default_rng(2)

    def text(count: int) -> str:
        return " ".join(words.choices(vocabulary, k=count))

    tools = [{"type": "function", "function": {"name": "search", "description": text(40)}}]
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": text(150)}]
    prompt = rng.integers(0, 49152, 220)
    calls = []
    for turn in range(turns):
        messages = [*messages, {"role": "user", "content": text(60)}]
        prompt = np.concatenate([prompt, rng.integers(0, 49152, 90)])
        sampled, answer = choice(rng.integers(0, 49152, 100).tolist(), text=text(70)), rng.random(100)
        object.__setattr__(sampled, "logprobs", -answer.astype(np.float32))
        reply = {"role": "assistant", "content": sampled.text}
        response = {"id": f"r{turn}", "choices": [{"index": 0, "message": reply, "finish_reason": "stop"}]}
        request = {"model": "main", "messages": messages, "tools": tools, "temperature": 1.0}
        calls.append((intent(turn, request), completion(turn, prompt.astype(np.int32), sampled, response=response)))
        messages = [*messages, reply]
        prompt = np.concatenate([prompt, sampled.completion_ids])
    return calls


def _plain_bytes(calls: list[tuple[CallIntent, CallCompletion]]) -> int:
    return sum(
        len(
            json.dumps(
                {
                    "request": one.request,
                    "response": end.response,
                    "prompt_token_ids": end.prompt_ids.tolist(),
                    "response_token_ids": end.choices[0].completion_ids.tolist(),
                    "response_log_probs": [float(value) for value in end.choices[0].logprobs],
                },
                separators=(",", ":"),
            )
        )
        for one, end in calls
    )


def test_fifty_turns_are_ten_times_smaller_than_plain_json(store: Store, tmp_path: Path) -> None:
    recorder, calls = Recorder(store), _conversation(50)
    empty = _file_bytes(tmp_path)
    for one, end in calls:
        done(recorder.intent(one))
        done(recorder.completion(end))
    stored = _file_bytes(tmp_path) - empty
    assert _plain_bytes(calls) / stored >= 10
    for call, (one, end) in zip(Reader(store).calls_of("att_1"), calls, strict=True):
        same(call, one, end)


def test_the_size_of_a_trace_grows_with_its_turns_and_not_with_their_square(store: Store) -> None:
    recorder, calls, sizes = Recorder(store), _conversation(80), {}
    query = select(func.sum(func.length(schema.calls.c.request)))
    for number, (one, end) in enumerate(calls, 1):
        done(recorder.intent(one))
        done(recorder.completion(end))
        sizes[number] = store.read(lambda c: c.execute(query).scalar_one())
    assert (sizes[80] - sizes[40]) < 1.2 * (sizes[40] - sizes[1])


def _file_bytes(folder: Path) -> int:
    connection = sqlite3.connect(folder / "store.db")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return (folder / "store.db").stat().st_size


def test_rewards_are_recorded_all_or_none(store: Store) -> None:
    recorder, attempt = Recorder(store), started(store)
    with pytest.raises(RecordError, match="'bad' is nan"):
        recorder.rewards("ro_1", attempt.id, [Reward(name="good", value=1.0), Reward(name="bad", value=float("nan"))])
    with pytest.raises(RecordError, match="True"):
        recorder.rewards("ro_1", attempt.id, [Reward(name="good", value=True)])
    assert Reader(store).trace("ro_1").rewards == []
    given_rewards = [
        Reward(name=f"r{n}", value=n / 3, call_id="call_1" if n else None, created_at=5.0) for n in range(20)
    ]
    done(recorder.rewards("ro_1", attempt.id, given_rewards[:10], version="v1"))
    done(recorder.rewards("ro_1", attempt.id, given_rewards[10:]))
    first = [replace(reward, version="v1") for reward in given_rewards[:10]]
    assert Reader(store).trace("ro_1").rewards == [*first, *given_rewards[10:]]


def test_spans_come_back_in_order_of_start_and_refuse_nan(store: Store) -> None:
    recorder, attempt = Recorder(store), started(store)
    spans = [
        Span(
            id=f"span_{n}",
            rollout_id="ro_1",
            attempt_id=attempt.id,
            name="search",
            kind="tool",
            attributes={"n": n, "list": [1, {"x": None}]},
            started_at=9.0 - n,
            ended_at=None if n else 9.5,
        )
        for n in range(3)
    ]
    done(*(recorder.span(span) for span in spans))
    assert Reader(store).trace("ro_1").spans == spans[::-1]
    with pytest.raises(Conflict):
        recorder.span(spans[0]).result(BOUND_S)
    with pytest.raises(RecordError, match="'search' is inf"):
        recorder.span(Span(id="x", rollout_id="ro_1", attempt_id="a", name="search", attributes={"x": [float("inf")]}))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
messages_lists = st.lists(
    st.sampled_from([{"role": "user", "content": word} for word in "abc"]) | json_values, max_size=5
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "messages": messages_lists | json_values,
        "input": messages_lists | st.text(max_size=4),
        "tools": st.sampled_from([[], [{"name": "a"}], [{"name": "b"}]]),
        "system": st.sampled_from(["x", "y"]),
        "extra": json_values,
    },
)
token_rows = st.lists(st.integers(0, 2), max_size=6)
recorded_calls = st.tuples(
    requests,
    token_rows,
    st.lists(token_rows, max_size=3),
    st.dictionaries(st.text(max_size=4), json_values, max_size=2),
    st.sampled_from(["att_1", "att_2", None]),
    st.booleans(),
    st.sampled_from(list(Provenance)),
)


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    opened = open_store(f"sqlite:///{tmp_path_factory.mktemp('shared') / 'store.db'}")
    yield opened
    opened.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(calls=st.lists(recorded_calls, min_size=1, max_size=7), waits=st.booleans())
def test_whatever_is_recorded_comes_back(shared_store: Store, calls: list[tuple[Any, ...]], waits: bool) -> None:
    recorder, recorded, futures, example = Recorder(shared_store), [], [], new_id("x")
    for number, (request, prompt, rows, response, attempt, indexed_from_one, provenance) in enumerate(calls):
        names = {"call_id": f"{example}-{number}", "attempt_id": attempt and f"{example}-{attempt}"}
        one = intent(number, request, **names)
        choices = [choice(row, index + indexed_from_one) for index, row in enumerate(rows)]
        answered = {"call_id": names["call_id"], "response": response, "provenance": provenance}
        end = completion(number, prompt, *choices, **answered)
        futures += [recorder.intent(one), recorder.completion(end)]
        recorded.append((one, end))
        if waits:
            done(*futures)
    done(*futures)
    for one, end in recorded:
        same(Reader(shared_store).call(one.call_id), one, end)
