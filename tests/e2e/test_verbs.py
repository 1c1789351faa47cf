"""The verbs that run the whole loop, as a program and as a newcomer would call them."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.project import LEAN_AGENT, leyden, make_project, project_store, read, run_folder
from tests.tiny_model import build_tiny_model

from leyden.base.errors import LearningError
from leyden.cli import wiring
from leyden.cli.wiring import LocalServices
from leyden.store import ledger

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(900)]


def test_train_with_json_prints_one_object_a_line_and_the_result_last(tmp_path: Path) -> None:
    path = make_project(tmp_path, agent=LEAN_AGENT, num_holdout=3)
    said = leyden("train", "-c", str(path), "-s", "learn.steps=2", "--json", cwd=tmp_path).stdout
    rows = [json.loads(line) for line in said.splitlines()]
    steps = [row for row in rows if row["event"] == "step"]
    assert [(row["stage"], row["step"]) for row in steps] == [("rl", 0), ("rl", 1)]
    begun = [row["phase"] for row in rows if row["event"] == "begin"]
    assert [row["phase"] for row in rows if row["event"] == "end"] == begun
    last = rows[-1]
    assert last["event"] == "done"
    assert [one["policy_version"] for one in last["evaluations"]] == ["main@0", "main@2"]
    assert last["verdicts"]["base"]["answer"] in ("better", "worse", "not separable")
    assert Path(last["report"]) == run_folder(tmp_path) / "report.html" and Path(last["report"]).exists()
    kept = json.loads((run_folder(tmp_path) / "summary.json").read_text(encoding="utf-8"))
    assert {"event": "done", **kept} == last


def test_the_quickstart_goes_from_nothing_to_a_verdict(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model", pad_is_eos=True, hidden_size=32)
    folder = tmp_path / "here"
    small = ("learn.steps=1", "learn.tasks_per_step=2", "learn.group_size=2", "eval.max_tasks=6", "sft.epochs=1",
             "policies.main.max_context=2048", "policies.main.sampling.max_tokens=8",
             "policies.main.eval.max_tokens=8", "harness.concurrency=8")  # fmt: skip
    sets = [part for one in small for part in ("-s", one)]
    said = leyden("quickstart", "--dir", str(folder), "--model", str(model), *sets, cwd=tmp_path).stdout
    assert "What happens now" in said and "Verdict against base (main@0)" in said
    assert "Report: " in said and "The whole quickstart took" in said
    (report,) = (folder / "runs").glob("*/report.html")
    assert "SFT + RL" in report.read_text(encoding="utf-8")
    again = leyden("quickstart", "--dir", str(folder), "--model", str(model), *sets, "--json", cwd=tmp_path).stdout
    last = json.loads(again.splitlines()[-1])
    assert last["event"] == "done" and len(last["evaluations"]) == 3
    assert len(list((folder / "runs").glob("*/report.html"))) == 2, "a second run keeps the first"


@pytest.fixture
def services(tmp_path: Path) -> Iterator[LocalServices]:
    """A gateway that serves a run; nobody waits for a rollout, so there is no runner."""
    config = read(make_project(tmp_path), 'tasks.holdout=""')
    store = wiring.store_of(config)
    store.write(lambda c: ledger.add_run(c, store, "run-1", {}, {}, now=0.0)).result(10)
    made = LocalServices(config, store, tmp_path / "runs" / "run-1", "run-1", {"main": "http://127.0.0.1:9"}, "key")
    try:
        made.start()
        yield made
    finally:
        made.stop()
        store.close()


def test_a_gateway_that_died_unseen_is_replaced_before_it_is_asked(services: LocalServices) -> None:
    before = services.gateway.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    asyncio.run(services.hold())
    assert services.gateway.pid not in (None, before)
    state = services.client.post("/proxy/drain", {"timeout_s": 1})
    assert state["paused"] and state["drained"], "the new one holds calls as the old one was told to"
    asyncio.run(services.resume())
    assert not services.client.post("/proxy/resume", {})["paused"]


def test_a_gateway_that_lives_and_refuses_is_not_replaced(services: LocalServices) -> None:
    before = services.gateway.pid
    with pytest.raises(LearningError, match="did not do POST /proxy/pause: status "):
        asyncio.run(services._ask("/proxy/pause", {"resaon": "a key that is not there"}))
    assert services.gateway.pid == before


def test_an_evaluation_without_training_leaves_no_run_behind(tmp_path: Path) -> None:
    path = make_project(tmp_path, agent=LEAN_AGENT, num_holdout=3)
    said = leyden("eval", "-c", str(path), "--json", cwd=tmp_path).stdout
    assert json.loads(said.splitlines()[-1])["evaluations"][0]["policy_version"] == "main@0"
    store = project_store(tmp_path)
    try:
        assert store.read(ledger.runs) == []
    finally:
        store.close()
