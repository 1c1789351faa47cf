"""The closed family of model API dialects. Adding one: a file beside these, an entry here, a golden pair."""

from leyden.gateway.dialects.base import Body, Dialect, ModelRequest
from leyden.gateway.dialects.openai_chat import OpenAIChat
from leyden.gateway.dialects.openai_completions import OpenAICompletions

DIALECTS: tuple[Dialect, ...] = (OpenAIChat(), OpenAICompletions())
"""Every dialect."""

BY_NAME: dict[str, Dialect] = {dialect.name: dialect for dialect in DIALECTS}
"""By the name that records carry."""

__all__ = ["BY_NAME", "DIALECTS", "Body", "Dialect", "ModelRequest"]
