from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.traces.making import OUTCOMES, make_call, make_trace

from leyden.base import config
from leyden.base.errors import ConfigError
from leyden.base.records import Call, Drop
from leyden.learning import batch
from leyden.traces.assemble import Assembly, assemble


def run(calls: list[Call], **settings: Any) -> Assembly:
    trace = make_trace(calls=calls)
    return assemble([trace], policy="main", trainable_outcomes=OUTCOMES, overlong="window", **settings)


def test_a_window_keeps_the_end_of_the_prompt_and_every_sampled_token() -> None:
    assembly = run([make_call("c", prompt=range(10, 20), completions=[(7, 8, 9)])], max_tokens=8)
    (action,) = assembly.actions
    assert action.prompt_ids.tolist() == [15, 16, 17, 18, 19]
    assert action.completion_ids.tolist() == [7, 8, 9]
    assert (action.num_cut, action.drop) == (5, None)
    assert (assembly.sampled, assembly.trained, assembly.dropped) == (3, 3, {})
    assert (assembly.num_windowed, assembly.num_windowed_actions) == (3, 1)


def test_what_fits_is_not_touched() -> None:
    assembly = run([make_call("c", prompt=range(5), completions=[(7, 8, 9)])], max_tokens=8)
    assert assembly.actions[0].prompt_ids.tolist() == list(range(5))
    assert (assembly.num_windowed, assembly.num_windowed_actions) == (0, 0)


def test_sampled_tokens_before_the_window_are_dropped_and_counted() -> None:
    assembly = run([make_call("c", prompt=(1, 2), completions=[range(10, 20)])], max_tokens=4)
    head, tail = assembly.actions
    assert head.drop is Drop.OVERLONG and head.completion_ids.tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert tail.drop is None and tail.prompt_ids.tolist() == [16] and tail.completion_ids.tolist() == [17, 18, 19]
    assert (head.order, tail.order) == (0, 1)
    assert assembly.dropped == {Drop.OVERLONG: 7} and assembly.trained == 3


@given(
    st.integers(1, 12),
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.integers(2, 15),
)
@settings(deadline=None)
def test_a_window_conserves_tokens_and_their_logprobs(prompt: int, completions: list[int], limit: int) -> None:
    calls = [
        make_call(f"c{seq}", prompt=range(prompt), completions=[range(100, 100 + n) for n in completions], seq=seq)
        for seq in range(2)
    ]
    assembly = run(calls, max_tokens=limit)
    assert assembly.sampled == 2 * sum(completions) == assembly.trained + sum(assembly.dropped.values())
    by_choice: dict[tuple[str, int], list[int]] = {}
    for place, action in enumerate(assembly.actions):
        assert action.order == place
        assert len(action.logprobs) == action.num_tokens
        by_choice.setdefault((action.call_id, action.choice_index), []).extend(action.completion_ids.tolist())
        if action.drop is None:
            assert len(action.prompt_ids) >= 1
            assert len(action.prompt_ids) + action.num_tokens <= limit
    for (_, index), ids in by_choice.items():
        assert ids == list(range(100, 100 + completions[index]))


def test_another_reason_drops_the_whole_action_without_a_window() -> None:
    assembly = run([make_call("c", prompt=range(10), delivered=False)], max_tokens=4)
    (action,) = assembly.actions
    assert action.drop is Drop.UNDELIVERED and action.num_cut == 0


def test_windowed_actions_make_a_sound_batch_and_keep_the_mass_of_their_rollout() -> None:
    calls = [make_call("c0", prompt=range(30)), make_call("c1", prompt=(1, 2), completions=[range(9)], seq=1)]
    assembly = run(calls, max_tokens=6)
    (one,) = batch.build(assembly.actions, {"r0": 1.0})
    batch.check(one)
    assert float(one.weight_N.sum()) == pytest.approx(1.0)
    assert one.num_labels == assembly.trained == 2 + 5
    assert max(map(len, one.sequences)) == 6
    assert np.array_equal(one.sequences[0], [26, 27, 28, 29, 7, 8])


def test_a_window_without_importance_weights_is_refused() -> None:
    tree = {"learn": {"overlong": "window", "importance_cap": 0.0}}
    with pytest.raises(ConfigError, match="importance_cap"):
        config.from_tree(tree, base_dir=config.Config().base_dir)
    config.from_tree({"learn": {"overlong": "window", "algorithm": "rejection_sft"}}, base_dir=config.Config().base_dir)
