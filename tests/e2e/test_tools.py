"""A tool-calling agent, unmodified: the model calls a tool, the agent runs it, and the result goes back."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.project import make_project, read, write_lines

from leyden.base.records import Trace
from leyden.cli import wiring
from leyden.cli.progress import TextProgress
from leyden.house import House
from leyden.learning.schedule import plan_step
from leyden.loop import assemble_for, collect, imitate
from leyden.traces.forest import build_forest, leaves

AGENT = """\
import json
import os

from openai import OpenAI

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

client = OpenAI()
messages = [{"role": "user", "content": os.environ["WORD"]}]
for _ in range(3):
    message = client.chat.completions.create(model="main", messages=messages, tools=TOOLS).choices[0].message
    messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = f"{call.function.name}={json.loads(call.function.arguments)['x'] + 1}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(message.content)
"""

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
SYSTEM = (
    f"# Tools\n<tools>\n{json.dumps(TOOLS[0])}\n</tools>\n"
    'Call one with <tool_call>{"name": ..., "arguments": ...}</tool_call>'
)
"""What the template of the tiny model shows for these tools."""
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(900)]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """A run whose model is about to imitate a conversation with one tool call."""
    path = make_project(tmp_path, agent=AGENT, num_train=1, num_holdout=1, tools=True, hidden_size=64)
    opening = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "a0"}]
    called = {"role": "assistant", "content": CALL}
    result = {"role": "tool", "content": "f=2", "tool_call_id": "call-1"}
    demos = [
        {"task": "d1", "messages": [*opening, called]},
        {"task": "d2", "messages": [*opening, called, result, {"role": "assistant", "content": "it is 2"}]},
    ]
    write_lines(tmp_path / "demos.jsonl", demos)
    overrides = (
        'tasks.demos="demos.jsonl"', "sft.epochs=80", "sft.learning_rate=0.005", "policies.main.max_context=1024",
        "policies.main.eval={temperature=0.0, max_tokens=80}", "learn.grad_clip=1.0",
    )  # fmt: skip
    with wiring.open_house(read(path, *overrides), TextProgress()) as opened:
        yield opened


def test_a_tool_call_is_sampled_parsed_executed_and_recorded_as_one_trajectory(house: House) -> None:
    async def converse() -> list[Trace]:
        await imitate(house)
        rollouts = plan_step(
            house.run_id, 0, house.train_tasks, 1, {"main": house.lead.backend.version},
            sampling={"temperature": 1e-3, "max_tokens": 80},
        )  # fmt: skip
        return await collect(house, "tools", rollouts, 60)

    (trace,) = asyncio.run(converse())
    assert trace.attempt.stdout_tail.strip() == "it is 2"
    first, second = trace.calls
    assert first.response is not None and second.response is not None
    choice = first.response["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (asked,) = choice["message"]["tool_calls"]
    assert asked["function"]["name"] == "f" and json.loads(asked["function"]["arguments"]) == {"x": 1}
    assert first.request["tools"] == TOOLS
    assert [message["role"] for message in second.request["messages"]] == ["user", "assistant", "tool"]
    assert second.request["messages"][-1]["content"] == "f=2"
    assembly = assemble_for(house.config, [trace])
    assert [action.drop for action in assembly.actions] == [None, None]
    sequences = [np.concatenate([a.prompt_ids, a.completion_ids]) for a in assembly.actions]
    # The template keeps what was sampled, so the second prompt extends the first answer: one path to one leaf.
    forest = build_forest(sequences)
    assert len(leaves(forest)) == 1 and len(forest.tokens_U) == len(sequences[1])
