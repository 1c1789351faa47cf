"""`leyden init`: a folder with a small working project to change into your own."""

import json
import random
from importlib import resources
from pathlib import Path

import typer

from leyden.base.errors import ConfigError
from leyden.cli.verbs.options import JsonOption

HELP = "Write a small working project: an agent, tasks, a verifier and leyden.toml."

FILES = ("leyden.toml", "agent.py", "verify.py")


def command(
    folder: Path = typer.Argument(Path("."), help="Folder to write to; made if it is missing.", file_okay=False),
    force: bool = typer.Option(False, "--force", help="Overwrite files that exist."),
    json_output: JsonOption = False,
) -> None:
    """Write the files and say what to do next."""
    tasks = {"tasks/train.jsonl": _tasks("train", 64, seed=0), "tasks/holdout.jsonl": _tasks("holdout", 32, seed=1)}
    contents = {n: (resources.files("leyden.cli") / "templates" / n).read_text("utf-8") for n in FILES} | tasks
    existing = [name for name in contents if (folder / name).exists()]
    if existing and not force:
        raise ConfigError(f"{folder} already has {', '.join(existing)}; choose another folder, or give --force")
    for name, text in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if json_output:
        typer.echo(json.dumps({"folder": str(folder.resolve()), "files": sorted(contents)}))
        return
    typer.echo(f"Wrote {', '.join(sorted(contents))} to {folder.resolve()}")
    typer.echo("Next: put your agent into agent.py and your check into verify.py, then")
    typer.echo("  leyden run --limit 2\n  leyden train")


def _tasks(split: str, count: int, seed: int) -> str:
    """Sums of two numbers; the holdout uses sums that the train tasks do not."""
    random_ = random.Random(seed)
    pairs = [(a, b) for a in range(2, 40) for b in range(2, 40) if (a + b) % 2 == (split == "holdout")]
    lines = [
        json.dumps(
            {
                "id": f"{split}-{a}-{b}",
                "split": split,
                "domain": "sums",
                "input": {"question": f"What is {a} + {b}?"},
                "answer": a + b,
            }
        )
        for a, b in random_.sample(pairs, count)
    ]
    return "\n".join(lines) + "\n"
