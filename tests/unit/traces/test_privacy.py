"""What is not allowed is never written, and a changed text takes its ids with it: ids are text."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.traces.recording import chat, choice, completion, done, intent, started

from leyden.base.errors import ConfigError
from leyden.base.records import Call, Provenance, Span
from leyden.store.base import Store
from leyden.traces.privacy import FIELDS, KEEP, Privacy
from leyden.traces.privacy.redact import WITHHELD, redact, strip_tokens
from leyden.traces.reader import Reader
from leyden.traces.recorder import Recorder

EMAIL = re.compile(r"[\w.]+@[\w.]+")
SECRET = "alice@example.org"


def no_emails(text: str) -> str:
    return EMAIL.sub("[email]", text)


@pytest.fixture
def redacting(store: Store) -> Iterator[Recorder]:
    yield Recorder(store, Privacy(redactor=no_emails))


def _nothing_left(store: Store, folder: Path, *needles: bytes) -> None:
    """No file of the store holds any needle, compressed rows apart (those are read through the reader)."""
    store.close()
    for file in folder.iterdir():
        data = file.read_bytes()
        assert not [needle for needle in needles if needle in data]


def _spells_nothing(call: Call) -> None:
    assert call.provenance == Provenance.ALTERED
    assert call.refusal == "altered"
    assert len(call.prompt_ids) == 0
    assert all(len(c.completion_ids) == len(c.logprobs) == 0 for c in call.choices)
    assert SECRET not in repr(call)


def test_keeping_all_changes_nothing(store: Store) -> None:
    recorder = Recorder(store, KEEP)
    done(recorder.intent(intent(0, chat(SECRET))), recorder.completion(completion(0, [1], choice([2]))))
    call = Reader(store).call("call_0")
    assert (call.request, call.provenance, call.num_sampled) == (chat(SECRET), Provenance.SERVED, 1)


def test_a_call_without_anything_to_redact_stays_as_it_is(redacting: Recorder, store: Store) -> None:
    done(redacting.intent(intent(0, chat("hi"))), redacting.completion(completion(0, [1], choice([2]))))
    call = Reader(store).call("call_0")
    assert (call.provenance, call.refusal, call.prompt_ids.tolist()) == (Provenance.SERVED, None, [1])


def test_a_redacted_request_takes_the_ids_of_its_answer_with_it(
    redacting: Recorder, store: Store, tmp_path: Path
) -> None:
    prompt, sampled = np.arange(77_001, 77_041), list(range(88_001, 88_041))
    done(redacting.intent(intent(0, chat(f"write to {SECRET}"))))
    done(redacting.completion(completion(0, prompt.tolist(), choice(sampled), choice(sampled, 1))))
    call = Reader(store).call("call_0")
    _spells_nothing(call)
    assert call.request == chat("write to [email]")
    assert [(c.index, c.finish_reason, c.text) for c in call.choices] == [
        (0, "stop", "hello"),
        (1, "stop", "hello"),
    ]
    _nothing_left(
        store, tmp_path, SECRET.encode(), prompt.astype("<i4").tobytes(), np.asarray(sampled, "<i4").tobytes()
    )


def test_a_redacted_answer_keeps_neither_ids_nor_texts_cut_into_tokens(
    redacting: Recorder, store: Store, tmp_path: Path
) -> None:
    pieces = [{"token": "alice", "logprob": -0.1, "bytes": [97]}, {"token": "@exa", "logprob": -0.2}]
    answer = {
        "choices": [{"message": {"content": f"ask {SECRET}"}, "logprobs": {"content": pieces}, "token_ids": [1, 2]}],
        "prompt_token_ids": [3, 4],
    }
    done(redacting.intent(intent(0, chat("whom?"))))
    end = completion(0, [3, 4], choice([1, 2], text=f"ask {SECRET}"), response=answer, error=f"not {SECRET}")
    done(redacting.completion(end))
    call = Reader(store).call("call_0")
    _spells_nothing(call)
    assert call.response == {
        "choices": [{"message": {"content": "ask [email]"}, "logprobs": WITHHELD, "token_ids": WITHHELD}],
        "prompt_token_ids": WITHHELD,
    }
    assert (call.choices[0].text, call.error) == ("ask [email]", "not [email]")
    _nothing_left(store, tmp_path, SECRET.encode(), b"alice")


def test_a_completion_whose_intent_is_not_remembered_spells_nothing(store: Store) -> None:
    privacy = Privacy(redactor=no_emails)
    done(Recorder(store, privacy).intent(intent(0, chat(SECRET))))
    done(Recorder(store, privacy).completion(completion(0, [1, 2], choice([3]))))
    _spells_nothing(Reader(store).call("call_0"))


def test_a_prompt_of_ids_cannot_be_redacted_and_is_withheld(redacting: Recorder, store: Store) -> None:
    for number, prompt in enumerate(([1, 2, 3], [[1, 2], [3]])):
        done(redacting.intent(intent(number, {"model": "main", "prompt": prompt})))
        done(redacting.completion(completion(number, [1, 2, 3], choice([4]))))
        call = Reader(store).call(f"call_{number}")
        _spells_nothing(call)
        assert call.request == {"model": "main", "prompt": WITHHELD}


def test_redacted_turns_are_still_stored_as_differences(redacting: Recorder, store: Store) -> None:
    turns = [chat(SECRET), chat(SECRET, "b", "c")]
    for number, request in enumerate(turns):
        done(redacting.intent(intent(number, request)))
        done(redacting.completion(completion(number, [1], choice([2]))))
    calls = Reader(store).calls_of("att_1")
    assert [call.request for call in calls] == [chat("[email]"), chat("[email]", "b", "c")]
    for call in calls:
        _spells_nothing(call)


def test_keys_are_texts_too_and_no_value_is_lost() -> None:
    found, changed = redact({"a@b.c": 1, "x@y.z": {"d@e.f": [SECRET, 2, None]}, "[email]#2": 3}, no_emails)
    assert changed
    assert found == {"[email]": 1, "[email]#3": {"[email]": ["[email]", 2, None]}, "[email]#2": 3}


def test_only_ids_are_stripped() -> None:
    body = {
        "usage": {"tokens": 5, "prompt_tokens": 2},
        "logprobs": None,
        "choices": [{"token_ids": [1], "index": 0}],
    }
    assert strip_tokens(body) == {**body, "choices": [{"token_ids": WITHHELD, "index": 0}]}


def test_spans_are_redacted(redacting: Recorder, store: Store) -> None:
    attempt = started(store)
    span = Span(id="s", rollout_id="ro_1", attempt_id=attempt.id, name=f"to {SECRET}", attributes={"to": [SECRET]})
    done(redacting.span(span))
    (found,) = Reader(store).trace("ro_1").spans
    assert (found.name, found.attributes) == ("to [email]", {"to": ["[email]"]})


def test_what_a_purpose_does_not_allow_is_never_written(store: Store) -> None:
    privacy = Privacy(
        by_purpose={
            "metrics": frozenset(),
            "texts": frozenset({"request", "response"}),
            "live": frozenset({"spans"}),
        }
    )
    recorder = Recorder(store, privacy)
    for number, purpose in enumerate(("metrics", "texts", "train")):
        attempt = started(store, f"ro_{number}", purpose=purpose)
        ids: dict[str, Any] = {"rollout_id": f"ro_{number}", "attempt_id": attempt.id}
        done(recorder.intent(intent(number, chat(SECRET), **ids)))
        done(recorder.completion(completion(number, [1, 2], choice([3]), error=SECRET)))
        done(recorder.span(Span(id=f"s{number}", name="x", attributes={"to": SECRET}, **ids)))
    done(recorder.intent(intent(9, chat(SECRET), attempt_id=None)))
    done(recorder.completion(completion(9, [1, 2], choice([3]))))
    metrics, texts, train = (Reader(store).trace(f"ro_{number}") for number in range(3))
    _spells_nothing(metrics.calls[0])
    assert (metrics.calls[0].request, metrics.calls[0].response) == ({}, None)
    assert (metrics.calls[0].choices[0].text, metrics.calls[0].error) == (WITHHELD, WITHHELD)
    assert (texts.calls[0].request, texts.calls[0].num_sampled) == (chat(SECRET), 0)
    assert texts.calls[0].provenance == Provenance.ALTERED
    assert (train.calls[0].num_sampled, train.calls[0].provenance) == (1, Provenance.SERVED)
    assert [dict(t.spans[0].attributes) for t in (metrics, texts, train)] == [{}, {}, {"to": SECRET}]
    _spells_nothing(Reader(store).call("call_9"))


def test_a_policy_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="spell both"):
        Privacy(default=frozenset({"tokens", "request"}))
    with pytest.raises(ConfigError, match="colour"):
        Privacy(by_purpose={"x": frozenset({"colour"})})
    assert not Privacy(default=FIELDS - {"tokens"}).keeps_all
    assert KEEP.keeps_all
