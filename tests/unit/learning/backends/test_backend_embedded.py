"""The embedded backend as a whole: sample over HTTP, update, and what is served then."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tests.unit.learning.backends.sampler_model import build

from leyden.base.config import LearnConfig, LoraConfig, PolicyConfig, SamplingConfig
from leyden.base.errors import ConfigError, LearningError
from leyden.learning.backends.base import Backend, Objective
from leyden.learning.backends.embedded.backend import EmbeddedBackend
from leyden.learning.batch import Batch


class Served:
    def __init__(self, backend: EmbeddedBackend) -> None:
        self.backend = backend
        self.http = httpx.Client(
            base_url=backend.start(), headers={"authorization": f"Bearer {backend.engine_key}"}, timeout=30,
            trust_env=False,
        )  # fmt: skip

    def sample(self, prompt: list[int], version: int, **body: Any) -> httpx.Response:
        return self.http.post(
            "/v1/completions",
            json={
                "model": f"main@{version}",
                "prompt": prompt,
                "logprobs": 0,
                "return_token_ids": True,
                **body,
            },
        )

    def close(self) -> None:
        self.http.close()
        self.backend.close()


def served(folder: Path, **config: Any) -> Served:
    torch.set_num_threads(1)
    policy = PolicyConfig(model=str(build(folder)), max_context=128, sampling=SamplingConfig(max_tokens=8), **config)
    return Served(EmbeddedBackend("main", policy, LearnConfig(layout="padded"), version=1, drain_timeout_s=10))


@pytest.fixture(params=["float32", "bfloat16", "lora"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    kind = request.param
    lora = LoraConfig(rank=4) if kind == "lora" else None
    made = served(tmp_path / "m", dtype="bfloat16" if kind == "bfloat16" else "float32", lora=lora)
    yield made
    made.close()


def batch_of(prompt: list[int], choices: list[Any], credit: float = 1.0) -> Batch:
    ids = [np.asarray(c["token_ids"], np.int32) for c in choices]
    lengths = [len(i) for i in ids]
    total = sum(lengths)
    return Batch(
        sequences=[np.concatenate([np.asarray(prompt, np.int32), i]) for i in ids],
        prompt_len_A=np.full(len(ids), len(prompt), np.int32),
        rollout_A=np.arange(len(ids), dtype=np.int32),
        temperature_A=np.ones(len(ids), np.float32),
        action_N=np.repeat(np.arange(len(ids), dtype=np.int32), lengths),
        offset_N=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        token_N=np.concatenate(ids),
        logp_sampler_N=np.concatenate([np.asarray(c["logprobs"]["token_logprobs"], np.float32) for c in choices]),
        credit_N=np.full(total, credit, np.float32),
        weight_N=np.full(total, 1.0 / total, np.float32),
        num_rollouts=len(ids),
    )


def test_it_fulfils_the_contract_of_a_backend(engine: Served) -> None:
    backend: Backend = engine.backend
    assert backend.policy == "main" and backend.version == 1


def test_what_was_sampled_is_trained_and_the_new_version_is_served(engine: Served) -> None:
    prompt = list(range(30))
    tolerance = 1e-4 if engine.backend.loaded.dtype == "float32" else 0.2
    before = engine.sample(prompt, 1, n=4, seed=1).json()["choices"]
    batch = batch_of(prompt, before)
    assert np.abs(engine.backend.logprobs(batch) - batch.logp_sampler_N).max() < tolerance
    report = engine.backend.update([batch], Objective(learning_rate=0.01), 2)
    assert report.num_optimizer_steps == 1 and report.gap_max < tolerance
    assert engine.backend.version == 2
    assert engine.sample(prompt, 1).status_code == 404
    after = engine.sample(prompt, 2, n=4, seed=2).json()["choices"]
    again = batch_of(prompt, after)
    trainers = engine.backend.logprobs(again)
    assert np.abs(trainers - again.logp_sampler_N).max() < tolerance
    assert np.abs(engine.backend.logprobs(batch) - batch.logp_sampler_N).max() > 10 * tolerance / 4


def test_a_version_is_never_reused(engine: Served) -> None:
    with pytest.raises(LearningError, match="version 1"):
        engine.backend.update([], Objective(), 1)
    assert engine.sample([1, 2], 1).status_code == 200


def test_a_loss_that_is_not_finite_leaves_the_old_version_served(engine: Served) -> None:
    choices = engine.sample([1, 2, 3], 1, seed=3).json()["choices"]
    bad = batch_of([1, 2, 3], choices, credit=3e38)
    with pytest.raises(LearningError):
        engine.backend.update([bad], Objective(importance_cap=0.0), 2)
    assert engine.backend.version == 1
    assert engine.sample([1, 2, 3], 1, seed=3).json()["choices"] == choices


def test_a_saved_version_comes_back_and_a_training_run_goes_on(engine: Served, tmp_path: Path) -> None:
    prompt = [5, 6, 7]
    options: dict[str, Any] = {"n": 2, "seed": 4}
    before = engine.sample(prompt, 1, **options).json()["choices"]
    engine.backend.save(tmp_path / "v1", full=True)
    engine.backend.update([batch_of(prompt, before)], Objective(learning_rate=0.01), 2)
    engine.backend.load(tmp_path / "v1", 3, full=True)
    assert engine.backend.version == 3
    assert engine.sample(prompt, 3, **options).json()["choices"] == before


def test_a_demonstration_is_encoded_by_the_chat_template(engine: Served) -> None:
    ids, prompt_len = engine.backend.encode_demo(
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    assert engine.backend.loaded.decode(ids[prompt_len:]) == "b<|im_end|>"


def test_max_tokens_left_out_are_those_of_the_policy(engine: Served) -> None:
    usage = engine.sample([1], 1, seed=9).json()["usage"]
    assert usage["completion_tokens"] <= 8


def test_a_policy_that_is_not_trained_refuses_an_update(tmp_path: Path) -> None:
    made = served(tmp_path / "m", dtype="float32", trainable=False)
    try:
        with pytest.raises(LearningError, match=r"policies\.main\.trainable"):
            made.backend.update([], Objective(), 2)
    finally:
        made.close()
        made.backend.close()


def test_an_unknown_tool_parser_is_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="tool_parser"):
        EmbeddedBackend("main", PolicyConfig(model="nowhere", tool_parser="xml"), LearnConfig())


def test_a_number_given_to_the_weights_is_what_backend_and_engine_say(engine: Served) -> None:
    backend = engine.backend
    backend.serve_as(41)
    assert (backend.version, backend.sampler.version) == (41, 41)
    backend.load_base(42)
    assert (backend.version, backend.sampler.version) == (42, 42)
