"""What the end of a run says about itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leyden.base.config import Config, from_tree
from leyden.base.records import Call, Choice, Provenance
from leyden.cli.finish import conversation, diagnostics
from leyden.release.results import Evaluation


def config_of(**learn: object) -> Config:
    weights = {"correct": 1.0, "tokens": -0.001}
    return from_tree({"learn": learn, "rewards": {"weights": weights}}, base_dir=Path("."))


def _whole() -> Evaluation:
    return Evaluation(policy_version="main@0", split="holdout", fingerprint="f", success="correct", tasks=())


def _call(request: dict[str, Any], text: str) -> Call:
    answer = Choice(
        index=0,
        completion_ids=np.arange(2, dtype=np.int32),
        logprobs=np.zeros(2, np.float32),
        finish_reason="stop",
        text=text,
    )
    return Call(
        id="c", rollout_id="r", attempt_id="a", seq=0, dialect="openai_chat", alias="main", policy="main",
        policy_version=0, provenance=Provenance.SERVED, request=request, response={}, sampling={},
        prompt_ids=np.arange(3, dtype=np.int32), choices=[answer], status="ok", delivered=True, refusal=None,
    )  # fmt: skip


def step(*groups: tuple[str, list[float]], **more: Any) -> dict[str, Any]:
    return {"stage": "rl", "group_successes": groups, **more}


def test_memorised_and_hopeless_tasks_are_named() -> None:
    steps = [step(("easy", [1.0, 1.0]), ("hard", [0.0, 0.0]), ("fair", [0.0, 1.0]))] * 2
    memorised, hopeless, flat = diagnostics(config_of(), steps, {"base": _whole()})
    assert "1 of 3 tasks are memorised" in memorised and "(easy)" in memorised
    assert "1 of 3 tasks were never solved (hard)" in hopeless
    assert flat.startswith("67 % of the groups")


@pytest.mark.parametrize(("algorithm", "says"), [("dpo", "dpo makes differences of any size count alike"), ("ppo", "")])
def test_credit_for_smaller_parts_of_the_reward_is_told_with_what_to_do(algorithm: str, says: str) -> None:
    config = config_of(algorithm=algorithm)
    (said,) = diagnostics(
        config, [step(minor_credit=0.6), step(minor_credit=0.2), step(minor_credit=None)], {"base": _whole()}
    )
    assert said.startswith("40 % of the credit that main learned from was between rollouts of equal success")
    assert says in said and ("dr_grpo" in said) == bool(says) and "lower their weights" in said
    assert diagnostics(config, [step(minor_credit=0.25)], {"base": _whole()}) == []


def test_credit_is_told_of_each_policy_that_had_it() -> None:
    config = from_tree({"policies": {name: {"model": "m"} for name in ("main", "clerk")}}, base_dir=Path("."))
    parts = {"main": {"minor_credit": 0.1}, "clerk": {"minor_credit": 0.9}}
    (said,) = diagnostics(config, [step(policies=parts)], {"base": _whole()})
    assert said.startswith("90 % of the credit that clerk learned")


def test_a_task_that_was_solved_once_in_its_last_groups_is_not_named() -> None:
    steps = [step(("late", [0.0, 0.0])), step(("late", [1.0, 0.0]))]
    assert diagnostics(config_of(algorithm="dr_grpo"), steps, {"base": _whole()}) == []


def test_many_names_are_cut_and_counted() -> None:
    steps = [step(*((f"t{i:02}", [1.0, 1.0]) for i in range(12)))]
    said = diagnostics(config_of(algorithm="dr_grpo"), steps, {"base": _whole()})
    assert "12 of 12 tasks are memorised" in said[0] and "t07 ..." in said[0] and "t08" not in said[0]


@pytest.mark.parametrize(("share", "told"), [(0.04, False), (0.3, True)])
def test_importance_weights_at_their_cap_are_told_when_they_are_many(share: float, told: bool) -> None:
    said = diagnostics(config_of(), [{"stage": "rl", "importance_capped": share}], {"base": _whole()})
    assert any("30 % of importance weights met the cap 2.0" in line for line in said) == told


def test_without_a_holdout_nothing_was_proved() -> None:
    assert diagnostics(config_of(), [], {}) == ["There was no holdout, so nothing was proved; set tasks.holdout."]


def test_a_conversation_is_the_last_call_and_its_answer() -> None:
    first = _call({"messages": [{"role": "user", "content": "hi"}]}, "hello")
    asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"},
             {"role": "user", "content": "more"}]  # fmt: skip
    said = conversation([first, _call({"messages": asked}, "bye")])
    assert said == [*asked, {"role": "assistant", "content": "bye"}]
    assert conversation([_call({"prompt": "1 + 1 ="}, " 2")]) == [
        {"role": "user", "content": "1 + 1 ="},
        {"role": "assistant", "content": " 2"},
    ]
    assert conversation([]) == []
