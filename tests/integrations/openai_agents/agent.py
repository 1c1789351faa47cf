"""OpenAI Agents SDK: an agent with one tool, over Chat Completions."""

import os

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_default_openai_api("chat_completions")
set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


agent = Agent(name="calculator", instructions="Use the tool to add numbers.", model="main", tools=[add])
print(Runner.run_sync(agent, os.environ["QUESTION"]).final_output)
