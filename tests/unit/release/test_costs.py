"""Costs add up, and a budget ends a run by them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.release.test_evaluation import call, trace

from leyden.base.config import BudgetConfig, Config, CostsConfig, PriceConfig, from_tree
from leyden.base.errors import RecordError
from leyden.base.records import VERIFICATION_SPAN, Span
from leyden.release.budget import cannot_bind, exceeded, spent, step_s
from leyden.release.costs import Cost, call_usd, cost_of, total, total_of

PRICED = from_tree(
    {
        "policies": {"main": {"usd_per_million": {"input": 2.0, "output": 10.0}}},
        "costs": {"machine_usd_per_hour": 3.6},
    },
    base_dir=Path("."),
)
COSTS = st.builds(
    Cost, num_rollouts=st.integers(0, 9), prompt_tokens=st.integers(0, 99), usd=st.none() | st.integers(0, 9).map(float)
)


def test_a_rollout_costs_tokens_money_and_the_seconds_of_engine_harness_and_verifier() -> None:
    span = Span(id="s", rollout_id="r", attempt_id="a", name=VERIFICATION_SPAN, started_at=5.0, ended_at=5.5)
    other = replace(span, id="s2", name="workspace", ended_at=99.0)
    one = replace(trace(tokens=(5, 7)), spans=[span, other])
    one = replace(one, calls=[replace(c, latency_ms=250.0) for c in one.calls])
    assert cost_of(one, PRICED) == Cost(
        num_rollouts=1, num_calls=2, prompt_tokens=8, completion_tokens=12,
        usd=(8 * 2.0 + 12 * 10.0) / 1e6, engine_s=0.5, harness_s=2.0, verifier_s=0.5,
    )  # fmt: skip


def test_a_recorded_price_counts_more_than_the_price_list_and_no_price_is_none() -> None:
    assert call_usd(replace(call(5), usage={"cost_usd": 0.5}), PRICED) == 0.5
    assert call_usd(replace(call(5), usage={"cost_usd": 0}), PRICED) == 0.0
    assert call_usd(call(5), Config()) is None
    for odd in (True, "much", float("nan")):
        assert call_usd(replace(call(5), usage={"cost_usd": odd}), Config()) is None
    mixed = total_of([trace(tokens=(5,)), trace(tokens=(5,))], Config())
    assert mixed.usd is None and mixed.num_unpriced == 2 and "no price is known" in mixed.sentence()


def test_a_provider_without_token_ids_is_counted_by_its_own_usage() -> None:
    bare = replace(call(0), prompt_ids=call(0).prompt_ids[:0], usage={"input_tokens": 30, "output_tokens": 4})
    found = cost_of(replace(trace(), calls=[bare]), Config())
    assert (found.prompt_tokens, found.completion_tokens) == (30, 4)


@settings(deadline=None)
@given(st.lists(COSTS, max_size=6), st.integers(0, 6))
def test_sums_do_not_depend_on_how_they_are_grouped(costs: list[Cost], cut: int) -> None:
    assert total(costs) == total(costs[:cut]) + total(costs[cut:])
    assert total(costs).usd == (sum(c.usd for c in costs if c.usd is not None) if any(
        c.usd is not None for c in costs) else None)  # fmt: skip
    assert Cost.from_json(total(costs).to_json()) == total(costs)


def test_a_cost_of_another_version_is_refused() -> None:
    with pytest.raises(RecordError, match="colour"):
        Cost.from_json({"colour": 1})


def test_what_a_run_used_is_what_its_steps_and_evaluations_recorded() -> None:
    step: dict[str, Any] = {
        "cost": Cost(num_rollouts=8, prompt_tokens=100, completion_tokens=20, usd=1.0).to_json(),
        "seconds": {"rollouts": 40.0, "update": 20.0, "update_forward": 15.0},
    }
    assert step_s(step) == 60.0 and step_s({}) == 0.0
    used = spent([step, step, {"loss": 1.0}], [{"cost": step["cost"], "wall_s": 30.0}, {"cost": None}], PRICED.costs)
    assert (used.tokens, used.minutes) == (360, 2.5) and used.usd == pytest.approx(3.0 + 2.5 / 60 * 3.6)


@pytest.mark.parametrize(("name", "limit"), [("tokens", 360), ("minutes", 2.0), ("usd", 3.1)])
def test_a_limit_that_is_met_ends_the_run_by_name(name: str, limit: float) -> None:
    used = spent([], [{"cost": Cost(prompt_tokens=360, usd=3.0).to_json(), "wall_s": 150.0}], PRICED.costs)
    sentence = exceeded(used, BudgetConfig(**{name: limit}))
    assert sentence is not None and f"budget.{name}" in sentence and "--resume" in sentence
    assert exceeded(used, BudgetConfig(**{name: limit * 2})) is None
    assert exceeded(used, BudgetConfig()) is None


def test_a_limit_on_money_that_nothing_is_priced_for_is_said() -> None:
    limit = BudgetConfig(usd=1.0)
    assert "no policy or provider has a price" in str(cannot_bind(Config(budget=limit)))
    assert cannot_bind(PRICED.model_copy(update={"budget": limit})) is None
    assert cannot_bind(Config(budget=limit, costs=CostsConfig(machine_usd_per_hour=1.0))) is None
    assert cannot_bind(Config(budget=BudgetConfig(tokens=1))) is None


def test_a_price_is_the_policys_own_else_its_providers_else_not_known() -> None:
    config = from_tree(
        {
            "providers": {"big": {"usd_per_million": {"input": 1.0}}, "free": {}},
            "policies": {
                "a": {"provider": "big", "model": "m"},
                "b": {"provider": "big", "model": "m", "usd_per_million": {"output": 2.0}},
                "c": {"provider": "free", "model": "m"},
                "d": {"model": "m"},
            },
        },
        base_dir=Path("."),
    )
    prices = {name: config.price_of(name) for name in (*config.policies, "nobody")}
    assert prices == {
        "a": PriceConfig(input=1.0), "b": PriceConfig(output=2.0), "c": None, "d": None, "nobody": None,
    }  # fmt: skip
    assert call_usd(replace(call(5), policy="b"), config) == pytest.approx(5 * 2.0 / 1e6)
    assert call_usd(replace(call(5), policy="c"), config) is None
