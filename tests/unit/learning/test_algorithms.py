"""Every credit against a plain float64 reference, and the facts that must hold whatever the numbers."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.learning.scored import group, outcomes, rollout

from leyden.base import recipes
from leyden.base.config import LearnConfig
from leyden.base.records import Drop
from leyden.learning.algorithms import (
    ALGORITHMS,
    ActorCritic,
    Algorithm,
    Discounted,
    Distill,
    GlobalRelative,
    GroupRelative,
    Preference,
    StepGroups,
    make,
    surrogate_of,
)
from leyden.learning.algorithms.by_call import returns
from leyden.learning.algorithms.preference import pairs_of

numbers = st.floats(-50, 50, width=32)
groups_of_rewards = st.lists(st.lists(numbers, min_size=1, max_size=6), min_size=1, max_size=5)
episodes = st.lists(
    st.tuples(numbers, st.lists(st.floats(-5, 5, width=32), min_size=1, max_size=5)), min_size=1, max_size=5
)
quick = settings(deadline=None, max_examples=50)
DR_GRPO = GroupRelative(name="dr_grpo")


def config_for(name: str) -> LearnConfig:
    return LearnConfig.model_validate({"algorithm": name, **({"teacher": "t"} if name == "distill" else {})})


def episode_group(episode: Any) -> Any:
    return group(*(rollout(f"r{i}", reward, steps) for i, (reward, steps) in enumerate(episode)))


def calls(algorithm: Algorithm, *groups: Any) -> list[list[float]]:
    return [[float(c) for c in award.calls or ()] for award in algorithm.award(groups)]  # type: ignore[arg-type]


def test_the_registry_and_the_recipes_have_the_same_names_and_every_one_is_made() -> None:
    assert set(ALGORITHMS) == set(recipes.RECIPES)
    for name, recipe in recipes.RECIPES.items():
        config = config_for(name)
        algorithm = make(config)
        assert algorithm.name == name
        assert surrogate_of(config, algorithm) == recipes.surrogate_of(config.model_dump())
        assert ("values" in algorithm.needs) == recipe.critic and ("teacher" in algorithm.needs) == recipe.teacher


@pytest.mark.parametrize("name", recipes.RECIPES)
@given(values=groups_of_rewards, random=st.randoms(use_true_random=False))
@quick
def test_a_permutation_of_groups_and_rollouts_permutes_the_awards_exactly(
    name: str, values: list[list[float]], random: Any
) -> None:
    algorithm = make(config_for(name))
    groups = [outcomes(rewards, f"g{i}") for i, rewards in enumerate(values)]
    ids = [r.rollout_id for g in groups for r in g.rollouts]
    before = dict(zip(ids, algorithm.award(groups), strict=True))
    mixed = []
    for one in groups:
        members = list(one.rollouts)
        if name != "dpo":  # equal rewards are paired by place there
            random.shuffle(members)
        mixed.append(replace(one, rollouts=members))
    random.shuffle(mixed)
    after = dict(zip([r.rollout_id for g in mixed for r in g.rollouts], algorithm.award(mixed), strict=True))
    assert after == before
    assert all(math.isfinite(award.rollout) for award in before.values())


@given(groups_of_rewards)
@quick
def test_reinforce_pp_is_the_z_score_over_the_step(values: list[list[float]]) -> None:
    flat = np.asarray([r for rewards in values for r in rewards], np.float64)
    for baseline in (False, True):
        algorithm = GlobalRelative(name="x", group_baseline=baseline)
        found = [a.rollout for a in algorithm.award([outcomes(r, f"g{i}") for i, r in enumerate(values)])]
        d = flat.copy()
        if baseline:
            d = np.concatenate([np.asarray(r, np.float64) - np.mean(r, dtype=np.float64) for r in values])
        expected = np.zeros(len(d)) if np.ptp(d) < 1e-12 else (d - d.mean()) / (d.std(ddof=1) + 1e-6)
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.lists(st.lists(st.integers(-9, 9), min_size=2, max_size=5), min_size=2, max_size=4), st.floats(0.5, 100))
@quick
def test_reinforce_pp_forgets_the_scale_and_its_baseline_variant_also_the_level_of_each_group(
    values: list[list[int]], scale: float
) -> None:
    plain, baseline = GlobalRelative(), GlobalRelative(name="x", group_baseline=True)
    given_ = [outcomes([float(v) for v in rewards], f"g{i}") for i, rewards in enumerate(values)]
    scaled = [outcomes([scale * v for v in rewards], f"g{i}") for i, rewards in enumerate(values)]
    moved = [outcomes([v + 7.0 * i for v in rewards], f"g{i}") for i, rewards in enumerate(values)]
    for algorithm, others in ((plain, scaled), (baseline, scaled), (baseline, moved)):
        found = [a.rollout for a in algorithm.award(others)]
        assert found == pytest.approx([a.rollout for a in algorithm.award(given_)], rel=1e-4, abs=1e-4)


@given(episodes)
@quick
def test_without_discount_and_step_rewards_calls_get_the_credit_of_dr_grpo(episode: Any) -> None:
    silent = [(reward, [0.0] * len(steps)) for reward, steps in episode]
    expected = DR_GRPO.credit([reward for reward, _ in silent])
    for algorithm in (Discounted(gamma=1.0), Discounted(gamma=1.0, step_rewards=True)):
        for credit, per_call in zip(expected, calls(algorithm, episode_group(silent)), strict=True):
            assert per_call == pytest.approx([credit] * len(per_call), rel=1e-9, abs=1e-9)


@given(episodes, st.floats(0.1, 1))
@quick
def test_discounted_and_process_credit_equal_their_double_sums(episode: Any, gamma: float) -> None:
    mean_outcome = np.mean([reward for reward, _ in episode], dtype=np.float64)
    mean_step = np.mean([s for _, steps in episode for s in steps], dtype=np.float64)
    discounted = calls(Discounted(gamma=gamma), episode_group(episode))
    process = calls(Discounted(gamma=gamma, step_rewards=True), episode_group(episode))
    for (reward, steps), by_outcome, by_step in zip(episode, discounted, process, strict=True):
        last = len(steps) - 1
        for k in range(len(steps)):
            outcome = gamma ** (last - k) * (reward - mean_outcome)
            sum_k = sum(gamma ** (j - k) * (steps[j] - mean_step) for j in range(k, last + 1))
            assert by_outcome[k] == pytest.approx(outcome, rel=1e-9, abs=1e-9)
            assert by_step[k] == pytest.approx(outcome + sum_k, rel=1e-9, abs=1e-8)


@given(episodes, st.floats(0.1, 1), st.floats(0, 3))
@quick
def test_step_groups_add_the_distance_from_the_mean_of_the_calls_in_the_same_state(
    episode: Any, gamma: float, weight: float
) -> None:
    # Calls with an even number share a state across rollouts, the others stand alone.
    members = [
        rollout(f"r{i}", reward, steps, prompts=[(1, k) if k % 2 == 0 else (2, k, i) for k in range(len(steps))])
        for i, (reward, steps) in enumerate(episode)
    ]
    found = calls(StepGroups(gamma=gamma, weight=weight), group(*members))
    mean = np.mean([reward for reward, _ in episode], dtype=np.float64)
    back = [
        [
            sum(gamma ** (j - k) * (s[j] + (r if j == len(s) - 1 else 0.0)) for j in range(k, len(s)))
            for k in range(len(s))
        ]
        for r, s in episode
    ]
    for i, (reward, steps) in enumerate(episode):
        for k in range(len(steps)):
            peers = [b[k] for b in back if len(b) > k] if k % 2 == 0 else [back[i][k]]
            expected = reward - mean + weight * (back[i][k] - np.mean(peers))
            assert found[i][k] == pytest.approx(expected, rel=1e-7, abs=1e-6)


def test_an_observation_is_what_is_new_in_a_prompt() -> None:
    # Both come to the observation 9 after different histories: equal observations, other prompts.
    one = rollout("a", 1.0, [0.0, 0.0], prompts=[(1, 2), (1, 2, 0, 1, 9)])
    two = rollout("b", 0.0, [0.0, 0.0], prompts=[(1, 3), (1, 3, 0, 1, 9)])
    by_prompt = calls(StepGroups(gamma=1.0, weight=1.0), group(one, two))
    by_observation = calls(StepGroups(gamma=1.0, weight=1.0, state="observation"), group(one, two))
    assert by_prompt == [[0.5, 0.5], [-0.5, -0.5]]
    assert by_observation == [[0.5, 1.0], [-0.5, -1.0]]


@given(st.lists(st.floats(-5, 5), max_size=6), st.floats(-5, 5), st.floats(0.1, 1))
@quick
def test_returns_obey_the_recursion(rewards: list[float], last: float, gamma: float) -> None:
    found = [*returns(rewards, last, gamma), 0.0]
    for k in range(len(rewards)):
        own = rewards[k] + (last if k == len(rewards) - 1 else 0.0)
        assert found[k] == pytest.approx(own + gamma * found[k + 1], abs=1e-12)


@given(episodes, st.floats(0.1, 1), st.floats(0, 1), st.data())
@quick
def test_advantages_of_the_critic_equal_the_sum_over_later_errors(
    episode: Any, gamma: float, lam: float, data: Any
) -> None:
    algorithm = ActorCritic(gamma=gamma, gae_lambda=lam)
    for reward, steps in episode:
        values = data.draw(st.lists(st.floats(-5, 5), min_size=len(steps), max_size=len(steps)))
        (award,) = algorithm.award([group(rollout("r", reward, steps, values=values))])
        after = [*values[1:], 0.0]
        error = [s + gamma * v - own for s, v, own in zip(steps, after, values, strict=True)]
        error[-1] += reward
        for k in range(len(steps)):
            expected = sum((gamma * lam) ** (j - k) * error[j] for j in range(k, len(steps)))
            assert award.calls is not None and award.targets is not None
            assert award.calls[k] == pytest.approx(expected, rel=1e-9, abs=1e-8)
            assert award.targets[k] == pytest.approx(expected + values[k], rel=1e-9, abs=1e-8)


def test_a_critic_that_is_right_leaves_no_advantage_and_lambda_one_gives_returns() -> None:
    (perfect,) = ActorCritic(gae_lambda=0.3).award([group(rollout("r", 2.0, [1.0, 0.0, -1.0], values=[2.0, 1.0, 1.0]))])
    assert perfect.calls == pytest.approx([0.0, 0.0, 0.0])
    (blind,) = ActorCritic(gae_lambda=1.0).award([group(rollout("r", 2.0, [1.0, 0.0, -1.0], values=[0.0, 0.0, 0.0]))])
    assert blind.calls == blind.targets == pytest.approx([2.0, 1.0, 1.0])


def test_a_call_without_a_value_is_no_time_step_and_its_reward_counts_for_the_call_before() -> None:
    whole = rollout("r", 1.0, [0.0, 5.0, 0.0], values=[0.5, None, 0.25])
    (award,) = ActorCritic(gamma=0.9, gae_lambda=0.8).award([group(whole)])
    (short,) = ActorCritic(gamma=0.9, gae_lambda=0.8).award([group(rollout("r", 1.0, [5.0, 0.0], values=[0.5, 0.25]))])
    assert award.calls is not None and short.calls is not None and award.targets is not None
    assert [award.calls[0], award.calls[2]] == short.calls
    assert math.isnan(award.targets[1])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9))
@quick
def test_pairs_are_disjoint_differ_and_leave_no_two_rollouts_that_could_still_be_paired(values: list[int]) -> None:
    rewards = [float(v) for v in values]
    pairs = pairs_of(rewards)
    used = [i for pair in pairs for i in pair]
    assert len(used) == len(set(used))
    assert all(rewards[a] > rewards[b] for a, b in pairs)
    assert len({rewards[i] for i in range(len(rewards)) if i not in used}) <= 1
    awards = Preference().award([outcomes(rewards)])
    assert [a.rollout for a in awards] == [
        1.0 if i in {a for a, _ in pairs} else -1.0 if i in {b for _, b in pairs} else 0.0 for i in range(len(rewards))
    ]
    assert all((a.pair != "") == (a.rollout != 0.0) for a in awards)
    assert Preference().zero_credit_drop is Drop.UNPAIRED


def test_distillation_is_the_difference_to_the_teacher_token_by_token() -> None:
    one = rollout("r", 0.0, [0.0, 0.0])
    heard = replace(one.calls[0], teacher=[np.asarray([-0.25, -1.0], np.float32)])
    unheard = replace(one.calls[1], teacher=[np.zeros(0, np.float32)])
    (award,) = Distill().award([group(replace(one, calls=[heard, unheard]))])
    assert award.calls is not None
    (first,), (second,) = award.calls  # type: ignore[misc]
    assert first.tolist() == [0.25, -0.5] and second.tolist() == [0.0, 0.0]
    assert award.rollout == pytest.approx(-0.0625)


def test_an_algorithm_that_overrides_nothing_says_so() -> None:
    with pytest.raises(NotImplementedError, match="neither credit"):
        Algorithm().award([outcomes([1.0])])
