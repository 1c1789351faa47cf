"""Drawing tokens and cutting text: facts against an obvious reference."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leyden.learning.backends.embedded.draw import Draw, draw
from leyden.learning.backends.embedded.stopping import TextStream


def test_a_uniform_grid_draws_every_token_as_often_as_its_probability_says() -> None:
    torch.manual_seed(0)
    logits_V = torch.randn(300) * 2
    num = 4000
    grid = [(i + 0.5) / num for i in range(num)]
    tokens, logprobs = draw(logits_V.expand(num, -1), [Draw(0.8, 1.0, 0)] * num, grid)
    p_V = (logits_V / 0.8).softmax(-1)
    counts_V = torch.bincount(torch.tensor(tokens), minlength=300)
    # Inversion on a grid is exact up to one grid point at each edge of a token's interval.
    assert (counts_V - num * p_V).abs().max() <= 1.0 + 1e-3
    assert torch.tensor(logprobs).allclose(p_V.log()[tokens], atol=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_unit_interval_never_draw_what_has_no_probability(uniform: float) -> None:
    logits_V = torch.full((517,), float("-inf"))
    logits_V[[130, 131, 400]] = torch.tensor([0.0, -50.0, 1.0])
    token, logprob = draw(logits_V[None], [Draw(1.0, 1.0, 0)], [uniform])
    assert token[0] in (130, 400) and logprob[0] > -2


def test_top_p_and_top_k_keep_the_smallest_set_and_logprobs_are_renormalised() -> None:
    logits_V = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    num = 200
    grid = [(i + 0.5) / num for i in range(num)]
    for rule, kept in ((Draw(1.0, 0.65, 0), [0.4, 0.3]), (Draw(1.0, 1.0, 3), [0.4, 0.3, 0.2])):
        tokens, logprobs = draw(logits_V.expand(num, -1), [rule] * num, grid)
        assert set(tokens) == set(range(len(kept)))
        expected = [torch.tensor(kept[t] / sum(kept)).log().item() for t in tokens]
        assert logprobs == pytest.approx(expected, abs=1e-5)


def test_rows_with_different_rules_do_not_touch_each_other() -> None:
    torch.manual_seed(1)
    logits_BV = torch.randn(4, 200)
    rules = [Draw(0.0, 1.0, 0), Draw(1.0, 0.5, 0), Draw(2.0, 1.0, 0), Draw(1.0, 1.0, 5)]
    uniforms = [0.3, 0.6, 0.9, 0.1]
    together = draw(logits_BV, rules, uniforms)
    alone = [draw(logits_BV[b : b + 1], rules[b : b + 1], uniforms[b : b + 1]) for b in range(4)]
    assert together[0] == [tokens[0] for tokens, _ in alone]
    assert together[1] == pytest.approx([logprobs[0] for _, logprobs in alone], abs=1e-6)
    assert together[0][0] == int(logits_BV[0].argmax())


def as_text(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_text_that_comes_byte_by_byte_is_whole_and_ends_before_the_first_stop_string(
    text: str, stops: list[str]
) -> None:
    stream = TextStream(as_text, stops)
    parts = []
    for byte in text.encode():
        parts.append(stream.push([byte]))
        if stream.matched is not None:
            break
    out = "".join(parts) + stream.finish()
    # The first stop string is the one that is complete first.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    if not ends:
        assert out == text and stream.matched is None
    else:
        first = min(end for end, _ in ends)
        assert out in {text[:at] for end, at in ends if end == first}
        assert all("\ufffd" not in part or "\ufffd" in text for part in parts)
