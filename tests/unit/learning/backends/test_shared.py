"""Several policies over one base model: what they share, and that none of them sees the adapter of another."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_model import build_tiny_model

from leyden.base.config import LearnConfig, LoraConfig, PolicyConfig
from leyden.base.errors import ModelUnusable
from leyden.learning.backends.base import Objective
from leyden.learning.backends.embedded import shared
from leyden.learning.backends.embedded.attention import attention_scope, causal_kernel
from leyden.learning.backends.embedded.backend import EmbeddedBackend
from leyden.learning.backends.embedded.model import LoadedModel, load_model, parameter_fingerprint
from leyden.learning.backends.embedded.requests import Delta, SamplingRequest
from leyden.learning.backends.embedded.shadow import ShadowLinear, packing_works, shadow_of
from leyden.learning.batch import Batch, demo_batches

LORA = LoraConfig(rank=4, alpha=8.0)
PROMPT = [5, 60, 71, 80, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("shared") / "model", hidden_size=32)


def policy(folder: Path, **values: Any) -> PolicyConfig:
    return PolicyConfig(model=str(folder), **{"dtype": "float32", "max_context": 128, **values})


def three(folder: Path, **values: Any) -> dict[str, PolicyConfig]:
    return {
        "planner": policy(folder, lora=LORA, **values),
        "writer": policy(folder, lora=LORA, **values),
        "judge": policy(folder, trainable=False, **values),
    }


def num_bytes(*models: LoadedModel) -> int:
    """Bytes of the parameters, each storage once."""
    found = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for one in models for p in one.model.parameters()
    }
    return sum(found.values())


def logits(loaded: LoadedModel) -> torch.Tensor:
    ids_BT = torch.tensor([PROMPT])
    with torch.no_grad(), loaded.compute(), attention_scope(causal_kernel):
        out: torch.Tensor = loaded.head(loaded.hidden(ids_BT, torch.arange(len(PROMPT))[None])).float()
    return out


def lesson(token: int) -> list[Batch]:
    return demo_batches([([*PROMPT, token, token], len(PROMPT))], batch_size=1, epochs=3, seed=0)


def sample(backend: EmbeddedBackend, num_tokens: int = 6, seed: int = 1) -> tuple[list[int], list[float]]:
    found: list[Delta] = []
    done = threading.Event()

    def sink(delta: Delta) -> None:
        found.append(delta)
        if delta.finish_reason or delta.error:
            done.set()

    backend.sampler.submit(SamplingRequest(prompt_ids=PROMPT, max_tokens=num_tokens, temperature=1.0, seed=seed), sink)
    assert done.wait(20) and found[-1].error is None, found
    return [i for d in found for i in d.ids], [p for d in found for p in d.logprobs]


@pytest.fixture
def served(folder: Path) -> Iterator[dict[str, EmbeddedBackend]]:
    policies = three(folder)
    made = shared.backends_of(policies, dict.fromkeys(policies, LearnConfig(layout="padded")), seed=0)
    yield made
    for backend in made.values():
        backend.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_base_is_in_memory_and_every_view_computes_what_a_model_of_its_own_does(folder: Path, dtype: str) -> None:
    found = shared.load_together(three(folder, dtype=dtype), seed=3)
    alone = {
        name: load_model(folder, dtype=dtype, lora=one.lora, max_context=128, seed=3)  # type: ignore[arg-type]
        for name, one in three(folder, dtype=dtype).items()
    }
    adapters = sum(p.numel() * 4 for p in found["writer"].trainable().values())
    assert num_bytes(*found.values()) == num_bytes(alone["judge"]) + 2 * adapters
    for name, one in found.items():
        assert torch.equal(logits(one), logits(alone[name])), name
        assert set(one.trainable()) == (set(alone[name].trainable()) if one.lora else set())


def test_an_update_of_one_policy_is_seen_by_no_other(served: dict[str, EmbeddedBackend]) -> None:
    before = {name: logits(backend.loaded) for name, backend in served.items()}
    base = parameter_fingerprint(served["judge"].loaded.causal)
    served["planner"].update(lesson(40), Objective(surrogate="nll", learning_rate=1e-2), 1)
    assert not torch.equal(logits(served["planner"].loaded), before["planner"])
    for name in ("writer", "judge"):
        assert torch.equal(logits(served[name].loaded), before[name])
    served["writer"].update(lesson(50), Objective(surrogate="nll", learning_rate=1e-2), 1)
    assert torch.equal(logits(served["judge"].loaded), before["judge"])
    assert parameter_fingerprint(served["judge"].loaded.causal) == base
    assert logits(served["planner"].loaded)[0, -1, 40] > before["planner"][0, -1, 40]
    assert logits(served["writer"].loaded)[0, -1, 50] > before["writer"][0, -1, 50]


def test_each_policy_is_sampled_with_its_own_adapter_and_the_log_probs_are_the_trainers(
    served: dict[str, EmbeddedBackend],
) -> None:
    for name, token in (("planner", 40), ("writer", 50)):
        served[name].update(lesson(token) * 4, Objective(surrogate="nll", learning_rate=3e-2), 1)
    for name in ("planner", "writer"):
        ids, logprobs = sample(served[name])
        batch = demo_batches([([*PROMPT, *ids], len(PROMPT))], batch_size=1, epochs=1, seed=0)[0]
        assert np.allclose(served[name].logprobs(batch), logprobs, atol=1e-4), name
        other = "writer" if name == "planner" else "planner"
        assert not np.allclose(served[other].logprobs(batch), logprobs, atol=1e-2), name


def test_calls_of_all_policies_at_once_are_answered_as_alone(served: dict[str, EmbeddedBackend]) -> None:
    served["planner"].update(lesson(40) * 4, Objective(surrogate="nll", learning_rate=3e-2), 1)
    alone = {(name, seed): sample(served[name], seed=seed) for name in served for seed in range(4)}
    with ThreadPoolExecutor(12) as pool:
        together = {key: pool.submit(sample, served[key[0]], 6, key[1]) for key in alone}
    for key, (ids, logprobs) in alone.items():
        got_ids, got_logprobs = together[key].result()
        assert got_ids == ids and np.allclose(got_logprobs, logprobs, atol=1e-4), key


def test_a_checkpoint_of_one_policy_leaves_the_others_as_they_are(
    served: dict[str, EmbeddedBackend], tmp_path: Path
) -> None:
    objective = Objective(surrogate="nll", learning_rate=1e-2)
    served["planner"].update(lesson(40), objective, 1)
    served["planner"].save(tmp_path / "planner@1", full=True)
    kept, writer = logits(served["planner"].loaded), logits(served["writer"].loaded)
    served["planner"].update(lesson(41), objective, 2)
    after = logits(served["planner"].loaded)
    served["planner"].load(tmp_path / "planner@1", 1, full=True)
    assert torch.equal(logits(served["planner"].loaded), kept)
    assert torch.equal(logits(served["writer"].loaded), writer)
    served["planner"].update(lesson(41), objective, 2)
    assert torch.equal(logits(served["planner"].loaded), after), "a resumed update is bit-identical"


def test_a_policy_whose_weights_are_all_trained_has_a_model_of_its_own(folder: Path) -> None:
    found = shared.load_together({"whole": policy(folder), "planner": policy(folder, lora=LORA)})
    ours = {p.data_ptr() for p in found["whole"].model.parameters()}
    assert ours.isdisjoint({p.data_ptr() for p in found["planner"].model.parameters()})
    assert found["planner"].model is not found["whole"].model
    assert len(found["whole"].trainable()) == len(list(found["whole"].model.parameters()))


def test_templates_and_contexts_are_those_of_each_policy(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }};{% endfor %}", encoding="utf-8")
    policies = {
        "planner": policy(folder, lora=LORA, chat_template=str(template), max_context=64),
        "writer": policy(folder, lora=LORA),
    }
    found = shared.load_together(policies)
    said = [{"role": "user", "content": "hi"}]
    assert found["planner"].render(said) == "hi;" and "im_start" in found["writer"].render(said)
    assert (found["planner"].max_context, found["writer"].max_context) == (64, 128)
    assert num_bytes(*found.values()) < 2 * num_bytes(found["writer"])
    with pytest.raises(ModelUnusable, match="positions for 4096"):
        shared.load_together({**policies, "writer": policy(folder, lora=LORA, max_context=5000)})


def test_all_engines_want_the_same_key_and_know_their_own_name_only(served: dict[str, EmbeddedBackend]) -> None:
    assert len({backend.engine_key for backend in served.values()}) == 1
    assert [backend.server.model for backend in served.values()] == ["planner@0", "writer@0", "judge@0"]


@pytest.mark.skipif(not packing_works(), reason="this processor's kernels take plain weights")
def test_the_packed_copies_of_the_base_are_shared_by_the_samplers(folder: Path) -> None:
    found = shared.load_together(three(folder, dtype="bfloat16"))
    packed = [
        {id(m.packed) for m in shadow_of(one.causal).modules() if isinstance(m, ShadowLinear)} for one in found.values()
    ]
    base = packed[2]
    assert base and base < packed[0] and packed[0] & packed[1] == base, "adapters are packed apart"
