"""The supervised stage: every policy learns the approved demonstrations that are for it.

Promises: one optimizer step of each policy per step of the stage, in the order that the run's seed gives; a policy that
has no more to imitate keeps its weights and takes the next number all the same, for versions of all policies advance
together. Demonstrations that are like a task of the holdout are refused. Does not record and does not save.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from leyden.base import leaks
from leyden.house import House, Learner
from leyden.learning import batch, schedule
from leyden.learning.backends.base import Objective
from leyden.step_report import summed, update_numbers


def lessons(house: House) -> dict[str, list[batch.Batch]]:
    """By policy, its demonstrations as one batch per optimizer step. Raises HoldoutError."""
    guard = leaks.Guard(house.holdout_tasks, threshold=house.config.tasks.near)
    leaks.refuse(guard.of_demos([demo for one in house.learners for demo in one.demos]), "demonstrations")
    return {one.policy: _batches(one) for one in house.learners}


async def step(house: House, batches: Mapping[str, Sequence[batch.Batch]], number: int) -> dict[str, Any]:
    """Step `number` of the stage, while calls are held back; its report: what one policy learned stands among the rest,
    what several learned below `policies`."""
    begun = time.time()
    parts: dict[str, dict[str, Any]] = {}
    for learner in house.learners:
        mine, version = batches[learner.policy], learner.backend.version + 1
        if number < len(mine):
            objective = _objective(learner, number)
            update = await asyncio.to_thread(learner.backend.update, [mine[number]], objective, version)
            parts[learner.policy] = {"version": version, **update_numbers(update)}
        else:
            learner.backend.serve_as(version)
    house.progress.advance(number + 1, ", ".join(f"loss {part['loss']:.3f}" for part in parts.values()))
    whole = parts[house.policy] if len(house.learners) == 1 else {**summed(parts.values()), "policies": parts}
    return {**whole, "seconds": {"update": time.time() - begun}}


def _batches(learner: Learner) -> list[batch.Batch]:
    sft = learner.config.sft
    assert sft is not None
    encoded = [learner.backend.encode_demo(demo.messages) for demo in learner.demos]
    made = batch.demo_batches(encoded, batch_size=sft.batch_size, epochs=sft.epochs, seed=learner.config.run.seed)
    assert len(made) == learner.sft_steps
    return made


def _objective(learner: Learner, number: int) -> Objective:
    sft = learner.config.sft
    assert sft is not None
    rate = schedule.learning_rate_at(number, learner.sft_steps, sft.schedule, sft.warmup_steps, sft.learning_rate)
    return Objective(surrogate="nll", importance_cap=0.0, learning_rate=rate, grad_clip=learner.config.learn.grad_clip)
