"""What a configuration makes of `[learn]`, in a formula with its numbers: `leyden train --explain`. No torch, no files.

`explain` gives plain JSON; `text` makes lines for people of it. Every number comes with where it is from: a default, a
default of the algorithm, the file, an override. What has no part in the objective is named with its reason.
"""

from collections.abc import Mapping
from typing import Any

from leyden.base import recipes
from leyden.base.config import Config, LearnConfig
from leyden.learning.schedule import learning_rate_at

WEIGHTS: Mapping[str, str] = {
    "rollout_mean": "1 / (R * T_p)",
    "token_mean": "1 / T",
    "call_mean": "1 / (C * T_a)",
    "constant": "1 / (R * {constant_tokens})",
}
"""Weight of a token; the letters are those of `leyden.learning.batch`."""

LETTERS = (
    "R rollouts of one optimizer step, T their trained tokens, T_p those of a token's rollout, C their calls, "
    "T_a tokens of a token's call"
)

TERMS: Mapping[str, str] = {
    "policy_gradient": "-credit * logp",
    "ppo_clip": "-min(ratio * credit, clip(ratio, {low:g}, {high:g}) * credit)",
    "cispo": "-clip(ratio, {low:g}, {high:g}) * credit * logp   [the clipped ratio is a constant]",
    "gspo": "-min(s * credit, clip(s, {low:g}, {high:g}) * credit)   [s: geometric mean of the ratios of a call]",
    "nll": "-credit * logp",
}
"""Loss per token by surrogate."""


def explain(config: Config, origins: Mapping[str, str], surrogate: str | None = None) -> dict[str, Any]:
    """The effective objective as plain JSON. `origins`: key of the configuration to where it was set, if anywhere.

    `surrogate` is the loss per token where a class of the user's file fixes it; None: that of the recipe.
    """
    learn = config.learn
    values = learn.model_dump()
    recipe = recipes.recipe_of(learn.algorithm)
    off = recipes.off(values)
    return {
        "algorithm": learn.algorithm,
        "title": recipe.title,
        "source": recipe.source,
        "credit": recipe.credit,
        "objective": _objective(learn, surrogate or recipes.surrogate_of(values)),
        "letters": LETTERS,
        "batch": _arithmetic(config),
        "numbers": {
            f"learn.{key}": {"value": values[key], "from": _origin(key, recipe, learn.algorithm, origins)}
            for key in values
            if key not in off
        },
        "off": _off(learn, off),
        "notes": _notes(config),
    }


def text(found: Mapping[str, Any]) -> str:
    """The explanation for people."""
    lines = [f"{found['algorithm']}: {found['title']} ({found['source']})", "", "Credit of rollout i (call k)"]
    lines += [f"    {found['credit']}", "", "Objective, minimised"]
    lines += [f"    {line}" for line in found["objective"]]
    lines += ["", f"    {found['letters']}", "", "Batch"]
    lines += [f"    {name}: {value}" for name, value in found["batch"].items()]
    lines += ["", "Numbers and where they are from"]
    width = max(len(key) for key in found["numbers"])
    for key, entry in found["numbers"].items():
        lines.append(f"    {key:<{width}}  {entry['value']!s:<16}  {entry['from']}")
    lines += ["", "Off"]
    lines += [f"    {key}: {reason}" for key, reason in found["off"].items()]
    if found["notes"]:
        lines += ["", "Note"]
        lines += [f"    {note}" for note in found["notes"]]
    return "\n".join(lines)


def _objective(learn: LearnConfig, surrogate: str) -> list[str]:
    """The formula, a line per term."""
    if surrogate == "dpo":
        margin = "sum over tokens of the better of (logp - logp_reference) - the same sum over the worse"
        return [f"mean over pairs of -log sigmoid({learn.dpo_beta:g} * margin)", f"margin = {margin}"]
    term = TERMS[surrogate].format(low=1 - learn.clip_low, high=1 + learn.clip_high)
    if surrogate == "ppo_clip" and learn.clip_dual:
        term += f", and at most {learn.clip_dual:g} * |credit| where credit < 0"
    weighed = surrogate != "nll" and learn.old_logprobs == "recomputed" and learn.importance_cap > 0
    parts = ["importance * surrogate" if weighed else "surrogate"]
    parts += [f"{learn.kl:g} * k3"] if learn.kl else []
    parts += [f"(-{learn.entropy:g} * H)"] if learn.entropy else []
    lines = [f"sum over tokens of weight * ({' + '.join(parts)})"]
    lines.append(f"weight = {WEIGHTS[learn.normalisation].format(constant_tokens=learn.constant_tokens)}")
    lines.append(f"surrogate = {term}")
    whose = "the sampler" if learn.old_logprobs == "recorded" else "the trainer before the step"
    if surrogate in recipes.RATIO_SURROGATES:
        lines.append(f"ratio = exp(logp - logp_old), logp_old of {whose}")
    by = "of all tokens of the call" if learn.importance_level == "sequence" else "of the token"
    if weighed:
        lines.append(f"importance = min(p_trainer / p_sampler {by}, {learn.importance_cap:g}), a constant")
    if surrogate != "nll" and learn.importance_mask:
        low, high = 1 / learn.importance_mask, learn.importance_mask
        lines.append(f"dropped as off_policy: p_trainer / p_sampler {by} outside [{low:g}, {high:g}]")
    if learn.kl:
        lines.append("k3 = exp(d) - d - 1, d = logp_reference - logp, reference: the policy at the first such update")
    if learn.entropy:
        lines.append("H = entropy of the policy at the token, in nats")
    if recipes.recipe_of(learn.algorithm).critic:
        clip = f", at most {learn.value_clip:g} away from what it was before the step" if learn.value_clip else ""
        lines.append(f"+ {learn.value_coef:g} * mean over calls of (V - target)^2 / 2{clip}")
        lines.append("target = credit + V before the step")
    return lines


