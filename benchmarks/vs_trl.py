"""Seconds and memory of a GRPO step beside TRL's GRPOTrainer: same model, prompts, group size and lengths.

    python benchmarks/vs_trl.py --model FOLDER [--quick]

Our side is the whole of Leyden: harness processes, gateway, durable capture, verifier, sampler and trainer, started
by `leyden train`. The peer calls a reward function in its own process. The first step of each is left out, since it
compiles kernels. Memory is the largest sum over all processes of a side. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.peers import environment  # noqa: E402 - the path is set above

PEER = ("torch==2.13.0", "trl==1.16.0", "transformers", "datasets")
GROUP_SIZE, MAX_TOKENS, LEARNING_RATE = 8, 32, 1e-5
PROMPTS = [
    f"Tell me in your own words what {thing} is good for, and why people who have never seen one should want it."
    for thing in ("a kettle", "a lighthouse", "a bicycle", "a compass", "a hammer", "an umbrella", "a mirror", "a lock")
]
"""With the chat template of SmolLM2 about 60 tokens each."""

AGENT = """\
import json, os
from urllib.request import Request, urlopen
body = {"model": "main", "messages": [{"role": "user", "content": os.environ["PROMPT"]}], "max_tokens": %d}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urlopen(Request(url, json.dumps(body).encode(), headers)) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
"""
# An empty answer earns most, which `leyden train` would refuse: here a reward is needed that is learned in a few steps.
VERIFIER = """\
def verify(task, trace, workspace):
    return 1.0 - min(1.0, len(trace["final_text"]) / 150)
"""
SETTINGS = """\
[harness]
command = "python agent.py"
preload = ["urllib.request"]
concurrency = 64
env = {{ PROMPT = "{{input.prompt}}" }}
[tasks]
train = "train.jsonl"
[policies.main]
model = "{model}"
max_context = 256
sampling = {{ temperature = 1.0, max_tokens = {max_tokens} }}
[rewards]
verifier = "verify.py:verify"
[probes]
before_training = false
[learn]
algorithm = "grpo"
group_size = {group_size}
tasks_per_step = {num_prompts}
steps = {steps}
learning_rate = {learning_rate}
checkpoint_every = 1000
"""


class Watch:
    """The largest memory of a process and all its descendants, proportional for shared pages where the system says."""

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._process = psutil.Process(pid)
        self._over = False
        self._thread = Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """The peak in bytes."""
        self._over = True
        self._thread.join(10)
        return self.peak_bytes

    def _look(self) -> None:
        while not self._over:
            total = 0
            try:
                for process in (self._process, *self._process.children(recursive=True)):
                    try:
                        # Forked harnesses share most of their pages: PSS counts each page once.
                        total += process.memory_full_info().pss
                    except psutil.Error:
                        continue
            except psutil.Error:
                return
            self.peak_bytes = max(self.peak_bytes, total)
            time.sleep(1.0)


def ours(model: str, steps: int, folder: Path) -> tuple[list[dict[str, float]], int]:
    """(one row a step, peak memory)."""
    settings = {
        "model": model, "max_tokens": MAX_TOKENS, "group_size": GROUP_SIZE, "num_prompts": len(PROMPTS),
        "steps": steps, "learning_rate": LEARNING_RATE,
    }  # fmt: skip
    (folder / "agent.py").write_text(AGENT % MAX_TOKENS, encoding="utf-8")
    (folder / "verify.py").write_text(VERIFIER, encoding="utf-8")
    (folder / "leyden.toml").write_text(SETTINGS.format(**settings), encoding="utf-8")
    tasks = [{"id": f"t{i}", "input": {"prompt": prompt}} for i, prompt in enumerate(PROMPTS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "leyden.cli.main", "train", "-c", str(folder / "leyden.toml"), "--json"]
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as process:
        watch = Watch(process.pid)
        assert process.stdout is not None
        for line in process.stdout:
            row = json.loads(line)
            if row["event"] == "step":
                seconds = row["seconds"]["rollouts"] + row["seconds"]["update"]
                rows.append({"seconds": seconds, "reward": row["reward_mean"]})
                print(f"leyden  step {len(rows)}: {seconds:6.1f} s, reward {row['reward_mean']:.3f}", flush=True)
        peak = watch.stop()
    assert process.returncode == 0, f"leyden train ended with {process.returncode}"
    return rows, peak


def theirs(model: str, steps: int, folder: Path) -> tuple[list[dict[str, float]], int]:
    """The same of TRL."""
    python = environment.make(ROOT / ".benchmark-venv" / "trl", sys.executable, PEER)
    job = {
        "model": model, "prompts": PROMPTS, "group_size": GROUP_SIZE, "max_tokens": MAX_TOKENS, "steps": steps,
        "learning_rate": LEARNING_RATE, "folder": str(folder),
    }  # fmt: skip
    rows = []
    command = [str(python), str(ROOT / "benchmarks/peers/trl_grpo.py")]
    with (
        (folder / "trl.log").open("w") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        watch = Watch(process.pid)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(job))
        process.stdin.close()
        for line in process.stdout:
            if line.startswith('{"seconds"'):
                rows.append(json.loads(line))
                print(
                    f"TRL     step {len(rows)}: {rows[-1]['seconds']:6.1f} s, reward {rows[-1]['reward']:.3f}",
                    flush=True,
                )
        peak = watch.stop()
    assert process.returncode == 0, (folder / "trl.log").read_text()[-2000:]
    return rows, peak


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--quick", action="store_true", help="3 steps instead of 10")
    parser.add_argument("--no-peer", action="store_true", help="leave TRL out")
    options = parser.parse_args()
    steps = 3 if options.quick else 10
    model = str(Path(options.model).resolve())
    with tempfile.TemporaryDirectory() as folder:
        our_rows, our_bytes = ours(model, steps, Path(folder))
    summary: dict[str, Any] = {
        "step_s": statistics.median(row["seconds"] for row in our_rows[1:]),
        "memory_bytes": our_bytes,
        "rewards": [round(row["reward"], 4) for row in our_rows],
        "group_size": GROUP_SIZE, "num_prompts": len(PROMPTS), "max_tokens": MAX_TOKENS, "steps": steps,
    }  # fmt: skip
    if not options.no_peer:
        with tempfile.TemporaryDirectory() as folder:
            rows, their_bytes = theirs(model, steps, Path(folder))
        summary |= {
            "trl_step_s": statistics.median(row["seconds"] for row in rows[1:]),
            "trl_memory_bytes": their_bytes,
            "trl_rewards": [round(row["reward"], 4) for row in rows],
        }
        summary["step_time_ratio"] = summary["trl_step_s"] / summary["step_s"]
        summary["memory_ratio"] = summary["trl_memory_bytes"] / summary["memory_bytes"]
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
