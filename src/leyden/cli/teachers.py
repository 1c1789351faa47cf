"""The teacher of a run: a frozen model beside the one that is trained. Imports torch when there is one."""

from typing import Any

from leyden.base.config import Config
from leyden.base.errors import ConfigError
from leyden.cli.models import source_of
from leyden.learning.evidence import Teacher


def teacher_of(config: Config, student: Any) -> Teacher | None:
    """The model that a run learns from, beside its embedded backend `student`; None where the algorithm wants none.

    Raises ConfigError when `learn.teacher` names no frozen policy with a model, ModelUnusable for another tokenizer.
    """
    name = config.learn.teacher
    if not name:
        return None
    settings = config.policies.get(name)
    if settings is None or settings.trainable or not settings.model:
        raise ConfigError(
            f"learn.teacher = {name!r} needs policies.{name}.model and policies.{name}.trainable = false: a teacher is "
            "a model that stays as it is"
        )
    from leyden.learning.backends.embedded.teacher import EmbeddedTeacher

    resolved = settings.model_copy(update={"model": source_of(config, name)})
    return EmbeddedTeacher(resolved, config.learn, student.loaded)
