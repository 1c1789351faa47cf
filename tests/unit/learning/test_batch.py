from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.unit.traces.making import OUTCOMES, make_call, make_trace

from leyden.base.errors import RecordError
from leyden.base.records import Drop
from leyden.learning.batch import (
    ActionKey,
    Batch,
    Details,
    Normalisation,
    build,
    check,
    demo_batches,
    key_of,
    zero_credit_tokens,
)
from leyden.traces.assemble import Action, assemble

NORMALISATIONS: tuple[Normalisation, ...] = get_args(Normalisation)
splits = st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=1, max_size=6)


def actions_of(lengths: Sequence[Sequence[int]]) -> list[Action]:
    """Rollout r makes one call for each of lengths[r], with that many sampled tokens."""
    traces = [
        make_trace(
            f"r{r}",
            group_id=f"g{r // 2}",
            calls=[
                make_call(f"r{r}c{c}", seq=c, prompt=range(1, 3 + c), completions=[range(10 * c, 10 * c + n)])
                for c, n in enumerate(calls)
            ],
        )
        for r, calls in enumerate(lengths)
    ]
    return list(assemble(traces, policy="main", trainable_outcomes=OUTCOMES).actions)


def some_credit(lengths: Sequence[Sequence[int]]) -> dict[str, float]:
    return {f"r{r}": (-1.0) ** r * (r + 1) for r in range(len(lengths))}


def mass_by_rollout(batch: Batch) -> NDArray[Any]:
    rollout_N = batch.rollout_A[batch.action_N]
    return np.bincount(rollout_N, weights=batch.weight_N, minlength=batch.num_rollouts)


@given(splits)
def test_under_rollout_mean_every_rollout_has_the_same_mass_however_it_was_split(
    lengths: list[list[int]],
) -> None:
    for batch in build(actions_of(lengths), some_credit(lengths)):
        check(batch)
        mass = mass_by_rollout(batch)
        alive = {f"r{r}" for r, calls in enumerate(lengths) if calls}
        expected = [1 / len(lengths) if rollout_id in alive else 0 for rollout_id in batch.rollout_ids]
        assert mass == pytest.approx(expected, rel=1e-6)


@given(splits)
def test_each_normalisation_gives_the_number_of_its_formula(lengths: list[list[int]]) -> None:
    actions, credit = actions_of(lengths), some_credit(lengths)
    loss = {(a.call_id, k): 0.1 * k + a.num_tokens for a in actions for k in range(a.num_tokens)}
    by_call = [[loss[a.call_id, k] for k in range(a.num_tokens)] for a in actions]
    by_rollout = [
        [loss[a.call_id, k] for a in actions if a.rollout_id == f"r{r}" for k in range(a.num_tokens)]
        for r in range(len(lengths))
    ]
    tokens = [value for call in by_call for value in call]
    if not tokens:
        assert build(actions, credit) == []
        return
    expected = {
        "rollout_mean": sum(np.mean(r) for r in by_rollout if r) / len(lengths),
        "token_mean": np.mean(tokens),
        "call_mean": np.mean([np.mean(call) for call in by_call]),
        "constant": sum(tokens) / (len(lengths) * 9),
    }
    names = {(*a.completion_ids.tolist(), a.rollout_id): a.call_id for a in actions}
    for normalisation in NORMALISATIONS:
        (batch,) = build(actions, credit, normalisation=normalisation, constant_tokens=9)
        found = 0.0
        for n in range(batch.num_labels):
            a = batch.action_N[n]
            completion = tuple(batch.sequences[a][batch.prompt_len_A[a] :].tolist())
            call_id = names[(*completion, batch.rollout_ids[batch.rollout_A[a]])]
            found += float(batch.weight_N[n]) * loss[call_id, int(batch.offset_N[n])]
        assert found == pytest.approx(expected[normalisation], rel=1e-5)


