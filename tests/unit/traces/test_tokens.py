import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.base.records import Provenance
from leyden.traces.tokens import RawChoice, checked


def raw(completion_ids: Any = (5, 6), logprobs: Any = (-0.1, -0.2), index: int = 0) -> RawChoice:
    """Tuples stand for the lists of the wire; anything else is passed as it is."""
    ids = list(completion_ids) if isinstance(completion_ids, tuple) else completion_ids
    values = list(logprobs) if isinstance(logprobs, tuple) else logprobs
    return RawChoice(index, ids, values, "stop", "text")


def test_agreeing_tokens_are_kept_as_they_came() -> None:
    tokens = checked([1, 2, 3], [raw(), raw((7,), (0.0,), 1)], {"prompt_tokens": 3, "completion_tokens": 3})
    assert tokens.refusal is None
    assert tokens.provenance is Provenance.SERVED
    assert tokens.prompt_ids.dtype == np.int32 and tokens.prompt_ids.tolist() == [1, 2, 3]
    assert [c.completion_ids.tolist() for c in tokens.choices] == [[5, 6], [7]]
    assert tokens.choices[0].logprobs.tolist() == pytest.approx([-0.1, -0.2])
    assert tokens.choices[1].index == 1 and tokens.choices[1].text == "text"


@pytest.mark.parametrize(
    ("prompt", "choice", "usage", "refusal"),
    [
        (None, raw(), None, "missing_prompt_ids"),
        ([], raw(), None, "missing_prompt_ids"),
        ([1], raw(None), None, "missing_completion_ids"),
        ([1], raw(logprobs=None), None, "missing_logprobs"),
        ([1], raw(logprobs=(-0.1,)), None, "length_mismatch"),
        ([1], raw(logprobs=(-0.1, -0.2, -0.3)), None, "length_mismatch"),
        ([1], raw((), (-0.1,)), None, "length_mismatch"),
        ([1], raw(), {"prompt_tokens": 2}, "usage_mismatch"),
        ([1], raw(), {"completion_tokens": 3}, "usage_mismatch"),
        ([1], raw(logprobs=(-0.1, math.nan)), None, "bad_logprob"),
        ([1], raw(logprobs=(math.nan, -0.1)), None, "bad_logprob"),
        ([1], raw(logprobs=(-math.inf, -0.1)), None, "bad_logprob"),
        ([1], raw(logprobs=(math.inf, -0.1)), None, "bad_logprob"),
        ([1], raw(logprobs=(math.inf, -math.inf)), None, "bad_logprob"),
        ([1], raw(logprobs=(0.002, -0.1)), None, "bad_logprob"),
        ([1], raw(logprobs=(-1e39, -0.1)), None, "bad_logprob"),
        ([1], raw(logprobs=(-(10**400), -0.1)), None, "bad_logprob"),
        ([1], raw(logprobs=(None, -0.1)), None, "bad_logprob"),
        ([1], raw(logprobs=("-0.1", -0.1)), None, "bad_logprob"),
        ([1], raw(logprobs={"content": []}), None, "bad_logprob"),
        ([1, -1], raw(), None, "bad_token_id"),
        ([1, 2**31], raw(), None, "bad_token_id"),
        ([1, True], raw(), None, "bad_token_id"),
        ([1, 2.0], raw(), None, "bad_token_id"),
        ("12", raw(), None, "bad_token_id"),
        ([1], raw((5, "6")), None, "bad_token_id"),
        ([1], raw((5, None)), None, "bad_token_id"),
        ([1], raw((5, -6)), None, "bad_token_id"),
    ],
)
def test_each_fault_of_an_engine_is_refused_by_name(
    prompt: Any, choice: RawChoice, usage: dict[str, int] | None, refusal: str
) -> None:
    assert checked(prompt, [choice], usage).refusal == refusal


def test_no_choices_are_refused() -> None:
    tokens = checked([1], [], None)
    assert (tokens.refusal, tokens.choices) == ("no_choices", [])


@pytest.mark.parametrize("prompt", [None, [1]])
def test_without_ids_arrays_are_empty_and_the_tokens_are_ours(prompt: list[int] | None) -> None:
    tokens = checked(prompt, [raw(None if prompt else (5, 6)), raw((7,), (0.0,), 1)], None)
    assert tokens.provenance is Provenance.RETOKENIZED
    assert len(tokens.prompt_ids) == 0
    assert [len(c.completion_ids) for c in tokens.choices] == [0, 0]
    assert [len(c.logprobs) for c in tokens.choices] == [0, 0]
    assert [c.finish_reason for c in tokens.choices] == ["stop", "stop"]


def test_missing_logprobs_keep_the_ids_that_were_served() -> None:
    tokens = checked([1], [raw(logprobs=None)], None)
    assert tokens.provenance is Provenance.SERVED
    assert tokens.choices[0].completion_ids.tolist() == [5, 6]
    assert np.isnan(tokens.choices[0].logprobs).all() and len(tokens.choices[0].logprobs) == 2


@pytest.mark.parametrize("logprobs", [(), None])
def test_an_empty_completion_is_accepted(logprobs: Any) -> None:
    tokens = checked([1], [raw((), logprobs)], {"prompt_tokens": 1, "completion_tokens": 0})
    assert tokens.refusal is None
    assert len(tokens.choices[0].completion_ids) == len(tokens.choices[0].logprobs) == 0


def test_rounding_above_zero_is_kept_not_repaired() -> None:
    tokens = checked([1], [raw(logprobs=(5e-4, 0))], None)
    assert tokens.refusal is None
    assert tokens.choices[0].logprobs[0] == np.float32(5e-4)


def test_the_stop_token_is_a_token_like_any_other() -> None:
    # pad == eos == 2 in many tokenizers; lengths decide what is trained, not ids.
    tokens = checked([2, 2], [raw((2, 2), (-0.1, -0.1))], {"prompt_tokens": 2, "completion_tokens": 2})
    assert tokens.refusal is None and tokens.choices[0].completion_ids.tolist() == [2, 2]


json_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
anything = json_values | st.lists(json_values, max_size=4) | st.dictionaries(st.text(max_size=2), json_values)


usages = st.none() | st.just({"prompt_tokens": "x"})


@given(anything, st.lists(st.tuples(anything, anything), max_size=3), usages)
def test_nothing_that_an_engine_answers_raises(prompt: Any, choices: list[tuple[Any, Any]], usage: Any) -> None:
    tokens = checked(prompt, [RawChoice(i, *pair, "stop") for i, pair in enumerate(choices)], usage)
    assert len(tokens.choices) == len(choices)
    for choice in tokens.choices:
        assert len(choice.completion_ids) == len(choice.logprobs)
        assert tokens.refusal is not None or np.isfinite(choice.logprobs).all()
