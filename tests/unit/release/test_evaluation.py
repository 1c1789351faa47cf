import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leyden.base.config import from_tree
from leyden.base.errors import RecordError
from leyden.base.records import (
    Attempt,
    Call,
    Choice,
    Outcome,
    Provenance,
    Reward,
    Rollout,
    Split,
    Task,
    Trace,
)
from leyden.base.tasks import fingerprint
from leyden.release.evaluation import Evaluation, details, plan, successes, summarise, table

REWARDS = {"weights": {"correct": 1.0, "tokens": -0.1}, "success": "correct"}
CONFIG = from_tree({"rewards": REWARDS}, base_dir=Path("."))
PLAIN = from_tree({}, base_dir=Path("."))


def call(num_tokens: int) -> Call:
    ids = np.arange(num_tokens, dtype=np.int32)
    choice = Choice(index=0, completion_ids=ids, logprobs=np.zeros(num_tokens, np.float32), finish_reason="stop")
    return Call(
        id=f"call{num_tokens}", rollout_id="r", attempt_id="a", seq=0, dialect="openai_chat", alias="main",
        policy="main", policy_version=3, provenance=Provenance.SERVED, request={}, response={}, sampling={},
        prompt_ids=np.zeros(4, np.int32), choices=(choice,), status="ok", delivered=True, refusal=None,
    )  # fmt: skip


def trace(
    task: str = "t1",
    domain: str = "shop",
    correct: float | None = 1.0,
    outcome: Outcome | None = Outcome.COMPLETED,
    tokens: tuple[int, ...] = (5, 7),
    split: Split = "holdout",
    question: str = "",
    **changes: Any,
) -> Trace:
    rollout: dict[str, Any] = {
        "id": "r",
        "task": Task(id=task, split=split, domain=domain, input={"q": question or task}),
        "policy_versions": {"main": 3},
        "reward": None if correct is None else correct - 0.1,
    }
    named: Mapping[str, float] = {} if correct is None else {"correct": correct, "tokens": 1.0}
    return Trace(
        rollout=Rollout(**{**rollout, **changes}),
        attempt=Attempt(id="a", rollout_id="r", number=1, started_at=0.0, outcome=outcome, duration_s=2.0),
        calls=[call(count) for count in tokens],
        rewards=[Reward(name=name, value=value) for name, value in named.items()],
    )


def test_a_task_is_solved_by_the_success_component_and_rewarded_by_the_total() -> None:
    evaluation = summarise([trace(), trace(correct=0.0)], CONFIG)
    (task,) = evaluation.tasks
    assert (task.successes, task.rewards) == ((True, False), (0.9, -0.1))
    assert task.components == {"correct": 0.5, "tokens": 1.0}
    assert (task.num_calls, task.completion_tokens, task.latency_s) == (2.0, 12.0, 2.0)
    assert evaluation.policy_version == "main@3" and evaluation.pass1.mean == 0.5


def test_without_a_success_component_the_total_decides() -> None:
    assert summarise([trace()], PLAIN).pass1.mean == 1.0
    assert summarise([trace(correct=0.55)], PLAIN).pass1.mean == 0.0


@pytest.mark.parametrize("outcome", [Outcome.INFRA_ERROR, Outcome.ENV_ERROR, Outcome.CANCELLED])
def test_what_the_infrastructure_broke_is_excluded_and_counted_never_zero(outcome: Outcome) -> None:
    evaluation = summarise(
        [trace(), trace(correct=None, outcome=outcome), trace("t2", correct=None, outcome=outcome)], CONFIG
    )
    assert evaluation.pass1.mean == 1.0 and evaluation.reward.mean == pytest.approx(0.9)
    assert evaluation.num_excluded == 2 and evaluation.pass1.num_tasks == 1
    assert evaluation.outcomes == {"completed": 1, str(outcome): 2}


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.AGENT_ERROR, Outcome.OVERLONG])
def test_a_failed_agent_did_not_solve_its_task_and_has_no_invented_reward(outcome: Outcome) -> None:
    evaluation = summarise([trace(), trace("t2", correct=None, outcome=outcome)], CONFIG)
    assert evaluation.pass1.mean == 0.5 and evaluation.num_excluded == 0
    assert evaluation.reward.mean == pytest.approx(0.9) and evaluation.reward.num_tasks == 1


def test_a_completed_rollout_without_a_reward_is_unscored_and_counted() -> None:
    evaluation = summarise([trace(), trace(correct=None)], CONFIG)
    assert evaluation.pass1.mean == 1.0
    assert (evaluation.num_unscored, evaluation.num_excluded) == (1, 1)


