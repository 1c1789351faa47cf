"""The closed family of model API dialects. Adding one: a file beside these, an entry here, a golden pair."""

from leyden.gateway.dialects.anthropic import Anthropic
from leyden.gateway.dialects.base import Body, Dialect, ModelRequest
from leyden.gateway.dialects.openai_chat import OpenAIChat
from leyden.gateway.dialects.openai_completions import OpenAICompletions
from leyden.gateway.dialects.openai_responses import OpenAIResponses

DIALECTS: tuple[Dialect, ...] = (OpenAIChat(), OpenAICompletions(), OpenAIResponses(), Anthropic())
"""Every dialect."""

BY_NAME: dict[str, Dialect] = {dialect.name: dialect for dialect in DIALECTS}
"""By the name that records carry."""

__all__ = ["BY_NAME", "DIALECTS", "Body", "Dialect", "ModelRequest"]
