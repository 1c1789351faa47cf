"""One pass for several samplers: each row with its own adapter, and nobody waits for who does not come."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.learning.backends.test_sampler_flat import stir
from tests.unit.learning.backends.tiny import VOCAB, make_loaded
from torch import Tensor

from leyden.base.config import LoraConfig
from leyden.learning.backends.embedded import joint, shadow, shared
from leyden.learning.backends.embedded.cache import SlotCache
from leyden.learning.backends.embedded.flat_layers import FlatModel
from leyden.learning.backends.embedded.joint import Turn
from leyden.learning.backends.embedded.model import LoadedModel, wrap
from leyden.learning.backends.embedded.passes import FlatPasses, Prompt, passes_of


def of_one_base(num: int, *, dtype: str = "float32", targets: Sequence[str] = ()) -> list[LoadedModel]:
    """Models with an adapter each over the same parameters, and one without any behind them."""
    base: Any = make_loaded("qwen2", dtype=dtype)  # type: ignore[arg-type]
    base.causal.requires_grad_(False)
    made = []
    for i in range(num):
        lora = LoraConfig(rank=2 + i, targets=tuple(targets)) if i < num - 1 else None
        one = wrap(
            shared.twin(base.causal), base.tokenizer, "", dtype=dtype, lora=lora, max_context=256,  # type: ignore[arg-type]
            source="tiny", seed=i,
        )  # fmt: skip
        made.append(stir(one, seed=i))
    return made


class Player:
    """The passes of one model and a cache with some sequences."""

    def __init__(self, loaded: LoadedModel, turn: Turn, num: int, seed: int) -> None:
        passes = passes_of(shadow.shadow_of(loaded.causal), loaded, turn)
        assert isinstance(passes, FlatPasses)
        self.passes = passes
        dtype = torch.float32 if loaded.dtype == "float32" else torch.bfloat16
        self.cache = SlotCache(2, 2, 8, dtype, torch.device("cpu"))
        self.cache.reserve(num + 8, 64)
        rng = np.random.default_rng(seed)
        self.sequences = [rng.integers(0, VOCAB, n) for n in rng.integers(3, 20, num)]
        with torch.no_grad():
            passes.fill(self.cache, [Prompt(i, s[:-1], 0) for i, s in enumerate(self.sequences)], 2048)

    def step(self) -> Tensor:
        ids = np.asarray([s[-1] for s in self.sequences])
        places = np.asarray([len(s) - 1 for s in self.sequences])
        with torch.no_grad():
            return self.passes.logits(self.cache, ids, places, [None] * len(ids)).float().clone()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass from now on."""
    rows: list[int] = []
    usual = FlatModel.hidden

    def hidden(self: FlatModel, ids_T: Tensor, *args: Any) -> Tensor:
        rows.append(len(ids_T))
        return usual(self, ids_T, *args)

    monkeypatch.setattr(FlatModel, "hidden", hidden)
    return rows


def together(*calls: Callable[[], Any]) -> list[Future[Any]]:
    """Futures of calls that were all begun before this returns, and are over."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call) for call in calls]


@pytest.mark.parametrize("targets", [(), ("v_proj", "up_proj")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_that_meet_are_one_pass_and_every_row_is_as_alone(
    dtype: str, targets: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = of_one_base(3, dtype=dtype, targets=targets)
    alone = [
        Player(one, Turn(), num, seed=i).step() for i, (one, num) in enumerate(zip(models, (5, 1, 3), strict=True))
    ]
    turn = Turn()
    players = [Player(one, turn, num, seed=i) for i, (one, num) in enumerate(zip(models, (5, 1, 3), strict=True))]
    monkeypatch.setattr(joint, "PATIENCE_S", 20.0)
    for player in players:
        player.passes.expect(True)
    rows = counted(monkeypatch)
    found = [future.result() for future in together(*(player.step for player in players))]
    assert rows == [16], "nine rows, padded once"
    for ours, expected in zip(found, alone, strict=True):
        assert ours.shape == expected.shape
        assert (ours - expected).norm() <= (1e-5 if dtype == "float32" else 0.03) * expected.norm()
    assert not torch.allclose(alone[1], found[2][:1], atol=0.1)


def test_models_with_weights_of_their_own_take_turns_in_one_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [make_loaded("llama", seed=i) for i in range(2)]
    alone = [Player(one, Turn(), 2, seed=i).step() for i, one in enumerate(models)]
    turn = Turn()
    players = [Player(one, turn, 2, seed=i) for i, one in enumerate(models)]
    for player in players:
        player.passes.expect(True)
    rows = counted(monkeypatch)
    found = [future.result() for future in together(*(player.step for player in players))]
    assert rows == [2, 2]
    assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def test_who_decodes_nothing_is_not_waited_for_and_who_is_late_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn()
    first, second = (Player(one, turn, 2, seed=0) for one in of_one_base(2))
    monkeypatch.setattr(joint, "PATIENCE_S", 20.0)
    first.passes.expect(True)
    began = time.monotonic()
    first.step()
    second.passes.expect(True)
    second.passes.expect(False)
    first.step()
    assert time.monotonic() - began < 10, "nobody was waited for"
    second.passes.expect(True)
    waiting: Future[Any]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.step)
        time.sleep(0.2)
        assert not waiting.done(), "the other has sequences"
        second.passes.expect(False)
        waiting.result(10)
    monkeypatch.setattr(joint, "PATIENCE_S", 0.1)
    second.passes.expect(True)
    first.step()


def test_a_pass_that_fails_fails_for_all_who_were_in_it_and_for_nobody_after(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = Turn()
    players = [Player(one, turn, 2, seed=0) for one in of_one_base(3)]
    for player in players:
        player.passes.expect(True)
    expected = [future.result() for future in together(*(player.step for player in players))]

    def broken(*args: Any) -> Tensor:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(joint, "PATIENCE_S", 20.0)
        patched.setattr(FlatModel, "hidden", broken)
        errors = [future.exception(10) for future in together(*(player.step for player in players))]
        assert all("no room" in str(error) for error in errors)
    found = [future.result() for future in together(*(player.step for player in players))]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


def test_what_is_computed_alone_is_computed_alone() -> None:
    turn = Turn()
    (player,) = (Player(one, turn, 2, seed=0) for one in of_one_base(1))
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with turn.alone():
            entered.set()
            assert leave.wait(10)

    with ThreadPoolExecutor(2) as pool:
        holding = pool.submit(hold)
        assert entered.wait(10)
        step = pool.submit(player.step)
        time.sleep(0.1)
        assert not step.done()
        leave.set()
        holding.result(10)
        assert len(step.result(10)) == 2
