"""What every store promises (`leyden.store.base.Store`), over every implementation."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, func, select
from tests.unit.store.builders import call_row, choice_row, completion_row, finished, script

from leyden.base.errors import Conflict, NotFound, RecordError, StoreError, StoreUnusable
from leyden.store import aio, open_store
from leyden.store.base import Store
from leyden.store.schema import calls, choices, completions, control

URLS: dict[str, Callable[[Path], str]] = {"sqlite": lambda folder: f"sqlite:///{folder / 'store.db'}"}
"""One fresh store per implementation."""
BOUND_S = 20.0
"""Longest wait of a test for something that takes milliseconds."""


@pytest.fixture(params=sorted(URLS))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return URLS[request.param](tmp_path)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    opened = open_store(url)
    yield opened
    opened.close()


def _values(store: Store) -> dict[str, str]:
    return store.read(lambda c: {row.key: row.value for row in c.execute(select(control))})


def _row(key: str, value: str = "1") -> dict[str, str]:
    return {"key": key, "value": value}


class _Held:
    """Keeps the writer busy so that what is handed in meanwhile becomes one group."""

    def __init__(self, store: Store) -> None:
        self._go = threading.Event()
        started = threading.Event()

        def job(_: Connection) -> None:
            started.set()
            self._go.wait(BOUND_S)

        self._future = store.write(job)
        assert started.wait(BOUND_S)

    def release(self) -> None:
        self._go.set()
        self._future.result(BOUND_S)


def test_an_appended_row_is_there_when_its_future_is_done(store: Store) -> None:
    store.append(control, [_row("a"), _row("b", "2")]).result(BOUND_S)
    assert _values(store) == {"a": "1", "b": "2"}


def test_appending_no_rows_is_done_too(store: Store) -> None:
    assert store.append(control, []).result(BOUND_S) is None


def test_what_is_stored_is_there_after_reopening(store: Store, url: str) -> None:
    store.append(control, [_row("a")]).result(BOUND_S)
    store.close()
    again = open_store(url, create=False)
    assert _values(again) == {"a": "1"}
    again.close()


def test_a_nullable_column_may_be_missing(store: Store) -> None:
    row = call_row(1)
    del row["attempt_id"], row["request_parent"]
    store.append(calls, [row]).result(BOUND_S)
    assert store.read(lambda c: c.execute(select(calls.c.attempt_id)).scalar_one()) is None


def test_a_missing_column_is_a_record_error(store: Store) -> None:
    with pytest.raises(RecordError, match="null"):
        store.append(control, [{"key": "a"}]).result(BOUND_S)


def test_an_unknown_column_is_our_own_fault(store: Store) -> None:
    with pytest.raises(AssertionError, match="colour"):
        store.append(control, [{"key": "a", "value": "1", "colour": "red"}])


def test_a_value_that_no_column_takes_fails_its_own_append_only(store: Store) -> None:
    held = _Held(store)
    good, bad = (
        store.append(control, [_row("good")]),
        store.append(control, [{"key": "bad", "value": object()}]),
    )
    held.release()
    good.result(BOUND_S)
    assert bad.exception(BOUND_S) is not None
    assert _values(store) == {"good": "1"}


def test_only_the_guilty_append_of_a_group_conflicts(store: Store) -> None:
    store.append(control, [_row("taken")]).result(BOUND_S)
    held = _Held(store)
    futures = [store.append(control, [_row(key)]) for key in ("a", "taken", "b", "a", "c")]
    held.release()
    failed = [isinstance(future.exception(BOUND_S), Conflict) for future in futures]
    assert failed == [False, True, False, True, False]
    assert set(_values(store)) == {"taken", "a", "b", "c"}


def test_of_rows_with_one_conflict_none_is_in(store: Store) -> None:
    store.append(control, [_row("taken")]).result(BOUND_S)
    with pytest.raises(Conflict, match="another id"):
        store.append(control, [_row("new"), _row("taken")]).result(BOUND_S)
    assert set(_values(store)) == {"taken"}


def test_rows_of_several_tables_are_all_in_or_none(store: Store) -> None:
    store.append(calls, [call_row(1), call_row(2)]).result(BOUND_S)
    store.append_all([(choices, [choice_row(1)]), (completions, [completion_row(1)])]).result(BOUND_S)
    with pytest.raises(Conflict):
        store.append_all([(completions, [completion_row(2)]), (choices, [choice_row(1)])]).result(BOUND_S)
    assert store.read(lambda c: c.execute(select(completions.c.call_id)).scalars().all()) == ["call_1"]


def test_parents_and_children_of_one_group_may_be_handed_in_at_once(store: Store) -> None:
    held = _Held(store)
    futures = []
    for number in range(20):
        futures += [
            store.append(calls, [call_row(number)]),
            store.append_all([(completions, [completion_row(number)]), (choices, [choice_row(number)])]),
        ]
    held.release()
    assert [future.exception(BOUND_S) for future in futures] == [None] * 40
    assert store.read(lambda c: c.execute(select(func.count()).select_from(choices)).scalar_one()) == 20


def test_a_child_without_its_parent_is_refused(store: Store) -> None:
    with pytest.raises(NotFound, match="refers"):
        store.append(completions, [completion_row(1)]).result(BOUND_S)


def test_a_job_returns_its_result_and_sees_what_was_handed_in_before_it(store: Store) -> None:
    held = _Held(store)
    store.append(control, [_row("a", "7")])
    found = store.write(lambda c: c.execute(select(control.c.value)).scalar_one())
    held.release()
    assert found.result(BOUND_S) == "7"


def test_a_failed_job_leaves_no_trace_and_hurts_nobody(store: Store) -> None:
    def job(connection: Connection) -> None:
        connection.execute(control.insert(), [_row("half")])
        store.changed(connection, "things")
        raise KeyError("why not")

    held = _Held(store)
    before, failed, after = (
        store.append(control, [_row("a")]),
        store.write(job),
        store.append(control, [_row("b")]),
    )
    held.release()
    assert isinstance(failed.exception(BOUND_S), KeyError)
    assert (before.exception(BOUND_S), after.exception(BOUND_S)) == (None, None)
    assert set(_values(store)) == {"a", "b"}
    assert store.count("things") == 0


def test_a_conflict_inside_a_job_is_a_conflict(store: Store) -> None:
    store.append(control, [_row("taken")]).result(BOUND_S)
    with pytest.raises(Conflict):
        store.write(lambda c: c.execute(control.insert(), [_row("taken")])).result(BOUND_S)


def test_work_goes_on_although_its_waiter_gave_up(store: Store) -> None:
    held = _Held(store)
    future = store.append(control, [_row("a")])
    assert not future.cancel()
    held.release()
    future.result(BOUND_S)
    assert _values(store) == {"a": "1"}


def test_a_reader_sees_one_moment(store: Store) -> None:
    count = select(func.count()).select_from(control)

    def query(connection: Connection) -> tuple[int, int]:
        first = connection.execute(count).scalar_one()
        store.append(control, [_row("meanwhile")]).result(BOUND_S)
        return first, connection.execute(count).scalar_one()

    assert store.read(query) == (0, 0)
    assert store.read(lambda c: c.execute(count).scalar_one()) == 1


def test_a_reader_cannot_write(store: Store) -> None:
    with pytest.raises(StoreError):
        store.read(lambda c: c.execute(control.insert(), [_row("a")]))
    assert _values(store) == {}


def test_whatever_a_query_raises_comes_out(store: Store) -> None:
    def query(_: Connection) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        store.read(query)


def test_many_threads_lose_nothing(store: Store) -> None:
    num_threads, num_rows = 12, 40

    def work(thread: int) -> None:
        for number in range(num_rows):
            store.append(control, [_row(f"{thread}-{number}")]).result(BOUND_S)
            assert store.read(lambda c: c.execute(select(control.c.key).limit(1)).scalar_one())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert len(_values(store)) == num_threads * num_rows


def test_a_change_is_counted_when_it_is_durable(store: Store) -> None:
    assert store.count("things") == 0
    for _ in range(3):
        store.write(lambda c: store.changed(c, "things")).result(BOUND_S)
    assert (store.count("things"), store.count("other")) == (3, 0)


def test_watch_returns_at_once_what_has_changed_already(store: Store) -> None:
    store.write(lambda c: store.changed(c, "things")).result(BOUND_S)
    assert store.watch("things", 0, BOUND_S) == 1


def test_watch_gives_up_when_the_time_is_over(store: Store) -> None:
    assert store.watch("things", 0, 0.02) == 0
    assert store.watch("things", 5, 0.0) == 5


def test_watch_wakes_up_for_a_change_of_its_topic(store: Store) -> None:
    seen: Future[int] = Future()
    waiter = threading.Thread(target=lambda: seen.set_result(store.watch("things", 0, BOUND_S)))
    waiter.start()
    store.write(lambda c: store.changed(c, "other")).result(BOUND_S)
    store.write(lambda c: store.changed(c, "things")).result(BOUND_S)
    assert seen.result(BOUND_S) == 1
    waiter.join(BOUND_S)


def test_watch_wakes_up_for_a_change_of_another_process(store: Store, url: str) -> None:
    seen: list[Future[int]] = [store.subscribe("things", after) for after in range(3)]
    code = """
