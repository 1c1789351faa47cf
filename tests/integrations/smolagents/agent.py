"""smolagents: an agent that calls tools, and ends with the tool `final_answer`."""

import os

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


model = OpenAIModel("main", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print(ToolCallingAgent(tools=[add], model=model, max_steps=4).run(os.environ["QUESTION"]))
