"""The flat layers and shared trunks of the sampler against the modules of the model and plain attention."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.learning.backends import tiny
from tests.unit.learning.backends.test_sampler import ask, close
from tests.unit.learning.backends.tiny import VOCAB, make_loaded
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Gemma3TextConfig, MistralConfig, Olmo2Config

from leyden.base.config import LoraConfig
from leyden.base.errors import LearningError
from leyden.learning.backends.embedded import decoder, shadow
from leyden.learning.backends.embedded.attention import attention_scope, causal_kernel
from leyden.learning.backends.embedded.cache import PrefixStore, SlotCache, Trunk
from leyden.learning.backends.embedded.flat import DecodeAttention
from leyden.learning.backends.embedded.joint import Turn
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.passes import FlatPasses, ModulePasses, Passes, Prompt, passes_of
from leyden.learning.backends.embedded.requests import Counters
from leyden.learning.backends.embedded.sampler import Sampler

FLAT = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3")


@pytest.fixture(autouse=True)
def _a_window_that_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny.CONFIGS, "mistral", lambda **values: MistralConfig(**values, sliding_window=6))
    kinds: dict[str, Any] = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "query_pre_attn_scalar": 8,
    }
    monkeypatch.setitem(tiny.CONFIGS, "gemma3", lambda **values: Gemma3TextConfig(**values, **kinds))
    monkeypatch.setitem(tiny.CONFIGS, "olmo2", Olmo2Config)


def logits_by(passes: Passes, sequences: Sequence[np.ndarray], budget: int) -> list[Tensor]:
    """Logits of the last three tokens of each sequence: the others fill the cache, these come one by one."""
    cache = SlotCache(2, 2, 8, torch.float32, torch.device("cpu"))
    cache.reserve(len(sequences), 64)
    with torch.no_grad():
        passes.fill(cache, [Prompt(i, s[:-3], 0) for i, s in enumerate(sequences)], budget)
        found = []
        for back in (3, 2, 1):
            ids = np.asarray([s[-back] for s in sequences], np.int64)
            places = np.asarray([len(s) - back for s in sequences], np.int64)
            found.append(passes.logits(cache, ids, places, [None] * len(ids))[: len(ids)])
    return found


@pytest.mark.parametrize("budget", [7, 2048])
@pytest.mark.parametrize("kind", FLAT)
def test_flat_layers_compute_what_the_modules_do(kind: str, budget: int) -> None:
    loaded = make_loaded(kind)
    clone = shadow.shadow_of(loaded.causal)
    flat = passes_of(clone, loaded)
    assert isinstance(flat, FlatPasses)
    rng = np.random.default_rng(0)
    sequences = sorted((rng.integers(0, VOCAB, n) for n in (5, 9, 14, 33, 34)), key=len)
    for a, b in zip(
        logits_by(flat, sequences, budget),
        logits_by(ModulePasses(clone, loaded, Turn()), sequences, budget),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=2e-5, rtol=1e-4)


def stir(loaded: LoadedModel, seed: int = 0) -> LoadedModel:
    """Adapters that do something: B is 0 at first."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    loaded.refresh()
    return loaded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("targets", [(), ("k_proj", "v_proj", "down_proj"), ("o_proj", "gate_proj")])
@pytest.mark.parametrize("kind", FLAT)
def test_low_rank_updates_are_added_as_their_modules_add_them(kind: str, targets: tuple[str, ...], dtype: str) -> None:
    lora = LoraConfig(rank=3, alpha=5.0, targets=targets)
    loaded = stir(make_loaded(kind, lora=lora, dtype=dtype))  # type: ignore[arg-type]
    clone = shadow.shadow_of(loaded.causal)
    flat = passes_of(clone, loaded)
    assert isinstance(flat, FlatPasses)
    ids_T = torch.arange(20) * 7 % VOCAB
    found, expected = flat.whole(ids_T).float(), ModulePasses(clone, loaded, Turn()).whole(ids_T).float()
    assert (found - expected).norm() <= (1e-5 if dtype == "float32" else 0.03) * expected.norm()
    stir(loaded, seed=1)
    assert flat.stale() == 2 * {0: 5, 3: 2, 2: 2}[len(targets)]
    flat.refresh()
    assert flat.stale() == 0 and not torch.allclose(flat.whole(ids_T).float(), found, atol=0.01)