import sys
from leyden.store import open_store
store = open_store(sys.argv[1])
for _ in range(3):
    store.write(lambda c: store.changed(c, "things")).result(20)
store.close()
"""
    finished(script(code, url))
    counts = [future.result(BOUND_S) for future in seen]
    assert counts[2] == 3
    assert all(count > after for after, count in enumerate(counts))


def test_a_cancelled_subscription_lets_go(store: Store) -> None:
    future = store.subscribe("things", 0)
    assert future.cancel()
    store.write(lambda c: store.changed(c, "things")).result(BOUND_S)
    assert store.subscribe("things", 0).result(BOUND_S) == 1


async def test_a_thousand_tasks_may_watch_at_once(store: Store) -> None:
    waiting = [asyncio.create_task(aio.watch(store, "things", 0, BOUND_S)) for _ in range(1000)]
    await asyncio.sleep(0)
    await aio.write(store, lambda c: store.changed(c, "things"))
    assert await asyncio.gather(*waiting) == [1] * 1000


async def test_an_event_loop_appends_writes_reads_and_gives_up(store: Store) -> None:
    await aio.append(store, control, [_row("a", "3")])
    assert await aio.write(store, lambda c: c.execute(select(control.c.value)).scalar_one()) == "3"
    assert await aio.read(store, lambda c: c.execute(select(control.c.value)).scalar_one()) == "3"
    assert await aio.watch(store, "things", 4, 0.01) == 4
    with pytest.raises(Conflict):
        await aio.append(store, control, [_row("a")])


async def test_a_cancelled_task_does_not_undo_its_write(store: Store) -> None:
    held = _Held(store)
    task = asyncio.create_task(aio.append(store, control, [_row("a")]))
    await asyncio.sleep(0)
    task.cancel()
    held.release()
    with pytest.raises(asyncio.CancelledError):
        await task
    await aio.append(store, control, [_row("b")])
    assert set(_values(store)) == {"a", "b"}


def test_closing_finishes_what_was_handed_in(store: Store, url: str) -> None:
    held = _Held(store)
    futures = [store.append(control, [_row(str(number))]) for number in range(600)]
    closing = threading.Thread(target=store.close)
    closing.start()
    held.release()
    closing.join(BOUND_S)
    assert [future.exception(0) for future in futures] == [None] * 600
    again = open_store(url)
    assert len(_values(again)) == 600
    again.close()


def test_a_closed_store_says_so(store: Store) -> None:
    waiting = store.subscribe("things", 0)
    store.close()
    store.close()
    operations: list[Callable[[], Any]] = [
        lambda: store.append(control, [_row("a")]).result(BOUND_S),
        lambda: store.write(lambda c: None).result(BOUND_S),
        lambda: store.read(lambda c: None),
        lambda: store.count("things"),
        lambda: store.watch("things", 0, BOUND_S),
        lambda: waiting.result(BOUND_S),
    ]
    for operation in operations:
        with pytest.raises(StoreUnusable, match="closed"):
            operation()


def test_processes_that_open_a_fresh_store_at_once_all_succeed(url: str) -> None:
    code = """
