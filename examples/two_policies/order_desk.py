"""A harness of two agents on the plain OpenAI SDK: a reader and a clerk.

The reader sees the message of a customer and notes the order; the clerk, who never sees the message, enters the note in
the order book. They ask for the models "reader" and "clerk". What they wrote goes to `note.txt` and `entry.txt` in the
working directory; whether it is right is not decided here. Where REPLY is set, a third one, "correspondent", thanks the
customer in `reply.txt`.

Environment: MESSAGE, REPLY (unset or empty: nobody answers), and the OPENAI_* variables of the SDK.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import OpenAI

ROLES = {
    "reader": "Note what is ordered and by whom.",
    "clerk": "Enter the note in the order book.",
    "correspondent": "Thank the customer in one short sentence.",
}
"""System message by the name of the model."""
MAX_TOKENS = 16


def messages_for(role: str, text: str) -> list[dict[str, str]]:
    """The conversation of one call."""
    return [{"role": "system", "content": ROLES[role]}, {"role": "user", "content": text}]


def ask(client: "OpenAI", role: str, text: str) -> str:
    """What the agent of that role writes about `text`."""
    messages: Any = messages_for(role, text)
    answer = client.chat.completions.create(model=role, messages=messages, max_tokens=MAX_TOKENS)
    return (answer.choices[0].message.content or "").strip()


def main() -> None:
    """See the module."""
    from openai import OpenAI  # here, so that orders.py can share the prompts without the SDK's import time

    client = OpenAI()
    note = ask(client, "reader", os.environ["MESSAGE"])
    Path("note.txt").write_text(note, encoding="utf-8")
    entry = ask(client, "clerk", note)
    Path("entry.txt").write_text(entry, encoding="utf-8")
    if os.environ.get("REPLY"):
        Path("reply.txt").write_text(ask(client, "correspondent", os.environ["MESSAGE"]), encoding="utf-8")
    print(entry)


if __name__ == "__main__":
    main()
