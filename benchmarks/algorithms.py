"""Whether each algorithm learns, by the whole road: harness, gateway, capture, verifier, trainer; several seeds.

    python benchmarks/algorithms.py [--quick]                       a model of 30,000 weights, 20 seconds a run
    python benchmarks/algorithms.py --config FILE --model FOLDER --steps 12 --algorithms grpo rloo --out FOLDER

Without `--config` the task is a toy: the reward is the share of lower-case letters in an answer, the model knows
nothing. A run has learned when the mean reward of its last steps exceeds that of its first by more than four standard
errors of the difference, from the intervals of the steps.

With it, any configuration is trained, from the weights in `--model` and without `[sft]` and holdout: a copy of it is
written beside it. There the tasks of a step differ more than an algorithm changes them in a few steps, so each seed has
a control first: the same tasks in the same order at a learning rate that changes nothing. A run has learned when its
tasks of the second half of the steps earn more than the control's, task by task, by more than three standard errors.
`--out` keeps the runs; what is there already is not run again.

Seeds are independent, so an algorithm's rises are also judged together, by the same number of standard errors of their
mean.

`dr_grpo+stale2` is Dr. GRPO with `learn.max_staleness = 2`, at as many rollouts. The last line is JSON.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.e2e.project import LEAN_AGENT, make_project  # noqa: E402 - the path is set above

from leyden.base.config import load  # noqa: E402
from leyden.base.recipes import RECIPES  # noqa: E402
from leyden.store import open_store, selections  # noqa: E402

SETTINGS: dict[str, tuple[str, ...]] = {
    "gspo": ("learn.epochs=2", "learn.mini_batches=2"),
    "cispo": ("learn.epochs=2", "learn.mini_batches=2"),
    "dapo": ("learn.epochs=2", "learn.mini_batches=2"),
    "ppo": ("learn.epochs=2", "learn.mini_batches=2"),
    "dpo": ("learn.dpo_beta=0.5", "learn.epochs=2"),
    "dr_grpo+stale2": ("learn.max_staleness=2",),
}
"""What an algorithm needs beside its defaults; a `+` sets variants of one apart."""
TOY_SETTINGS: dict[str, tuple[str, ...]] = {
    "gspo": ("learn.clip_low=0.2", "learn.clip_high=0.2"),
    "ppo": ("learn.value_learning_rate=0.02",),
    "rejection_sft": ("learn.min_reward=0.4",),
}
"""The toy's rewards are shares, and its model needs large steps."""
EDGE = 3
"""Steps at either end that are compared."""


def algorithms() -> list[str]:
    """All that learn from rewards; imitation and distillation learn from others' texts."""
    return [*(name for name in RECIPES if name not in ("sft", "distill")), "dr_grpo+stale2"]


def run(config: Path, name: str, seed: int, sets: Sequence[str], folder: Path) -> Path:
    """One run of `leyden train`, unless it is there; its folder."""
    command = [sys.executable, "-m", "leyden.cli.main", "train", "--config", str(config)]
    algorithm = f"learn.algorithm={name.partition('+')[0]}"
    for item in (f'run.dir="{folder}"', f"run.seed={seed}", algorithm, *SETTINGS.get(name, ()), *sets):
        command += ["--set", item]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}
    if not list(folder.glob("*/summary.json")):
        done = subprocess.run(command, cwd=config.parent, env=env, capture_output=True, text=True)
        if done.returncode:
            said = f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            raise RuntimeError(f"{name}, seed {seed}: exit {done.returncode}\n{said}")
    (path,) = folder.glob("*/summary.json")
    shutil.rmtree(path.parent / "checkpoints", ignore_errors=True)  # 1.6 GB a run for a model of 135M, and not needed
    return path.parent