import sys, time
from leyden.store import open_store
from leyden.store.schema import control
import leyden.store.sqlite, alembic.command
time.sleep(max(0, float(sys.argv[2]) - time.time()))
store = open_store(sys.argv[1])
store.append(control, [{"key": sys.argv[3], "value": "1"}]).result(20)
store.close()
"""
    start = str(time.time() + 1.0)
    for process in [script(code, url, start, name) for name in ("a", "b", "c")]:
        finished(process)
    store = open_store(url)
    assert set(_values(store)) == {"a", "b", "c"}
    store.close()


# Receipts


def test_a_receipt_comes_once_the_rows_are_durable_or_says_why_not(store: Store) -> None:
    found: dict[str, BaseException | None] = {}
    told = threading.Event()

    def receipt(name: str) -> Callable[[BaseException | None], None]:
        def take(failure: BaseException | None) -> None:
            assert name not in found
            found[name] = failure
            if len(found) == 3:
                told.set()

        return take

    held = _Held(store)
    for number, name in enumerate(("a", "b", "a")):
        store.hand_in([(control, [_row(name)])], receipt(f"{number}"), lazily=number == 1)
    assert found == {}
    store.flush()
    held.release()
    assert told.wait(BOUND_S)
    assert found["0"] is None and found["1"] is None and isinstance(found["2"], Conflict)
    assert _values(store) == {"a": "1", "b": "1"}


def test_what_was_handed_in_goes_with_what_comes_after_it_or_with_the_end(store: Store) -> None:
    found: list[BaseException | None] = []
    store.hand_in([(control, [_row("a")])], found.append)
    store.append(control, [_row("b")]).result(BOUND_S)
    assert found == [None]
    store.hand_in([(control, [_row("c")])], found.append)
    store.close()
    assert found == [None, None]


def test_a_job_with_a_receipt_is_done_whole_or_leaves_no_trace(store: Store) -> None:
    found: list[BaseException | None] = []
    held = _Held(store)
    store.hand_in_job(lambda connection: connection.execute(control.insert().values(_row("a"))), found.append)

    def broken(connection: Connection) -> None:
        connection.execute(control.insert().values(_row("b")))
        raise NotFound("what it looked for")

    store.hand_in_job(broken, found.append, lazily=True)
    assert found == []
    held.release()
    store.append(control, [_row("c")]).result(BOUND_S)
    assert found[0] is None and isinstance(found[1], NotFound) and len(found) == 2
    assert _values(store) == {"a": "1", "c": "1"}
    store.close()
    store.hand_in_job(broken, found.append)
    assert isinstance(found[2], StoreUnusable)


def test_a_closed_store_says_so_in_the_receipt(store: Store) -> None:
    store.close()
    found: list[BaseException | None] = []
    store.hand_in([(control, [_row("a")])], found.append)
    assert isinstance(found[0], StoreUnusable)


def test_many_receipts_of_one_commit_wake_an_event_loop_once(store: Store) -> None:
    wakes = 0

    async def main() -> None:
        nonlocal wakes
        loop, quay = asyncio.get_running_loop(), aio.Quay(store)
        wake = loop.call_soon_threadsafe

        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return wake(*arguments, **named)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]
        held = _Held(store)
        names = [str(number) for number in range(50)]
        waits = [quay.durable(lambda receipt, n=n: store.hand_in([(control, [_row(n)])], receipt)) for n in names]  # type: ignore[misc]
        again = quay.durable(lambda receipt: store.hand_in([(control, [_row("0")])], receipt))
        tasks = [asyncio.ensure_future(wait) for wait in [*waits, again]]
        await asyncio.sleep(0)
        tasks[1].cancel()
        held.release()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), BOUND_S)
        assert isinstance(results[1], asyncio.CancelledError) and isinstance(results[-1], Conflict)
        assert [result for result in results if result is not None] == [results[1], results[-1]]

    asyncio.run(main())
    assert len(_values(store)) == 50
    assert wakes <= 25, "one for each commit; the writer may be quick enough to make several"
