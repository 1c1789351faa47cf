"""Numbers that the store gives to calls of one attempt while several processes write them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool
from tests.unit.traces.recording import BOUND_S, chat, completion, done, intent, started

from leyden.base.errors import Conflict
from leyden.store import open_store, schema
from leyden.store.base import Store
from leyden.traces.numbers import insert_numbered
from leyden.traces.reader import Reader
from leyden.traces.recorder import Recorder
from leyden.traces.rows import call_row


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[Store]]:
    opened = [open_store(f"sqlite:///{tmp_path / 'leyden.db'}") for _ in range(2)]
    yield opened
    for store in opened:
        store.close()


def test_calls_that_two_processes_write_at_once_are_numbered_without_gaps(stores: list[Store]) -> None:
    attempt = started(stores[0])
    recorders = [Recorder(store) for store in stores]
    waiting = [
        recorders[number % 2].numbered_intent(
            intent(number, chat("hi"), attempt_id=attempt.id, digest=f"digest-{number % 3}", seq=99),
            lambda seq: {"asked": {}, "used": {"seed": 1000 + seq}},
        )
        for number in range(60)
    ]
    given = [future.result(BOUND_S) for future in waiting]
    assert sorted(seq for seq, _ in given) == list(range(60))
    for digest in range(3):
        assert sorted(occurrence for number, (_, occurrence) in enumerate(given) if number % 3 == digest) == list(
            range(20)
        )
    calls = Reader(stores[1]).calls_of(attempt.id)
    assert [call.seq for call in calls] == list(range(60))
    assert [call.sampling["seed"] for call in calls] == [1000 + seq for seq in range(60)]
    assert {call.id: call.seq for call in calls} == {f"call_{n}": seq for n, (seq, _) in enumerate(given)}


def test_a_server_numbers_calls_of_transactions_that_run_at_once(postgres: str, stores: list[Store]) -> None:
    engine = create_engine(postgres.replace("postgresql:", "postgresql+psycopg:", 1), poolclass=NullPool)
    schema.metadata.create_all(engine)
    attempt = started(stores[0])
    rows = stores[0].read(lambda connection: connection.execute(schema.attempts.select()).mappings().all())
    with engine.begin() as connection:
        connection.execute(schema.attempts.insert(), [dict(row) for row in rows])

    def write(number: int) -> tuple[int, int]:
        told = intent(number, chat("hi"), attempt_id=attempt.id, digest=f"digest-{number % 2}")
        row = call_row(told, told.request, None, 0)
        with engine.begin() as connection:
            return insert_numbered(connection, row, lambda seq: {"asked": {}, "used": {"seed": seq}})

    with ThreadPoolExecutor(8) as pool:
        given = list(pool.map(write, range(24)))
    engine.dispose()
    assert sorted(seq for seq, _ in given) == list(range(24))
    for digest in range(2):
        assert sorted(number for _, number in given[digest::2]) == list(range(12))


def test_a_call_that_could_not_be_written_takes_no_number(stores: list[Store]) -> None:
    attempt = started(stores[0])
    recorder = Recorder(stores[0])

    def write(number: int) -> tuple[int, int]:
        told = intent(number, chat("hi"), attempt_id=attempt.id, digest="d")
        return recorder.numbered_intent(told, lambda seq: {"asked": {}, "used": {}}).result(BOUND_S)

    assert write(0) == (0, 0)
    with pytest.raises(Conflict):
        write(0)
    assert write(1) == (1, 1)


def test_a_numbered_call_is_completed_and_shares_its_request_like_any_other(stores: list[Store]) -> None:
    attempt = started(stores[0])
    recorder = Recorder(stores[0])
    for number, texts in enumerate((["a"], ["a", "b", "c"])):
        told = intent(number, chat(*texts), attempt_id=attempt.id)
        done(recorder.numbered_intent(told, lambda seq: {"asked": {}, "used": {}}))
        done(recorder.completion(completion(number, [1, 2])))
    calls = Reader(stores[0]).calls_of(attempt.id)
    assert [call.request for call in calls] == [chat("a"), chat("a", "b", "c")]
    assert [call.status for call in calls] == ["ok", "ok"]