@given(splits, st.randoms(use_true_random=False), st.integers(1, 4), st.integers(0, 3))
def test_the_order_of_actions_and_credit_changes_nothing(
    lengths: list[list[int]], random: Any, mini_batches: int, seed: int
) -> None:
    actions, credit = actions_of(lengths), some_credit(lengths)
    expected = build(actions, credit, mini_batches=mini_batches, seed=seed)
    mixed = list(actions)
    random.shuffle(mixed)
    items = list(credit.items())
    random.shuffle(items)
    found = build(mixed, dict(items), mini_batches=mini_batches, seed=seed)
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        assert one.rollout_ids == two.rollout_ids
        for name in ("prompt_len_A", "rollout_A", "action_N", "offset_N", "token_N", "credit_N", "weight_N"):
            assert np.array_equal(getattr(one, name), getattr(two, name))
        assert all(map(np.array_equal, one.sequences, two.sequences))


@given(splits, st.integers(1, 8))
def test_mini_batches_share_out_every_token_once_and_split_no_rollout(
    lengths: list[list[int]], mini_batches: int
) -> None:
    actions, credit = actions_of(lengths), some_credit(lengths)
    batches = build(actions, credit, mini_batches=mini_batches)
    assert sum(b.num_labels for b in batches) == sum(a.num_tokens for a in actions)
    places = [batch.rollout_ids for batch in batches]
    assert len({i for ids in places for i in ids}) == sum(map(len, places))
    for batch in batches:
        check(batch)


def test_seven_rollouts_over_two_mini_batches_are_four_and_three() -> None:
    lengths = [[2]] * 7
    batches = build(actions_of(lengths), some_credit(lengths), mini_batches=2)
    assert [b.num_rollouts for b in batches] == [4, 3]
    assert [float(b.weight_N.sum()) for b in batches] == pytest.approx([1, 1])


def test_a_rollout_of_seven_calls_stays_on_one_side_of_the_border() -> None:
    lengths = [[1], [3] * 7, [1], [1]]
    for seed in range(5):
        batches = build(actions_of(lengths), some_credit(lengths), mini_batches=2, seed=seed)
        rows = [sum(1 for a in b.rollout_A if b.rollout_ids[a] == "r1") for b in batches]
        assert sorted(rows) == [0, 7]


def test_groups_stay_in_one_mini_batch_where_sizes_allow() -> None:
    lengths = [[1]] * 8
    for seed in range(5):
        for batch in build(actions_of(lengths), some_credit(lengths), mini_batches=4, seed=seed):
            first, second = sorted(batch.rollout_ids)
            assert int(first[1:]) // 2 == int(second[1:]) // 2


def test_the_seed_moves_rollouts_between_mini_batches() -> None:
    lengths = [[1]] * 8
    orders = {
        tuple(b.rollout_ids for b in build(actions_of(lengths), some_credit(lengths), mini_batches=4, seed=s))
        for s in range(6)
    }
    assert len(orders) > 1


def test_rollouts_without_a_token_count_in_the_scale() -> None:
    lengths: list[list[int]] = [[4], [], [], []]
    (batch,) = build(actions_of(lengths), some_credit(lengths))
    assert batch.num_rollouts == 4 and float(batch.weight_N.sum()) == pytest.approx(0.25)


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_skipping_zero_credit_changes_no_weight_of_the_rest(normalisation: Normalisation) -> None:
    lengths = [[2, 3], [4], [1]]
    credit = {"r0": 1.0, "r1": 0.0, "r2": -1.0}
    actions = actions_of(lengths)
    (whole,) = build(actions, credit, normalisation=normalisation)
    (part,) = build(actions, credit, normalisation=normalisation, skip_zero_credit=True)
    check(part)
    kept = whole.credit_N != 0
    assert np.array_equal(whole.weight_N[kept], part.weight_N)
    assert np.array_equal(whole.token_N[kept], part.token_N)
    assert part.num_rollouts == whole.num_rollouts == 3
    assert part.report == {"num_trained_tokens": 10, "num_zero_credit_tokens": 4, "num_skipped_tokens": 4}
    assert whole.report["num_skipped_tokens"] == 0 and part.num_labels + 4 == whole.num_labels
    assert zero_credit_tokens(actions, credit) == 4


def test_a_step_without_anything_to_train_has_no_batch() -> None:
    assert build([], {}) == []
    assert build([], {"r0": 1.0}) == []
    actions = actions_of([[2], [3]])
    assert build(actions, {"r0": 0.0, "r1": 0.0}, skip_zero_credit=True) == []
    assert build([replace(a, drop=Drop.STALE) for a in actions], {"r0": 1.0, "r1": 1.0}) == []


