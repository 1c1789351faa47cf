"""What each algorithm is made of: its formula, its source, its defaults and the keys of `[learn]` that it reads.

`fill` puts an algorithm's own defaults where a configuration says nothing; `check` refuses a key that was set and
that nothing would read: it would look like a choice and be none. Pure data and two rules; the credit itself is in
`leyden.learning.algorithms`, whose registry has the same names.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_CUSTOM = re.compile(r".+\.py:[A-Za-z_]\w*")
RATIO_SURROGATES = ("ppo_clip", "cispo", "gspo")
"""Surrogates that compare the policy with the one before the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One algorithm in words, with what it takes from `[learn]`."""

    title: str
    """As papers call it."""
    credit: str
    """Formula of the credit."""
    source: str
    """Where it is from: an arXiv id, or a book."""
    when: str
    """When to choose it."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Its own defaults of keys of `[learn]`."""
    keys: frozenset[str] = frozenset()
    """Keys of `SPECIFIC` that it reads."""
    surrogate: str | None = None
    """Loss per token that cannot be chosen; None: `learn.surrogate`."""
    critic: bool = False
    """Whether the backend trains a value head beside the policy."""
    teacher: bool = False
    """Whether another model scores the tokens."""
    scale_free: bool = False
    """Whether the differences within a group count alike however small they are: divided by their spread, or ranked."""


SPECIFIC: Mapping[str, str] = {
    "min_reward": "the threshold of imitation",
    "gamma": "discounting over the calls of a rollout",
    "step_reward_weight": "rewards of single calls",
    "state": "comparing calls in the same state",
    "state_weight": "comparing calls in the same state",
    "gae_lambda": "a critic",
    "value_coef": "a critic",
    "value_clip": "a critic",
    "value_learning_rate": "a critic",
    "dpo_beta": "preference pairs",
    "teacher": "a teacher",
    "refills": "comparison within groups",
    "overlong_buffer": "comparison of rewards",
    "overlong_penalty": "comparison of rewards",
}
"""Keys of `[learn]` that only some algorithms read, and what they are about."""

_OF_WEIGHTS = (
    "normalisation", "constant_tokens", "surrogate", "clip_low", "clip_high", "clip_dual", "old_logprobs",
    "importance_cap", "importance_level", "importance_mask", "kl", "entropy", "epochs", "mini_batches", "learning_rate",
    "schedule", "warmup_steps", "weight_decay", "betas", "grad_clip", "layout", "token_budget", "max_staleness",
    "activation_checkpointing", "overlong", "max_sequence_tokens",
)  # fmt: skip
"""Keys of `[learn]` that only an update of weights reads."""

_SHAPED = frozenset({"overlong_buffer", "overlong_penalty"})
_GROUPED = _SHAPED | {"refills"}

