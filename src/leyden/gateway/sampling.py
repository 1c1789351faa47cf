"""Sampling parameters of a call: one place decides, and every change has a name. Pure."""

from hashlib import blake2b
from typing import Any

from leyden.base.config import PolicyConfig, SamplingConfig
from leyden.base.records import Rollout
from leyden.gateway.dialects import ModelRequest


def effective_sampling(
    request: ModelRequest, policy: PolicyConfig | None, rollout: Rollout | None
) -> tuple[dict[str, Any], list[str]]:
    """(what is used, which of it was changed): the policy's configuration, then the rollout's, then the
    harness's.

    A model without a configuration is served as it was asked. What was not sent counts as the API's default.
    """
    asked = dict(request.asked)
    used: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, **asked}
    if policy is not None:
        own = _own_sampling(policy, rollout)
        if not policy.respect_harness:
            used.update(temperature=own["temperature"], top_p=own["top_p"])
        else:
            used.update({key: own[key] for key in ("temperature", "top_p") if key not in asked})
        used["max_tokens"] = min(asked.get("max_tokens", own["max_tokens"]), own["max_tokens"])
    defaults = {"temperature": 1.0, "top_p": 1.0}
    rewrites = [key for key, value in used.items() if value != asked.get(key, defaults.get(key))]
    return used, sorted(rewrites)


def _own_sampling(policy: PolicyConfig, rollout: Rollout | None) -> dict[str, Any]:
    section: SamplingConfig = policy.eval if rollout is not None and rollout.mode == "val" else policy.sampling
    own = {"temperature": section.temperature, "top_p": section.top_p, "max_tokens": section.max_tokens}
    if rollout is not None:
        own.update({key: value for key, value in rollout.sampling.items() if key in own})
    return own


def seed_of(rollout_seed: int, attempt_number: int, seq: int) -> int:
    """The seed of a call that brought none: differs by attempt and by order of arrival; 31 bits, as engines
    take."""
    text = f"{rollout_seed}/{attempt_number}/{seq}".encode()
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "big") & 0x7FFFFFFF
