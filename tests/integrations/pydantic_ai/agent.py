"""pydantic-ai: an agent with one tool. Model, address and key come from the environment."""

import os

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("main"), instructions="Use the tool to add numbers.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


print(agent.run_sync(os.environ["QUESTION"]).output)
