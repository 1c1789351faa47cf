"""Policies that somebody else serves: which they are, and the backend that stands for them."""

import os

from leyden.base.config import Config, PolicyConfig
from leyden.base.errors import ConfigError
from leyden.learning.backends.external import ExternalBackend


def is_external(config: Config, policy: str) -> bool:
    """Whether an engine or provider of its own serves the policy, and no weight of it is to be moved."""
    settings = config.policies[policy]
    return bool(settings.engine) and (config.learn.improves_prompts or not settings.trainable)


def external_backend(policy: str, settings: PolicyConfig) -> ExternalBackend:
    """The backend of such a policy. Raises ConfigError when its key is not there."""
    key = os.environ.get(settings.engine_key_env, "") if settings.engine_key_env else ""
    if settings.engine_key_env and not key:
        raise ConfigError(
            f"policies.{policy}.engine_key_env names {settings.engine_key_env}, which is not set; export it, or remove "
            "engine_key_env"
        )
    return ExternalBackend(policy, settings.engine, key)