def test_a_rollout_where_everything_failed_has_no_mean_rather_than_zero() -> None:
    evaluation = summarise([trace(correct=None, outcome=Outcome.INFRA_ERROR)], CONFIG)
    assert np.isnan(evaluation.pass1.mean) and evaluation.hardest_domain is None
    assert Evaluation.from_json(evaluation.to_json()) == evaluation


def test_domains_are_listed_hardest_first() -> None:
    traces = [
        trace("a", "easy"),
        trace("b", "hard", correct=0.0),
        trace("c", "hard"),
        trace("d", "even", 0.0),
    ]
    evaluation = summarise(traces, CONFIG)
    assert [row.domain for row in evaluation.domains()] == ["even", "hard", "easy"]
    hardest = evaluation.hardest_domain
    assert hardest is not None and hardest.pass1.mean == 0.0 and hardest.pass1.high > 0


def test_none_of_sixty_solved_still_has_an_interval() -> None:
    evaluation = summarise([trace(f"t{number}", correct=0.0) for number in range(60)], CONFIG)
    assert evaluation.pass1.mean == 0.0 and evaluation.pass1.high > 0.05


def test_json_keeps_everything() -> None:
    evaluation = summarise([trace(), trace("t2", correct=None, outcome=Outcome.TIMEOUT)], CONFIG)
    again = Evaluation.from_json(json.dumps(evaluation.to_json(), allow_nan=False))
    assert again == evaluation and again.pass1 == evaluation.pass1


def test_an_evaluation_of_the_first_schema_is_read_with_none_for_what_it_did_not_record() -> None:
    tree = summarise([trace(), trace("t2")], CONFIG).to_json()
    for name in ("cost", "wall_s", "sampling", "safety"):
        del tree[name]
    for task in tree["tasks"]:
        for name in ("prompt_tokens", "num_retries", "num_wrong_tool_calls", "num_unsafe", "usd"):
            del task[name]
    old = Evaluation.from_json({**tree, "schema": 1})
    assert old.cost is None and old.tasks[0].usd is None and old.pass1.mean == 1.0
    assert old.mean_of("num_retries").num_tasks == 0 and old.unsafe is None
    assert Evaluation.from_json(old.to_json()) == old
    assert any("Hardest" in line for line in details(old)) is False


def test_pass_at_k_is_the_mean_over_tasks_and_counts_only_tasks_with_enough_samples() -> None:
    traces = [trace("a", correct=c) for c in (1.0, 0.0, 0.0)] + [trace("b", correct=c) for c in (0.0, 0.0, 0.0)]
    evaluation = summarise([*traces, trace("c")], CONFIG)
    assert evaluation.pass_at(2).mean == pytest.approx((2 / 3 + 0) / 2) and evaluation.pass_at(2).num_tasks == 2
    assert evaluation.pass_at(3).mean == 0.5 and list(evaluation.pass_at_all()) == [1]
    assert list(summarise(traces, CONFIG).pass_at_all()) == [1, 2]
    with pytest.raises(RecordError, match=r"eval\.samples"):
        evaluation.pass_at(4)


def test_retries_wrong_tool_calls_safety_tokens_and_money_stand_beside_success() -> None:
    asked = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"required": ["x"]}}}]}
    wrong = {"choices": [{"message": {"tool_calls": [{"id": "1", "function": {"name": "g", "arguments": "{}"}}]}}]}
    good = trace()
    bad = replace(
        trace("t2"),
        attempt=replace(good.attempt, number=3),
        calls=[replace(call(5), request=asked, response=wrong, usage={"cost_usd": 0.25}, latency_ms=1500.0)],
        rewards=[Reward(name="correct", value=0.0), Reward(name="safe", value=0.0)],
    )
    evaluation = summarise([good, bad], from_tree({"rewards": REWARDS, "eval": {"safety": "safe"}}, base_dir=Path(".")))
    first, second = evaluation.tasks
    assert (first.num_retries, second.num_retries) == (0.0, 2.0)
    assert (first.num_wrong_tool_calls, second.num_wrong_tool_calls) == (0.0, 1.0)
    assert (first.num_unsafe, second.num_unsafe) == (None, 1) and evaluation.unsafe is not None
    assert evaluation.unsafe.mean == 1.0 and evaluation.unsafe.num_tasks == 1
    assert (first.usd, second.usd, second.prompt_tokens) == (None, 0.25, 4.0)
    assert evaluation.cost is not None and evaluation.cost.usd == 0.25 and evaluation.cost.num_unpriced == 2
    assert evaluation.cost.engine_s == pytest.approx(1.5) and evaluation.cost.harness_s == 4.0
    assert Evaluation.from_json(evaluation.to_json()) == evaluation
    said = "\n".join(details(evaluation))
    assert "1.00 retries, 0.50 wrong tool calls" in said and "Safety violations (safe): 100.0 %" in said


