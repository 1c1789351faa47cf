"""Rooms are put together; what does not fit is refused before anything starts."""

import os
import signal
from pathlib import Path

import pytest

from leyden.base.config import Config, from_tree
from leyden.base.errors import ConfigError, Interrupted, LearningError
from leyden.cli import wiring
from leyden.cli.backends import policy_of
from leyden.cli.registering import start_version
from leyden.store import ledger


def config_of(folder: Path, **sections: object) -> Config:
    return from_tree(dict(sections), base_dir=folder)


def test_a_relative_store_lies_beside_the_configuration(tmp_path: Path) -> None:
    store = wiring.store_of(config_of(tmp_path))
    store.close()
    assert (tmp_path / "leyden.db").exists()


def test_a_policy_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[policies.other\] \(known: main\)"):
        policy_of(config_of(tmp_path, policies={"main": {"model": "m"}}), "other")


def test_imitation_without_demonstrations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.demos"):
        wiring.tasks_of(config_of(tmp_path, sft={"epochs": 1}))


def test_an_evaluation_may_use_the_first_tasks_only(tmp_path: Path) -> None:
    lines = "".join(f'{{"id": "t{i}", "input": {{"i": {i}}}}}\n' for i in range(5))
    (tmp_path / "held.jsonl").write_text(lines, encoding="utf-8")
    config = config_of(tmp_path, tasks={"holdout": "held.jsonl"}, eval={"max_tasks": 2})
    _, _, held, _ = wiring.tasks_of(config)
    assert [task.id for task in held] == ["t0", "t1"] and held[0].split == "holdout"


def test_a_new_run_never_reuses_the_number_of_a_version(tmp_path: Path) -> None:
    store = wiring.store_of(config_of(tmp_path))
    try:
        numbers = [
            store.write(lambda c, r=run: start_version(c, store, "main", r, "model", 7)).result(10)  # type: ignore[misc]
            for run in ("run-1", "run-2")
        ]
        # The first run may make versions 1 to 7, even if it is resumed after the second has begun.
        assert numbers == [0, 8]
        versions = store.read(lambda connection: ledger.policy_versions(connection, "main"))
        assert [(v.name, v.run_id) for v in versions] == [("main@0", "run-1"), ("main@8", "run-2")]
    finally:
        store.close()


def test_the_first_signal_asks_and_is_heard_at_the_next_look() -> None:
    asked: list[bool] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop = wiring.StopSignal(on_first=lambda: asked.append(True))
    try:
        stop.install()
        stop.check()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested and asked == [True]
        with pytest.raises(Interrupted, match="--resume"):
            stop.check()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_gateway_that_is_not_there_is_named() -> None:
    with pytest.raises(LearningError, match=r"http://127.0.0.1:9 did not do POST /proxy/pause: no answer"):
        wiring.GatewayClient("http://127.0.0.1:9", "key").post("/proxy/pause", {})


def test_run_ids_are_readable_and_different(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    first, second = wiring.new_run_id(config), wiring.new_run_id(config)
    assert first != second and "-grpo-" in first and "-eval-" in wiring.new_run_id(config, training=False)
