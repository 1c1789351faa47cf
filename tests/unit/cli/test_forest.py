"""The forest in the terminal, in JSON and in the report."""

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tests.unit.cli.calling import Caller
from tests.unit.traces.making import OUTCOMES, make_call, make_trace

from leyden.base.config import from_tree
from leyden.cli import forest_tree
from leyden.cli.finish import _example_forest
from leyden.cli.report import forest, render
from leyden.store import lookups, open_store
from leyden.testing.fake_engine import FakeEngine
from leyden.testing.running import start_attempt
from leyden.testing.scripted import Behaviour, Reply
from leyden.traces import picture
from leyden.traces.assemble import assemble
from leyden.traces.picture import Picture

POLICY = {"policies": {"main": {"model": "absent"}}}
ATTACK = "<script>alert(1)</script>"


def data_of(*, attack: bool = False) -> Picture:
    calls = [
        make_call("c0", prompt=(1, 2, 3), completions=[(7, 8)]),
        make_call("c1", prompt=(1, 2, 5, 6), completions=[(9, 9)], seq=1),
    ]
    trace = make_trace(calls=calls)
    actions = assemble([trace], policy="main", trainable_outcomes=OUTCOMES).actions

    def decode(ids: list[int]) -> str:
        return ATTACK if attack else "".join(chr(96 + i) for i in ids)

    return forest.forest_data("Group g0, 1 rollouts", [trace], actions, decode, with_ids=True)


def drawn(data: Picture) -> str:
    out = io.StringIO()
    forest_tree.show(data, Console(file=out, width=160, highlight=False))
    return out.getvalue()


def test_the_terminal_shows_counts_the_class_its_position_and_both_sides() -> None:
    text = drawn(data_of())
    assert "Group g0" in text
    assert "2 answers on 2 trajectories: 11 tokens, of which 9 are distinct" in text
    assert "2 tokens from 0, shared by 2 answers" in text
    assert "unknown at 2" in text or "template at 2" in text
    assert "before: 'cgh' [3 7 8]" in text and "now:    'efii' [5 6 9 9]" in text
    assert "2 sampled, 2 trained; call 2" in text


def test_a_deep_forest_is_drawn_to_a_depth_and_the_rest_is_counted() -> None:
    spine = list(range(1000, 1200))
    calls = [make_call(f"c{n}", prompt=spine[: n + 1], completions=[(n + 1,)], seq=n) for n in range(0, len(spine), 2)]
    data = forest.forest_data("deep", [make_trace(calls=calls)], (), None)
    text = drawn(data)
    assert "lie deeper than" in text
    assert max(map(len, text.splitlines())) <= 160 or "answers on" in text
    assert max(branch["level"] for branch in data["branches"]) > forest_tree.MAX_LEVELS


def test_what_is_left_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "MAX_BRANCHES", 1)
    data = data_of()
    assert data["num_left_out"] == 2
    assert "2 more branches are not shown" in drawn(data)
    assert "2 branches left out of this page" in forest.forest(data)


def test_the_report_shows_the_same_and_escapes_what_agents_wrote() -> None:
    page = render({"title": "t", "forest": data_of(attack=True)})
    assert 'id="forest"' in page and "shared by 2 answers" in page
    assert ATTACK not in page and "&lt;script&gt;" in page
    assert "No group of this run" in render({"title": "t"})


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    turn = itertools.count()
    with FakeEngine(Behaviour(reply=lambda body: Reply(text=f"answer {next(turn) % 2}"))) as running:
        yield running


def test_inspect_draws_a_rollout_and_a_group(leyden: Caller, project: Path, engine: FakeEngine) -> None:
    config = project / "leyden.toml"
    said = leyden(
        "run", "-c", config, "--limit", "1", "--samples", "3", "--json", "-s", f"policies.main.engine={engine.url}"
    )
    assert said.code == 0, said.err
    one = next(row["rollout"] for row in said.rows if "rollout" in row)
    without = ("-c", config, "-s", "policies.main.model=absent")
    alone = leyden("inspect", one[:-2], "--forest", *without, "--json").rows[0]
    assert alone["num_answers"] == 1 and len(alone["branches"]) == 1
    text = leyden("inspect", one, "--forest", *without)
    assert text.code == 0 and f"Rollout {one}" in text.out and "1 answers on 1 trajectories" in text.out
    assert leyden("inspect", "nobody", "--forest", *without).code == 1
    store = open_store(f"sqlite:///{project / 'leyden.db'}", create=False)
    try:
        group = store.read(lambda connection: lookups.find(connection, one)).group_id
    finally:
        store.close()
    assert group is not None
    whole = leyden("inspect", group, "--forest", *without, "--json").rows[0]
    assert whole["num_answers"] == 3 and whole["branches"][0]["num_rows"] == 3
    assert whole["num_trained"] == whole["num_sampled"] > 0


def test_the_report_takes_the_group_that_its_run_asked_for_last(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path / 'leyden.db'}")
    try:
        for group in ("g1", "g1", "g2", "g2"):
            start_attempt(store, run_id="mine", group_id=group)
        start_attempt(store, run_id="another", group_id="g3")
        start_attempt(store, run_id="mine", group_id="v", mode="val")
        ids = store.read(lambda connection: lookups.newest_group(connection, "mine"))
        found = store.read(lambda connection: [lookups.find(connection, one) for one in ids])
        assert {rollout.group_id for rollout in found} == {"g2"}
        assert len(ids) == 2
        house: Any = SimpleNamespace(store=store, run_id="mine", config=from_tree(POLICY, base_dir=tmp_path))
        data = _example_forest(house)
        assert data is not None and "2 rollouts" in data["title"] and data["branches"] == []
        house.run_id = "nothing"
        assert _example_forest(house) is None
    finally:
        store.close()