def test_dropped_actions_and_empty_completions_bring_no_labels() -> None:
    call = make_call("c0", completions=[(), (5, 6)])
    late = make_call("c1", seq=1, delivered=False)
    assembly = assemble([make_trace(calls=[call, late])], policy="main", trainable_outcomes=OUTCOMES)
    (batch,) = build(assembly.actions, {"r0": 1.0})
    check(batch)
    assert batch.num_labels == assembly.trained == 2
    assert len(batch.sequences) == 1 and batch.token_N.tolist() == [5, 6]


def test_identical_calls_and_choices_are_trained_once_each() -> None:
    calls = [make_call(f"c{seq}", completions=[(7, 8), (7, 8)], seq=seq) for seq in range(3)]
    assembly = assemble([make_trace(calls=calls)], policy="main", trainable_outcomes=OUTCOMES)
    (batch,) = build(assembly.actions, {"r0": 1.0})
    assert len(batch.sequences) == 6 and batch.num_labels == 12
    assert batch.weight_N == pytest.approx(1 / 12)


def test_the_pad_or_end_token_is_trained_like_any_other() -> None:
    call = make_call("c0", prompt=(2, 2, 9), completions=[(2, 9, 2)])
    assembly = assemble([make_trace(calls=[call])], policy="main", trainable_outcomes=OUTCOMES)
    (batch,) = build(assembly.actions, {"r0": 1.0})
    check(batch)
    assert batch.token_N.tolist() == [2, 9, 2] and batch.offset_N.tolist() == [0, 1, 2]


def test_each_label_carries_what_its_action_was_sampled_with() -> None:
    calls = [
        make_call("c0", completions=[(5,)], sampling={"temperature": 0.5}),
        make_call("c1", seq=1, completions=[(6, 7)]),
    ]
    assembly = assemble([make_trace(calls=calls)], policy="main", trainable_outcomes=OUTCOMES)
    (batch,) = build(assembly.actions, {"r0": -2.0})
    assert batch.temperature_A.tolist() == [0.5, 1.0]
    assert batch.credit_N.tolist() == [-2.0] * 3 and batch.logp_sampler_N.tolist() == [-0.5] * 3


def test_an_action_whose_rollout_was_given_no_credit_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="r0"):
        build(actions_of([[1]]), {})


@pytest.mark.parametrize(
    "fault",
    [
        {"token_N": np.asarray([0, 1, 9], np.int32)},
        {"offset_N": np.asarray([0, 0, 0], np.int32)},
        {"offset_N": np.asarray([0, 1, 2], np.int32)},
        {"action_N": np.asarray([0, 1, 0], np.int32)},
        {"rollout_A": np.asarray([0, 7], np.int32)},
        {"temperature_A": np.asarray([1, 0], np.float32)},
        {"credit_N": np.asarray([0, 1, np.nan], np.float32)},
        {"prompt_len_A": np.asarray([0, 3], np.int32)},
        {"weight_N": np.zeros(2, np.float32)},
    ],
)
def test_a_batch_with_a_broken_invariant_does_not_pass(fault: dict[str, Any]) -> None:
    (batch,) = build(actions_of([[2, 1]]), {"r0": 1.0})
    check(batch)
    with pytest.raises(AssertionError):
        check(replace(batch, **fault))


