"""Probes through the real gateway, runner, harness and verifier, on environments of the gallery."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "examples" / "probe_gallery"))

from environments import CLEAN, HACKABLE, write  # noqa: E402
from measure import measure  # noqa: E402

from leyden.base.config import dump, from_tree, load  # noqa: E402
from leyden.base.errors import Interrupted, ProbeError  # noqa: E402
from leyden.base.records import Task  # noqa: E402
from leyden.base.tasks import load_tasks  # noqa: E402
from leyden.cli import probing  # noqa: E402
from leyden.cli.main import app  # noqa: E402
from leyden.cli.verbs import train  # noqa: E402
from leyden.rewards.components import Total  # noqa: E402
from leyden.rewards.probes import BUILT_IN, probes_of  # noqa: E402
from leyden.store import open_store  # noqa: E402

BY_NAME = {environment.name: environment for environment in (*HACKABLE, *CLEAN)}


class Said:
    """Keeps what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def begin(self, phase: str, total: int) -> None:
        """Not kept."""

    def advance(self, done: int, note: str = "") -> None:
        """Not kept."""

    def end(self) -> None:
        """Not kept."""


def project(folder: Path, name: str, **probes: Any) -> Path:
    tree = {**write(BY_NAME[name], folder), "probes": {"tasks": 2, **probes}}
    path = folder / "leyden.json"
    path.write_text(dump(from_tree(tree, base_dir=folder)))
    return path


def test_the_gallery_is_as_large_as_it_says() -> None:
    assert len(HACKABLE) >= 12 and len(CLEAN) >= 6
    assert len(BY_NAME) == len(HACKABLE) + len(CLEAN)
    assert all(e.flaw for e in HACKABLE) and not any(e.flaw for e in CLEAN)


@pytest.mark.parametrize(
    ("environment", "probe", "wins"),
    [
        ("stripped_to_nothing", "empty_answer", True),
        ("mentions_in_context", "question_echoed", True),
        ("reads_json_score", "reward_injected", True),
        ("test_in_workspace", "tests_tampered", True),
        ("result_in_workspace", "results_forged", True),
        ("crashes_on_nonsense", "failure_as_success", True),
        ("coin", "verifier_unstable", True),
        ("exact_sum", "verifier_crashed", False),
        ("program_tested_outside", "tests_tampered", False),
        ("builtin_numeric", "results_forged", False),
    ],
)
def test_a_probe_finds_what_it_is_for_and_leaves_the_sound_alone(environment: str, probe: str, wins: bool) -> None:
    row = measure(BY_NAME[environment], only=[probe])
    assert row["won"] == ([probe] if wins else []), row
    assert row["not_judged"] == []


def test_the_verb_shows_who_won_and_fails(tmp_path: Path) -> None:
    path = project(tmp_path, "stripped_to_nothing")
    shown = CliRunner().invoke(app, ["probe", "-c", str(path), "--only", "empty_answer", "--json"])
    assert shown.exit_code == 1, shown.output
    found = json.loads(shown.stdout.strip().splitlines()[-1])
    assert found["won"] == ["empty_answer"]
    assert found["probes"][0]["tries"][0]["task_id"] == "sum-17-26"
    listed = CliRunner().invoke(app, ["probe", "-c", str(path), "--list", "--json"])
    assert listed.exit_code == 0 and "tests_tampered" in listed.stdout
    assert not (tmp_path / "leyden.db").exists(), "probes leave the project's own store alone"


def test_training_refuses_and_says_which_probe_had_how_much_on_which_tasks(tmp_path: Path) -> None:
    names = ["stripped_to_nothing", "exact_sum"]
    skip = [n for n in probes_of(from_tree({}, base_dir=tmp_path), quick=True) if n.name != "empty_answer"]
    path = project(tmp_path / "open", names[0], skip=[p.name for p in skip])
    with pytest.raises(
        ProbeError, match=r"empty_answer .*100% of the highest reward .bound 20%. on sum-17-26, sum-38-55"
    ):
        train.train(load(path), Said())  # type: ignore[arg-type]
    path = project(tmp_path / "sound", names[1], skip=[p.name for p in skip])
    said, config = Said(), load(path)
    probing.before_training(config, load_tasks(config.resolve(config.tasks.train)), said)
    assert said.said[0].startswith("1 probes of the reward took")