def _arithmetic(config: Config) -> dict[str, Any]:
    learn = config.learn
    rollouts = learn.tasks_per_step * learn.group_size
    updates = learn.epochs * learn.mini_batches
    shared = rollouts / learn.mini_batches
    found: dict[str, Any] = {
        "rollouts of a step": f"{learn.tasks_per_step} tasks * {learn.group_size} = {rollouts}",
        "optimizer steps of a step": f"{learn.epochs} epochs * {learn.mini_batches} mini-batches = {updates} at most",
        "rollouts of an optimizer step": f"{rollouts} / {learn.mini_batches} = {shared:g}",
        "rollouts of the run": f"{learn.steps} steps * {rollouts} = {learn.steps * rollouts}",
        "learning rate": _rates(learn),
    }
    if learn.refills:
        most = rollouts * (1 + learn.refills)
        found["rollouts of a step with refills"] = f"{rollouts} * (1 + {learn.refills}) = {most} at most"
    if learn.overlong_buffer:
        limit = config.policies[learn.policy].sampling.max_tokens if learn.policy in config.policies else 0
        start = limit * (1 - learn.overlong_buffer)
        found["long answers"] = f"lose reward from {start:g} tokens on, {learn.overlong_penalty:g} at {limit}"
    return found


def _rates(learn: LearnConfig) -> str:
    if not learn.steps:
        return "no step is made"
    first, last = (
        learning_rate_at(step, learn.steps, learn.schedule, learn.warmup_steps, learn.learning_rate)
        for step in (0, learn.steps - 1)
    )
    return f"{first:g} at the first step, {learn.learning_rate:g} at the peak, {last:g} at the last"


def _origin(key: str, recipe: recipes.Recipe, algorithm: str, origins: Mapping[str, str]) -> str:
    if f"learn.{key}" in origins:
        return origins[f"learn.{key}"]
    return f"default of {algorithm}" if key in recipe.defaults else "default"


def _off(learn: LearnConfig, off: Mapping[str, str]) -> dict[str, str]:
    """Terms with weight 0 first, then keys that nothing reads, each with the reason."""
    zero = {
        "kl": "no divergence from a reference",
        "entropy": "no entropy bonus",
        "clip_dual": "no second bound where credit is negative",
        "importance_cap": "no weight between sampler and trainer",
        "importance_mask": "no token is dropped for being unlikely to one of sampler and trainer",
        "refills": "groups without a difference stay, with credit 0",
        "overlong_buffer": "long answers lose no reward",
        "value_clip": "no bound on the move of a value",
        "grad_clip": "no bound on the gradient norm",
        "weight_decay": "no decay of weights",
    }
    found = {f"learn.{key}": f"0: {why}" for key, why in zero.items() if not getattr(learn, key) and key not in off}
    return found | {f"learn.{key}": reason for key, reason in off.items()}


def _notes(config: Config) -> list[str]:
    learn = config.learn
    said = []
    surrogate = recipes.surrogate_of(learn.model_dump())
    single = learn.epochs * learn.mini_batches == 1
    if surrogate in recipes.RATIO_SURROGATES and single and learn.old_logprobs == "recomputed":
        said.append(
            "With one optimizer step per step every ratio is 1 and nothing is clipped: epochs or mini_batches above 1 "
            "give clipping something to do."
        )
    if learn.group_size == 1 and "refills" in recipes.recipe_of(learn.algorithm).keys:
        said.append("Groups of one have nothing to compare: raise learn.group_size, or choose reinforce_pp or ppo.")
    if recipes.recipe_of(learn.algorithm).scale_free and len(config.rewards.weights) > 1:
        said.append(
            f"With {learn.algorithm} every difference within a group counts alike, however small: where all rollouts "
            "succeed or all fail, the smaller parts of rewards.weights push as hard as success does elsewhere. "
            f"{', '.join(recipes.keeping_scale())} keep the size."
        )
    if not learn.steps:
        said.append("learn.steps is 0: there is no reinforcement step.")
    return said
