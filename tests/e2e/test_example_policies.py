"""The example of two policies at its smallest, and that its reward is the one that its README tells."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from tests.e2e.project import assert_conserved, finished, leyden, metrics, project_store, run_folder
from tests.e2e.team import build_loud_model

from leyden.base.config import load
from leyden.base.tasks import load_demos, load_tasks
from leyden.cli.probing import run_probes
from leyden.rewards.probes import probes_of
from leyden.traces.reader import Reader

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_policies"
sys.path.insert(0, str(EXAMPLE))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example with a few orders."""
    import orders

    copy = tmp_path / "two_policies"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("data", "runs", "*.db*", "__pycache__"))
    orders.generate(copy / "data", {"train": 6, "holdout": 4, "demos": 3}, seed=1)
    return copy


def test_orders_are_the_same_for_a_seed_and_demonstrations_are_worth_everything(folder: Path, tmp_path: Path) -> None:
    import orders
    import score

    orders.generate(tmp_path / "again", {"train": 6, "holdout": 4, "demos": 3}, seed=1)
    for name in ("train", "holdout", "demos"):
        assert (tmp_path / "again" / f"{name}.jsonl").read_bytes() == (folder / f"data/{name}.jsonl").read_bytes()
    demos = load_demos(folder / "data/demos.jsonl", ["reader", "clerk"])
    assert [demo.policy for demo in demos] == ["reader", "clerk"] * 3
    tasks = [*load_tasks(folder / "data/train.jsonl"), *load_tasks(folder / "data/holdout.jsonl", split="holdout")]
    for task in tasks:
        asked, answer = {"answer": task.answer}, task.answer
        for name, text in (("note", orders.note_of(answer)), ("entry", orders.entry_of(answer))):
            (tmp_path / f"{name}.txt").write_text(text)
        assert score.verify(asked, {}, tmp_path) == {"entry": 1.0, "noted": 1.0, "entered": 1.0}
        (tmp_path / "note.txt").write_text(f"{answer['who']}: {answer['goods']}")
        assert score.verify(asked, {}, tmp_path) == {"entry": 1.0, "noted": 0.5, "entered": 0.5}
        (tmp_path / "entry.txt").write_text("I do not know, sorry")
        assert score.verify(asked, {}, tmp_path) == {"entry": 0.0, "noted": 0.5, "entered": 0.0}
        (tmp_path / "entry.txt").unlink()
        assert score.verify(asked, {}, tmp_path)["entry"] == 0.0


class Quiet:
    """No progress is shown."""

    def begin(self, phase: str, total: int) -> None:
        """A phase starts."""

    def advance(self, done: int, note: str = "") -> None:
        """So much of it is over."""

    def end(self) -> None:
        """It is over."""


def test_its_reward_passes_the_probes_that_run_before_training(folder: Path) -> None:
    config = load(folder / "leyden.toml", ["probes.tasks=1"])
    tasks = load_tasks(config.resolve(config.tasks.train))
    results = run_probes(config, tasks, probes_of(config, quick=True), Quiet())
    assert [(result.name, result.why) for result in results if result.won] == []


@pytest.mark.timeout(300)
def test_it_imitates_and_learns_with_both_policies_while_a_third_answers(folder: Path, tmp_path: Path) -> None:
    model = build_loud_model(tmp_path / "model")
    names = ("reader", "clerk", "correspondent")
    overrides = [f"policies.{name}.model={model}" for name in names]
    overrides += [f"policies.{name}.max_context=400" for name in names]  # a letter is a token there
    overrides += ["learn.steps=2", "learn.tasks_per_step=1", "learn.group_size=4", "harness.env.REPLY=yes"]
    words = [word for one in overrides for word in ("-s", one)]
    leyden("train", "-c", "leyden.toml", *words, cwd=folder)
    run = run_folder(folder)
    assert [sorted(row["policies"]) for row in metrics(run, "sft")] == [["clerk", "reader"]] * 2
    for row in metrics(run):
        assert_conserved(row)
        assert all(part["conservation"]["trained"] > 0 for part in row["policies"].values())
        assert row["conservation"]["dropped"]["not_trainable"] > 0, "what the correspondent says is trained by nobody"
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert [one["policy_version"] for one in summary["evaluations"]] == [
        "reader@0+clerk@0", "reader@2+clerk@2", "reader@4+clerk@4",
    ]  # fmt: skip
    store = project_store(folder)
    try:
        traces = Reader(store).traces([r.id for r in finished(store, run.name)])
    finally:
        store.close()
    assert all([call.policy for call in trace.calls] == list(names) for trace in traces)
    assert {call.policy_version for trace in traces for call in trace.calls if call.policy == names[2]} == {0}