def test_demonstrations_are_each_seen_once_per_epoch_in_new_orders() -> None:
    demos = [(list(range(1, 4 + d)), 2) for d in range(7)]
    batches = demo_batches(demos, batch_size=3, epochs=2, seed=1)
    assert [b.num_rollouts for b in batches] == [3, 3, 1, 3, 3, 1]
    epochs = [[i for b in batches[low : low + 3] for i in b.rollout_ids] for low in (0, 3)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [f"demo-{d}" for d in range(7)]
    assert epochs[0] != epochs[1]
    for batch in batches:
        check(batch)
        assert mass_by_rollout(batch) == pytest.approx(1 / batch.num_rollouts)
        assert np.isnan(batch.logp_sampler_N).all()
        assert set(batch.credit_N.tolist()) == {1.0} == set(batch.temperature_A.tolist())
    again = demo_batches(demos, batch_size=3, epochs=2, seed=1)
    assert [b.rollout_ids for b in again] == [b.rollout_ids for b in batches]


@pytest.mark.parametrize("demo", [([1, 2], 2), ([1, 2], 0), ([], 0)])
def test_a_demonstration_without_an_answer_or_a_beginning_is_refused_by_number(demo: Any) -> None:
    with pytest.raises(RecordError, match="demonstration 1"):
        demo_batches([([1, 2, 3], 1), demo], batch_size=2, epochs=1, seed=0)


@given(splits, st.data())
def test_credit_of_single_calls_and_tokens_reaches_exactly_their_labels_and_changes_no_weight(
    lengths: list[list[int]], data: Any
) -> None:
    actions, credit = actions_of(lengths), some_credit(lengths)
    own: dict[ActionKey, Any] = {}
    for action in actions:
        kind = data.draw(st.sampled_from(["rollout", "call", "token"]))
        if kind == "call":
            own[key_of(action)] = float(action.num_tokens)
        elif kind == "token":
            own[key_of(action)] = np.arange(action.num_tokens, dtype=np.float32) + 0.5
    plain = build(actions, credit, mini_batches=2)
    found = build(actions, credit, mini_batches=2, details=Details(credit=own))
    assert len(found) == len(plain)
    for batch, before in zip(found, plain, strict=True):
        check(batch)
        assert np.array_equal(batch.weight_N, before.weight_N) and batch.rollout_ids == before.rollout_ids
        for a, key in enumerate(batch.keys_A):
            mine = batch.credit_N[batch.action_N == a]
            assert mine.tolist() == np.broadcast_to(own.get(key, credit[key[0]]), mine.shape).tolist()


def test_only_actions_whose_credit_is_all_zero_are_skipped() -> None:
    actions = actions_of([[2, 2], [2]])
    own: dict[ActionKey, Any] = {
        ("r0", "r0c0", 0): np.asarray([0.0, 1.0], np.float32),
        ("r0", "r0c1", 0): 0.0,
    }
    (batch,) = build(actions, {"r0": 0.0, "r1": 1.0}, skip_zero_credit=True, details=Details(credit=own))
    check(batch)
    assert {key[1] for key in batch.keys_A} == {"r0c0", "r1c0"}
    assert batch.report["num_zero_credit_tokens"] == 3 and batch.report["num_skipped_tokens"] == 2
    assert zero_credit_tokens(actions, {"r0": 0.0, "r1": 1.0}, Details(credit=own)) == 3


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=2, max_size=8), st.integers(1, 5))
def test_the_rollouts_of_a_pair_stay_in_one_optimizer_step_and_pairs_weigh_the_same(
    lengths: list[list[int]], mini_batches: int
) -> None:
    num_pairs = len(lengths) // 2
    lengths = lengths[: 2 * num_pairs]
    pair = {f"r{r}": f"p{r % num_pairs}" for r in range(len(lengths))}  # across groups, the hardest case
    credit = {f"r{r}": 1.0 if r < num_pairs else -1.0 for r in range(len(lengths))}
    batches = build(actions_of(lengths), credit, mini_batches=mini_batches, details=Details(pair=pair))
    assert sum(len(batch.rollout_ids) for batch in batches) == len(lengths)
    for batch in batches:
        check(batch)
        assert batch.pair_A is not None
        names = [pair[i] for i in batch.rollout_ids]
        assert all(names.count(name) == 2 for name in names)
        assert len(set(batch.pair_A.tolist())) == len(set(names))
        assert batch.weight_N == pytest.approx(np.full(batch.num_labels, 2 / len(names)))


def test_values_and_targets_stand_with_their_actions_and_nan_where_there_are_none() -> None:
    details = Details(value={("r0", "r0c0", 0): 0.5}, target={("r0", "r0c0", 0): 0.75})
    (batch,) = build(actions_of([[2, 1]]), {"r0": 1.0}, details=details)
    check(batch)
    assert batch.value_A is not None and batch.target_A is not None and batch.pair_A is None
    assert batch.value_A[0] == 0.5 and batch.target_A[0] == 0.75
    assert np.isnan(batch.value_A[1]) and np.isnan(batch.target_A[1])
    with pytest.raises(AssertionError):
        check(replace(batch, target_A=np.zeros(1, np.float32)))
