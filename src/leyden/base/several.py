"""Several policies in one run: which are trained, which are served as they are, and what `[learn]` and `[sft]` are for
each.

`[policies.NAME.learn]` holds keys of `[learn]` that differ for one policy. `learn_of` merges them: what the policy says
wins; what `[learn]` says holds where the policy's algorithm reads it; the rest is the default of that algorithm. A key
that belongs to the whole run (`RUN_KEYS`), one that does not exist and one that nothing would read are errors, and so
is a matcher that could never choose. `[policies.NAME.sft]` is the same for `[sft]`, without such rules. Pure; imports
nothing of the configuration but its types.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from leyden.base import recipes
from leyden.base.errors import ConfigError

if TYPE_CHECKING:
    from leyden.base.config import Config, LearnConfig, PolicyConfig, SftConfig

_Section = TypeVar("_Section", bound=BaseModel)

RUN_KEYS = frozenset(
    {
        "policy", "group_size", "tasks_per_step", "steps", "max_staleness", "refills", "eval_every",
        "checkpoint_every", "keep_checkpoints", "step_timeout_s",
    }
)  # fmt: skip
"""Keys of `[learn]` that are about the rollouts and steps that all policies share."""


def is_ours(policy: "PolicyConfig") -> bool:
    """Whether the embedded sampler serves it: it has a model here, and neither an engine nor a provider."""
    return bool(policy.model) and not policy.engine and not policy.provider


def trained(config: "Config") -> tuple[str, ...]:
    """The policies that a run trains: `learn.policy`, then every other trainable one with a model of its own.

    An algorithm that improves prompts improves those of `learn.policy` alone.
    """
    lead = config.learn.policy
    if config.learn.improves_prompts:
        return (lead,)
    return (lead, *(n for n, one in config.policies.items() if n != lead and one.trainable and is_ours(one)))


def frozen(config: "Config") -> tuple[str, ...]:
    """The policies that the embedded sampler serves and that nothing changes. A teacher only scores: it is none."""
    moved = trained(config)
    teachers = {learn_of(config, name).teacher for name in moved}
    return tuple(n for n, one in config.policies.items() if n not in moved and is_ours(one) and n not in teachers)


def lead_of(tree: Mapping[str, Any]) -> str | None:
    """The first trainable policy of a configuration that says neither `learn.policy` nor `[policies.main]`."""
    policies, learn = tree.get("policies"), tree.get("learn") or {}
    if not isinstance(policies, Mapping) or not isinstance(learn, Mapping) or "policy" in learn or "main" in policies:
        return None
    for name, one in policies.items():
        ours = isinstance(one, Mapping) and one.get("model") and not one.get("engine") and not one.get("provider")
        if ours and one.get("trainable", True):
            return str(name)
    return None


def learn_of(config: "Config", name: str) -> "LearnConfig":
    """`[learn]` as policy `name` reads it. Raises ValueError with what is wrong in its own section."""
    learn = config.learn
    own = dict(config.policies[name].learn) if name in config.policies else {}
    if not own:
        return learn if learn.policy == name else learn.model_copy(update={"policy": name})
    _refuse_keys(f"policies.{name}.learn", own, [key for key in type(learn).model_fields if key not in RUN_KEYS])
    return _made(type(learn), {**_inherited(learn, own), **own, "policy": name}, f"policies.{name}.learn")


def sft_of(config: "Config", name: str) -> "SftConfig | None":
    """`[sft]` as policy `name` reads it. Raises ValueError with what is wrong in its own section."""
    sft, own = config.sft, config.policies[name].sft if name in config.policies else {}
    if not own:
        return sft
    if sft is None:
        raise ValueError(f"policies.{name}.sft would do nothing: there is no section [sft]; add it")
    _refuse_keys(f"policies.{name}.sft", own, list(type(sft).model_fields))
    return _made(type(sft), {**sft.model_dump(), **own}, f"policies.{name}.sft")


def _made(section: type[_Section], values: Mapping[str, Any], where: str) -> _Section:
    """The section that `values` make. Raises ValueError with what is wrong."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        said = "; ".join(
            f"{'.'.join(map(str, item['loc']))} = {item['input']!r}: {item['msg']}"
            if item["type"] != "value_error"
            else item["msg"].removeprefix("Value error, ")
            for item in error.errors()
        )
        raise ValueError(f"{where}: {said}") from None


