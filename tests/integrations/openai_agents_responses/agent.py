"""OpenAI Agents SDK: an agent with one tool, over the Responses API, which is its default; streamed."""

import asyncio
import os

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


async def main() -> None:
    agent = Agent(name="calculator", instructions="Use the tool to add numbers.", model="main", tools=[add])
    result = Runner.run_streamed(agent, os.environ["QUESTION"])
    async for _ in result.stream_events():
        pass
    print(result.final_output)


asyncio.run(main())
