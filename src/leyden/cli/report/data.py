"""What the report shows, as one plain tree that JSON can hold.

Every key is optional: a section without data says so or is left out. Times are in seconds or minutes as
named, shares and rewards are fractions (0.59 is shown as 59.0 %). Intervals are 95 % unless `level` says
otherwise.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from leyden.traces.picture import Picture


class Mean(TypedDict):
    """A mean with its interval; `low` and `high` are None where there is none."""

    mean: float | None
    low: float | None
    high: float | None


class EvaluationData(TypedDict, total=False):
    """One policy version on the holdout, in the order base, SFT, SFT+RL."""

    label: str
    """For people: `Base`, `SFT`, `SFT + RL`."""
    policy_version: str
    """`policy@version`."""
    pass1: Mean
    """Share of tasks solved."""
    reward: Mean
    """Mean reward."""
    tokens: float | None
    """Mean completion tokens of a rollout."""
    minutes: float | None
    """Wall time spent on training until here, from the start of the run."""
    n: int
    """Tasks."""
    num_excluded: int
    """Rollouts that did not count."""


class StepData(TypedDict, total=False):
    """One step of a stage. Numbers may be None where they were not measured."""

    stage: str
    """`sft` or `rl`."""
    step: int
    """From 1 in each stage."""
    reward_mean: float | None
    """Mean reward of the rollouts of the step."""
    reward_low: float | None
    """Lower end of its interval."""
    reward_high: float | None
    """Upper end of its interval."""
    success: float | None
    """Share of the rollouts that solved their task."""
    loss: float | None
    """Loss of the update."""
    grad_norm: float | None
    """Norm of the gradient before clipping."""
    kl: float | None
    """Estimate of the divergence from the starting policy."""
    entropy: float | None
    """Mean entropy per trained token, in nats."""
    gap_mean: float | None
    """Mean difference of sampler and trainer log-probabilities."""
    gap_max: float | None
    """Largest such difference."""
    completion_tokens_mean: float | None
    """Mean completion tokens of a rollout."""
    seconds: Mapping[str, float]
    """Wall time per phase (`sample`, `reward`, `update`, ...)."""
    num_groups: int
    """Groups of the step."""
    num_zero_variance: int
    """Groups whose rewards were all equal, which teach nothing."""
    minor_credit: float | None
    """Share of the differences of credit that lies between rollouts of equal success."""
    memorised: Sequence[str]
    """Ids of tasks that every rollout solved."""


class ConservationData(TypedDict):
    """Where the sampled tokens of one step went: sampled = trained + sum of dropped."""

    stage: str
    step: int
    sampled: int
    trained: int
    dropped: Mapping[str, int]


class DomainData(TypedDict, total=False):
    """One family of holdout tasks, before and after."""

    domain: str
    n: int
    before: Mean
    after: Mean


class TranscriptData(TypedDict, total=False):
    """One rollout as it went."""

    policy_version: str
    """`policy@version`."""
    outcome: str
    """How it ended."""
    success: bool | None
    """Whether the task was solved."""
    reward: float | None
    """Weighted total."""
    components: Mapping[str, float]
    """Named numbers behind the total."""
    messages: Sequence[Mapping[str, Any]]
    """Chat messages, the last answer included."""
    answer: str
    """The final answer (for example SQL), shown apart."""


class PairData(TypedDict, total=False):
    """The same holdout task before and after."""

    task_id: str
    domain: str
    title: str
    """What was asked, in one line."""
    before: TranscriptData
    after: TranscriptData


class SlotData(TypedDict):
    """One text of a prompt policy."""

    name: str
    where: str
    """In words, for example `system message`."""
    before: str
    """What the harness sends; placeholders in single braces."""
    after: str
    """What the model reads instead."""


class PromptsData(TypedDict, total=False):
    """How prompts were improved."""

    version: str
    """`policy@version` of the best ones."""
    rounds: Sequence[Mapping[str, Any]]
    """Per round of the search: `step`, `score` and counts of what was spent."""
    slots: Sequence[SlotData]
    diff: str
    """Unified, over all slots; empty where nothing better was found."""


class RunData(TypedDict, total=False):
    """What was run, and where."""

    facts: Mapping[str, str | int | float]
    """Name to value, in the order to show: model, machine, versions, seed, started, minutes, ..."""
    config: str
    """The resolved configuration as text."""


class ReportData(TypedDict, total=False):
    """Everything that a report can show."""

    title: str
    """Heading of the page."""
    subtitle: str
    """One line below it."""
    verdict: Mapping[str, Any] | None
    """Fields of `leyden.base.records.Verdict`, or None when nothing was compared."""
    sentence: str
    """The verdict in plain words."""
    looks: str
    """How often this holdout was looked at, in plain words."""
    level: float
    """Of every interval; 0.95 if absent."""
    run: RunData
    evaluations: Sequence[EvaluationData]
    steps: Sequence[StepData]
    outcomes: Sequence[Mapping[str, Any]]
    """`{"stage", "step", "counts": {outcome: count}}` per step."""
    conservation: Sequence[ConservationData]
    domains: Sequence[DomainData]
    transcripts: Sequence[PairData]
    forest: Picture | None
    """One example group."""
    prompts: PromptsData
    diagnostics: Sequence[str]
    """Plain sentences about what to know or to do, for example memorised tasks."""
