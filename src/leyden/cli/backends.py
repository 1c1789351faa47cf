"""The backends of a run: one for each policy that this process serves. Imports torch when one is embedded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leyden.base import several
from leyden.base.config import Config, PolicyConfig
from leyden.base.errors import ConfigError
from leyden.base.tasks import Demo
from leyden.cli.external import external_backend, is_external
from leyden.cli.models import source_of
from leyden.cli.teachers import teacher_of
from leyden.house import Learner
from leyden.learning.backends.external import ExternalBackend
from leyden.learning.evidence import Teacher


def policy_of(config: Config, name: str) -> PolicyConfig:
    """The section of a policy. Raises ConfigError when there is none."""
    if name not in config.policies:
        known = ", ".join(sorted(config.policies)) or "none"
        raise ConfigError(f"no section [policies.{name}] (known: {known}); add one with `model = ...`")
    return config.policies[name]


@dataclass(frozen=True, kw_only=True)
class Backends:
    """What a run samples from and trains."""

    trained: Mapping[str, Any]
    """By policy, the first of the run first; the rest are served as they are."""
    frozen: Mapping[str, Any]
    """By policy."""

    @property
    def ours(self) -> dict[str, Any]:
        """Those that serve a model in this process, by policy; all of them want the same key."""
        every = {**self.trained, **self.frozen}
        return {name: backend for name, backend in every.items() if not isinstance(backend, ExternalBackend)}

    @property
    def engine_key(self) -> str:
        """That key; empty where there is no such backend."""
        return next((str(backend.engine_key) for backend in self.ours.values()), "")

    def start(self) -> dict[str, str]:
        """Begin to serve; the URLs of those engines, by policy."""
        return {name: backend.start() for name, backend in self.ours.items()}

    def close(self) -> None:
        """Stop serving. Idempotent."""
        for backend in (*self.trained.values(), *self.frozen.values()):
            backend.close()


def backends_of(config: Config) -> Backends:
    """The backends of all policies that this process serves, not yet serving. Raises ConfigError, ModelUnusable.

    An engine of somebody else that stands for the first policy is used as it is.
    """
    lead, *others = config.trained
    alone = is_external(config, lead)
    ours = ([] if alone else [lead]) + others + list(config.frozen)
    made = embedded_of(config, ours) if ours else {}
    if alone:
        made[lead] = external_backend(lead, config.policies[lead])
    return Backends(
        trained={name: made[name] for name in (lead, *others)}, frozen={name: made[name] for name in config.frozen}
    )


def embedded_of(config: Config, names: list[str]) -> dict[str, Any]:
    """An embedded backend for each of `names`; those that may share one base model do."""
    for name in names:
        settings = policy_of(config, name)
        if settings.provider:
            raise ConfigError(
                f"policies.{name} is answered by provider {settings.provider!r}; it cannot be trained here"
            )
        if not settings.model:
            raise ConfigError(f"policies.{name}.model is empty; name a folder, a hub id or a GGUF file")
    try:
        from leyden.learning.backends.embedded import shared
    except ModuleNotFoundError as error:
        raise ConfigError(f"training needs {error.name}; install it with: pip install 'leyden[train]'") from error
    resolved = {name: _resolved(config, name) for name in names}
    learns = {name: several.learn_of(config, name) for name in names}
    return dict(shared.backends_of(resolved, learns, seed=config.run.seed))


def backend_of(config: Config, policy: str) -> Any:
    """The backend of one policy alone, not yet serving."""
    settings = policy_of(config, policy)
    if is_external(config, policy):
        return external_backend(policy, settings)
    return embedded_of(config, [policy])[policy]


def _resolved(config: Config, name: str) -> PolicyConfig:
    """A policy's section with paths as they are; one that only stands beside the trained ones is not trained."""
    settings = config.policies[name]
    template = str(config.resolve(settings.chat_template)) if settings.chat_template else ""
    found = {"model": source_of(config, name), "chat_template": template}
    beside = name in config.frozen
    return settings.model_copy(update=found | ({"trainable": False, "lora": None} if beside else {}))


def learners_of(config: Config, backends: Backends, demos: Sequence[Demo], *, training: bool) -> list[Learner]:
    """Every policy that is trained, as the loop knows it, each with its own of `demos`."""
    teachers: dict[tuple[str, str], Teacher | None] = {}
    found = []
    for name, backend in backends.trained.items():
        own = config.of(name)
        teacher = None
        if training and own.learn.teacher:
            key = (own.learn.teacher, config.policies[name].model)
            if key not in teachers:
                teachers[key] = teacher_of(own, backend)
            teacher = teachers[key]
        mine = [demo for demo in demos if demo.policy == name]
        found.append(Learner(config=own, backend=backend, teacher=teacher, demos=mine))
    return found
