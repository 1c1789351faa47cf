"""From named components to one number, and why it is that number.

`total = sum(weight * clip(value) for components whose gate is open)`. A component without a weight counts
nothing but is kept. A scheduled weight is that of the attempt's step. No weights at all: a single component
counts with weight 1. A component that a weight or a gate names and that is missing is an error, never 0.
Python floats throughout. Does not run a verifier.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from leyden.base.config import RewardsConfig, WeightSchedule
from leyden.base.errors import VerifierError
from leyden.base.records import check_reward, to_json

SINGLE = "reward"
"""Name of the component when a verifier returns one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one component did to the total."""

    name: str
    """Component."""
    value: float
    """As it was given."""
    clipped: float
    """After `rewards.clip`."""
    weight: float
    """From `rewards.weights`; 0 when it has none."""
    gate: str | None
    """The component that had to be above 0, if any."""
    open: bool
    """False when the gate shut it out."""

    @property
    def amount(self) -> float:
        """Part of the total."""
        return self.weight * self.clipped if self.open else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A total and its parts; the amounts add up to the total."""

    total: float
    """The reward of the rollout."""
    parts: tuple[Contribution, ...]
    """In alphabetical order."""

    def text(self) -> str:
        """One line for people, for example `1.2 = correct 1 x 1 + safe 0.5 x 0.4`."""
        terms = [
            f"{part.name} {part.clipped:g} x {part.weight:g}" + ("" if part.open else f" (shut by {part.gate})")
            for part in self.parts
        ]
        return f"{self.total:g} = " + " + ".join(terms)


class Total:
    """The reward function that `[rewards]` describes."""

    def __init__(self, config: RewardsConfig) -> None:
        self._config = config

    def explain(self, components: Mapping[str, float], step: int | None = None) -> Explanation:
        """The total of one attempt and its parts, with the weights of a step (from 0); None: the last weights.

        Raises RecordError for a value that is no finite number, VerifierError when the components do not fit
        the configuration.
        """
        values = {name: check_reward(name, value) for name, value in components.items()}
        weights = self._weights(values, step)
        self._check_names(values)
        parts = []
        for name in sorted(values):
            low, high = self._config.clip.get(name, (float("-inf"), float("inf")))
            gate = self._config.gates.get(name)
            parts.append(
                Contribution(
                    name=name,
                    value=values[name],
                    clipped=min(max(values[name], low), high),
                    weight=weights.get(name, 0.0),
                    gate=gate,
                    open=gate is None or values[gate] > 0,
                )
            )
        return Explanation(total=sum((part.amount for part in parts), 0.0), parts=tuple(parts))

    def success(self, components: Mapping[str, float]) -> bool:
        """Whether the task counts as solved: `rewards.success`, or the total, above 0.5."""
        name = self._config.success
        if not name:
            return self.explain(components).total > 0.5
        if name not in components:
            raise VerifierError(_unknown(f"rewards.success = {name!r}", name, components))
        return check_reward(name, components[name]) > 0.5

    def _weights(self, values: Mapping[str, float], step: int | None) -> Mapping[str, float]:
        if self._config.weights or self._config.schedule:
            scheduled = {name: weight_at(one, step) for name, one in self._config.schedule.items()}
            return {**self._config.weights, **scheduled}
        if len(values) > 1:
            raise VerifierError(
                f"there are {len(values)} components ({', '.join(sorted(values))}) and no weights; "
                f"set rewards.weights, for example {{ {min(values)} = 1.0 }}"
            )
        return dict.fromkeys(values, 1.0)

    def _check_names(self, values: Mapping[str, float]) -> None:
        for name in self._config.weights:
            if name not in values:
                raise VerifierError(_unknown(f"rewards.weights.{name}", name, values))
        for name in self._config.schedule:
            if name not in values:
                raise VerifierError(_unknown(f"rewards.schedule.{name}", name, values))
        for name, gate in self._config.gates.items():
            for needed in (name, gate):
                if needed not in values:
                    raise VerifierError(_unknown(f"rewards.gates.{name} = {gate!r}", needed, values))
        for name in self._config.clip:
            if name not in values:
                raise VerifierError(_unknown(f"rewards.clip.{name}", name, values))


def weight_at(schedule: WeightSchedule, step: int | None) -> float:
    """Weight of a step (from 0): `first` up to `from_step`, `last` from `to_step` on, a straight line between."""
    if step is None or step >= schedule.to_step:
        return schedule.last
    if step <= schedule.from_step:
        return schedule.first
    share = (step - schedule.from_step) / (schedule.to_step - schedule.from_step)
    return schedule.first * (1 - share) + schedule.last * share


def check_rewards(config: RewardsConfig) -> None:
    """Raise VerifierError for settings that cannot hold, whatever a verifier returns."""
    for name, weight in config.weights.items():
        check_reward(f"rewards.weights.{name}", weight)
    for name, one in config.schedule.items():
        check_reward(f"rewards.schedule.{name}.first", one.first)
        check_reward(f"rewards.schedule.{name}.last", one.last)
    for name, (low, high) in config.clip.items():
        if not low <= high:
            raise VerifierError(f"rewards.clip.{name} = [{low}, {high}] is empty; put the lower bound first")


def reward_version(config: RewardsConfig, *files: Path | None) -> str:
    """Hash of everything that a reward depends on but the run itself; 16 hexadecimal digits.

    `files` are those that hold its definition: the verifier's, the judge's rubric.
    """
    digest = hashlib.sha256()
    for file in files:
        if file is not None:
            digest.update(file.read_bytes())
    what = {"verifier", "settings", "weights", "schedule", "gates", "clip", "success", "judge"}
    settings = config.model_dump(include=what)
    digest.update(to_json(settings).encode())
    return digest.hexdigest()[:16]


def _unknown(setting: str, name: str, values: Mapping[str, float]) -> str:
    known = ", ".join(sorted(values)) or "none"
    return f"{setting} needs the component {name!r}, but there is none; components of this attempt: {known}"
