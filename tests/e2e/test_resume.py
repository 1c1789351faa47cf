"""`kill -9` at any moment loses nothing and doubles nothing."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.e2e.project import (
    AGENT,
    ENV,
    LEAN_AGENT,
    LIMIT_S,
    assert_conserved,
    attempts_of,
    finished,
    leyden,
    make_project,
    metrics,
    num_open,
    project_store,
    run_folder,
    said,
    start,
)

from leyden.base.records import RolloutState
from leyden.traces.reader import Reader

pytestmark = pytest.mark.timeout(900)  # two whole runs; a killed runner's leases last 30 s


def until(met: Callable[[], bool], process: "subprocess.Popen[str]", folder: Path, what: str) -> None:
    """Wait until `met`; fails when the process ends first or the limit is over."""
    deadline = time.monotonic() + LIMIT_S
    while not met():
        assert process.poll() is None, f"ended with {process.returncode} before {what}\n{said(folder)}"
        assert time.monotonic() < deadline, f"{what} did not happen within {LIMIT_S} s"
        time.sleep(0.02)


def num_steps(folder: Path) -> int:
    """Steps that the metrics file has so far."""
    found = list((folder / "runs").glob("*/metrics.jsonl"))
    return found[0].read_text(encoding="utf-8").count('"stage": "rl"') if found else 0


def num_over(folder: Path) -> int:
    """Training rollouts that are over, whatever their run."""
    if not (folder / "leyden.db").exists() or not num_steps(folder):
        return 0
    store = project_store(folder)
    try:
        return sum(r.mode == "train" for r in finished(store, run_folder(folder).name))
    finally:
        store.close()


def child(process: "subprocess.Popen[str]", word: str) -> psutil.Process:
    """The one child of the run that was started with `word`."""
    found = [p for p in psutil.Process(process.pid).children() if word in p.cmdline()]
    assert len(found) == 1, [p.cmdline() for p in psutil.Process(process.pid).children()]
    return found[0]


def assert_nothing_lost_or_doubled(folder: Path, steps: int, *, group: int = 8, tasks: int = 2) -> None:
    """What the store must hold after a run of `steps` steps, whatever happened on the way."""
    run = run_folder(folder)
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(steps))
    for row in rows:
        assert_conserved(row)
        assert row["num_rollouts"] == group * tasks
    store = project_store(folder)
    try:
        over = finished(store, run.name)
        assert num_open(store, run.name) == 0
        assert len({r.id for r in over}) == len(over)
        assert Counter(r.step for r in over if r.mode == "train") == dict.fromkeys(range(steps), group * tasks)
        for rollout in over:
            tries = attempts_of(store, rollout.id)
            assert rollout.state == RolloutState.SUCCEEDED, rollout
            assert sum(str(a.outcome) == "completed" for a in tries) == 1
            assert all(a.ended_at is not None for a in tries)
        traces = Reader(store).traces([r.id for r in over])
    finally:
        store.close()
    for trace in traces:
        delivered = [call for call in trace.calls if call.status == "ok" and call.delivered]
        assert len(delivered) == 1, [(c.status, c.delivered, c.error) for c in trace.calls]
        assert [r.name for r in trace.rewards] == ["letters", "tokens"]


def recorded(row: dict[str, Any]) -> dict[str, Any]:
    """What of a step must come out the same when it is done again: everything but how long it took."""
    return {name: value for name, value in row.items() if name not in ("time", "seconds", "passes_measured_s", "cost")}


def test_a_killed_learner_repeats_its_steps_bit_by_bit_and_goes_on(tmp_path: Path) -> None:
    path = make_project(tmp_path, agent=LEAN_AGENT, num_holdout=2)
    # The checkpoint after step 2 is the only one, so a kill in step 4 makes step 3 be learned again.
    process = start("train", "-c", str(path), "-s", "learn.steps=5", "-s", "learn.checkpoint_every=2", cwd=tmp_path)
    draw = random.Random(os.getpid())
    wanted = 16 * 3 + draw.randrange(12)
    until(lambda: num_steps(tmp_path) >= 3 and num_over(tmp_path) >= wanted, process, tmp_path, "step 4")
    process.kill()
    process.wait(10)
    run = run_folder(tmp_path)
    before = metrics(run)
    leyden("train", "--resume", str(run), cwd=tmp_path)
    after = metrics(run)
    assert len(before) in (3, 4)
    assert [recorded(row) for row in after[: len(before)]] == [recorded(row) for row in before]
    assert_nothing_lost_or_doubled(tmp_path, 5)
    assert (run / "report.html").exists()


PLACES = {
    "between two optimizer steps of one update": ("torch.optim:AdamW.step", 6),
    "before the step is written down": ("leyden.store.ledger:add_step", 3),
    "while a checkpoint is flushed": ("leyden.learning.backends.embedded.atomic:_flush", 9),
    "before a checkpoint gets its name": ("leyden.learning.backends.embedded.atomic:os.rename", 2),
    "before a checkpoint is registered": ("leyden.store.ledger:add_policy_version", 3),
    "before old optimizer states are dropped": ("leyden.loop:_prune", 2),
}
"""Where the learner of three steps with two optimizer steps each is killed: in its third step, or while the
checkpoint after its second is written."""


@pytest.mark.parametrize("place", PLACES)
def test_a_kill_during_an_update_or_a_checkpoint_loses_nothing_and_doubles_nothing(tmp_path: Path, place: str) -> None:
    where, number = PLACES[place]
    path = make_project(tmp_path, agent=LEAN_AGENT)
    arguments = ("train", "-c", str(path), "-s", "learn.steps=3", "-s", "learn.checkpoint_every=1",
                 "-s", "learn.keep_checkpoints=1", "-s", 'tasks.holdout=""')  # fmt: skip
    trap = [sys.executable, str(Path(__file__).with_name("killed.py")), where, str(number), *arguments]
    killed = subprocess.run(trap, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=LIMIT_S)
    assert killed.returncode == -signal.SIGKILL, f"{where} was not reached\n{killed.stdout}\n{killed.stderr}"
    run = run_folder(tmp_path)
    before = metrics(run) if (run / "metrics.jsonl").exists() else []
    assert 1 <= len(before) <= 2
    leyden("train", "--resume", str(run), cwd=tmp_path)
    assert [recorded(row) for row in metrics(run)[: len(before)]] == [recorded(row) for row in before]
    assert_nothing_lost_or_doubled(tmp_path, 3)
    left = sorted(item.name for item in (run / "checkpoints").iterdir() if item.is_dir())
    assert left == ["main@1", "main@2", "main@3"], "a half-written folder was left, or a version is missing"


def test_a_run_killed_before_its_first_checkpoint_starts_over_with_its_own_rollouts(tmp_path: Path) -> None:
    path = make_project(tmp_path, agent=LEAN_AGENT)
    process = start("train", "-c", str(path), "-s", "learn.steps=3", "-s", 'tasks.holdout=""',
                    "-s", "learn.checkpoint_every=3", cwd=tmp_path)  # fmt: skip
    until(lambda: num_steps(tmp_path) >= 2, process, tmp_path, "step 2")
    process.kill()
    process.wait(10)
    run = run_folder(tmp_path)
    before = metrics(run)[:2]
    leyden("train", "--resume", str(run), cwd=tmp_path)
    assert [recorded(row) for row in metrics(run)[:2]] == [recorded(row) for row in before]
    assert_nothing_lost_or_doubled(tmp_path, 3)


@pytest.mark.parametrize(("word", "agent"), [("serve", AGENT), ("--worker", LEAN_AGENT)])
def test_a_killed_gateway_or_runner_is_replaced_and_the_run_completes(tmp_path: Path, word: str, agent: str) -> None:
    path = make_project(tmp_path, agent=agent)
    process = start("train", "-c", str(path), "-s", "learn.steps=4", "-s", 'tasks.holdout=""', cwd=tmp_path)
    wanted = 16 + random.Random(os.getpid()).randrange(16)
    until(lambda: num_over(tmp_path) >= wanted, process, tmp_path, "step 2")
    victim = child(process, word)
    os.kill(victim.pid, signal.SIGKILL)
    assert process.wait(LIMIT_S) == 0, said(tmp_path)
    assert_nothing_lost_or_doubled(tmp_path, 4)


def test_ctrl_c_stops_between_two_units_of_work_and_resume_goes_on(tmp_path: Path) -> None:
    path = make_project(tmp_path, agent=LEAN_AGENT)
    process = start("train", "-c", str(path), "-s", "learn.steps=3", "-s", 'tasks.holdout=""', cwd=tmp_path)
    until(lambda: num_steps(tmp_path) >= 1, process, tmp_path, "step 1")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 130, said(tmp_path)
    text = said(tmp_path)
    assert "Stopping after the work in hand" in text and "--resume" in text
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive and gone
    leyden("train", "--resume", str(run_folder(tmp_path)), cwd=tmp_path)
    assert_nothing_lost_or_doubled(tmp_path, 3)
