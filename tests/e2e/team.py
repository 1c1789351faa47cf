"""A project of two policies that are learned together, and a third that answers and stays as it is.

The agent asks `planner`, then `writer`, then `critic`, for a few characters each. Half of the reward is the share of
the planner's characters that are lower-case letters, the other half that of the writer's that are capitals: each can
only learn its own part, and one that learned the part of the other would lose.
"""

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from tests.e2e.project import write_lines
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

SETTINGS = """\
[harness]
command = "python agent.py"
env = { WORD = "{input.word}" }
concurrency = 8
timeout_s = 120

[tasks]
train = "train.jsonl"
holdout = "holdout.jsonl"

[policies.planner]
model = "model"
lora = { rank = 8, alpha = 16.0 }
max_context = 128
dtype = "float32"
sampling = { temperature = 1.0, max_tokens = 8 }
eval = { temperature = 1.0, max_tokens = 8 }

[policies.writer]
model = "model"
lora = { rank = 8, alpha = 16.0 }
max_context = 128
dtype = "float32"
sampling = { temperature = 1.0, max_tokens = 8 }
eval = { temperature = 1.0, max_tokens = 8 }
learn = { algorithm = "rloo", learning_rate = 6e-2 }

[policies.critic]
model = "model"
trainable = false
max_context = 128
dtype = "float32"
sampling = { temperature = 1.0, max_tokens = 8 }

[rewards]
verifier = "verify.py:verify"
weights = { letters = 0.5, capitals = 0.5 }

[learn]
group_size = 8
tasks_per_step = 2
steps = 8
learning_rate = 6e-2
grad_clip = 0.0
checkpoint_every = 2
step_timeout_s = 300

[eval]
resamples = 500

[probes]
before_training = false   # its reward is how an answer looks, which any constant can have
"""


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
    words = [f"{chr(97 + i % 26)}{i}" for i in range(4 + num_holdout)]
    rows = [{"id": f"task-{word}", "input": {"word": word}} for word in words]
    write_lines(folder / "train.jsonl", rows[:4])
    write_lines(folder / "holdout.jsonl", rows[4:])
    return folder / "leyden.toml"
