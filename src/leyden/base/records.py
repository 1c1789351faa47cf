"""The words of Leyden, one per thing, as records.

*task* what is asked, with an id, a split and a domain. *rollout* one agent run at a task under named
policy versions. *attempt* one try of a rollout; a retry is a new attempt. *call* one model request and its
answer. *span* any other thing that happened. *trace* all calls and spans of an attempt. *forest* calls merged
by shared token prefix. *trajectory* one root-to-leaf path. *group* rollouts of one task compared with each
other. *reward* named numbers for a rollout or a call, and their weighted sum. *credit* the number after
comparison. *policy* a name that calls ask for; *policy version* immutable weights and/or prompts behind it.
*outcome* how an attempt ended. *provenance* how we know a token. *verdict* what the gate says.

Records are frozen; arrays inside them are never written to. The two that every call makes are msgspec's structs, which
take a tenth of the time of a frozen dataclass. Times are seconds since the epoch (float).
Letters of shapes: P = prompt tokens of a call, R = completion tokens of a choice.
"""

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from leyden.base.errors import RecordError

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]

VERIFICATION_SPAN = "verification"
"""Name of the span in which the runner records how long the verifier took."""

Split = Literal["train", "val", "holdout"]
Mode = Literal["train", "val"]

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class Outcome(StrEnum):
    """How an attempt ended."""

    COMPLETED = "completed"
    AGENT_ERROR = "agent_error"
    TIMEOUT = "timeout"
    OVERLONG = "overlong"
    ENV_ERROR = "env_error"
    INFRA_ERROR = "infra_error"
    CANCELLED = "cancelled"


class Provenance(StrEnum):
    """How we know the tokens of a call (docs/token-truth.md)."""

    SERVED = "served"
    SPLICED = "spliced"
    RETOKENIZED = "retokenized"
    ALTERED = "altered"


class Drop(StrEnum):
    """Why a sampled token is not trained. Every step asserts sampled = trained + sum(dropped)."""

    OVERLONG = "overlong"
    OUTCOME = "outcome"
    NO_REWARD = "no_reward"
    STALE = "stale"
    ALTERED = "altered"
    RETOKENIZED = "retokenized"
    UNDELIVERED = "undelivered"
    FAILED_CALL = "failed_call"
    REFUSED_TOKENS = "refused_tokens"
    NOT_TRAINABLE = "not_trainable"
    SAMPLING_MISMATCH = "sampling_mismatch"
    BELOW_THRESHOLD = "below_threshold"
    UNPAIRED = "unpaired"
    FLAT_GROUP = "flat_group"
    OFF_POLICY = "off_policy"
    SUPERSEDED = "superseded"


class RolloutState(StrEnum):
    """States of a rollout; the words are those of the compatible protocol."""

    QUEUING = "queuing"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


