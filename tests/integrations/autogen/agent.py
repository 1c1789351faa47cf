"""AutoGen agentchat: an assistant with one tool that reflects on what the tool said."""

import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


async def main() -> None:
    """One task."""
    info = {
        "vision": False,
        "function_calling": True,
        "json_output": False,
        "family": "unknown",
        "structured_output": False,
    }
    client = OpenAIChatCompletionClient(model="main", model_info=info)
    agent = AssistantAgent("calculator", client, tools=[add], reflect_on_tool_use=True)
    result = await agent.run(task=os.environ["QUESTION"])
    print(result.messages[-1].content)
    await client.close()


asyncio.run(main())
