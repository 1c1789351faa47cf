"""The sampler: its log-probs against a plain forward pass, seeds, stopping, sharing, pausing."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.unit.learning.backends.sampler_model import build

from leyden.base.errors import RequestRefused
from leyden.learning.backends.embedded.attention import attention_scope, causal_kernel
from leyden.learning.backends.embedded.model import LoadedModel, load_model
from leyden.learning.backends.embedded.requests import Delta, SamplingRequest, Ticket
from leyden.learning.backends.embedded.sampler import Sampler


@dataclass
class Heard:
    """Collects what a sink hears."""

    choices: int = 1
    text: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    reasons: dict[int, Any] = field(default_factory=dict)
    num_deltas: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    first: threading.Event = field(default_factory=threading.Event)

    def __call__(self, delta: Delta) -> None:
        self.num_deltas += 1
        self.text[delta.choice] = self.text.get(delta.choice, "") + delta.text
        self.ids.setdefault(delta.choice, []).extend(delta.ids)
        self.logprobs.setdefault(delta.choice, []).extend(delta.logprobs)
        self.first.set()
        if delta.finish_reason or delta.error:
            assert delta.choice not in self.reasons
            self.reasons[delta.choice] = delta.error or delta.finish_reason
            if len(self.reasons) == self.choices:
                self.done.set()

    def wait(self) -> "Heard":
        assert self.done.wait(30), "the sampler did not answer within 30 s"
        return self


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(1)
    folder = build(tmp_path_factory.mktemp("tiny"))
    return load_model(folder, dtype="float32", max_context=256)


@pytest.fixture
def sampler(loaded: LoadedModel) -> Iterator[Sampler]:
    made = Sampler(loaded, seed=1)
    yield made
    made.close()


def ask(sampler: Sampler, prompt: Sequence[int] | str, **options: Any) -> tuple[Heard, Ticket]:
    heard = Heard(options.get("num_choices", 1))
    ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    ticket = sampler.submit(SamplingRequest(**{"prompt_ids": ids, "max_tokens": 12, **options}), heard)
    return heard, ticket


def reference(loaded: LoadedModel, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """log p(ids | prompt) from one plain forward pass over the whole sequence."""
    whole_BT = torch.tensor([[*prompt, *ids]])
    with torch.no_grad(), attention_scope(causal_kernel), loaded.compute():
        hidden = loaded.hidden(whole_BT, torch.arange(whole_BT.shape[1])[None])
        logits = loaded.head(hidden)[0].float() / temperature
    logp = logits.log_softmax(-1)
    return [float(logp[len(prompt) - 1 + i, token]) for i, token in enumerate(ids)]


def close(a: Sequence[float], b: Sequence[float], tolerance: float = 1e-4) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= tolerance for x, y in zip(a, b, strict=True))


def test_logprobs_of_batched_requests_equal_a_plain_forward_pass(sampler: Sampler, loaded: LoadedModel) -> None:
    prompts = [[(7 * i + j * j) % 250 for j in range(3 + 5 * i)] for i in range(9)]
    sampler.pause(5)
    asked = [ask(sampler, p, seed=i, temperature=0.7) for i, p in enumerate(prompts)]
    sampler.resume()
    for prompt, (heard, _) in zip(prompts, asked, strict=True):
        heard.wait()
        assert close(heard.logprobs[0], reference(loaded, prompt, heard.ids[0], 0.7))


def test_logprobs_of_reused_prefixes_and_staggered_requests_equal_a_plain_forward_pass(
    sampler: Sampler, loaded: LoadedModel
) -> None:
    shared = [(3 * j) % 250 for j in range(40)]
    first, _ = ask(sampler, shared, seed=1, max_tokens=30)
    assert first.first.wait(30) and first.wait()
    later = [([*shared, i, i + 1], ask(sampler, [*shared, i, i + 1], seed=i, max_tokens=20 + i)[0]) for i in range(4)]
    again = shared + first.ids[0][:-1] + [9, 8, 7]
    later.append((again, ask(sampler, again, seed=5)[0]))
    for prompt, heard in later:
        assert close(heard.wait().logprobs[0], reference(loaded, prompt, heard.ids[0]))
    assert sampler.counters.num_reused_tokens >= 4 * 32 + len(again) - 5


def test_one_prompt_asked_many_times_is_computed_once(sampler: Sampler, loaded: LoadedModel) -> None:
    prompt = [(11 * j) % 250 for j in range(50)]
    sampler.pause(5)
    asked = [ask(sampler, prompt, seed=i)[0] for i in range(8)]
    sampler.resume()
    for heard in asked:
        assert close(heard.wait().logprobs[0], reference(loaded, prompt, heard.ids[0]))
    assert sampler.counters.num_prefill_tokens == 49
    assert len({tuple(h.ids[0]) for h in asked}) == 8


def test_a_prompt_of_one_token_needs_no_prefill(sampler: Sampler, loaded: LoadedModel) -> None:
    heard, _ = ask(sampler, [5], seed=2)
    assert close(heard.wait().logprobs[0], reference(loaded, [5], heard.ids[0]))
    assert sampler.counters.num_prefill_tokens == 0


def test_a_long_prompt_is_computed_in_several_passes(
    sampler: Sampler, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.learning.backends.embedded.decoder.PREFILL_TOKENS", 16)
    prompts = [[(5 * j + i) % 250 for j in range(60 + i)] for i in range(3)]
    asked = [ask(sampler, p)[0] for p in prompts]
    for prompt, heard in zip(prompts, asked, strict=True):
        assert close(heard.wait().logprobs[0], reference(loaded, prompt, heard.ids[0]))


def test_bfloat16_logprobs_are_near_those_of_the_trainer(tmp_path: Path) -> None:
    low = load_model(build(tmp_path / "m"), dtype="bfloat16", max_context=128)
    sampler = Sampler(low)
    try:
        asked = [ask(sampler, [i, 2, 3, 4], seed=i)[0] for i in range(5)]
        for i, heard in enumerate(asked):
            assert close(heard.wait().logprobs[0], reference(low, [i, 2, 3, 4], heard.ids[0]), 0.2)
    finally:
        sampler.close()


def test_the_same_seed_gives_the_same_tokens_in_any_company(sampler: Sampler) -> None:
    alone = ask(sampler, "hello", seed=42, max_tokens=20)[0].wait()
    crowd = [ask(sampler, f"other {i}", seed=i, max_tokens=25)[0] for i in range(7)]
    again = ask(sampler, "hello", seed=42, max_tokens=20)[0].wait()
    other = ask(sampler, "hello", seed=43, max_tokens=20)[0].wait()
    for heard in crowd:
        heard.wait()
    assert alone.ids == again.ids
    assert alone.ids != other.ids


def test_n_choices_differ_and_each_is_reproducible(sampler: Sampler) -> None:
    first = ask(sampler, "abc", seed=3, num_choices=4)[0].wait()
    second = ask(sampler, "abc", seed=3, num_choices=4)[0].wait()
    assert first.ids == second.ids
    assert len({tuple(ids) for ids in first.ids.values()}) == 4


def test_greedy_takes_the_most_probable_token_and_reports_temperature_one(
    sampler: Sampler, loaded: LoadedModel
) -> None:
    prompt = list(b"greedy")
    heard = ask(sampler, prompt, temperature=0.0)[0].wait()
    assert heard.ids == ask(sampler, prompt, temperature=0.0)[0].wait().ids
    assert close(heard.logprobs[0], reference(loaded, prompt, heard.ids[0]))


def test_the_text_ends_before_a_stop_string_that_crosses_tokens(sampler: Sampler) -> None:
    # Every token is one byte here, so any two ASCII neighbours are a stop string across a token border.
    for seed in range(50):
        plain = ask(sampler, "stop", seed=seed, max_tokens=60)[0].wait()
        text = plain.text[0]
        pairs = [i for i in range(2, len(text) - 1) if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i]
        if pairs:
            at = pairs[0]
            break
    else:
        raise AssertionError("no seed gave two ASCII neighbours")
    for stream in (False, True):
        cut = ask(sampler, "stop", seed=seed, max_tokens=60, stop=(text[at : at + 2],), stream=stream)[0].wait()
        assert cut.text[0] == text[:at]
        assert cut.reasons[0] == "stop"
        assert cut.ids[0] == plain.ids[0][: len(cut.ids[0])]
        assert sampler.loaded.decode(cut.ids[0]).endswith(text[at : at + 2])


def test_a_stop_id_ends_a_generation_and_is_among_the_ids(sampler: Sampler) -> None:
    plain = ask(sampler, "stop", seed=9, max_tokens=20)[0].wait()
    wanted = plain.ids[0][5]
    cut = ask(sampler, "stop", seed=9, max_tokens=20, stop_ids=frozenset({wanted}))[0].wait()
    assert cut.ids[0] == plain.ids[0][: plain.ids[0].index(wanted) + 1]
    assert cut.reasons[0] == "stop"


def test_an_end_token_sampled_first_is_an_empty_completion(loaded: LoadedModel, sampler: Sampler) -> None:
    first = ask(sampler, "empty", temperature=0.0, max_tokens=1)[0].wait().ids[0][0]
    usual = loaded.eos_ids
    loaded.eos_ids = (first,)
    try:
        heard = ask(sampler, "empty", temperature=0.0)[0].wait()
    finally:
        loaded.eos_ids = usual
    assert (heard.text[0], heard.ids[0], heard.reasons[0]) == ("", [first], "stop")
    assert len(heard.logprobs[0]) == 1


def test_streamed_text_and_ids_equal_those_that_are_not_streamed(sampler: Sampler) -> None:
    for seed in range(6):
        whole = ask(sampler, "stream", seed=seed, max_tokens=80)[0].wait()
        parts = ask(sampler, "stream", seed=seed, max_tokens=80, stream=True)[0].wait()
        assert whole.num_deltas == 1 and parts.num_deltas > 1
        assert (whole.text, whole.ids, whole.reasons) == (parts.text, parts.ids, parts.reasons)


def test_a_cancelled_request_frees_its_slots(sampler: Sampler) -> None:
    heard, ticket = ask(sampler, "x", max_tokens=250, num_choices=3, stream=True, stop_ids=frozenset())
    assert heard.first.wait(30)
    ticket.cancel()
    heard.wait()
    assert set(heard.reasons.values()) <= {"abort", "stop", "length"}
    sampler.pause(5)
    assert sampler.num_active == 0
    sampler.resume()


def test_a_prompt_that_fills_the_context_is_refused_by_name(sampler: Sampler) -> None:
    with pytest.raises(RequestRefused, match="256") as refused:
        ask(sampler, [1] * 256)
    assert refused.value.kind == "context_length_exceeded" and refused.value.status == 400


def test_the_context_ends_a_generation_with_reason_length(sampler: Sampler, loaded: LoadedModel) -> None:
    usual, loaded.eos_ids = loaded.eos_ids, ()
    try:
        heard = ask(sampler, [1] * 250, max_tokens=100)[0].wait()
    finally:
        loaded.eos_ids = usual
    assert len(heard.ids[0]) == 6 and heard.reasons[0] == "length"


@pytest.mark.parametrize("prompt", [[], [-1], [258], [1 << 70]])
def test_a_prompt_without_valid_ids_is_refused(sampler: Sampler, prompt: list[int]) -> None:
    with pytest.raises(RequestRefused, match="token"):
        ask(sampler, prompt)


def test_a_full_queue_is_refused_with_429(loaded: LoadedModel) -> None:
    sampler = Sampler(loaded, max_waiting=3)
    try:
        sampler.pause(5)
        asked = ask(sampler, "a", num_choices=3)[0]
        with pytest.raises(RequestRefused) as refused:
            ask(sampler, "b")
        assert refused.value.status == 429
        sampler.resume()
        asked.wait()
    finally:
        sampler.close()


def test_pause_aborts_what_is_left_after_the_deadline_and_resume_refuses_the_old_version(
    loaded: LoadedModel,
) -> None:
    sampler = Sampler(loaded, version=1)
    try:
        usual, loaded.eos_ids = loaded.eos_ids, ()
        running = ask(sampler, "r", max_tokens=250, stream=True, num_choices=2)[0]
        assert running.first.wait(30)
        sampler.pause(0.0)
        loaded.eos_ids = usual
        assert set(running.wait().reasons.values()) <= {"abort", "length"}
        waiting = ask(sampler, "w", version=1)[0]
        with torch.no_grad():
            next(loaded.model.parameters()).add_(0.0)
        sampler.resume(version=2)
        error = waiting.wait().reasons[0]
        assert isinstance(error, RequestRefused) and error.status == 404
        with pytest.raises(RequestRefused, match="version 1"):
            ask(sampler, "w", version=1)
        assert ask(sampler, "w", version=2)[0].wait().reasons[0] in ("stop", "length")
    finally:
        sampler.close()


def test_a_change_of_weights_is_sampled_and_no_stale_keys_are_reused(tmp_path: Path) -> None:
    types: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    for dtype in types:
        mine = load_model(build(tmp_path / dtype), dtype=dtype, max_context=128)
        sampler = Sampler(mine)
        try:
            prompt = list(range(40))
            before = ask(sampler, prompt, seed=1)[0].wait()
            sampler.pause(5)
            with torch.no_grad():
                for parameter in mine.model.parameters():
                    parameter.mul_(1.3)
            sampler.resume(version=1)
            after = ask(sampler, prompt, seed=1)[0].wait()
            assert before.logprobs != after.logprobs
            assert close(after.logprobs[0], reference(mine, prompt, after.ids[0]), 1e-4 if dtype == "float32" else 0.3)
        finally:
            sampler.close()


def test_forty_requests_at_once_all_end(sampler: Sampler) -> None:
    asked = [ask(sampler, f"request {i}", seed=i, max_tokens=5 + i)[0] for i in range(40)]
    for heard in asked:
        assert heard.wait().reasons[0] in ("stop", "length")


def test_a_closed_sampler_answers_those_who_wait(loaded: LoadedModel) -> None:
    sampler = Sampler(loaded)
    sampler.pause(5)
    heard = ask(sampler, "late")[0]
    sampler.close()
    sampler.close()
    assert "stopped" in str(heard.wait().reasons[0])
