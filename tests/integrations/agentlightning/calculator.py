"""An agent for Agent Lightning's local controller: it asks its model twice, uses a tool between, and rewards itself.

It knows `AGL_OPENAI_BASE_URL`, `AGL_EVENT_URL`, `AGL_KEY` and what `env_map` gave it, and imports nothing of Leyden.
"""

import os

import httpx

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two whole numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


class Calculator:
    """What `config.local.agent_class` names."""

    def run(self) -> None:
        """One attempt."""
        question, expected = os.environ["QUESTION"], os.environ["EXPECTED"]
        if question == "crash":
            raise RuntimeError("asked to crash")
        with httpx.Client(headers={"authorization": f"Bearer {os.environ['AGL_KEY']}"}, timeout=60) as client:
            messages: list[dict[str, object]] = [{"role": "user", "content": question}]
            body = {"model": "main", "messages": messages, "tools": TOOLS}
            url = os.environ["AGL_OPENAI_BASE_URL"] + "/chat/completions"
            first = client.post(url, json=body).raise_for_status().json()["choices"][0]["message"]
            messages.append(first)
            calls = first.get("tool_calls") or ()
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in calls]
            last = client.post(url, json=body).raise_for_status().json()["choices"][0]["message"]["content"]
            events = os.environ["AGL_EVENT_URL"]
            note = {"event_type": "note", "data": {"answer": last}}
            client.post(events, json=note).raise_for_status()
            reward = {"event_type": "reward", "data": {"value": float(expected in last), "source": "agent"}}
            client.post(events, json=reward).raise_for_status()
