"""LangGraph under LangChain: a ReAct graph with one tool."""

import os

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


graph = create_agent(ChatOpenAI(model="main"), [add], system_prompt="Use the tool to add numbers.")
answer = graph.invoke({"messages": [{"role": "user", "content": os.environ["QUESTION"]}]})
print(answer["messages"][-1].content)