@pytest.mark.parametrize("change", ["merged", "disabled", "dropout"])
def test_an_adapter_that_does_something_else_is_left_to_its_modules(change: str) -> None:
    loaded = stir(make_loaded("llama", lora=LoraConfig(rank=2)))
    model: Any = loaded.model
    if change == "merged":
        model.merge_adapter()
    elif change == "disabled":
        model.disable_adapter_layers()
    else:
        base: Any = loaded.causal.base_model
        base.layers[0].mlp.up_proj.lora_dropout["default"] = torch.nn.Dropout(0.5)
    assert isinstance(passes_of(shadow.shadow_of(loaded.causal), loaded), ModulePasses)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
@pytest.mark.parametrize("kind", FLAT)
def test_flat_layers_in_bfloat16_are_as_near_to_float32_as_the_modules_are(kind: str, lora: LoraConfig | None) -> None:
    exact = make_loaded(kind, lora=lora)
    low = make_loaded(kind, lora=lora, dtype="bfloat16")
    ids_T, places_1T = torch.arange(20) * 7 % VOCAB, torch.arange(20)[None]
    with torch.no_grad(), attention_scope(causal_kernel):
        expected = exact.head(exact.hidden(ids_T[None], places_1T))[0]
        modules = low.head(low.hidden(ids_T[None], places_1T))[0].float()
    clone = shadow.shadow_of(low.causal)
    passes = passes_of(clone, low)
    assert isinstance(passes, FlatPasses)
    error = (passes.whole(ids_T).float() - expected).norm()
    assert error <= 1.5 * (modules - expected).norm()


def test_layers_of_another_shape_and_a_layer_that_is_changed_use_their_own_modules() -> None:
    olmo = make_loaded("olmo2")  # its norms come behind attention and MLP only
    assert isinstance(passes_of(shadow.shadow_of(olmo.causal), olmo), ModulePasses)
    llama = make_loaded("llama")
    layer: Any = llama.causal.base_model.layers[1]  # type: ignore[index]
    usual = layer.mlp.forward
    layer.mlp.forward = lambda x: 2.0 * usual(x)
    assert isinstance(passes_of(shadow.shadow_of(llama.causal), llama), ModulePasses)


def test_joined_weights_follow_an_update_and_say_when_they_have_not() -> None:
    low = make_loaded("qwen2", dtype="bfloat16")
    clone = shadow.shadow_of(low.causal)
    passes = passes_of(clone, low)
    ids_T = torch.arange(9)
    before = passes.whole(ids_T)
    with torch.no_grad():
        for parameter in low.model.parameters():
            parameter.mul_(1.2)
    assert passes.stale() == 2
    shadow.refresh(clone)
    passes.refresh()
    assert passes.stale() == 0
    fresh = passes_of(shadow.shadow_of(low.causal), low)
    assert torch.equal(passes.whole(ids_T), fresh.whole(ids_T)) and not torch.equal(passes.whole(ids_T), before)


