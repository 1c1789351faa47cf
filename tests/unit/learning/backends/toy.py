"""A tiny model that learns in memory: it samples, is scored, and is updated by the code of a step of the loop.

Nothing but the gateway, the runner and the store is missing, so that an algorithm is seen to learn in seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tests.unit.learning.backends.tiny import VOCAB, make_loaded
from tests.unit.traces.making import OUTCOMES, make_call, make_trace

from leyden.base.config import LearnConfig
from leyden.base.records import Choice, Reward, Trace
from leyden.learning.algorithms import make
from leyden.learning.backends.base import UpdateReport
from leyden.learning.backends.embedded.attention import attention_scope, causal_kernel
from leyden.learning.backends.embedded.model import LoadedModel
from leyden.learning.backends.embedded.trainer import Trainer
from leyden.learning.credit import Credit, credit_groups
from leyden.learning.evidence import Teacher, gather
from leyden.loop import batches_of, drop_untrained, objective_of
from leyden.traces.assemble import assemble

WANTED = 16
"""Tokens below it are good ones."""


def sample(
    loaded: LoadedModel, prompts_RP: np.ndarray, num_tokens: int, random: torch.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(ids, log-probs) of completions of equally long prompts at temperature 1, both (R, num_tokens)."""
    ids_RT = torch.from_numpy(prompts_RP.astype(np.int64))
    logprobs = []
    with torch.no_grad():
        for _ in range(num_tokens):
            with attention_scope(causal_kernel):
                logits_RV = loaded.causal(input_ids=ids_RT, use_cache=False).logits[:, -1]
            log_p_RV = torch.log_softmax(logits_RV.float(), -1)
            token_R1 = torch.multinomial(log_p_RV.exp(), 1, generator=random)
            logprobs.append(log_p_RV.gather(1, token_R1))
            ids_RT = torch.cat([ids_RT, token_R1], 1)
    return ids_RT[:, prompts_RP.shape[1] :].numpy().astype(np.int32), torch.cat(logprobs, 1).numpy()


Play = Callable[[LoadedModel, int, torch.Generator], list[Trace]]


def good_share(loaded: LoadedModel, step: int, random: torch.Generator) -> list[Trace]:
    """Two groups of eight; the reward is the share of good tokens among four."""
    prompts = np.asarray([[1, 20 + g, 30 + step % 2] for g in range(2) for _ in range(8)], np.int32)
    ids, logprobs = sample(loaded, prompts, 4, random)
    return [
        trace_of(f"r{i}", f"g{i // 8}", [(prompts[i], ids[i], logprobs[i])], float((ids[i] < WANTED).mean()))
        for i in range(16)
    ]


def trace_of(
    name: str,
    group: str,
    calls: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
    reward: float,
    step_rewards: Mapping[int, float] | None = None,
) -> Trace:
    """A rollout of one call per (prompt, completion, log-probs); `step_rewards` by number of the call."""
    made = [
        replace(
            make_call(f"{name}-c{k}", seq=k, prompt=prompt.tolist()),
            choices=[Choice(index=0, completion_ids=ids, logprobs=logprobs, finish_reason="stop")],
        )
        for k, (prompt, ids, logprobs) in enumerate(calls)
    ]
    rewards = [Reward(name="step", value=v, call_id=f"{name}-c{k}") for k, v in (step_rewards or {}).items()]
    return replace(make_trace(name, group_id=group, calls=made, reward=reward), rewards=rewards)


class Toy:
    """A run of a tiny model under `[learn]` keys."""

    def __init__(
        self, play: Play = good_share, *, seed: int = 0, listens_to: Teacher | None = None, **learn: Any
    ) -> None:
        values = {"learning_rate": 0.02, "grad_clip": 0.0, "steps": 100, **learn}
        self.learn = LearnConfig.model_validate(values)
        self.loaded = make_loaded(seed=seed)
        self.trainer = Trainer(self.loaded, self.learn)
        self.teacher = listens_to
        self.reports: list[UpdateReport] = []
        self.credits: list[Credit] = []
        self._play = play
        self._random = torch.Generator().manual_seed(seed)

    def step(self, number: int) -> float:
        """One step; the mean of all rewards that its rollouts had."""
        traces = self._play(self.loaded, number, self._random)
        algorithm = make(self.learn)
        assembly = assemble(traces, policy="main", trainable_outcomes=OUTCOMES)
        evidence = gather(traces, assembly, algorithm, self.learn, self.trainer, self.teacher)
        credit = credit_groups(assembly, algorithm, evidence)
        self.credits.append(credit)
        assembly, credit = drop_untrained(self.learn, assembly, credit, algorithm)
        batches = batches_of(self.learn, 0, number, assembly, credit)
        self.reports.append(self.trainer.update(batches, objective_of(self.learn, number, algorithm)))
        totals = [(t.rollout.reward or 0.0) + sum(r.value for r in t.rewards) for t in traces]
        return sum(totals) / len(totals)

    def run(self, steps: int) -> list[float]:
        """The reward of each step."""
        return [self.step(number) for number in range(steps)]


def taught(seed: int = 3) -> LoadedModel:
    """A model that has learned by imitation to write good tokens."""
    loaded = make_loaded(seed=seed)
    random = np.random.default_rng(0)
    optimizer = torch.optim.Adam(loaded.model.parameters(), lr=0.01)
    for _ in range(40):
        ids_RT = random.integers(0, WANTED, (16, 7))
        ids_RT[:, :3] = random.integers(0, VOCAB, (16, 3))
        ids = torch.from_numpy(ids_RT)
        with attention_scope(causal_kernel):
            logits = loaded.causal(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, 2:-1].flatten(0, 1), ids[:, 3:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return loaded