ROLLOUT_TRANSITIONS: Mapping[RolloutState, frozenset[RolloutState]] = {
    RolloutState.QUEUING: frozenset({RolloutState.RUNNING, RolloutState.FAILED}),
    RolloutState.RUNNING: frozenset({RolloutState.SUCCEEDED, RolloutState.FAILED}),
    RolloutState.SUCCEEDED: frozenset(),
    RolloutState.FAILED: frozenset(),
}
"""Which state may follow which; terminal states are final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is asked."""

    id: str
    """Unique within its files."""
    split: Split = "train"
    """Holdout tasks are never trained on; the runner and the store refuse it."""
    domain: str = ""
    """Name of a family of tasks; results are reported per domain."""
    input: Mapping[str, Any] = field(default_factory=dict)
    """Given to the harness."""
    answer: Any = None
    """Given to the verifier only."""
    purpose: str = "train"
    """Why this data may be used; checked by the privacy policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """Immutable weights and/or prompts behind a policy name. Names are never reused."""

    policy: str
    """The name that calls ask for."""
    version: int
    """0 is what the policy started from."""
    kind: Literal["weights", "prompt"] = "weights"
    """What differs from the parent."""
    parent: int | None = None
    """The version it was made from."""
    path: str | None = None
    """Folder of the checkpoint, if it was saved."""
    run_id: str | None = None
    """The run that made it."""
    step: int | None = None
    """The step of that run after which it stood."""
    created_at: float = 0.0
    """Seconds since the epoch."""
    prompts: Mapping[str, Any] = field(default_factory=dict)
    """Slots and their texts, as `leyden.base.prompts.slots_to_json` writes them; empty: prompts are left alone."""

    @property
    def name(self) -> str:
        """`policy@version`, the name under which an engine serves it."""
        return f"{self.policy}@{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One agent run at a task under named policy versions."""

    id: str
    """Unique in the store."""
    task: Task
    """What is asked."""
    mode: Mode = "train"
    """`train` rollouts may be trained on, `val` rollouts are evaluation."""
    run_id: str | None = None
    """The run that asked for it, if one did."""
    group_id: str | None = None
    """Rollouts of one task that are compared with each other."""
    step: int | None = None
    """The step of the run that asked for it."""
    policy_versions: Mapping[str, int] = field(default_factory=dict)
    """Policy name to version; calls of this rollout are answered by exactly these."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters that replace the policy's own (evaluation may ask for temperature 0)."""
    seed: int = 0
    """Calls that bring no seed get one derived from this."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Free fields of whoever created it."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """`timeout_seconds`, `local`, `k8s` of the compatible protocol."""
    state: RolloutState = RolloutState.QUEUING
    """Where it is."""
    version: int = 1
    """Grows with every change of the status."""
    num_attempts: int = 0
    """Attempts started so far."""
    last_attempt_id: str | None = None
    """The newest attempt."""
    outcome: Outcome | None = None
    """How the last attempt ended, once the rollout is over."""
    reward: float | None = None
    """Weighted total of the last attempt; None means no reward, which is not 0."""
    error_message: str | None = None
    """Why it failed, for people."""
    job_name: str | None = None
    """Kubernetes job, if one runs it."""
    created_at: float = 0.0
    """Seconds since the epoch."""
    updated_at: float = 0.0
    """Seconds since the epoch."""
    finished_seq: int | None = None
    """Position in the order of completion, the cursor of `terminal`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try of a rollout."""

    id: str
    """Unique in the store."""
    rollout_id: str
    """Whose try it is."""
    number: int
    """1 for the first."""
    started_at: float
    """Seconds since the epoch."""
    ended_at: float | None = None
    """None while it runs."""
    outcome: Outcome | None = None
    """None while it runs."""
    exit_code: int | None = None
    """Of the harness; negative is a signal."""
    detail: str = ""
    """What happened, in one or two sentences."""
    diagnosis: str | None = None
    """A short name for a likely set-up fault: `no_calls`, `no_reward`, `wrong_url`, ..."""
    stdout_tail: str = ""
    """Last part of standard output."""
    stderr_tail: str = ""
    """Last part of standard error."""
    duration_s: float | None = None
    """Wall time of the harness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One sampled answer of a call: one action."""

    index: int
    """Position among the choices of its call."""
    completion_ids: IntArray
    """What the engine sampled, the stop token included if it was sampled; shape (R,)."""
    logprobs: FloatArray
    """Log-probability of each completion id under the distribution sampled from; shape (R,)."""
    finish_reason: str
    """`stop`, `length`, `tool_calls`, `abort`, ..."""
    text: str = ""
    """What the user was sent, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOrigin:
    """Who is behind a call of live traffic, as its headers say."""

    service: str
    """Name of the service key that it came with; `admin` or `runner` for those keys."""
    session: str | None = None
    """`x-leyden-session`: calls that belong together."""
    subject: str | None = None
    """`x-leyden-subject`: a pseudonym of the person that it is about."""
    purpose: str | None = None
    """`x-leyden-purpose`: what it may be used for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One model request and its answer, as the reader gives it back."""

    id: str
    """Unique in the store."""
    rollout_id: str | None
    """None for live traffic."""
    attempt_id: str | None
    """None for live traffic."""
    seq: int
    """Order of arrival within the attempt, from 0."""
    dialect: str
    """`openai_chat`, `openai_completions`, ..."""
    alias: str
    """The model name that the harness asked for."""
    policy: str
    """The policy that answered."""
    policy_version: int
    """Its version."""
    provenance: Provenance
    """How we know the tokens."""
    request: Mapping[str, Any]
    """The body as the harness sent it, after redaction."""
    response: Mapping[str, Any] | None
    """The body as it was answered, after redaction; None if it failed."""
    sampling: Mapping[str, Any]
    """Effective sampling parameters (`temperature`, `top_p`, `max_tokens`, `seed`, `stop`)."""
    prompt_ids: IntArray
    """What the engine read; shape (P,); empty if unknown."""
    choices: Sequence[Choice]
    """Every sampled answer."""
    status: Literal["ok", "error", "aborted", "open"]
    """`open` means an intent without a completion: the call was in flight when something died."""
    delivered: bool
    """False when the client left before the last byte."""
    refusal: str | None
    """Why its tokens are refused for training, or None."""
    rewrites: Sequence[str] = ()
    """Fields of the request that were changed on the way to the engine."""
    error: str | None = None
    """What went wrong, for people."""
    http_status: int = 200
    """What the client was answered."""
    started_at: float = 0.0
    """Seconds since the epoch."""
    latency_ms: float = 0.0
    """From the first byte in to the last byte out."""
    retry_count: int = 0
    """Highest retry number that an SDK marked on this request."""
    usage: Mapping[str, Any] = field(default_factory=dict)
    """Counts as the engine gave them; `cost_usd` beside them where a provider answered."""
    live: LiveOrigin | None = None
    """Set for live traffic."""
    slots: Mapping[str, Any] = field(default_factory=dict)
    """What a prompt policy did: `texts` (name of a place to what the engine read there instead), `filled` and
    `unmatched` (names of slots); empty without one."""

    @property
    def num_sampled(self) -> int:
        """Sampled tokens over all choices."""
        return sum(len(choice.completion_ids) for choice in self.choices)


