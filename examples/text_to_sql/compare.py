"""Makes the report that compares methods on one holdout: base, prompts, SFT, SFT + RL, and prompts with SFT + RL.

    python compare.py --out FOLDER            about an hour and a half on two cores

`full.toml` trains the weights. `demonstrations.toml` looks for demonstrations twice: for the untrained model, and for
the trained one. `leyden compare` then puts all five side by side in `compare.html`. What is finished is not run again.
"""

import argparse
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
    entrants = [f"base={weights['run']}/base", *entrant("prompts", prompts), f"SFT={weights['run']}/sft"]
    entrants += [f"SFT+RL={weights['run']}/final", *entrant("prompts+SFT+RL", both)]
    command = [sys.executable, "-m", "leyden.cli.main", "compare", *entrants, "--config", str(out / "full.toml")]
    subprocess.run([*command, "--stored", "--out", str(out / "compare.html")], check=True)
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


def entrant(name: str, summary: dict[str, Any]) -> list[str]:
    """How `leyden compare` is told of a search's result; nothing where it kept the harness's own prompts."""
    labels = [row["label"] for row in summary["evaluations"]]
    if len(labels) < 2:
        print(f"{name}: no demonstrations did better than the harness's own prompts; there is nothing to compare.")
        return []
    return [f"{name}={summary['run']}/final"]


if __name__ == "__main__":
    sys.exit(main())
