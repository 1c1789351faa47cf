"""One framework's agent, run by Leyden's runner through its gateway on a scripted engine, and what came of it checked.

    python tests/integrations/check.py NAME COMMAND...

Prints one JSON line and exits with 1 where it is not what is expected; with `--summary` instead of a name, reads that
line and prints it in words. The scripted engine plays a model that uses the tool `add` once and then says the sum: by a
tool call where the request offers tools, in the words of ReAct where it does not.
"""

import asyncio
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from leyden.base.config import Config, from_tree
from leyden.base.records import Outcome, Provenance, Rollout, Task, Trace
from leyden.loop import assemble_for
from leyden.runner.lease import Runner
from leyden.store import open_store, queue
from leyden.store.base import Store
from leyden.testing.fake_engine import FakeEngine
from leyden.testing.running import running_gateway
from leyden.testing.scripted import Behaviour, Reply
from leyden.traces.forest import build_forest
from leyden.traces.reader import Reader

A, B, SUM = 17, 25, "42"
"""The sum stands in no prompt, so whoever says it has used the tool."""
QUESTION = f"What is {A} + {B}?"
BOUND_S = 240.0
"""Longest wait for one attempt: some frameworks take half a minute to be imported on a busy machine."""
FINAL_TOOLS = ("final_answer", "final_result")
"""Tools by which frameworks end."""
EXPECTED: Mapping[str, tuple[int, int]] = {}
"""(calls, conversations) where it is not two calls of one conversation."""


def play(body: Mapping[str, Any]) -> Reply:
    """What the scripted model says."""
    known = SUM in json.dumps(body["messages"])
    tools = [tool["function"]["name"] for tool in body.get("tools") or ()]
    if not tools and not known and "Action Input" in json.dumps(body["messages"]):
        return Reply(text=f'Thought: I add.\nAction: add\nAction Input: {{"a": {A}, "b": {B}}}')
    if not tools:
        return Reply(text=f"Thought: I now know the final answer\nFinal Answer: {SUM}" if known else "hello")
    if not known:
        return Reply(text="", tool_calls=(("add", json.dumps({"a": A, "b": B})),))
    last = next((name for name in tools if name in FINAL_TOOLS), None)
    return Reply(text="", tool_calls=((last, json.dumps({"answer": SUM})),)) if last else Reply(text=f"It is {SUM}.")


def check(name: str, trace: Trace, config: Config) -> tuple[dict[str, Any], list[str]]:
    """(what is shown, what is wrong)."""
    prompts = [call.prompt_ids.tolist() for call in trace.calls]
    fresh = [
        number
        for number, prompt in enumerate(prompts)
        if not any(prompt[: len(earlier)] == earlier for earlier in prompts[:number])
    ]
    sequences = [[*call.prompt_ids, *choice.completion_ids] for call in trace.calls for choice in call.choices]
    unique = len(build_forest([np.asarray(one, np.int32) for one in sequences]).tokens_U)
    assembly = assemble_for(config, [trace])
    calls, conversations = EXPECTED.get(name, (2, 1))
    wrong = []
    if trace.attempt.outcome is not Outcome.COMPLETED or trace.rollout.reward != 1.0:
        wrong.append(
            f"outcome {trace.attempt.outcome}, reward {trace.rollout.reward}: {trace.attempt.stderr_tail[-1500:]}"
        )
    if (len(trace.calls), len(fresh)) != (calls, conversations):
        wrong.append(f"{len(trace.calls)} calls in {len(fresh)} conversations, not {calls} in {conversations}")
    if any(call.provenance is not Provenance.SERVED or call.refusal for call in trace.calls):
        wrong.append(f"tokens refused: {[call.refusal for call in trace.calls]}")
    if assembly.trained != assembly.sampled or not assembly.sampled:
        wrong.append(
            f"{assembly.trained} of {assembly.sampled} sampled tokens can be trained: {dict(assembly.dropped)}"
        )
    shown = {
        "name": name, "outcome": str(trace.attempt.outcome), "reward": trace.rollout.reward, "calls": len(trace.calls),
        "conversations": len(fresh), "tokens": sum(map(len, sequences)), "tokens_in_forest": unique,
        "rewrites": sorted({field for call in trace.calls for field in call.rewrites}),
    }  # fmt: skip
    return shown, wrong


async def run_one(store: Store, config: Config, url: str) -> None:
    """One rollout, to its end."""
    rollout = Rollout(id="one", task=Task(id="sum", input={"question": QUESTION}, answer=SUM))
    store.write(lambda connection: queue.enqueue(connection, store, [rollout])).result(10)
    stop = asyncio.Event()
    running = asyncio.create_task(Runner(store, config, url).run(stop))
    deadline = time.monotonic() + BOUND_S
    try:
        while store.read(lambda connection: queue.get(connection, "one")).finished_seq is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the rollout was not over after {BOUND_S:.0f} s")
            await asyncio.sleep(0.1)
    finally:
        stop.set()
        await running


def summary(said: str) -> str:
    """What a run printed, for a table."""
    try:
        told = json.loads(said.splitlines()[-1])
    except (ValueError, IndexError):
        return "failed before it could be checked"
    if told["wrong"]:
        return "NOT AS EXPECTED: " + " ".join(told["wrong"][0].split())[:200].replace("|", "/")
    calls = f"{told['calls']} calls in {told['conversations']} conversation"
    tokens = f"{told['tokens_in_forest']} of {told['tokens']} tokens are unique"
    return f"{told['outcome']}, reward {told['reward']}: {calls}, {tokens}"


def main() -> int:
    """Run one agent; 1 if it did not do what is expected."""
    if sys.argv[1:] == ["--summary"]:
        print(summary(sys.stdin.read()))
        return 0
    name, *command = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, FakeEngine(Behaviour(reply=play)) as engine:
        root = Path(folder)
        (root / "verify.py").write_text(
            "def verify(task, trace, workspace):\n    return float(task['answer'] in trace['stdout_tail'])\n"
        )
        tree = {
            "harness": {
                "command": shlex.join(command), "timeout_s": BOUND_S - 40, "max_attempts": 1,
                "env": {"QUESTION": "{input.question}", "OTEL_SDK_DISABLED": "true"},
            },
            # The scripted engine has a token per byte, and some frameworks have a long system prompt.
            "policies": {"main": {"engine": engine.url, "max_context": 65536}},
            "rewards": {"verifier": "verify.py:verify"},
        }  # fmt: skip
        config = from_tree(tree, base_dir=root)
        store = open_store(f"sqlite:///{root / 'leyden.db'}")
        try:
            with running_gateway(config, store) as gateway:
                asyncio.run(run_one(store, config, gateway.url))
            trace = Reader(store).trace("one")
        finally:
            store.close()
    shown, wrong = check(name, trace, config)
    if SUM not in trace.attempt.stdout_tail:
        wrong.append(f"the agent did not print {SUM}: {trace.attempt.stdout_tail[-500:]!r}")
    wrong += [f"refused: {span.attributes}" for span in trace.spans if span.name == "gateway_refusal"]
    print(json.dumps({**shown, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
