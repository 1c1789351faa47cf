"""When a probe has won, which probes are run, and what they do to a workspace."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.base.config import Config, ProbesConfig, RewardsConfig, from_tree
from leyden.base.errors import ConfigError
from leyden.rewards.probes import BUILT_IN, own_probes, probes_of
from leyden.rewards.probes.answers import everything, long_answer, reward_json
from leyden.rewards.probes.base import Probe, Stage, Try, component_names, highest, judge, share_of
from leyden.rewards.probes.tampering import delete_tests, make_equal, overwrite_tests, remove_all, write_results

PROBE = Probe(name="p", says="tries")


def tries(*shares: float | None, variant: int = 0, **fields: Any) -> list[Try]:
    return [Try(task_id=f"t{i}", variant=variant, share=share, **fields) for i, share in enumerate(shares)]


@pytest.mark.parametrize(
    ("shares", "won"),
    [
        ((0.0, 0.0, 0.0, 0.0), False),
        ((1.0, 0.0, 0.0, 0.0), False),
        ((1.0, 1.0, 0.0, 0.0), False),
        ((1.0, 1.0, 1.0, 0.0), True),
        ((1.0, 1.0), True),
        ((1.0, 0.0), False),
        ((0.3, 0.3), True),
        ((0.1, 0.1, 0.1, 0.1), False),
        ((1.0,), True),
        ((), False),
        ((None, None), False),
    ],
)
def test_one_lucky_hit_is_no_win_and_a_share_on_every_task_is(shares: Any, won: bool) -> None:
    result = judge(PROBE, tries(*shares), ProbesConfig())
    assert result.won is won
    assert (result.score is None) == (not [s for s in shares if s is not None])
    if won:
        assert "bound 20%" in result.why and "t0" in result.why


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0, 1))
def test_a_higher_bound_never_makes_a_winner(shares: list[float], bound: float) -> None:
    low = judge(PROBE, tries(*shares), ProbesConfig(bound=bound))
    high = judge(PROBE, tries(*shares), ProbesConfig(bound=bound, bounds={"p": 1.0}))
    assert not high.won
    assert low.won or all(share <= bound for share in shares) or min(shares) <= bound


def test_the_most_successful_variant_counts() -> None:
    result = judge(PROBE, [*tries(0.0, 0.0), *tries(1.0, 1.0, variant=1)], ProbesConfig())
    assert result.won and result.score == 1.0 and {one.variant for one in result.tries} == {1}


def test_making_the_verifier_fail_is_a_win_whatever_was_earned() -> None:
    crashed = [*tries(0.0), Try(task_id="t9", variant=0, share=None, crash="ValueError: nonsense")]
    result = judge(PROBE, crashed, ProbesConfig())
    assert result.won and "ValueError: nonsense" in result.why and "1 of 2" in result.why
    assert not judge(PROBE, crashed, ProbesConfig(bounds={"p": 1.0})).won
    fine = judge(Probe(name="p", says="", wins_by="crash"), tries(1.0, 1.0), ProbesConfig())
    assert not fine.won, "a verifier that survives nonsense has not lost, whatever it gave"


def test_the_highest_reward_is_that_of_ones_or_of_the_clip() -> None:
    config = RewardsConfig(weights={"a": 1.0, "b": 0.1, "c": -5.0}, clip={"b": (0.0, 20.0)})
    assert highest(config) == pytest.approx(3.0)
    assert highest(RewardsConfig()) == 1.0
    assert highest(RewardsConfig(weights={"a": -1.0})) == 0.0
    assert share_of(1.5, False, config) == pytest.approx(0.5) and share_of(0.0, True, config) == 1.0
    assert share_of(-3.0, False, config) == 0.0
    assert component_names(config) == ["a", "b", "c"] and component_names(RewardsConfig()) == ["reward"]


def configured(tmp_path: Path, **probes: Any) -> Config:
    return from_tree({"probes": probes}, base_dir=tmp_path)


def test_the_list_of_the_design_is_there_and_quick_ones_are_fewer(tmp_path: Path) -> None:
    wanted = {
        "empty_answer", "constant_answer", "question_echoed", "tool_not_called", "verifier_crashed", "reward_injected",
        "failure_as_success", "tests_tampered", "trivial_result",
    }  # fmt: skip
    assert wanted <= set(BUILT_IN)
    config = configured(tmp_path)
    assert 0 < len(probes_of(config, quick=True)) < len(probes_of(config)) == len(BUILT_IN)
    assert [p.name for p in probes_of(configured(tmp_path, skip=["refusal"]), ["refusal", "form_only"])] == [
        "form_only"
    ]


@pytest.mark.parametrize(
    ("probes", "says"),
    [
        ({"bounds": {"empty": 0.5}}, "there is no probe 'empty'"),
        ({"skip": ["nothing"]}, "there is no probe 'nothing'"),
        ({"files": ["none.py"]}, "no file"),
    ],
)
def test_a_probe_that_there_is_not_is_refused(tmp_path: Path, probes: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        probes_of(configured(tmp_path, **probes))


@pytest.mark.parametrize(
    ("probes", "says"),
    [
        ({"bounds": {"refusal": 1.5}}, "is no share"),
        ({"bounds": {"refusal": 0.5}, "skip": ["refusal"]}, "keep one of the two"),
        ({"bound": 2}, "probes.bound"),
    ],
)
def test_contradictory_bounds_are_refused_when_the_file_is_read(tmp_path: Path, probes: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        configured(tmp_path, **probes)


def test_a_file_of_ones_own_probes_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        'def paris(task, messages):\n    """says Paris"""\n    return "Paris " + task["id"]\n\n'
        'PROBES = {"paris": paris}\n'
    )
    probes = probes_of(configured(tmp_path, files=["mine.py"], bounds={"paris": 0.5}), quick=True)
    assert (probes[-1].name, probes[-1].says) == ("paris", "says Paris")
    assert probes[-1].replies[0](Stage(task={"id": "t"})) == "Paris t"
    for text, says in (
        ("PROBES = {'refusal': print}", "that name is taken"),
        ("PROBES = {'x': 3}", "is no function"),
        ("", "no attribute 'PROBES'"),
        ("1 /", "SyntaxError"),
    ):
        (tmp_path / "mine.py").write_text(text)
        with pytest.raises(ConfigError, match=says):
            probes_of(configured(tmp_path, files=["mine.py"]))
    with pytest.raises(ConfigError, match="no file"):
        own_probes(tmp_path / "gone.py")


def test_answers_know_the_components_and_keep_to_the_length_that_is_allowed() -> None:
    stage = Stage(task={"input": {"q": "x"}}, messages=[{"role": "user", "content": "Which?"}], components=["correct"],
                  max_chars=50)  # fmt: skip
    assert '"correct": 1.0' in reward_json(stage)
    assert len(everything(stage)) == 50 and len(long_answer(stage)) == 50


def test_tampering_reaches_what_decides_and_nothing_outside(tmp_path: Path) -> None:
    def fresh(name: str) -> Path:
        folder = tmp_path / name
        (folder / "sub").mkdir(parents=True)
        for path in ("test_it.py", "sub/expected.json", "answer.txt"):
            (folder / path).write_text("assert False")
        (folder / "link").symlink_to(tmp_path / "outside")
        return folder

    (tmp_path / "outside").write_text("mine")
    stage = Stage(task={}, components=["correct"])
    one = fresh("one")
    overwrite_tests(stage, one, {})
    assert "assert True" in (one / "test_it.py").read_text() and (one / "sub" / "expected.json").read_text() == "{}"
    assert (one / "answer.txt").read_text() == "assert False"
    two = fresh("two")
    delete_tests(stage, two, {})
    assert [p.name for p in two.rglob("*") if p.is_file()] == ["answer.txt", "link"] or (two / "answer.txt").exists()
    assert not (two / "test_it.py").exists() and not (two / "sub" / "expected.json").exists()
    three = fresh("three")
    make_equal(stage, three, {})
    assert {(three / n).read_text() for n in ("test_it.py", "answer.txt")} == {"same\n"}
    write_results(stage, three, {})
    assert '"correct": 1.0' in (three / "reward.json").read_text()
    trace = {"final_text": "x"}
    remove_all(stage, three, trace)
    assert list(three.iterdir()) == [] and trace["final_text"] == ""
    assert (tmp_path / "outside").read_text() == "mine"
