"""`leyden judge` through a real gateway, with a scripted judge whose faults are known."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from typer.testing import CliRunner

from leyden.base.config import dump, from_tree
from leyden.base.errors import ConfigError
from leyden.base.records import Attempt, Outcome, Reward, Rollout, RolloutState, Task
from leyden.cli.main import app
from leyden.store import open_store, queue
from leyden.store.base import Store
from leyden.testing.fake_engine import FakeEngine
from leyden.testing.running import Started, running_gateway
from leyden.testing.scripted import Behaviour, Reply
from leyden.traces.recorder import Recorder

ROOT = Path(__file__).resolve().parents[3]


def model(body: Mapping[str, Any]) -> Reply:
    """The agent's model says its seed; the judge takes the first of two, and likes length."""
    text = str(body["messages"][-1]["content"])
    if not str(body["model"]).startswith("judge"):
        return Reply(text=f"answer {text}", whole=True)
    if "=== first ===" in text:
        return Reply(text='{"better": "first"}', whole=True)
    return Reply(text=json.dumps({"score": min(1.0, len(text) / 1000)}), whole=True)


def play(store: Store, url: str, number: int) -> None:
    """A rollout with one answer, a judge's score and a label that contradicts it on every fourth."""
    task = Task(id=f"t{number % 6}", split="val")
    rollout = Rollout(id=f"ro-{number}", task=task, mode="val", created_at=time.time())

    def begin(connection: Any) -> tuple[Attempt, str]:
        queue.enqueue(connection, store, [rollout])
        return queue.start_attempt(connection, store, rollout.id, "test", time.time())

    attempt, token = store.write(begin).result(10)
    body = {"model": "main", "messages": [{"role": "user", "content": str(number)}]}
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    address = Started(rollout, attempt, token).base_url(url) + "/chat/completions"
    with urlopen(Request(address, json.dumps(body).encode(), headers), timeout=20) as answer:
        assert answer.status == 200
    good = float(number % 2)
    label = good if number % 4 else 1.0 - good
    recorder = Recorder(store)
    recorder.rewards(rollout.id, attempt.id, [Reward(name="judge", value=good)]).result(10)
    recorder.rewards(rollout.id, attempt.id, [Reward(name="helpful", value=label, source="human")]).result(10)

    def end(connection: Any) -> None:
        now = time.time()
        ended = Attempt(
            id=attempt.id, rollout_id=rollout.id, number=1, started_at=attempt.started_at, ended_at=now,
            outcome=Outcome.COMPLETED,
        )  # fmt: skip
        queue.end_attempt(connection, store, ended)
        queue.finish(
            connection, store, rollout.id, state=RolloutState.SUCCEEDED, outcome=Outcome.COMPLETED, reward=good,
            error_message=None, now=now,
        )  # fmt: skip

    store.write(end).result(10)


def test_agreement_and_both_biases_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    (tmp_path / "rubric.md").write_text("Is it helpful?")
    with FakeEngine(Behaviour(reply=model)) as engine:
        tree = {
            "store": {"url": f"sqlite:///{tmp_path / 'leyden.db'}"},
            "policies": {name: {"model": name, "engine": engine.url} for name in ("main", "judge")},
            "rewards": {"judge": {"policy": "judge", "rubric": "rubric.md"}},
        }
        config = from_tree(tree, base_dir=tmp_path)
        (tmp_path / "leyden.json").write_text(dump(config))
        store = open_store(config.store.url)
        try:
            with running_gateway(config, store) as listening:
                for number in range(12):
                    play(store, listening.url, number)
        finally:
            store.close()
        shown = CliRunner().invoke(app, ["judge", "-c", str(tmp_path / "leyden.json"), "--json"])
        assert shown.exit_code == 0, (shown.output, shown.exception)
        said = CliRunner().invoke(app, ["judge", "-c", str(tmp_path / "leyden.json"), "--samples", "0"])
    found = json.loads(shown.stdout)
    # Labels contradict on 0, 4, 8: 9 of 12 agree, and kappa is (0.75 - 0.5) / (1 - 0.5).
    assert found["agreement"] == {"num_items": 12, "agreed": 0.75, "kappa": pytest.approx(0.5)}
    assert found["position"]["num_pairs"] == found["position"]["num_first"] == 6 and found["position"]["biased"]
    assert found["length"]["mean_gain"] > 0 and found["length"]["biased"]
    assert "12 items, 75% agree, kappa 0.50" in said.stdout and "too few to rely on" in said.stdout


def test_without_a_judge_there_is_nothing_to_check(tmp_path: Path) -> None:
    (tmp_path / "leyden.json").write_text(dump(from_tree({}, base_dir=tmp_path)))
    shown = CliRunner().invoke(app, ["judge", "-c", str(tmp_path / "leyden.json")])
    assert isinstance(shown.exception, ConfigError) and "there is no judge" in str(shown.exception)
