"""The queue of rollouts: made once, leased by one, tried, finished for good."""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, func, select
from tests.unit.store.builders import call_row, choice_row, completion_row, finished, rollout, script

from leyden.base.errors import Conflict, HoldoutError, NotFound, RecordError
from leyden.base.records import Attempt, Outcome, Rollout, RolloutState, Task
from leyden.store import open_store, queue, schema
from leyden.store.base import Store

T = TypeVar("T")
BOUND_S = 20.0
QUEUING, RUNNING, SUCCEEDED, FAILED = RolloutState


class House:
    """A store whose queue functions can be called like methods."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def write(self, job: Callable[..., T], *arguments: Any, **options: Any) -> T:
        return self.store.write(lambda c: job(c, self.store, *arguments, **options)).result(BOUND_S)

    def read(self, query: Callable[..., T], *arguments: Any, **options: Any) -> T:
        return self.store.read(lambda c: query(c, *arguments, **options))

    def enqueue(self, *names: str, **changes: Any) -> list[Rollout]:
        return self.write(queue.enqueue, [rollout(name, **changes) for name in names])

    def lease(self, owner: str = "me", limit: int = 10, lease_s: float = 30.0, now: float = 100.0) -> list[str]:
        return [r.id for r in self.write(queue.lease, owner, limit, lease_s, now)]

    def started(self, name: str = "a", owner: str = "me", now: float = 100.0) -> tuple[Attempt, str]:
        return self.write(queue.start_attempt, name, owner, now)

    def get(self, name: str) -> Rollout:
        return self.read(queue.get, name)

    def finish(self, name: str, state: RolloutState = SUCCEEDED, **changes: Any) -> Rollout:
        values = {"outcome": Outcome.COMPLETED, "reward": 0.5, "error_message": None, "now": 110.0, **changes}
        return self.write(queue.finish, name, state=state, **values)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    store = open_store(f"sqlite:///{tmp_path / 'store.db'}")
    yield House(store)
    store.close()


def ended(attempt: Attempt, outcome: Outcome = Outcome.COMPLETED) -> Attempt:
    return replace(
        attempt,
        ended_at=120.0,
        outcome=outcome,
        exit_code=0,
        detail="well",
        diagnosis="no_calls",
        stdout_tail="out",
        stderr_tail="err",
        duration_s=20.0,
    )


def test_a_queued_rollout_comes_back_as_it_was_given(house: House) -> None:
    given = rollout("a", run_id="run", group_id="g", step=3, mode="val", created_at=50.0)
    (made,) = house.write(queue.enqueue, [given])
    assert made == replace(given, updated_at=50.0)
    assert house.get("a") == made


def test_a_rollout_without_a_time_gets_one(house: House) -> None:
    assert house.enqueue("a")[0].created_at > 1e9


def test_a_task_without_an_answer_keeps_none_apart_from_null_like_answers(house: House) -> None:
    for name, answer in (("none", None), ("zero", 0), ("empty", ""), ("list", [])):
        house.enqueue(name, task=Task(id="t", answer=answer))
        assert house.get(name).task.answer == answer


def test_queueing_an_id_again_returns_what_is_there_unchanged(house: House) -> None:
    (first,) = house.enqueue("a")
    changes = house.store.count(queue.TOPIC)
    again, new = house.write(queue.enqueue, [rollout("a", seed=99), rollout("b")])
    assert (again, new.id) == (first, "b")
    assert house.write(queue.enqueue, [rollout("a", seed=99)]) == [first]
    assert house.store.count(queue.TOPIC) == changes + 1


def test_the_same_id_twice_in_one_request_is_one_rollout(house: House) -> None:
    one, other = house.write(queue.enqueue, [rollout("a", seed=1), rollout("a", seed=2)])
    assert one == other
    assert one.seed == 1


def test_a_holdout_task_is_never_queued_for_training(house: House) -> None:
    held = Task(id="secret", split="holdout")
    with pytest.raises(HoldoutError, match="secret"):
        house.write(queue.enqueue, [rollout("a"), rollout("b", task=held)])
    assert sum(house.read(queue.count_by_state).values()) == 0
    assert house.write(queue.enqueue, [rollout("b", task=held, mode="val")])[0].task.split == "holdout"


@pytest.mark.parametrize("bad", ["", "a/b", "-a", "a" * 129])
def test_an_id_that_no_path_can_carry_is_refused(house: House, bad: str) -> None:
    with pytest.raises(RecordError, match="rollout id"):
        house.enqueue(bad)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}])
def test_what_is_no_json_is_refused_by_name(house: House, value: object) -> None:
    with pytest.raises(RecordError, match="metadata of rollout 'a'"):
        house.enqueue("a", metadata={"x": value})


def test_many_come_back_in_the_order_that_was_asked_for(house: House) -> None:
    names = [f"r{number}" for number in range(1201)]
    house.enqueue(*names)
    asked = names[::-1]
    assert [r.id for r in house.read(queue.get_many, asked)] == asked
    with pytest.raises(NotFound, match=r"1 of 2 .*gone"):
        house.read(queue.get_many, ["r1", "gone"])
    with pytest.raises(NotFound, match="gone"):
        house.get("gone")


def test_selections_are_in_order_of_insertion(house: House) -> None:
    house.enqueue("b", "a", run_id="one", step=1)
    house.enqueue("c", run_id="two", step=1)
    house.lease(limit=1)

    def ids(found: list[Rollout]) -> list[str]:
        return [r.id for r in found]

    assert ids(house.read(queue.select_by_state, [QUEUING, RUNNING], 10)) == ["b", "a", "c"]
    assert ids(house.read(queue.select_by_state, ["queuing"], 10)) == ["a", "c"]
    assert ids(house.read(queue.select_by_state, [QUEUING], 1)) == ["a"]
    assert ids(house.read(queue.select_by_state, [QUEUING], 10, "two")) == ["c"]
    assert ids(house.read(queue.select_by_step, "one", 1)) == ["b", "a"]
    assert house.read(queue.count_by_state) == {QUEUING: 2, RUNNING: 1, SUCCEEDED: 0, FAILED: 0}
    assert house.read(queue.count_by_state, "one", 1) == {QUEUING: 1, RUNNING: 1, SUCCEEDED: 0, FAILED: 0}


def test_leases_go_first_in_first_out_and_to_one_owner(house: House) -> None:
    house.enqueue("a", "b", "c")
    assert house.lease("x", limit=2) == ["a", "b"]
    assert house.lease("y", limit=2) == ["c"]
    assert house.lease("z") == []
    assert house.get("a").state == RUNNING


def test_a_heartbeat_keeps_what_is_owned_and_names_what_is_lost(house: House) -> None:
    house.enqueue("a", "b", "c", "d")
    house.lease("x", limit=3, now=100.0, lease_s=10.0)
    house.lease("y", limit=1, now=100.0, lease_s=10.0)
    house.finish("c")

    def beat(now: float) -> set[str]:
        asked = ["a", "b", "c", "d", "gone"]
        return house.store.write(lambda c: queue.heartbeat(c, "x", asked, 10.0, now)).result(BOUND_S)

    assert beat(109.0) == {"a", "b"}
    assert house.lease("z", now=115.0) == ["d"]
    assert house.lease("z", now=120.0) == ["a", "b"]
    assert beat(121.0) == set()


def test_a_lease_that_ran_out_ends_the_attempt_as_infrastructure_error(house: House) -> None:
    house.enqueue("a")
    house.lease("x", now=100.0, lease_s=10.0)
    attempt, token = house.started(owner="x")
    assert house.lease("y", now=109.9) == []
    assert house.lease("y", now=110.1) == ["a"]
    (lost,) = house.read(queue.attempts, "a")
    assert (lost.outcome, lost.ended_at, lost.diagnosis) == (Outcome.INFRA_ERROR, 110.1, "lost_runner")
    assert "lost runner: x" in lost.detail
    found = house.read(queue.attempt_by_token, token)
    assert found is not None
    assert found[0].ended_at == 110.1
    with pytest.raises(Conflict, match="infra_error"):
        house.write(queue.end_attempt, ended(attempt))
    with pytest.raises(Conflict, match="leased by 'y'"):
        house.started(owner="x")
    assert house.started(owner="y")[0].number == 2


def test_attempts_count_up_and_belong_to_their_rollout(house: House) -> None:
    house.enqueue("a")
    house.lease()
    first, _ = house.started()
    with pytest.raises(Conflict, match=r"attempt 1 .* has not ended"):
        house.started()
    house.write(queue.end_attempt, ended(first, Outcome.ENV_ERROR))
    second, _ = house.started(now=130.0)
    assert (second.number, second.started_at) == (2, 130.0)
    assert house.read(queue.attempts, "a") == [ended(first, Outcome.ENV_ERROR), second]
    assert (house.get("a").num_attempts, house.get("a").last_attempt_id) == (2, second.id)
    assert house.read(queue.attempts, "gone") == []
    with pytest.raises(NotFound):
        house.started("gone")


def test_an_attempt_ends_once(house: House) -> None:
    house.enqueue("a")
    attempt, _ = house.started()
    house.write(queue.end_attempt, ended(attempt))
    changes = house.store.count(queue.ATTEMPTS_TOPIC)
    house.write(queue.end_attempt, replace(ended(attempt), detail="again"))
    assert house.read(queue.attempts, "a")[0].detail == "well"
    assert house.store.count(queue.ATTEMPTS_TOPIC) == changes
    with pytest.raises(Conflict, match=r"ended as completed.*timeout"):
        house.write(queue.end_attempt, ended(attempt, Outcome.TIMEOUT))
    with pytest.raises(NotFound):
        house.write(queue.end_attempt, replace(ended(attempt), id="gone"))
    with pytest.raises(RecordError, match="outcome"):
        house.write(queue.end_attempt, attempt)


def test_a_token_is_known_by_its_hash_only(house: House, tmp_path: Path) -> None:
    house.enqueue("a", "b")
    attempt, token = house.started()
    _, other = house.started("b")
    assert token.startswith("ley-")
    assert token != other
    found = house.read(queue.attempt_by_token, token)
    assert found == (attempt, house.get("a"))
    for wrong in ("", "ley-", token[:-1], token + "x", "\udcff"):
        assert house.read(queue.attempt_by_token, wrong) is None
    stored = house.store.read(lambda c: c.execute(select(schema.attempts.c.token_hash)).scalars().all())
    assert hashlib.sha256(token.encode()).hexdigest() in stored
    house.store.close()
    assert all(token.encode() not in file.read_bytes() for file in tmp_path.iterdir())


def test_a_finished_rollout_stays_as_it_is(house: House) -> None:
    house.enqueue("a")
    house.lease()
    over = house.finish("a", reward=0.25)
    assert (over.state, over.outcome, over.reward, over.finished_seq) == (
        SUCCEEDED,
        Outcome.COMPLETED,
        0.25,
        1,
    )
    assert house.finish("a", reward=0.25) == over
    others: list[dict[str, Any]] = [
        {"reward": 0.5},
        {"reward": None},
        {"state": FAILED},
        {"outcome": Outcome.TIMEOUT},
    ]
    for changes in others:
        with pytest.raises(Conflict, match="is over"):
            house.finish("a", **{"reward": 0.25, **changes})
    with pytest.raises(Conflict, match="is succeeded"):
        house.started()
    with pytest.raises(Conflict, match="over"):
        house.write(queue.release, "a", 1.0)
    assert house.lease(now=1e9) == []


def test_only_a_running_rollout_succeeds(house: House) -> None:
    house.enqueue("a")
    with pytest.raises(Conflict, match="queuing and cannot become succeeded; allowed: failed, running"):
        house.finish("a")
    assert house.finish("a", FAILED, outcome=Outcome.CANCELLED, reward=None).state == FAILED
    with pytest.raises(NotFound):
        house.finish("gone")


@pytest.mark.parametrize("reward", [float("nan"), True, "1"])
def test_a_total_that_is_no_number_is_refused(house: House, reward: object) -> None:
    house.enqueue("a")
    house.lease()
    with pytest.raises(RecordError):
        house.finish("a", reward=reward)


def test_a_released_rollout_is_leased_again_in_its_old_place(house: House) -> None:
    house.enqueue("a", "b")
    house.lease(limit=1)
    attempt, _ = house.started()
    house.write(queue.end_attempt, ended(attempt, Outcome.INFRA_ERROR))
    house.write(queue.release, "a", 105.0)
    house.write(queue.release, "a", 105.0)
    assert house.get("a").state == RUNNING
    assert house.lease("y", now=105.0) == ["a", "b"]
    assert house.read(queue.attempts, "a")[0].detail == "well"


def test_a_patch_changes_what_it_names_and_repeats_harmlessly(house: House) -> None:
    house.enqueue("a")
    patched = house.write(queue.patch_status, "a", state=RUNNING, job_name="job-1", now=101.0)
    assert (patched.state, patched.job_name, patched.version, patched.updated_at) == (
        RUNNING,
        "job-1",
        2,
        101.0,
    )
    changes = house.store.count(queue.TOPIC)
    assert house.write(queue.patch_status, "a", state=RUNNING, job_name="job-1", now=999.0) == patched
    assert house.write(queue.patch_status, "a", now=999.0) == patched
    assert house.store.count(queue.TOPIC) == changes
    over = house.write(queue.patch_status, "a", state=FAILED, error_message="evicted", now=102.0)
    assert (over.state, over.error_message, over.outcome, over.finished_seq) == (FAILED, "evicted", None, 1)
    assert house.write(queue.patch_status, "a", state=FAILED, error_message="evicted", now=103.0) == over
    with pytest.raises(Conflict, match="final"):
        house.write(queue.patch_status, "a", state=RUNNING, now=103.0)


@pytest.mark.parametrize(
    ("before", "after"),
    [(a, b) for a, b in itertools.product(RolloutState, repeat=2) if a != b],
)
def test_a_patch_follows_the_transitions_of_the_protocol(
    house: House, before: RolloutState, after: RolloutState
) -> None:
    house.enqueue("a")
    road = {QUEUING: [], RUNNING: [RUNNING], SUCCEEDED: [RUNNING, SUCCEEDED], FAILED: [FAILED]}[before]
    for state in road:
        house.write(queue.patch_status, "a", state=state, now=1.0)
    allowed = {(QUEUING, RUNNING), (QUEUING, FAILED), (RUNNING, SUCCEEDED), (RUNNING, FAILED)}
    if (before, after) in allowed:
        assert house.write(queue.patch_status, "a", state=after, now=2.0).state == after
    else:
        with pytest.raises(Conflict):
            house.write(queue.patch_status, "a", state=after, now=2.0)


def test_a_controller_may_bring_attempts_of_its_own(house: House) -> None:
    house.enqueue("a", "b")
    patched = house.write(queue.patch_status, "a", state=RUNNING, last_attempt_id="pod-1", now=101.0)
    assert (patched.last_attempt_id, patched.num_attempts) == ("pod-1", 1)
    (attempt,) = house.read(queue.attempts, "a")
    assert (attempt.id, attempt.number, attempt.ended_at) == ("pod-1", 1, None)
    assert house.lease(now=1e9) == ["b"]
    with pytest.raises(Conflict, match="belongs to rollout 'a'"):
        house.write(queue.patch_status, "b", last_attempt_id="pod-1", now=102.0)
    with pytest.raises(RecordError, match="last_attempt_id"):
        house.write(queue.patch_status, "b", last_attempt_id="../x", now=102.0)


def test_deleting_removes_everything_of_a_rollout_and_nothing_else(house: House) -> None:
    house.enqueue("a", "b")
    tried = {name: house.started(name)[0] for name in ("a", "b")}
    for number, (name, attempt) in enumerate(tried.items()):
        house.store.append(schema.calls, [call_row(number, attempt_id=attempt.id, rollout_id=name)]).result(BOUND_S)
        house.store.append_all(
            [(schema.completions, [completion_row(number)]), (schema.choices, [choice_row(number)])]
        ).result(BOUND_S)
    house.write(queue.delete, "a")
    house.write(queue.delete, "a")
    for table in (schema.rollouts, schema.attempts, schema.calls, schema.completions, schema.choices):
        query = select(func.count()).select_from(table)
        assert house.store.read(lambda c, q=query: c.execute(q).scalar_one()) == 1  # type: ignore[misc]
    assert [r.id for r in house.read(queue.select_by_state, list(RolloutState), 10)] == ["b"]


def test_a_cursor_sees_every_end_once_even_when_rollouts_are_deleted(house: House) -> None:
    house.enqueue("a", "b", "c", run_id="run")
    house.enqueue("d", run_id="other")
    house.lease()
    for name in ("c", "a"):
        house.finish(name)
    found, cursor, total = house.read(queue.terminal, 0, 1)
    assert ([r.id for r in found], cursor, total) == (["c"], 1, 2)
    found, cursor, total = house.read(queue.terminal, cursor, 10)
    assert ([r.id for r in found], cursor, total) == (["a"], 2, 2)
    house.write(queue.delete, "a")
    house.finish("d")
    house.finish("b")
    found, after, total = house.read(queue.terminal, cursor, 10, "run")
    assert ([r.id for r in found], after, total) == (["b"], 4, 2)
    assert house.read(queue.terminal, 4, 10) == ([], 4, 3)


def test_cancelling_a_run_fails_what_is_not_over(house: House) -> None:
    house.enqueue("a", "b", "c", run_id="run")
    house.enqueue("d", run_id="other")
    house.lease(limit=2)
    _, token = house.started()
    house.finish("b")
    assert house.write(queue.cancel_unfinished, "run", 150.0) == ["a", "c"]
    assert house.write(queue.cancel_unfinished, "run", 151.0) == []
    assert {name: (house.get(name).state, house.get(name).outcome) for name in "abcd"} == {
        "a": (FAILED, Outcome.CANCELLED),
        "b": (SUCCEEDED, Outcome.COMPLETED),
        "c": (FAILED, Outcome.CANCELLED),
        "d": (QUEUING, None),
    }
    found = house.read(queue.attempt_by_token, token)
    assert found is not None
    assert found[0].outcome == Outcome.CANCELLED


def test_groups_are_finished_when_all_of_them_are(house: House) -> None:
    house.enqueue("a", "b", group_id="g1", run_id="run")
    house.enqueue("c", "d", group_id="g2", run_id="run")
    house.enqueue("e", run_id="run", mode="val")
    house.lease()
    for name in ("b", "a", "c", "e"):
        house.finish(name)
    assert house.read(queue.finished_groups, run_id="run") == [["a", "b"], ["e"]]
    assert house.read(queue.finished_groups, mode="train") == [["a", "b"]]
    assert house.read(queue.finished_groups, run_id="other") == []


def test_every_change_wakes_whoever_watches(house: House) -> None:
    count = house.store.count(queue.TOPIC)
    for change in (
        lambda: house.enqueue("a"),
        lambda: house.lease(),
        lambda: house.started(),
        lambda: house.write(queue.release, "a", 1.0),
        lambda: house.finish("a"),
        lambda: house.write(queue.delete, "a"),
    ):
        change()
        assert house.store.count(queue.TOPIC) > count
        count = house.store.count(queue.TOPIC)


def test_two_processes_never_lease_the_same_rollout(house: House) -> None:
    names = [f"r{number}" for number in range(300)]
    house.enqueue(*names)
    code = """
import sys
from leyden.store import open_store, queue
store = open_store(sys.argv[1])
while True:
    got = store.write(lambda c: queue.lease(c, store, sys.argv[2], 3, 600, 100.0)).result(20)
    if not got:
        break
    print(*[r.id for r in got])
store.close()
"""
    processes = [script(code, house.store.url, owner) for owner in ("x", "y")]
    leased = [finished(process).split() for process in processes]
    assert sorted(leased[0] + leased[1]) == sorted(names)


def test_a_connection_of_a_reader_is_enough_to_look(house: House) -> None:
    def look(connection: Connection) -> int:
        return len(queue.select_by_state(connection, [QUEUING], 5))

    house.enqueue("a")
    assert house.store.read(look) == 1
