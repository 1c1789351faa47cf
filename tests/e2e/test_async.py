"""Rollouts that go on during updates: real processes, real weights."""

from pathlib import Path
from statistics import mean

import pytest
from tests.e2e.project import (
    AGENT,
    LEAN_AGENT,
    assert_conserved,
    finished,
    leyden,
    make_project,
    metrics,
    run_folder,
    start,
)
from tests.e2e.test_learning import learn
from tests.e2e.test_resume import num_steps, recorded, until

from leyden.store import open_store
from leyden.traces.reader import Reader

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.timeout(900),
    pytest.mark.flaky(reruns=2, only_rerun=["AssertionError"]),  # as in test_learning.py
]

ASYNC = ("learn.max_staleness=2", 'tasks.holdout=""', "harness.concurrency=16")


def test_a_policy_learns_from_rollouts_that_run_on_during_updates(tmp_path: Path) -> None:
    path = make_project(tmp_path, agent=AGENT)
    _, rows = learn(path, *ASYNC, "learn.steps=8", 'harness.env={ WORD = "{input.word}", CALLS = "2" }')
    rewards = [row["reward_mean"] for row in rows]
    assert mean(rewards[-2:]) > mean(rewards[:2]) + 0.2, rewards
    assert sorted(place for row in rows for place in row["groups"]) == list(range(16))
    assert any(row["staleness"] > 0 for row in rows), "no step met an older version"
    for row in rows:
        assert_conserved(row)
        assert row["staleness"] <= 2 and "stale" not in row["conservation"]["dropped"]
    store = open_store(f"sqlite:///{tmp_path / 'leyden.db'}", create=False)
    try:
        run = run_folder(tmp_path).name
        traces = Reader(store).traces([r.id for r in finished(store, run)])
    finally:
        store.close()
    mixed = [t for t in traces if len({call.policy_version for call in t.calls}) > 1]
    assert mixed, "no rollout went on under newer weights"


def test_a_killed_asynchronous_run_repeats_its_steps_bit_by_bit_and_goes_on(tmp_path: Path) -> None:
    path = make_project(tmp_path, agent=LEAN_AGENT)
    sets = [part for one in (*ASYNC, "learn.steps=6", "learn.checkpoint_every=3") for part in ("-s", one)]
    process = start("train", "-c", str(path), *sets, cwd=tmp_path)

    until(lambda: num_steps(tmp_path) >= 5, process, tmp_path, "step 5")
    process.kill()
    process.wait(10)
    run = run_folder(tmp_path)
    before = metrics(run)
    leyden("train", "--resume", str(run), cwd=tmp_path)
    after = metrics(run)
    assert len(before) in (5, 6)
    same = ("groups", "conservation", "loss", "grad_norm", "reward_mean", "staleness")
    for row, again in zip(before, after, strict=False):
        assert {name: recorded(row)[name] for name in same} == {name: recorded(again)[name] for name in same}
    assert [row["step"] for row in after] == list(range(6))
    assert sorted(place for row in after for place in row["groups"]) == list(range(12))
    for row in after:
        assert_conserved(row)
