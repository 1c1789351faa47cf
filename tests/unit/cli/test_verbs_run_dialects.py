"""Harnesses that speak Messages or Responses run unchanged: all they know is their environment."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.calling import Caller

from leyden.testing.fake_engine import FakeEngine
from leyden.testing.scripted import Behaviour, Reply

MESSAGES = """
import json, os, anthropic
question = json.loads(os.environ["LEYDEN_TASK"])["input"]["question"]
sdk = anthropic.Anthropic()
tool = {"name": "add", "input_schema": {"type": "object"}}
history = [{"role": "user", "content": question}]
first = sdk.messages.create(model="main", max_tokens=64, messages=history, tools=[tool])
[use] = [block for block in first.content if block.type == "tool_use"]
history += [
    {"role": "assistant", "content": first.content},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": str(sum(use.input["of"]))}]},
]
with sdk.messages.stream(model="main", max_tokens=64, messages=history, tools=[tool]) as stream:
    print(stream.get_final_text())
"""
RESPONSES = """
import json, os, openai
question = json.loads(os.environ["LEYDEN_TASK"])["input"]["question"]
sdk = openai.OpenAI()
tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
first = sdk.responses.create(model="main", input=question, tools=[tool])
[call] = [item for item in first.output if item.type == "function_call"]
result = {"type": "function_call_output", "call_id": call.call_id, "output": str(sum(json.loads(call.arguments)["of"]))}
with sdk.responses.stream(model="main", input=[result], previous_response_id=first.id, tools=[tool]) as stream:
    print(stream.get_final_response().output_text)
"""


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """Calls the tool with the numbers of the question, then says what the tool said."""

    def reply(body: Mapping[str, Any]) -> Reply:
        last = body["messages"][-1]
        if last["role"] == "tool":
            return Reply(text=last["content"])
        if not last["content"].startswith("What is "):
            return Reply(text="hello")  # the gateway looks at what the engine can do
        numbers = last["content"].removeprefix("What is ").removesuffix("?").split(" + ")
        return Reply(text="", tool_calls=(("add", f'{{"of":[{", ".join(numbers)}]}}'),))

    with FakeEngine(Behaviour(reply=reply)) as running:
        yield running


@pytest.mark.parametrize("agent", [MESSAGES, RESPONSES], ids=["messages", "responses"])
def test_a_harness_of_another_api_is_recorded_scored_and_exported(
    leyden: Caller, project: Path, engine: FakeEngine, agent: str
) -> None:
    (project / "agent.py").write_text(agent, encoding="utf-8")
    config = project / "leyden.toml"
    said = leyden("run", "-c", config, "--limit", "1", "--json", "-s", f"policies.main.engine={engine.url}")
    assert said.code == 0, said.err
    [row] = [row for row in said.rows if "rollout" in row]
    assert (row["outcome"], row["calls"]) == ("completed", 2), said.err
    assert row["reward"] > 0.5, "the verifier finds the answer whichever API it came through"
    shown = leyden("inspect", row["rollout"], "-c", config, "--json").rows[0]
    assert [call["provenance"] for call in shown["calls"]] == ["served", "served"]
    assert [action["drop"] for action in shown["actions"]] == [None, None]