def steps_of(made: Path) -> list[dict[str, Any]]:
    """What a run says of its steps."""
    return [json.loads(line) for line in (made / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def judged_alone(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """First and last mean reward, and whether the rise is more than chance."""
    rewards = [row["reward_mean"] for row in rows]
    first, last = rewards[:EDGE], rewards[-EDGE:]
    spread = [(row["reward_high"] - row["reward_low"]) / 3.92 for row in (*rows[:EDGE], *rows[-EDGE:])]
    error = sum(s**2 for s in spread) ** 0.5 / EDGE
    rise = statistics.mean(last) - statistics.mean(first)
    return {
        "first": round(statistics.mean(first), 3),
        "last": round(statistics.mean(last), 3),
        "standard_error": round(error, 4),
        "learned": bool(rise > 4 * error),
        "rollouts": sum(row["num_rollouts"] for row in rows),
    }


def rewards_by_task(config: Path, made: Path, first: int) -> dict[str, list[float]]:
    """Rewards of a run from step `first` on; a rollout that earned nothing counts as 0."""
    with contextlib.chdir(config.parent):  # where the runs were started, so that a relative store.url is theirs
        store = open_store(load(config).store.url, create=False)
    found: dict[str, list[float]] = {}
    for step in range(first, len(steps_of(made))):
        for rollout in store.read(partial(selections.select_by_step, run_id=made.name, step=step)):
            if rollout.mode == "train":
                found.setdefault(rollout.task.id, []).append(rollout.reward or 0.0)
    store.close()
    return found


def judged_by_task(config: Path, made: Path, control: Path) -> dict[str, Any]:
    """Mean rewards of the second half, of the control and of the run, over the tasks of both."""
    rows = steps_of(made)
    theirs, ours = (rewards_by_task(config, folder, len(rows) // 2) for folder in (control, made))
    both = sorted(theirs.keys() & ours.keys())
    rises = [statistics.mean(ours[task]) - statistics.mean(theirs[task]) for task in both]
    error = statistics.stdev(rises) / len(rises) ** 0.5
    return {
        "first": round(statistics.mean(statistics.mean(theirs[task]) for task in both), 3),
        "last": round(statistics.mean(statistics.mean(ours[task]) for task in both), 3),
        "standard_error": round(error, 4),
        "learned": statistics.mean(rises) > 3 * error,
        "tasks": len(both),
        "rollouts": sum(row["num_rollouts"] for row in rows),
    }


def judged_together(rows: Sequence[dict[str, Any]], num_errors: float) -> dict[str, Any]:
    """The mean rise of the seeds, its standard error, and whether it is more than chance."""
    rise = statistics.mean(row["last"] - row["first"] for row in rows)
    error = sum(row["standard_error"] ** 2 for row in rows) ** 0.5 / len(rows)
    return {"rise": round(rise, 3), "standard_error": round(error, 4), "learned": rise > num_errors * error}


def stripped(config: Path) -> Path:
    """A copy of a configuration beside it, without [sft] and holdout."""
    text = re.sub(r"(?ms)^\[sft\]\n.*?(?=^\[)", "", config.read_text(encoding="utf-8"))
    copy = config.with_name(f"{config.stem}-algorithms.toml")
    copy.write_text(re.sub(r"(?m)^(holdout|val) = .*\n", "", text), encoding="utf-8")
    return copy


def main() -> None:
    """Run, print a row each, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="a configuration to train instead of the toy")
    parser.add_argument("--model", default="", help="weights to start from, with --config")
    parser.add_argument("--algorithms", nargs="+", default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=None)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--out", type=Path, default=None, help="a folder that keeps the runs")
    parser.add_argument("--quick", action="store_true", help="one seed")
    options = parser.parse_args()
    names = options.algorithms or algorithms()
    seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    given = stripped(options.config.resolve()) if options.config else None
    with contextlib.ExitStack() as stack:
        out = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for seed in seeds:
            sets = [f"learn.steps={options.steps}", *options.sets]
            if given:
                sets += [f'policies.main.model="{options.model}"'] if options.model else []
                still = [*sets, "learn.learning_rate=1e-12"]
                control = run(given, "dr_grpo", seed, still, out.resolve() / f"control-{seed}")
            for name in names:
                folder = out.resolve() / f"{re.sub('[^a-z0-9]', '-', name)}-{seed}"
                began = time.perf_counter()
                if given:
                    row = judged_by_task(given, run(given, name, seed, sets, folder), control)
                else:
                    config = make_project(folder, agent=LEAN_AGENT, seed=seed)
                    toy = ['tasks.holdout=""', "learn.tasks_per_step=4", *TOY_SETTINGS.get(name, ())]
                    row = judged_alone(steps_of(run(config, name, seed, [*sets, *toy], folder / "runs")))
                row = {"seed": seed, **row, "seconds": round(time.perf_counter() - began, 1)}
                results[name].append(row)
                said = "learned" if row["learned"] else "NOT separable"
                print(
                    f"{name:22} seed {seed}: {row['first']:.3f} -> {row['last']:.3f} "
                    f"(standard error {row['standard_error']:.3f}) {said}, {row['seconds']} s",
                    flush=True,
                )
    together = {name: judged_together(rows, 3 if given else 4) for name, rows in results.items()}
    for name, row in together.items():
        said = "learned" if row["learned"] else "NOT separable"
        print(f"{name:22} {len(seeds)} seeds: {row['rise']:+.3f} (standard error {row['standard_error']:.3f}) {said}")
    num_learned = sum(row["learned"] for row in together.values())
    print(
        json.dumps({"num_learned": num_learned, "num_algorithms": len(names), "together": together, "results": results})
    )


if __name__ == "__main__":
    main()
