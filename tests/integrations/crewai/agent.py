"""CrewAI: a crew of one agent with one tool."""

import os

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


llm = LLM(model="openai/main", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = Agent(role="calculator", goal="Add numbers", backstory="You add with the tool.", tools=[add], llm=llm)
task = Task(description=os.environ["QUESTION"], expected_output="The sum", agent=agent)
print(Crew(agents=[agent], tasks=[task]).kickoff())
