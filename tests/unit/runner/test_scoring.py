"""Whoever is asked about an attempt, and what becomes of their answers."""

from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.runner.conftest import SUCCEEDED, Bench
from tests.unit.runner.stand_in import ANSWER

from leyden.base.records import Outcome

AGENT = """
import model
model.call()
"""


def judged_by(bench: Bench, answer: str | None) -> None:
    """The stand-in answers as a judge when it is asked for one; None: with an error."""
    plain = bench.gateway.answer

    def reply(path: str, authorization: str, body: Any) -> tuple[int, Mapping[str, Any]]:
        if not isinstance(body, dict) or body.get("model") != "judge":
            return plain(path, authorization, body)
        bench.gateway.seen.append((path, authorization, body))
        if answer is None:
            return 503, {"error": {"message": "overloaded"}}
        message = {"role": "assistant", "content": answer}
        return 200, {**ANSWER, "choices": [{"index": 0, "finish_reason": "stop", "message": message}]}

    bench.gateway.answer = reply  # type: ignore[method-assign]


def with_judge(bench: Bench, answer: str | None, **rewards: Any) -> None:
    bench.agent(AGENT, env={"PYTHONPATH": str(bench.folder)})
    (bench.folder / "rubric.md").write_text("Is it polite? {input.q}")
    bench.tree["rewards"] = {"judge": {"policy": "judge", "rubric": "rubric.md"}, **rewards}
    judged_by(bench, answer)


async def test_a_judge_scores_through_the_gateway_with_the_key_of_the_attempt(bench: Bench) -> None:
    with_judge(bench, '{"score": 0.5, "reason": "half"}')
    rollout, attempt = await bench.one()
    assert (rollout.state, rollout.reward) == (SUCCEEDED, 0.5), attempt.detail
    path, authorization, body = bench.gateway.seen[-1]
    assert f"/rollout/r0/attempt/{attempt.id}/" in path and authorization.startswith("Bearer ")
    assert "fine" in body["messages"][1]["content"] and "Is it polite? ?" in body["messages"][1]["content"]


@pytest.mark.parametrize(
    ("answer", "says"), [("I cannot do that.", "no JSON object"), (None, "answered 503")], ids=["refuses", "fails"]
)
async def test_a_judge_that_refuses_or_fails_is_no_reward_with_a_diagnosis_and_never_zero(
    bench: Bench, answer: str | None, says: str
) -> None:
    with_judge(bench, answer)
    rollout, attempt = await bench.one()
    assert rollout.reward is None and attempt.outcome is Outcome.COMPLETED
    assert attempt.diagnosis == "judge_failed" and says in attempt.detail


async def test_the_verifier_and_the_judge_are_weighed_together(bench: Bench) -> None:
    with_judge(bench, '{"score": 1}', verifier="verify.py:verify", weights={"judge": 0.5, "rule": 1.0})
    (bench.folder / "verify.py").write_text("def verify(task, trace, workspace): return {'rule': 0.25}")
    rollout, attempt = await bench.one()
    assert rollout.reward == 0.75, attempt.detail


async def test_a_verifier_rewards_single_calls_and_they_stay_out_of_the_total(bench: Bench) -> None:
    bench.agent(AGENT, env={"PYTHONPATH": str(bench.folder)})
    bench.verifier("return {'right': 1.0, 'calls': {trace['calls'][0]['id']: {'useful': 0.5}}}", weights={"right": 1.0})
    rollout, attempt = await bench.one()
    assert rollout.reward == 1.0, attempt.detail
    trace = bench.trace()
    steps = [(r.call_id, r.name, r.value) for r in trace.rewards if r.call_id]
    assert steps == [(trace.calls[0].id, "useful", 0.5)]
    assert {r.version for r in trace.rewards} != {""}


async def test_a_reward_for_a_call_that_there_is_not_is_a_broken_verifier(bench: Bench) -> None:
    bench.agent(AGENT, env={"PYTHONPATH": str(bench.folder)}, max_attempts=1)
    bench.verifier("return {'right': 1.0, 'calls': {'nobody': {'useful': 0.5}}}", weights={"right": 1.0})
    rollout, attempt = await bench.one()
    assert rollout.reward is None and attempt.diagnosis == "verifier_failed"
    assert "which is no call of this attempt" in attempt.detail


async def test_a_hidden_verifier_is_recorded_and_changes_no_total(bench: Bench) -> None:
    bench.agent(AGENT, env={"PYTHONPATH": str(bench.folder)})
    bench.verifier("return 1.0", canary_verifier="hidden.py:verify", canary_share=1.0)
    (bench.folder / "hidden.py").write_text("def verify(task, trace, workspace): return 0.0")
    rollout, attempt = await bench.one()
    assert rollout.reward == 1.0, attempt.detail
    assert [(r.name, r.value) for r in bench.trace().rewards if r.source == "canary"] == [("canary", 0.0)]


async def test_a_scheduled_weight_is_that_of_the_step_of_the_rollout(bench: Bench) -> None:
    bench.agent(AGENT, env={"PYTHONPATH": str(bench.folder)})
    bench.verifier("return {'form': 1.0}", schedule={"form": {"first": 1.0, "last": 0.0, "to_step": 4}})
    await bench.enqueue(1, step=1)
    [rollout] = await bench.run(1)
    assert rollout.reward == 0.75
