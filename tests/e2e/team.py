"""A project of two policies that are learned together, and a third that answers and stays as it is.

The agent asks `planner`, then `writer`, then `critic`, for a few characters each. Half of the reward is the share of
the planner's characters that are lower-case letters, the other half that of the writer's that are capitals: each can
only learn its own part, and one that learned the part of the other would lose.
"""

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from tests.e2e.project import LEARN, POLICY, SHARED, write_tasks
from tests.tiny_model import build_tiny_model

AGENT = """\
import json
import os
from pathlib import Path
from urllib.request import Request, urlopen

headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
for name in ASKED:
    system = {"role": "system", "content": "You are the " + name + "."}
    messages = [system, {"role": "user", "content": os.environ["WORD"]}]
    body = {"model": MODEL or name, "messages": messages, "max_tokens": 8}
    with urlopen(Request(url, json.dumps(body).encode(), headers)) as answer:
        Path(name + ".txt").write_text(json.load(answer)["choices"][0]["message"]["content"])
"""

VERIFIER = """\
def share(workspace, name, low, high):
    path = workspace / (name + ".txt")
    said = path.read_text() if path.exists() else ""
    return sum(low <= letter <= high for letter in said) / max(1, len(said))


def verify(task, trace, workspace):
    return {"letters": share(workspace, "planner", "a", "z"), "capitals": share(workspace, "writer", "A", "Z")}
"""

LORA = "lora = { rank = 8, alpha = 16.0 }\n"
OWN = """\
steps = 8
learning_rate = 6e-2
step_timeout_s = 300

[rewards]
verifier = "verify.py:verify"
weights = { letters = 0.5, capitals = 0.5 }
"""
PLANNER, WRITER, CRITIC = (POLICY.replace("NAME", name) for name in ("planner", "writer", "critic"))
SETTINGS = (
    SHARED
    + PLANNER + LORA
    + WRITER + LORA + 'learn = { algorithm = "rloo", learning_rate = 6e-2 }\n'
    + CRITIC + "trainable = false\n"
    + LEARN + OWN
).replace("TOKENS", "8")  # fmt: skip


def build_loud_model(folder: Path) -> Path:
    """A tiny model whose head can say something clearly: it is no part of a LoRA update, so it has to be there."""
    build_tiny_model(folder, pad_is_eos=True, hidden_size=32)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 10
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_team(
    folder: Path,
    *,
    asked: Sequence[str] = ("planner", "writer", "critic"),
    model: str = "",
    settings: str = "",
    num_holdout: int = 3,
) -> Path:
    """Write everything to `folder`; the path of its configuration. `model`: the one name that the agent sends."""
    folder.mkdir(parents=True, exist_ok=True)
    build_loud_model(folder / "model")
    agent = AGENT.replace("ASKED", repr(tuple(asked))).replace("MODEL", repr(model))
    for name, text in (("agent.py", agent), ("verify.py", VERIFIER), ("leyden.toml", SETTINGS + settings)):
        (folder / name).write_text(text, encoding="utf-8")
    write_tasks(folder, 4, num_holdout)
    return folder / "leyden.toml"