def test_after_an_update_the_sampler_may_be_as_far_from_float32_as_the_trainer_is_and_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = make_loaded("llama", dtype="bfloat16")
    made = decoder.Decoder(loaded, Counters(), 1000)
    made.refresh()
    monkeypatch.setitem(decoder.SYNC_TOLERANCE, "bfloat16", 0.0)
    made.refresh()  # two ways to round differ, and neither is wrong
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.1)
    loaded.refresh()
    monkeypatch.setattr(shadow, "refresh", lambda clone: None)
    monkeypatch.setattr(shadow, "stale", lambda clone: 0)
    with pytest.raises(LearningError, match="weights were not taken over"):
        made.refresh()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_behind_trunks_is_that_over_whole_sequences(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    K, H, D, num_rows = 2, 6, 8, 7
    cache = SlotCache(1, K, D, dtype, torch.device("cpu"))
    cache.reserve(8, 20)
    trunks = [Trunk(*(torch.randn(1, K, n, D).to(dtype) for _ in range(2))) for n in (5, 30)]
    of_row = [trunks[0], None, trunks[1], trunks[0], trunks[1], trunks[1], None]
    cache.keys_LRKCD.normal_()
    cache.values_LRKCD.normal_()
    columns_T = np.asarray([0, 3, 7, 11, 0, 2, 9, 0])
    # Queries are a slice of a larger product, as they are in the model.
    q_THD = torch.randn(8, H + K, D).to(dtype)[:, :H]
    attention = DecodeAttention(cache, columns_T, of_row)
    attention.store(0, torch.randn(8, K, D).to(dtype), torch.randn(8, K, D).to(dtype))
    out_THD = attention.attend(0, q_THD, 0.4, None)
    for row in range(num_rows):
        end, trunk = columns_T[row] + 1, of_row[row]
        k, v = cache.keys_LRKCD[0, row, :, :end], cache.values_LRKCD[0, row, :, :end]
        if trunk is not None:
            k, v = torch.cat([trunk.keys_LKPD[0], k], 1), torch.cat([trunk.values_LKPD[0], v], 1)
        q_H1D = q_THD[row][:, None].float()
        expected = scaled_dot_product_attention(
            q_H1D[None], k[None].float(), v[None].float(), scale=0.4, enable_gqa=True
        )[0, :, 0]
        tolerance = 1e-5 if dtype == torch.float32 else 0.03
        assert torch.allclose(out_THD[row].float(), expected, atol=tolerance)


def reference(loaded: LoadedModel, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    """log p(ids | prompt) from one plain forward pass of the trainer's modules."""
    whole_BT = torch.tensor([[*prompt, *ids]])
    with torch.no_grad(), attention_scope(causal_kernel):
        logits_TV = loaded.head(loaded.hidden(whole_BT, torch.arange(whole_BT.shape[1])[None]))[0].float()
    logp_TV = logits_TV.log_softmax(-1)
    return [float(logp_TV[len(prompt) - 1 + i, token]) for i, token in enumerate(ids)]


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3", "olmo2"])
def test_turns_of_agents_that_share_a_prompt_are_scored_as_by_the_trainer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "TRUNK_TOKENS", 16)
    loaded = make_loaded(kind)
    sampler = Sampler(loaded, seed=3)
    monkeypatch.setattr(type(loaded), "decode", lambda self, ids, skip_special=False: "")
    loaded.eos_ids = ()
    try:
        prompt = [(3 * j) % VOCAB for j in range(40)]
        other = [*prompt[:33], 1, 2, 3]
        late = ask(sampler, prompt, seed=99)[0].wait()
        sampler.pause(5)
        asked = [(p, ask(sampler, p, seed=i)[0]) for i, p in enumerate([prompt] * 5 + [other] * 3 + [prompt[:20]])]
        sampler.resume()
        turns = [(prompt, late)] + [(p, heard.wait()) for p, heard in asked]
        for p, heard in turns:
            assert close(heard.logprobs[0], reference(loaded, p, heard.ids[0]))
        # The second turn of each goes on behind its first; two of them are asked twice.
        seconds = [[*p, *heard.ids[0], 7, 8] for p, heard in turns]
        again = [(p, ask(sampler, p, seed=i)[0]) for i, p in enumerate([*seconds, *seconds[:2]])]
        for p, heard in again:
            assert close(heard.wait().logprobs[0], reference(loaded, p, heard.ids[0]))
        assert any(entry.trunk is not None for entry in sampler.prefixes._entries.values()) == (kind == "llama")
    finally:
        sampler.close()


def test_the_bytes_of_a_trunk_are_counted_once_and_given_back_with_its_last_sequence() -> None:
    store = PrefixStore(10_000)
    keys = torch.zeros(1, 1, 32, 4)  # 512 bytes, with values 1024

    def ids(first: int, num: int) -> np.ndarray:
        return np.arange(first, first + num, dtype=np.int32)

    store.add(ids(0, 32), keys, keys)
    found = store.longest(ids(0, 40))
    assert found is not None and found[0] == 32
    trunk = store.share(found[1])
    assert store.num_bytes == 1024 and store.share(found[1]) is trunk
    for i in range(4):
        store.add(
            np.concatenate([ids(0, 32), ids(100 * i, 16)]).astype(np.int32), keys[:, :, :16], keys[:, :, :16], trunk
        )
    assert store.num_bytes == 1024 + 4 * 512
    cache = SlotCache(1, 1, 4, torch.float32, torch.device("cpu"))
    cache.reserve(1, 48)
    marked = store.longest(np.concatenate([ids(0, 32), ids(100, 20)]).astype(np.int32))
    assert marked is not None and marked[0] == 48
    marked[1].keys_LKCD = keys[:, :, :16] + 1
    marked[1].write(cache, 0, 30, 40)
    assert cache.keys_LRKCD[0, 0, 0, :11, 0].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0]
    store.max_bytes = 600
    store.add(ids(5000, 16), keys[:, :, :16], keys[:, :, :16])
    assert store.num_bytes == 512 and len(store) == 1