class CallIntent(msgspec.Struct, frozen=True, kw_only=True):
    """What is made durable before a request goes to an engine."""

    call_id: str
    """Unique in the store."""
    rollout_id: str | None
    """None for live traffic."""
    attempt_id: str | None
    """None for live traffic."""
    seq: int
    """Order of arrival within the attempt, from 0."""
    digest: str
    """Hash of path and body: equal requests have equal digests."""
    occurrence: int
    """How many unmarked requests with this digest came before it in the attempt."""
    origin: Literal["rollout", "live"]
    """Where the call comes from."""
    dialect: str
    """Name of the dialect."""
    alias: str
    """The model name that the harness asked for."""
    policy: str
    """The policy that answers."""
    policy_version: int
    """Its version."""
    engine: str
    """URL of the engine."""
    stream: bool
    """Whether the client asked for a stream."""
    request: Mapping[str, Any]
    """The body as it came."""
    sampling: Mapping[str, Any]
    """`{"asked": {...}, "used": {...}}`."""
    rewrites: Sequence[str] = ()
    """Fields changed on the way to the engine."""
    started_at: float = 0.0
    """Seconds since the epoch."""
    live: LiveOrigin | None = None
    """Set for live traffic."""
    slots: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """What a prompt policy did, as in `Call.slots`."""


class CallCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """What is made durable before the last byte of an answer is released."""

    call_id: str
    """Of the intent."""
    status: Literal["ok", "error", "aborted"]
    """How it ended."""
    http_status: int
    """What the client was answered."""
    response: Mapping[str, Any]
    """The body as it was answered; a stream is assembled into the body of its unstreamed twin."""
    provenance: Provenance
    """How we know the tokens."""
    refusal: str | None = None
    """Why its tokens are refused for training, or None."""
    prompt_ids: IntArray = msgspec.field(default_factory=lambda: np.zeros(0, np.int32))
    """What the engine read; shape (P,)."""
    choices: Sequence[Choice] = ()
    """Every sampled answer."""
    usage: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Counts as the engine gave them."""
    template_hash: str = ""
    """Hash of chat template and tools, if the engine tells."""
    delivered: bool = True
    """False when the client left before the last byte."""
    retry_count: int = 0
    """Highest retry number that an SDK marked."""
    error: str | None = None
    """What went wrong, for people."""
    latency_ms: float = 0.0
    """From the first byte in to the last byte out."""
    first_byte_ms: float | None = None
    """Until the first byte of the answer."""
    ended_at: float = 0.0
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Anything of an attempt that is not a model call."""

    id: str
    """Unique in the store."""
    rollout_id: str
    """Whose."""
    attempt_id: str
    """Whose."""
    name: str
    """For example the tool that was used, or an event type."""
    kind: str = "custom"
    """`tool`, `state_before`, `state_after`, `event`, `call` (a report of a model call, which `call` of the attributes
    names), `custom`."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """JSON."""
    started_at: float = 0.0
    """Seconds since the epoch."""
    ended_at: float | None = None
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One named number for an attempt or one of its calls."""

    name: str
    """Component (`correct`, `safe`, ...)."""
    value: float
    """Finite."""
    source: str = "verifier"
    """`verifier`, `agent`, `api`, `human`, `canary`."""
    call_id: str | None = None
    """Set for a step reward."""
    created_at: float = 0.0
    """Seconds since the epoch."""
    version: str = ""
    """Hash of the definition it was made by (`reward_version`); empty for what people and agents post."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All calls, spans and rewards of the last attempt of a rollout."""

    rollout: Rollout
    """Whose."""
    attempt: Attempt
    """Which try."""
    calls: Sequence[Call]
    """In order of arrival."""
    spans: Sequence[Span] = ()
    """In order of start."""
    rewards: Sequence[Reward] = ()
    """In order of arrival."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a paired comparison of two policy versions on the same tasks says."""

    answer: Literal["better", "worse", "not separable"]
    """About the candidate."""
    candidate: str
    """`policy@version`."""
    incumbent: str
    """`policy@version`."""
    difference: float
    """Mean of candidate minus incumbent, in the unit of the metric."""
    low: float
    """Lower end of the interval of the difference."""
    high: float
    """Upper end of the interval of the difference."""
    p_value: float
    """Two-sided."""
    test: str
    """Name of the test."""
    num_tasks: int
    """Pairs compared."""
    level: float = 0.95
    """Of the interval; the test uses 1 - level."""


def new_id(prefix: str) -> str:
    """A fresh id, `prefix` and 80 random bits: collisions are not a concern, guessing is."""
    return f"{prefix}_{secrets.token_hex(10)}"


def check_id(value: object, what: str) -> str:
    """`value` if it can be an id in paths and headers; RecordError otherwise."""
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise RecordError(
            f"{what} {value!r} cannot be an id; use 1 to 128 letters, digits, '_', '.', ':' or '-', "
            "beginning with a letter or digit"
        )
    return value


def check_reward(name: object, value: object) -> float:
    """`value` as a float if it is a finite number; RecordError for NaN, infinity, booleans and strings."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise RecordError(
            f"reward {name!r} is {value!r} ({type(value).__name__}); a reward is a finite number: "
            "return 1.0 or 0.0 instead of True or False, and nothing at all where there is no reward"
        )
    number = float(value)
    if not math.isfinite(number):
        raise RecordError(f"reward {name!r} is {number}; a reward is a finite number: NaN and infinity are refused")
    return number


def to_json(value: object) -> str:
    """Compact JSON with sorted keys: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