def _inherited(learn: "LearnConfig", own: Mapping[str, Any]) -> dict[str, Any]:
    """What `[learn]` says and an algorithm of the policy's own still reads; its defaults for the rest."""
    fields = {key: part.get_default() for key, part in type(learn).model_fields.items()}
    algorithm = own.get("algorithm", learn.algorithm)
    before = {**fields, **recipes.recipe_of(learn.algorithm).defaults}
    if not isinstance(algorithm, str) or recipes.unknown(algorithm):
        return learn.model_dump()  # the check that follows says so
    after = {**fields, **recipes.recipe_of(algorithm).defaults, **{key: fields[key] for key in RUN_KEYS}}
    said = learn.model_dump()
    changed = algorithm != learn.algorithm
    values = {k: after[k] if changed and v == before[k] and k not in RUN_KEYS else v for k, v in said.items()}
    off = recipes.off({**values, **own})
    return {key: after[key] if key in off else value for key, value in values.items()}


def _refuse_keys(where: str, own: Mapping[str, Any], allowed: list[str]) -> None:
    for key in own:
        if key in RUN_KEYS:
            raise ValueError(f"{where}.{key} is about the rollouts and steps that all policies share; set learn.{key}")
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(allowed)}"
            raise ValueError(f"unknown key {where}.{key}; {hint}")


def check(config: "Config") -> None:
    """Raise ValueError for sections of policies and matchers that could not be honoured."""
    for name, policy in config.policies.items():
        for section in ("learn", "sft"):
            if getattr(policy, section) and not policy.trainable:
                raise ValueError(
                    f"policies.{name}.{section} would do nothing: the policy has trainable = false; remove one of them"
                )
        sft_of(config, name)
        learn = learn_of(config, name)
        if learn.improves_prompts and not config.learn.improves_prompts:
            raise ValueError(
                f"policies.{name}.learn.algorithm = {learn.algorithm!r} improves prompts, which is the work of a whole "
                "run; set learn.algorithm"
            )
    _check_match(config)


def _check_match(config: "Config") -> None:
    matchers = {name: one.match for name, one in config.policies.items() if one.match.system or one.match.tools}
    match = config.match
    if matchers and not match.models:
        raise ValueError(
            f"policies.{next(iter(matchers))}.match chooses among calls for a name that stands for no single policy; "
            'list such names, for example match.models = ["agent"]'
        )
    if match.models and not matchers:
        raise ValueError("match.models is set, but no policy has a match; add [policies.NAME.match]")
    if match.default and (match.default not in config.policies or not match.models):
        known = ", ".join(sorted(config.policies)) or "none"
        raise ValueError(
            f"match.default = {match.default!r} needs a policy of that name (known: {known}) and match.models"
        )
    for name, one in matchers.items():
        try:
            re.compile(one.system)
        except re.error as error:
            said = f"policies.{name}.match.system = {one.system!r} is no regular expression: {error}"
            raise ValueError(said) from None


def refuse(config: "Config") -> None:
    """Raise ConfigError for what a run of several policies cannot do."""
    for name in frozen(config):
        if config.policies[name].lora and not config.policies[name].trainable:
            raise ConfigError(
                f"policies.{name}.lora would do nothing: nothing trains the policy; remove it, or set trainable = true"
            )


def learns(config: "Config") -> Iterator["LearnConfig"]:
    """`[learn]`, and as every policy that is trained reads it."""
    yield config.learn
    for name in trained(config):
        yield learn_of(config, name)
