"""Traces become actions, every sampled token accounted for. Pure; no I/O, no torch.

It promises that each choice of each call is one action, kept for one policy or dropped for one named reason,
and that `sampled == trained + sum(dropped)` in tokens. It does not compare rollouts: credit comes later, over
all rollouts of a group, those without a trained token included (`leyden.learning.batch`).

The first reason that holds, in this order, is the one that is counted:

    superseded         the call belongs to an earlier attempt of the rollout
    not_trainable      another policy answered, or the rollout is no training rollout
    failed_call        the call did not end well: error, abort, or still open
    undelivered        the client left before the last byte
    retokenized        ids are ours, not the engine's
    altered            a redaction or a cut touched the tokens
    refused_tokens     ids, log-probs and usage of the engine do not agree
    sampling_mismatch  the distribution sampled from is not the softmax that is trained
    overlong           prompt and completion are longer than the model is trained on (whole actions, or the
                       part before the window: see `window`)
    stale              an older policy version than allowed
    outcome            the attempt ended in a way that is not trained
    no_reward          nobody said how good it was

An overlong action can be trained in a window: its last `max_tokens` tokens, of which those that were sampled are
trained. The ids stay the served ones, but the model reads less than the sampler did, so the sampled distribution is
another one than the trained; the importance weight of the objective is what corrects for it.

Letters: P = prompt tokens, R = completion tokens of an action.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from leyden.base.records import Call, Choice, Drop, FloatArray, IntArray, Outcome, Provenance, Trace

OutcomePolicy = Literal["train", "zero", "exclude"]
Overlong = Literal["drop", "window"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One sampled choice of one call."""

    rollout_id: str
    """Whose."""
    group_id: str
    """Group of the rollout; the rollout's own id where it has no group."""
    call_id: str
    """Which call."""
    choice_index: int
    """Which choice of the call."""
    order: int
    """Place in time among the actions of its rollout in this assembly, from 0."""
    prompt_ids: IntArray
    """What the engine read; shape (P,)."""
    completion_ids: IntArray
    """What it sampled; shape (R,)."""
    logprobs: FloatArray
    """Of each sampled id, as the engine reported them; shape (R,)."""
    policy_version: int
    """Version that answered."""
    temperature: float
    """Sampled at; NaN where unknown, and then it is dropped."""
    finish_reason: str
    """As the engine named it."""
    reward: float | None
    """Of its rollout, after the policy for the outcome."""
    outcome: Outcome | None
    """Of its attempt."""
    drop: Drop | None
    """Why it is not trained; None: it is."""
    detail: str = ""
    """The drop in words, with the value that caused it."""
    num_cut: int = 0
    """Tokens that the sampler read and this action leaves out on the left; above 0 only in a window."""

    @property
    def num_tokens(self) -> int:
        """Sampled tokens."""
        return len(self.completion_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What one rollout brings to the comparison of its group."""

    rollout_id: str
    """Whose."""
    group_id: str
    """Compared with whom; the rollout's own id where it has no group."""
    task_id: str
    """What was asked."""
    outcome: Outcome | None
    """None while it runs."""
    reward: float | None
    """0 where the outcome's policy is `zero`; None where nobody scored it or the outcome is excluded."""
    drop: Drop | None
    """Why the whole rollout gets no credit (`not_trainable`, `outcome`, `no_reward`); None: it does."""
    detail: str = ""
    """The drop in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """All actions of one policy in some traces; counts are tokens unless they say otherwise."""

    rollouts: Sequence[Scored]
    """One per trace, in the order given."""
    actions: Sequence[Action]
    """In the order of traces and of time, dropped ones included."""
    sampled: int
    """Tokens of all actions, counted from the calls."""
    dropped: Mapping[Drop, int]
    """Tokens not trained, by reason."""
    trained: int
    """Tokens that are trained."""
    num_dropped_actions: Mapping[Drop, int]
    """Actions not trained, by reason; shows what has no known token."""
    num_calls_without_choices: int
    """Calls that brought no answer at all, so no action."""

    @property
    def num_windowed(self) -> int:
        """Trained tokens whose context is shorter than what the sampler read."""
        return sum(action.num_tokens for action in self.actions if action.drop is None and action.num_cut)

    @property
    def num_windowed_actions(self) -> int:
        """Trained actions of that kind."""
        return sum(action.drop is None and action.num_cut > 0 for action in self.actions)

    @property
    def kept(self) -> list[Action]:
        """Actions that are trained."""
        return [action for action in self.actions if action.drop is None]


def assemble(
    traces: Sequence[Trace],
    *,
    policy: str,
    trainable_outcomes: Mapping[Outcome, OutcomePolicy],
    min_version: int | None = None,
    max_tokens: int | None = None,
    overlong: Overlong = "drop",
) -> Assembly:
    """Every choice of every call in `traces` as an action of `policy`, or dropped by name.

    `trainable_outcomes` says for every Outcome whether its rollouts are trained with their reward, trained
    with reward 0, or excluded. Versions below `min_version` are stale, sequences of more than `max_tokens`
    (P + R) overlong: dropped, or trained in a window of that length.
    """
    rollouts: list[Scored] = []
    actions: list[Action] = []
    sampled = without_choices = 0
    for trace in traces:
        scored = _score(trace, trainable_outcomes)
        rollouts.append(scored)
        first = len(actions)
        for call in sorted(trace.calls, key=lambda call: (call.seq, call.id)):
            sampled += call.num_sampled
            without_choices += not call.choices
            for choice in call.choices:
                limit = max_tokens if overlong == "drop" else None
                drop, detail = _drop(trace, call, choice, scored, policy, min_version, limit)
                whole = _whole(call, choice, scored, len(actions) - first, drop, detail)
                too_long = max_tokens is not None and len(whole.prompt_ids) + whole.num_tokens > max_tokens
                if drop is None and too_long and max_tokens is not None:
                    actions.extend(window(whole, max_tokens))
                else:
                    actions.append(whole)
    return balanced(rollouts, actions, sampled, without_choices)


def _whole(call: Call, choice: Choice, scored: Scored, order: int, drop: Drop | None, detail: str) -> Action:
    temperature = _temperature(call)
    return Action(
        rollout_id=scored.rollout_id,
        group_id=scored.group_id,
        call_id=call.id,
        choice_index=choice.index,
        order=order,
        prompt_ids=call.prompt_ids,
        completion_ids=choice.completion_ids,
        logprobs=choice.logprobs,
        policy_version=call.policy_version,
        temperature=float("nan") if temperature is None else temperature,
        finish_reason=choice.finish_reason,
        reward=scored.reward,
        outcome=scored.outcome,
        drop=drop,
        detail=detail,
    )


def window(action: Action, max_tokens: int) -> list[Action]:
    """An overlong action as what is left of it in a window of `max_tokens` (2 or more) and what is not, in order.

    The window is the end of prompt and completion. Sampled tokens before it, and one that would begin it with
    nothing to be predicted from, are an action of their own that is dropped as overlong: no token is lost.
    """
    assert max_tokens >= 2, max_tokens
    prompt_len, num_tokens = len(action.prompt_ids), action.num_tokens
    num_cut = prompt_len + num_tokens - max_tokens
    assert num_cut > 0, "the action fits"
    if num_cut < prompt_len:
        return [replace(action, prompt_ids=action.prompt_ids[num_cut:], num_cut=num_cut)]
    # The first token of the window is a sampled one: it is read, not predicted.
    gone = num_cut - prompt_len + 1
    detail = f"{prompt_len + num_tokens} tokens; these stand before a window of {max_tokens}"
    head = replace(
        action,
        completion_ids=action.completion_ids[:gone],
        logprobs=action.logprobs[:gone],
        drop=Drop.OVERLONG,
        detail=detail,
    )
    tail = replace(
        action,
        order=action.order + 1,
        prompt_ids=action.completion_ids[gone - 1 : gone],
        completion_ids=action.completion_ids[gone:],
        logprobs=action.logprobs[gone:],
        num_cut=num_cut,
    )
    return [head, tail]


def balanced(
    rollouts: Sequence[Scored], actions: Sequence[Action], sampled: int, num_calls_without_choices: int
) -> Assembly:
    """An Assembly of these actions, with `sampled == trained + sum(dropped)` asserted."""
    dropped: Counter[Drop] = Counter()
    num_actions: Counter[Drop] = Counter()
    trained = 0
    for action in actions:
        if action.drop is None:
            trained += action.num_tokens
        else:
            dropped[action.drop] += action.num_tokens
            num_actions[action.drop] += 1
    assert sampled == trained + dropped.total(), (sampled, trained, dict(dropped))
    return Assembly(
        rollouts=tuple(rollouts),
        actions=tuple(actions),
        sampled=sampled,
        dropped=dict(dropped),
        trained=trained,
        num_dropped_actions=dict(num_actions),
        num_calls_without_choices=num_calls_without_choices,
    )


def _score(trace: Trace, outcomes: Mapping[Outcome, OutcomePolicy]) -> Scored:
    rollout = trace.rollout
    outcome = trace.attempt.outcome if trace.attempt.outcome is not None else rollout.outcome
    reward = rollout.reward
    drop: Drop | None = None
    detail = ""
    assert outcome is None or outcome in outcomes, f"no policy for outcome {outcome}"
    policy = "exclude" if outcome is None else outcomes[outcome]
    if rollout.mode != "train" or rollout.task.split == "holdout":
        drop = Drop.NOT_TRAINABLE
        detail = f"mode {rollout.mode}, split {rollout.task.split}"
    elif policy == "exclude":
        drop, reward = Drop.OUTCOME, None
        detail = "the attempt has not ended" if outcome is None else f"outcome {outcome.value} is excluded"
    elif policy == "zero":
        reward = 0.0
    elif reward is None:
        drop = Drop.NO_REWARD
        detail = "the rollout has no reward, which is not 0"
    return Scored(
        rollout_id=rollout.id,
        group_id=rollout.group_id or rollout.id,
        task_id=rollout.task.id,
        outcome=outcome,
        reward=reward,
        drop=drop,
        detail=detail,
    )


def _drop(
    trace: Trace,
    call: Call,
    choice: Choice,
    scored: Scored,
    policy: str,
    min_version: int | None,
    max_tokens: int | None,
) -> tuple[Drop | None, str]:
    """The first reason of the module's table that holds, in words too."""
    num_tokens = len(call.prompt_ids) + len(choice.completion_ids)
    mismatch = _sampling_mismatch(call)
    reasons: tuple[tuple[bool, Drop, str], ...] = (
        (call.attempt_id != trace.attempt.id, Drop.SUPERSEDED, f"of attempt {call.attempt_id}"),
        (call.policy != policy, Drop.NOT_TRAINABLE, f"answered by policy {call.policy}"),
        (scored.drop is Drop.NOT_TRAINABLE, Drop.NOT_TRAINABLE, scored.detail),
        (call.status != "ok", Drop.FAILED_CALL, f"status {call.status}: {call.error or 'no error given'}"),
        (not call.delivered, Drop.UNDELIVERED, "the client left before the last byte"),
        (call.provenance is Provenance.RETOKENIZED, Drop.RETOKENIZED, call.refusal or "text only"),
        (call.provenance is Provenance.ALTERED, Drop.ALTERED, "a redaction or a cut touched the tokens"),
        (call.refusal is not None, Drop.REFUSED_TOKENS, call.refusal or ""),
        (mismatch is not None, Drop.SAMPLING_MISMATCH, mismatch or ""),
        (
            max_tokens is not None and num_tokens > max_tokens,
            Drop.OVERLONG,
            f"{num_tokens} tokens, at most {max_tokens} are trained",
        ),
        (
            min_version is not None and call.policy_version < min_version,
            Drop.STALE,
            f"version {call.policy_version}, at least {min_version} is wanted",
        ),
    )
    for holds, drop, detail in reasons:
        if holds:
            return drop, detail
    return scored.drop, scored.detail


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "typical_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([], ()),
    "allowed_token_ids": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Parameters that bend the sampled distribution away from softmax(logits / temperature), and their neutral
values; None is always neutral."""


def _used(call: Call) -> Mapping[str, Any]:
    """What was sampled with: `used` where the call keeps what was asked for beside it."""
    used = call.sampling.get("used", call.sampling)
    return used if isinstance(used, Mapping) else {}


def _temperature(call: Call) -> float | None:
    value = _used(call).get("temperature")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _sampling_mismatch(call: Call) -> str | None:
    """Why log-probs of softmax(logits / temperature) are not those sampled from, or None."""
    temperature = _temperature(call)
    if temperature is None:
        return "the temperature that was sampled with is not recorded"
    if not 0.0 < temperature < float("inf"):
        return f"temperature {temperature}: nothing was sampled at random"
    for name, value in _used(call).items():
        neutral = _NEUTRAL.get(name)
        if neutral is not None and value is not None and value not in neutral:
            return f"{name} {value!r} changes the distribution; leave it out of what the policy samples with"
    return None
