"""Makes the table of the README: base, SFT, SFT + RL on a holdout, over several seeds, with intervals.

    python reproduce.py                                  the generated tasks, seeds 0 1 2 (under an hour a seed)
    python reproduce.py --geoquery PATH --seeds 0        GeoQuery, published question split

The model is the one that `leyden quickstart` fetches, or `--model`. Results of each run stay in `runs/`; the table
and `results.json` are written beside this file. A seed whose run is finished is not run again.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--model", default="", help="model folder; by default the quickstart's, fetched if need be")
    parser.add_argument("--geoquery", type=Path, help="folder with geography.json; see README.md")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for data, runs and results")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    out = options.out.resolve() / ("geoquery" if options.geoquery else "")
    out.mkdir(parents=True, exist_ok=True)
    config = "geoquery.toml" if options.geoquery else "full.toml"
    make_tasks(options.geoquery, out / "data")
    model = options.model or fetch_model()
    summaries = [run_seed(seed, config, out, model, options.sets) for seed in options.seeds]
    name = "geoquery" if options.geoquery else "generated"
    (out / f"results-{name}.json").write_text(json.dumps(summaries, indent=2) + "\n", encoding="utf-8")
    print(table(summaries))
    return 0


def make_tasks(geoquery: Path | None, folder: Path) -> None:
    """Generated tasks, or those of GeoQuery."""
    if (folder / "tasks" / "holdout.jsonl").exists():
        return
    script = [HERE / "import_geoquery.py", geoquery.resolve()] if geoquery else [HERE / "generate.py"]
    subprocess.run([sys.executable, *map(str, script), "--out", str(folder)], check=True, timeout=600)


def fetch_model() -> str:
    """The folder of the quickstart's model."""
    from leyden.cli.models import smollm2
    from leyden.cli.progress import TextProgress

    return str(smollm2(TextProgress()))


def run_seed(seed: int, config: str, out: Path, model: str, sets: list[str]) -> dict[str, Any]:
    """The summary of the finished run of this seed, which is run if it is not there."""
    sets = [f"run.seed={seed}", f'policies.main.model="{model}"', *sets]
    return train(config, out, out / "runs" / f"{Path(config).stem}-seed{seed}", sets)


def train(config: str, out: Path, runs: Path, sets: list[str]) -> dict[str, Any]:
    """The summary of the one finished run in the folder `runs`, made by `leyden train` if it is not there."""
    for path in sorted(runs.glob("*/summary.json")):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    if out != HERE:  # paths in a configuration are relative to it
        for name in (config, "harness.py", "verify.py", "prompts.json"):
            (out / name).write_text((HERE / name).read_text(encoding="utf-8"), encoding="utf-8")
    command = [sys.executable, "-m", "leyden.cli.main", "train", "--config", str(out / config)]
    for item in (f'run.dir="{runs}"', *sets):
        command += ["--set", item]
    started = time.monotonic()
    subprocess.run(command, check=True)
    (path,) = runs.glob("*/summary.json")
    summary = dict(json.loads(path.read_text(encoding="utf-8")))
    summary["minutes"] = round((time.monotonic() - started) / 60, 1)
    path.write_text(json.dumps(summary, indent=2), encoding="utf-8")
    return summary


def table(summaries: list[dict[str, Any]]) -> str:
    """Markdown, one row per seed and stage."""
    lines = [
        "| seed | policy | solved | 95 % interval | tokens per task | minutes so far |",
        "|---|---|---|---|---|---|",
    ]
    for summary in summaries:
        for row in summary["evaluations"]:
            p = row["pass1"]
            lines.append(
                f"| {summary['seed']} | {row['label']} | {100 * p['mean']:.1f} % | {100 * p['low']:.1f} to "
                f"{100 * p['high']:.1f} | {row['tokens']:.1f} | {row['minutes']:.1f} |"
            )
    lines += ["", "| seed | RL against SFT | won / lost | p (exact McNemar) | verdict | whole run |"]
    lines.append("|---|---|---|---|---|---|")
    for summary in summaries:
        v = summary["verdicts"].get("sft")
        if v is not None:
            lines.append(
                f"| {summary['seed']} | {100 * v['difference']:+.1f} points ({100 * v['low']:.1f} to "
                f"{100 * v['high']:.1f}) | {v['num_won']} / {v['num_lost']} of {v['num_tasks']} | {v['p_value']:.1e} | "
                f"{v['answer']} | {summary.get('minutes', 0):.0f} min |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
