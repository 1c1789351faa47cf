"""What a probe is, and when it has won.

A probe does what earns nothing when the reward is sound. It wins when it earns all the same. *Answer* probes speak
through the real harness: a scripted engine says their text, the gateway records it, the verifier scores it.
*Workspace* probes change what an attempt with an empty answer left, and *verifier* probes show the verifier evidence
that no honest attempt makes; both go to the real verifier in its own process. Pure; `leyden.cli.probing` runs them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from leyden.base.config import ProbesConfig, RewardsConfig
from leyden.base.stats import wilson

Kind = Literal["answer", "workspace", "verifier"]
CHARS_PER_TOKEN = 4
"""A scripted answer is cut at so many characters per token that the request allows: a policy could not say more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What a probe may use to make its move."""

    task: Mapping[str, Any]
    """What the harness may know of the task: no answer."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Of the request that is answered; empty for probes that are not asked by a harness."""
    components: Sequence[str] = ()
    """Names of the reward's components, as far as the configuration tells."""
    max_chars: int = 4000
    """Longest answer that the request allows."""


Reply = Callable[[Stage], str]
"""What the model says."""
Tamper = Callable[[Stage, Path, dict[str, Any]], None]
"""Changes a copy of the workspace and of the evidence (the trace as a verifier is shown it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One way to earn a reward without doing the task."""

    name: str
    """In `probes.bounds`, `probes.skip` and reports."""
    says: str
    """What it does, in a few words."""
    kind: Kind = "answer"
    """How it is played."""
    quick: bool = False
    """Whether it runs before training."""
    replies: Sequence[Reply] = ()
    """Of an answer probe: variants; the most successful one counts."""
    tampers: Sequence[Tamper] = ()
    """Of the others: variants; the most successful one counts."""
    wins_by: Literal["reward", "crash", "difference"] = "reward"
    """`crash`: by making the verifier fail; `difference`: by two answers to the same question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One probe at one task."""

    task_id: str
    """Which task."""
    variant: int
    """Which of the probe's variants."""
    share: float | None
    """Share of the highest reward that it earned, 1 when the task counts as solved; None: not judged."""
    total: float | None = None
    """The reward."""
    crash: str = ""
    """What the verifier died of."""
    why: str = ""
    """Why it could not be judged, or what is worth knowing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What a probe earned."""

    name: str
    """Of the probe."""
    says: str
    """Of the probe."""
    won: bool
    """Whether it earned more than it may."""
    score: float | None
    """Mean share of its most successful variant; None when nothing could be judged."""
    bound: float
    """What it may earn."""
    num_judged: int
    """Tries of that variant that were judged."""
    tries: Sequence[Try] = field(default_factory=tuple)
    """Of that variant."""
    why: str = ""
    """What happened, for people."""


def judge(probe: Probe, tries: Sequence[Try], config: ProbesConfig) -> ProbeResult:
    """The result of a probe from all of its tries."""
    bound = config.bounds.get(probe.name, config.bound)
    variants = sorted({one.variant for one in tries})
    results = [_variant(probe, [one for one in tries if one.variant == v], bound) for v in variants]
    if not results:
        return ProbeResult(
            name=probe.name, says=probe.says, won=False, score=None, bound=bound, num_judged=0, why="it was not tried"
        )
    return max(results, key=lambda r: (r.won, -1.0 if r.score is None else r.score))


def _variant(probe: Probe, tries: Sequence[Try], bound: float) -> ProbeResult:
    crashed = [one for one in tries if one.crash]
    shares = [one.share for one in tries if one.share is not None]
    score = sum(shares) / len(shares) if shares else None
    won, why = False, next((one.why for one in tries if one.why), "")
    if crashed and bound < 1:
        won, why = True, f"it made the verifier fail on {len(crashed)} of {len(tries)} tries: {crashed[0].crash}"
        score = score if score is not None else 1.0
    elif probe.wins_by != "crash" and shares:
        # One lucky hit among few tasks is no win; a share that every task pays, however small its number, is.
        won = wilson(sum(shares), len(shares)).low > bound or min(shares) > bound
        if won:
            tasks = ", ".join(dict.fromkeys(o.task_id for o in tries if o.share))
            what = why if probe.wins_by == "difference" else f"it earned {score:.0%} of the highest reward"
            why = f"{what} (bound {bound:.0%}) on {tasks}"
    return ProbeResult(
        name=probe.name,
        says=probe.says,
        won=won,
        score=score,
        bound=bound,
        num_judged=len(shares) + len(crashed),
        tries=tuple(tries),
        why=why,
    )


def highest(config: RewardsConfig) -> float:
    """The total of an attempt whose components with a positive weight are all 1, or at their clip; 0: none is."""
    last = {name: one.last for name, one in config.schedule.items()}
    weights = {**config.weights, **last} or {"": 1.0}
    return sum(weight * _top(config, name) for name, weight in weights.items() if weight > 0)


def _top(config: RewardsConfig, name: str) -> float:
    clip = config.clip.get(name) if name else next(iter(config.clip.values()), None)
    if name == config.judge.component and config.judge.policy:
        return config.judge.high if clip is None else min(clip[1], config.judge.high)
    return 1.0 if clip is None else max(0.0, clip[1])


def share_of(total: float, solved: bool, config: RewardsConfig) -> float:
    """Share of the highest reward, 1 when the task counts as solved."""
    top = highest(config)
    return 1.0 if solved else min(1.0, max(0.0, total / top)) if top > 0 else 0.0


def component_names(config: RewardsConfig) -> list[str]:
    """Names of components that the configuration tells."""
    named = {*config.weights, *config.schedule, *config.gates, *config.gates.values(), config.success}
    return sorted(named - {""}) or ["reward"]