def test_probes_that_cannot_be_judged_are_said_and_are_no_win(tmp_path: Path) -> None:
    path = project(tmp_path, "exact_sum")
    (tmp_path / "agent.py").write_text("print('never calls the model')\n")
    config = load(path)
    tasks = load_tasks(config.resolve(config.tasks.train))
    [result] = probing.run_probes(config, tasks, [BUILT_IN["empty_answer"]], Said())
    assert (result.won, result.score, result.num_judged) == (False, None, 0)
    assert "no_calls" in result.why


def test_a_request_to_stop_ends_the_probes_at_once(tmp_path: Path) -> None:
    config = load(project(tmp_path, "exact_sum"))

    def stop() -> None:
        raise Interrupted("stopped as asked")

    with pytest.raises(Interrupted):
        tasks = load_tasks(config.resolve(config.tasks.train))
        probing.run_probes(config, tasks, [BUILT_IN["empty_answer"]], Said(), stop)


def test_what_a_judge_alone_can_give_is_left_out_where_no_judge_is_asked(tmp_path: Path) -> None:
    rewards = from_tree(
        {
            "rewards": {
                "judge": {"policy": "judge", "rubric": "r.md"},
                "weights": {"judge": 1.0, "rule": 0.5, "form": 0.1},
                "gates": {"form": "judge"},
                "success": "judge",
            }
        },
        base_dir=tmp_path,
    ).rewards
    alone = probing.without_judge(rewards)
    assert Total(alone).explain({"rule": 1.0, "form": 1.0}).total == pytest.approx(0.6)
    assert alone.success == "" and probing.without_judge(alone) is alone


def test_tasks_are_taken_from_every_domain_first() -> None:
    tasks = [Task(id=f"{d}{i}", domain=d) for d in "ab" for i in range(3)]
    assert [t.id for t in probing.choose_tasks(tasks, 3)] == ["a0", "b0", "a1"]
    assert len(probing.choose_tasks(tasks, 99)) == 6


def test_labels_are_imported_whole_or_not_at_all(tmp_path: Path) -> None:
    from leyden.base.errors import RecordError
    from leyden.cli.verbs import label
    from leyden.testing.running import start_attempt
    from leyden.traces.reader import Reader

    store = open_store(f"sqlite:///{tmp_path / 'leyden.db'}")
    try:
        started = start_attempt(store, mode="val")
        file = tmp_path / "labels.jsonl"
        good = {"rollout": started.rollout.id, "components": {"helpful": 1, "kind": 0.5}}
        for bad, says in (
            ({"rollout": "nobody", "components": {"a": 1}}, "nothing was recorded"),
            ({"rollout": started.rollout.id, "components": {"a": True}}, "line 2: .*True"),
            ({"rollout": started.rollout.id, "components": {}}, "'components' is"),
            ({"rollout": started.rollout.id, "components": {"a": 1}, "by": "me"}, "unknown key 'by'"),
            ({"rollout": started.rollout.id, "components": {"a": 1}, "call": "c"}, "is no call of rollout"),
        ):
            file.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
            with pytest.raises(RecordError, match=says):
                label.record(store, label.read_labels(file), str(file))
            assert Reader(store).trace(started.rollout.id).rewards == []
        file.write_text(json.dumps(good))
        assert label.record(store, label.read_labels(file), str(file)) == 2
        found = Reader(store).trace(started.rollout.id).rewards
        assert [(r.name, r.value, r.source) for r in found] == [("helpful", 1.0, "human"), ("kind", 0.5, "human")]
        file.write_text("\n")
        with pytest.raises(RecordError, match="holds no label"):
            label.read_labels(file)
    finally:
        store.close()
