"""Makes the report that compares methods on one holdout: base, prompts, SFT, SFT + RL, and prompts with SFT + RL.

    python compare.py --out FOLDER            about an hour on two cores

`full.toml` trains the weights. `demonstrations.toml` looks for demonstrations twice: for the untrained model, and for
the trained one. `leyden compare` then puts all five side by side in `compare.html`. What is finished is not run again.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from reproduce import HERE, fetch_model, make_tasks, run_seed, train

NUM_TASKS = 64
"""Training tasks at which the search looks for own successes; the approved demonstrations come on top."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="", help="model folder; by default the quickstart's, fetched if need be")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for data, runs and the report")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    make_tasks(None, out / "data")
    model = options.model or fetch_model()
    prompts = search_prompts("base", options.seed, out, model)
    weights = run_seed(options.seed, "full.toml", out, model, options.sets)
    both = search_prompts("rl", options.seed, out, str(checkpoint(weights, out)))
    entrants = [
        f"base={weights['run']}/base",
        entrant("prompts", prompts, out),
        f"SFT={weights['run']}/sft",
        f"SFT+RL={weights['run']}/final",
        entrant("prompts+SFT+RL", both, out),
    ]
    command = [sys.executable, "-m", "leyden.cli.main", "compare", *entrants, "--config", str(out / "full.toml")]
    command += ["--set", f'policies.main.model="{model}"', "--set", "policies.main.max_context=1024"]
    subprocess.run([*command, "--out", str(out / "compare.html")], check=True)
    return 0


def search_prompts(name: str, seed: int, out: Path, model: str) -> dict[str, Any]:
    """The summary of a search for demonstrations for the model in a folder."""
    tasks = (out / "data" / "tasks" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    few = out / "data" / "tasks" / "train-few.jsonl"
    few.write_text("\n".join(tasks[:NUM_TASKS]) + "\n", encoding="utf-8")
    sets = [f"run.seed={seed}", f'policies.main.model="{model}"', f'tasks.train="{few}"']
    return train("demonstrations.toml", out, out / "runs" / f"prompts-{name}-seed{seed}", sets)


def checkpoint(summary: dict[str, Any], out: Path) -> Path:
    """The folder with the weights of a run's last evaluation."""
    version = summary["evaluations"][-1]["policy_version"]
    (folder,) = (out / "runs").glob(f"*/{summary['run']}/checkpoints/{version}")
    return folder


def entrant(name: str, summary: dict[str, Any], out: Path) -> str:
    """How `leyden compare` is told of a search's result: its best demonstrations, also where it kept the harness's own
    prompts because they did better on the validation tasks."""
    if len(summary["evaluations"]) > 1:
        return f"{name}={summary['run']}/final"
    (path,) = (out / "runs").glob(f"*/{summary['run']}/metrics.jsonl")
    rounds = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    tried = [one["tried"] for one in rounds if one["tried"]][-1]
    best = max(tried, key=lambda version: float(tried[version]["score"]))
    print(f"{name}: no demonstrations did better than the harness's own prompts; {best} came nearest.")
    return f"{name}={best}"


if __name__ == "__main__":
    sys.exit(main())
