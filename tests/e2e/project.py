"""A small project in a folder: a tiny model, an agent, a verifier and tasks that are learned in seconds.

The agent asks for a few characters; the reward is the share of them that are lower-case letters. A random model
writes some by chance, so every group has a difference to learn from, and one that learned writes hardly anything else.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.tiny_model import build_tiny_model

from leyden.base.config import Config, load
from leyden.base.records import Rollout, RolloutState
from leyden.store import open_store, queue, selections
from leyden.store.base import Store

AGENT = """\
import os

from openai import OpenAI

client = OpenAI(max_retries=5)
for _ in range(int(os.environ.get("CALLS", "1"))):
    answer = client.chat.completions.create(
        model="main", messages=[{"role": "user", "content": os.environ["WORD"]}], max_tokens=TOKENS
    )
print(answer.choices[0].message.content)
"""

LEAN_AGENT = """\
import json
import os
from urllib.request import Request, urlopen

body = {"model": "main", "messages": [{"role": "user", "content": os.environ["WORD"]}], "max_tokens": TOKENS}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urlopen(Request(url, json.dumps(body).encode(), headers)) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""
"""The same without the SDK, which costs 50 ms of processor time per attempt."""

VERIFIER = """\
def verify(task, trace, workspace):
    said = trace["final_text"]
    share = sum("a" <= letter <= "z" for letter in said) / max(1, len(said))
    return {"letters": share, "tokens": float(trace["num_completion_tokens"])}
"""

SHARED = """\
[tasks]
train = "train.jsonl"
holdout = "holdout.jsonl"

[eval]
resamples = 500

[probes]
before_training = false   # its reward is how an answer looks, which any constant can have

[harness]
command = "python agent.py"
env = { WORD = "{input.word}" }
concurrency = 8
timeout_s = 120
"""
POLICY = """
[policies.NAME]
model = "model"
max_context = 128
dtype = "float32"
sampling = { temperature = 1.0, max_tokens = TOKENS }
eval = { temperature = 1.0, max_tokens = TOKENS }
"""
LEARN = """
[learn]
group_size = 8
tasks_per_step = 2
grad_clip = 0.0
checkpoint_every = 2
"""
"""Of every such project; each ends in a section that may be gone on with."""

OWN = """\
steps = 6
learning_rate = 4e-2
mini_batches = 2
step_timeout_s = 90

[rewards]
verifier = "verify.py:verify"
weights = { letters = 1.0 }
success = "letters"
"""
SETTINGS = SHARED + 'preload = ["openai"]\n' + POLICY.replace("NAME", "main") + LEARN + OWN

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "NO_COLOR": "1"}
"""For children: one thread, because results are compared bit by bit and cores are few."""

LIMIT_S = 240.0
"""Longest wait for a command; each takes about fifteen seconds on two quiet cores, and tests run two at a time."""


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A JSON Lines file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tasks(folder: Path, num_train: int, num_holdout: int) -> None:
    """One word each, in two files."""
    words = [f"{chr(97 + i % 26)}{i}" for i in range(num_train + num_holdout)]
    rows = [{"id": f"task-{word}", "input": {"word": word}} for word in words]
    write_lines(folder / "train.jsonl", rows[:num_train])
    write_lines(folder / "holdout.jsonl", rows[num_train:])


def make_project(
    folder: Path,
    *,
    agent: str = AGENT,
    num_train: int = 4,
    num_holdout: int = 6,
    tokens: int = 8,
    seed: int = 0,
    tools: bool = False,
    hidden_size: int = 32,
) -> Path:
    """Write everything to `folder`; the path of its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tiny_model(folder / "model", pad_is_eos=True, hidden_size=hidden_size, seed=seed, tools=tools)
    for name, text in (("agent.py", agent), ("verify.py", VERIFIER), ("leyden.toml", SETTINGS)):
        (folder / name).write_text(text.replace("TOKENS", str(tokens)), encoding="utf-8")
    write_tasks(folder, num_train, num_holdout)
    return folder / "leyden.toml"


def read(path: Path, *overrides: str) -> Config:
    """The configuration of a project, a gateway port taken by chance."""
    return load(path, overrides)


def command(*arguments: str) -> list[str]:
    """`leyden ARGUMENTS` as a command line."""
    return [sys.executable, "-m", "leyden.cli.main", *arguments]


def leyden(
    *arguments: str, cwd: Path, check: bool = True, env: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a verb to its end; with `check`, a failure shows what it said."""
    done = subprocess.run(
        command(*arguments), cwd=cwd, env={**ENV, **(env or {})}, capture_output=True, text=True, timeout=LIMIT_S
    )
    if check:
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def start(*arguments: str, cwd: Path) -> "subprocess.Popen[str]":
    """Start a verb and let it run; what it says goes to `said.log`."""
    with (cwd / "said.log").open("w", encoding="utf-8") as log:
        return subprocess.Popen(command(*arguments), cwd=cwd, env=ENV, stdout=log, stderr=log, text=True)


def said(folder: Path) -> str:
    """The end of what the verb said that was started there."""
    return (folder / "said.log").read_text(encoding="utf-8")[-3000:]


def run_folder(folder: Path) -> Path:
    """The one run of a project."""
    found = [path.parent for path in (folder / "runs").glob("*/config.json")]
    assert len(found) == 1, found
    return found[0]


def metrics(run: Path, stage: str = "rl") -> list[dict[str, Any]]:
    """Rows of a stage."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["stage"] == stage]


def project_store(folder: Path) -> Store:
    """The store of a project."""
    return open_store(f"sqlite:///{folder / 'leyden.db'}", create=False)


def finished(store: Store, run_id: str) -> list[Rollout]:
    """Rollouts of a run that are over."""
    over = (RolloutState.SUCCEEDED, RolloutState.FAILED)
    return store.read(lambda connection: selections.select_by_state(connection, over, 10_000, run_id))


def num_open(store: Store, run_id: str) -> int:
    """Rollouts of a run that are not over."""
    states = (RolloutState.QUEUING, RolloutState.RUNNING)
    return len(store.read(lambda connection: selections.select_by_state(connection, states, 10_000, run_id)))


def attempts_of(store: Store, rollout_id: str) -> list[Any]:
    """Every attempt of a rollout."""
    return list(store.read(lambda connection: queue.attempts(connection, rollout_id)))


def assert_conserved(row: Mapping[str, Any]) -> None:
    """Every sampled token of a step was trained or has a reason."""
    books = row["conservation"]
    assert books["sampled"] == books["trained"] + sum(books["dropped"].values())
    assert books["sampled"] > 0
