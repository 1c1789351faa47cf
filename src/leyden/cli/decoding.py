"""Ids to text for people, where the tokenizer of the learned policy can be loaded."""

from collections.abc import Callable

from leyden.base.config import Config
from leyden.base.errors import ModelUnusable
from leyden.cli.models import source_of


def decoder(config: Config) -> Callable[[list[int]], str] | None:
    """Ids to text with the tokenizer of the learned policy; None where it cannot be loaded (no extra `train`)."""
    settings = config.policies.get(config.learn.policy)
    if settings is None or not settings.model:
        return None
    try:
        from leyden.learning.backends.embedded.model import load_tokenizer

        tokenizer = load_tokenizer(source_of(config, config.learn.policy))
    except (ModuleNotFoundError, ModelUnusable):
        return None
    return lambda ids: str(tokenizer.decode(ids))
