"""Each algorithm raises the reward of a tiny model, and PPO's critic is what makes it learn where it matters."""

from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.learning.backends.toy import WANTED, Toy, sample, taught, trace_of

from leyden.base import recipes
from leyden.base.config import LearnConfig
from leyden.base.records import Trace
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.trainer import Trainer

SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {"mini_batches": 2, "epochs": 2, "clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"mini_batches": 2, "epochs": 2},
    "dapo": {"refills": 1, "mini_batches": 2, "epochs": 2},
    "ppo": {"value_learning_rate": 0.02, "epochs": 2},
    "dpo": {"dpo_beta": 0.5, "epochs": 2},
    "rejection_sft": {"min_reward": 0.4},
    "distill": {"teacher": "teacher", "normalisation": "token_mean"},
}


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_the_reward_rises(name: str) -> None:
    teacher = Trainer(taught(), LearnConfig()) if name == "distill" else None
    toy = Toy(algorithm=name, listens_to=teacher, **SETTINGS.get(name, {}))
    rewards = toy.run(14)
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.2, rewards
    assert all(np.isfinite(report.loss) for report in toy.reports)


class Luck:
    """Four calls of one token each; a token below WANTED earns 1 at once.

    How the rollout ends is decided by what it began with, which the prompt shows: plus or minus ten, whatever it does.
    Every rollout is a group of its own, so that nothing but a critic can tell luck from merit.
    """

    def __init__(self) -> None:
        self.merit: list[float] = []

    def __call__(self, loaded: LoadedModel, step: int, random: torch.Generator) -> list[Trace]:
        num = 16
        luck_R = torch.randint(0, 2, (num,), generator=random).numpy()
        calls: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[] for _ in range(num)]
        good_RK = np.zeros((num, 4))
        for k in range(4):
            prompts = np.stack([np.asarray([1, 40 + luck, 50 + k], np.int32) for luck in luck_R])
            ids, logprobs = sample(loaded, prompts, 1, random)
            good_RK[:, k] = ids[:, 0] < WANTED
            for r in range(num):
                calls[r].append((prompts[r], ids[r], logprobs[r]))
        self.merit.append(float(good_RK.mean()))
        return [
            trace_of(f"r{r}", f"g{r}", calls[r], 20.0 * luck_R[r] - 10.0, dict(enumerate(good_RK[r].tolist())))
            for r in range(num)
        ]


def merits(**learn: Any) -> tuple[list[float], Toy]:
    """Share of good tokens of each step."""
    luck = Luck()
    toy = Toy(luck, algorithm="ppo", gamma=1.0, learning_rate=0.005, epochs=2, value_clip=0.0, **learn)
    toy.run(26)
    return luck.merit, toy


def test_a_critic_tells_merit_from_luck_where_returns_alone_do_not() -> None:
    with_critic, toy = merits(value_learning_rate=0.05, value_coef=0.2)
    without, blind = merits(value_coef=0.0)
    assert mean(with_critic[-5:]) > mean(with_critic[:3]) + 0.3, with_critic
    assert mean(with_critic[-5:]) > mean(without[-5:]) + 0.2, (with_critic, without)
    assert all(credit.details.value[key] == 0.0 for credit in blind.credits for key in credit.details.value)
    last, first = toy.reports[-1], toy.reports[0]
    assert last.value_loss < 0.2 * first.value_loss