def test_a_safety_component_that_no_rollout_has_is_said_and_not_counted_as_safe() -> None:
    config = from_tree({"rewards": REWARDS, "eval": {"safety": "harmless"}}, base_dir=Path("."))
    evaluation = summarise([trace()], config)
    assert evaluation.unsafe is None and "no rollout has the component 'harmless'" in "\n".join(details(evaluation))


def test_json_of_another_schema_or_with_unknown_fields_is_refused() -> None:
    tree = summarise([trace()], CONFIG).to_json()
    with pytest.raises(RecordError, match="schema 3"):
        Evaluation.from_json({**tree, "schema": 3})
    with pytest.raises(RecordError, match="colour"):
        Evaluation.from_json(json.dumps({**tree, "colour": 1}))
    with pytest.raises(RecordError, match="JSON"):
        Evaluation.from_json("[")


@pytest.mark.parametrize(
    ("traces", "complaint"),
    [
        ([], "no traces"),
        ([trace(), trace(policy_versions={"main": 4})], "policy versions"),
        ([trace(), trace("t2", split="val")], "splits"),
        ([trace(), trace("t1", question="other")], "stands for different"),
        ([trace(policy_versions={"judge": 1})], "judge"),
        ([trace(outcome=None)], "not over"),
    ],
)
def test_traces_that_are_no_evaluation_are_refused(traces: list[Trace], complaint: str) -> None:
    with pytest.raises(RecordError, match=complaint):
        summarise(traces, CONFIG)


def test_another_policy_can_be_evaluated_by_name() -> None:
    config = from_tree({"rewards": REWARDS, "learn": {"policy": "judge"}}, base_dir=Path("."))
    assert summarise([trace()], config, policy="main").policy_version == "main@3"


def test_a_planned_task_without_any_trace_is_kept_and_does_not_count() -> None:
    tasks = [Task(id=name, split="holdout", domain="shop", input={"q": name}) for name in ("t1", "t2")]
    evaluation = summarise([trace()], CONFIG, tasks=tasks, version=3, label="final")
    assert [task.num_counted for task in evaluation.tasks] == [1, 0] and evaluation.pass1.num_tasks == 1
    assert evaluation.fingerprint == fingerprint(tasks) and evaluation.label == "final"
    with pytest.raises(RecordError, match="not to be evaluated"):
        summarise([trace("t9")], CONFIG, tasks=tasks)
    with pytest.raises(RecordError, match="main@3, not of main@4"):
        summarise([trace()], CONFIG, version=4)


def test_a_plan_asks_for_the_same_rollouts_again_and_pairs_the_seeds_of_versions() -> None:
    tasks = [Task(id=name, split="holdout") for name in ("a", "b")]
    first = plan(run_id="run1", label="base", tasks=tasks, policy_versions={"main": 0}, samples=3)
    other = plan(run_id="run1", label="final", tasks=tasks, policy_versions={"main": 9}, samples=3)
    assert first == plan(run_id="run1", label="base", tasks=tasks, policy_versions={"main": 0}, samples=3)
    assert len({rollout.id for rollout in [*first, *other]}) == 12
    assert [rollout.seed for rollout in first] == [rollout.seed for rollout in other]
    assert len({rollout.seed for rollout in first}) == 6
    assert {rollout.mode for rollout in first} == {"val"}
    with pytest.raises(RecordError, match="0 samples"):
        plan(run_id=None, label="base", tasks=tasks, policy_versions={}, samples=0)


def test_successes_leave_out_what_does_not_count() -> None:
    traces = [
        trace(),
        trace(correct=0.0),
        trace(correct=None),
        trace(correct=None, outcome=Outcome.INFRA_ERROR),
    ]
    assert successes(traces, CONFIG) == [True, False]


def test_the_table_has_a_line_per_domain_and_one_for_all() -> None:
    evaluation = summarise([trace("a", "easy"), trace("b", "hard", correct=0.0)], CONFIG)
    assert table(evaluation).row_count == 3
    assert table(summarise([trace(domain="")], CONFIG)).row_count == 1


def test_a_result_reads_in_one_sentence() -> None:
    sentence = summarise([trace(), trace("t2", correct=None)], CONFIG, label="final").sentence()
    assert sentence.startswith("main@3 (final) solves 100.0 % of 1 holdout tasks (")
    assert sentence.endswith("12.0 completion tokens, 1 rollouts excluded")