RECIPES: Mapping[str, Recipe] = {
    "grpo": Recipe(
        title="GRPO",
        credit="(r_i - mean_group) / (std_group + 1e-6)",
        source="arXiv 2402.03300",
        when="the usual first choice when rewards are 0 or 1",
        keys=_GROUPED,
        scale_free=True,
    ),
    "dr_grpo": Recipe(
        title="Dr. GRPO",
        credit="r_i - mean_group",
        source="arXiv 2503.20783",
        when="rewards have small components: differences count as large as they are",
        keys=_GROUPED,
    ),
    "rloo": Recipe(
        title="RLOO",
        credit="r_i - mean of the others of the group",
        source="arXiv 2402.14740",
        when="as dr_grpo, with an unbiased baseline for small groups",
        keys=_GROUPED,
    ),
    "reinforce_pp": Recipe(
        title="REINFORCE++",
        credit="(r_i - mean_step) / (std_step + 1e-6)",
        source="arXiv 2501.03262",
        when="groups of one, or tasks of like difficulty",
        keys=_SHAPED,
    ),
    "reinforce_pp_baseline": Recipe(
        title="REINFORCE++ with a group baseline",
        credit="(r_i - mean_group) / (std_step of those differences + 1e-6)",
        source="arXiv 2501.03262",
        when="as grpo, where a division by the spread of each small group is too noisy",
        keys=_GROUPED,
    ),
    "gspo": Recipe(
        title="GSPO",
        credit="(r_i - mean_group) / (std_group + 1e-6)",
        source="arXiv 2507.18071",
        when="several optimizer steps per step on long calls, mixtures of experts",
        defaults={"surrogate": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        keys=_GROUPED,
        scale_free=True,
    ),
    "cispo": Recipe(
        title="CISPO",
        credit="(r_i - mean_group) / (std_group + 1e-6)",
        source="arXiv 2506.13585",
        when="several optimizer steps per step without losing the gradient of rare tokens",
        defaults={"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0, "normalisation": "token_mean"},
        keys=_GROUPED,
        scale_free=True,
    ),
    "dapo": Recipe(
        title="DAPO",
        credit="(r_i - mean_group) / (std_group + 1e-6), groups without a difference replaced",
        source="arXiv 2503.14476",
        when="many groups are all right or all wrong; long answers that are cut off",
        defaults={
            "surrogate": "ppo_clip",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "normalisation": "token_mean",
            "refills": 2,
            "overlong_buffer": 0.2,
        },
        keys=_GROUPED,
        scale_free=True,
    ),
    "discounted": Recipe(
        title="discounted outcome",
        credit="gamma^(calls that follow) * (r_i - mean_group)",
        source="Sutton and Barto 2018, section 3.3",
        when="agents of many calls whose last ones decide",
        defaults={"gamma": 0.95},
        keys=_GROUPED | {"gamma"},
    ),
    "process": Recipe(
        title="process rewards",
        credit="sum over this and later calls j of gamma^(j - k) * (s_j - mean of the group's s) "
        "+ gamma^(calls that follow) * (r_i - mean_group)",
        source="arXiv 2402.03300, section 4.1.3, without the division",
        when="calls have rewards of their own",
        keys=_GROUPED | {"gamma", "step_reward_weight"},
    ),
    "step_group": Recipe(
        title="step groups (GiGPO)",
        credit="r_i - mean_group + state_weight * (return of the call - mean over the group's calls in its state)",
        source="arXiv 2505.10978",
        when="agents that come back to the same state",
        defaults={"gamma": 0.95},
        keys=_GROUPED | {"gamma", "step_reward_weight", "state", "state_weight"},
    ),
    "ppo": Recipe(
        title="PPO with a critic",
        credit="sum over later calls j of (gamma * gae_lambda)^(j - k) * (s_j + gamma * V_(j+1) - V_j), "
        "r_i after the last call",
        source="arXiv 1707.06347 and 1506.02438",
        when="long rollouts with rewards on the way, or groups of one",
        defaults={"surrogate": "ppo_clip"},
        keys=_SHAPED | {"gamma", "step_reward_weight", "gae_lambda", "value_coef", "value_clip", "value_learning_rate"},
        critic=True,
    ),
    "dpo": Recipe(
        title="DPO from pairs inside a group",
        credit="+1 for the better and -1 for the worse of a pair; best with worst, second best with second worst, ...",
        source="arXiv 2305.18290",
        when="rewards order rollouts well, but their size means little",
        keys=_SHAPED | {"dpo_beta"},
        surrogate="dpo",
        scale_free=True,
    ),
    "distill": Recipe(
        title="on-policy distillation",
        credit="per token: logp_teacher - logp_sampler (reverse KL divergence)",
        source="arXiv 2306.13649",
        when="a better model with the same tokenizer is at hand",
        keys=frozenset({"teacher"}),
        teacher=True,
    ),
    "rejection_sft": Recipe(
        title="rejection sampling",
        credit="1 if r_i >= min_reward, otherwise the rollout is not trained",
        source="arXiv 2308.01825",
        when="a first lift of a weak model; nothing is pushed away from",
        keys=_SHAPED | {"min_reward"},
        surrogate="nll",
    ),
}
"""Every algorithm that has a name."""

CUSTOM = Recipe(
    title="an algorithm of your own",
    credit="what the class in that file says",
    source="your file",
    when="none of the others does",
    keys=frozenset(SPECIFIC) - {"gae_lambda", "value_coef", "value_clip", "value_learning_rate", "teacher"},
)
"""What `file.py:Class` may read; the class itself names the keys it does read."""


PROMPT_ALGORITHMS = ("bootstrap_demos", "apo", "gepa")
"""Values of `learn.algorithm` that improve prompts instead of weights; what they read is in `[prompts]`."""

_PROMPTS = Recipe(
    title="prompts",
    credit="none: candidates are compared by their mean score",
    source="docs/prompts.md",
    when="the prompt is the cheapest thing to improve, or the weights are not yours",
    surrogate="none",
)


def is_custom(algorithm: str) -> bool:
    """Whether `learn.algorithm` names a class in a file."""
    return _CUSTOM.fullmatch(algorithm) is not None


def keeping_scale() -> list[str]:
    """Names of the algorithms that compare the rewards of a group, need nothing else, and leave small differences
    small."""
    return [name for name, recipe in RECIPES.items() if recipe.keys == _GROUPED and not recipe.scale_free]


def recipe_of(algorithm: str) -> Recipe:
    """The recipe behind a value of `learn.algorithm` that `unknown` has nothing to say about."""
    if algorithm in PROMPT_ALGORITHMS:
        return _PROMPTS
    return CUSTOM if is_custom(algorithm) else RECIPES[algorithm]


def unknown(algorithm: str) -> str | None:
    """Why `learn.algorithm` cannot be this, with the nearest name; None: it can."""
    names = (*RECIPES, *PROMPT_ALGORITHMS)
    if algorithm in names or is_custom(algorithm):
        return None
    near = difflib.get_close_matches(algorithm, names, n=2)
    own = "write one of those, or `file.py:Class` for one of your own"
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else own
    return f"learn.algorithm = {algorithm!r} is no algorithm; {hint} (known: {', '.join(names)})"


def fill(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` of `[learn]` with the algorithm's own defaults where nothing is said."""
    recipe = RECIPES.get(str(values.get("algorithm", "grpo")))
    return {**(recipe.defaults if recipe else {}), **values}


def surrogate_of(values: Mapping[str, Any]) -> str:
    """The loss per token that is used."""
    return recipe_of(values["algorithm"]).surrogate or str(values["surrogate"])


def off(values: Mapping[str, Any]) -> dict[str, str]:
    """Keys of `[learn]` that nothing reads under these values, each with the reason."""
    name = values["algorithm"]
    recipe = recipe_of(name)
    if name in PROMPT_ALGORITHMS:
        weights = (*SPECIFIC, *_OF_WEIGHTS)
        return dict.fromkeys(weights, f"{name} moves no weight; what it reads is in [prompts]")
    found = {
        key: f"it is about {about}, and {name} has none; it is read by {_readers(key)}"
        for key, about in SPECIFIC.items()
        if key not in recipe.keys
    }
    surrogate = surrogate_of(values)
    if recipe.surrogate:
        found["surrogate"] = f"{name} always uses {recipe.surrogate}"
    if surrogate not in RATIO_SURROGATES:
        for key in ("clip_low", "clip_high"):
            found[key] = f"{surrogate} clips nothing; choose learn.surrogate = one of {', '.join(RATIO_SURROGATES)}"
        found["old_logprobs"] = f"{surrogate} has no ratio to the policy before the step"
    if surrogate != "ppo_clip":
        found["clip_dual"] = "only ppo_clip has a second bound"
    corrections = ("importance_cap", "importance_level", "importance_mask")
    if surrogate in ("nll", "dpo"):
        found.update(dict.fromkeys(corrections, f"{surrogate} has no importance weight"))
    elif values["old_logprobs"] == "recorded" and "old_logprobs" not in found:
        why = "with recorded old log-probs the ratio itself is taken against the sampler"
        found.update(dict.fromkeys(corrections, why))
    elif not values["importance_cap"] and not values["importance_mask"]:
        found["importance_level"] = "importance_cap and importance_mask are both 0"
    if values["normalisation"] != "constant":
        found["constant_tokens"] = f"it is the divisor of normalisation = constant, not {values['normalisation']}"
    if surrogate == "dpo":
        found["normalisation"] = "a preference pair is one loss: the sum over its tokens"
        found["kl"] = "dpo measures from its reference already; see dpo_beta"
        found["entropy"] = "a preference loss has no entropy term"
    if not values["overlong_buffer"] and "overlong_penalty" not in found:
        found["overlong_penalty"] = "overlong_buffer is 0"
    return found


def check(values: Mapping[str, Any], class_defaults: Mapping[str, Any]) -> list[str]:
    """What is wrong between the keys of `[learn]`: one sentence each, best first; [] if nothing is."""
    wrong = unknown(values["algorithm"])
    if wrong:
        return [wrong]
    recipe = recipe_of(values["algorithm"])
    default = {**class_defaults, **recipe.defaults}
    said = [
        f"learn.{key} = {values[key]!r} would do nothing: {reason}; leave it out"
        for key, reason in off(values).items()
        if values[key] != default[key]
    ]
    if recipe.teacher and not values["teacher"]:
        said.append("learn.teacher is empty; name a policy that is not trained, for example `teacher`")
    if 0 < values["clip_dual"] <= 1:
        said.append(f"learn.clip_dual = {values['clip_dual']} must be above 1 (or 0, which is off)")
    if 0 < values["importance_mask"] <= 1:
        said.append(f"learn.importance_mask = {values['importance_mask']} must be above 1 (or 0, which is off)")
    if values["max_staleness"]:
        said += _stale(values, recipe)
    return said


def _stale(values: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """What does not go with rollouts of older versions."""
    said = []
    if values["refills"]:
        said.append(
            f"learn.refills = {values['refills']} waits for the groups of its own step; set it to 0, or "
            "learn.max_staleness to 0"
        )
    surrogate = recipe.surrogate or values["surrogate"]
    recorded = values["old_logprobs"] == "recorded" and surrogate in RATIO_SURROGATES
    corrected = values["importance_cap"] or values["importance_mask"] or recorded
    if surrogate not in ("nll", "dpo") and not corrected:
        said.append(
            f"learn.max_staleness = {values['max_staleness']} trains on rollouts of older versions, and nothing "
            "corrects for that: set learn.importance_cap above 0, for example 2.0"
        )
    return said


def _readers(key: str) -> str:
    return ", ".join(name for name, recipe in RECIPES.items() if key in recipe.keys)
