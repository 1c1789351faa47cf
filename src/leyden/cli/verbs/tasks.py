"""`leyden tasks`: cut one task file into train, val and holdout, or look for leaks between the files in use."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import typer

from leyden.base import splitting
from leyden.base.errors import ConfigError
from leyden.base.records import Task
from leyden.base.tasks import load_demos, load_tasks
from leyden.cli.holdouts import guard_of
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, read_config

HELP = "`split` cuts a task file by time, domain or chance; `check` looks for holdout tasks among what is trained on."


def command(
    action: str = typer.Argument(..., help="split or check.", metavar="ACTION"),
    file: Path = typer.Argument(None, help="With split: the task file.", metavar="[FILE]", dir_okay=False),
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    by: str = typer.Option("", "--by", help="time, domain or chance."),
    key: str = typer.Option("", "--key", metavar="FIELD", help="With time: the field of `input` that holds it."),
    holdout: str = typer.Option("", "--holdout", help="A share, as 0.2; with domain: names, comma-separated."),
    val: str = typer.Option("", "--val", help="The same for val; none if empty."),
    seed: int = typer.Option(0, "--seed", help="With chance."),
    out: Path = typer.Option(
        Path("."), "--out", help="Folder for train.jsonl, val.jsonl, holdout.jsonl.", file_okay=False
    ),
    json_output: JsonOption = False,
) -> None:
    """Write the parts, or print the leaks; exit status 1 when there are any."""
    if action == "split":
        if file is None or by not in ("time", "domain", "chance") or not holdout:
            raise ConfigError("`leyden tasks split FILE --by time|domain|chance --holdout SHARE-OR-NAMES` is needed")
        parts = _split(load_tasks(file), by, key, holdout, val, seed)
        _write(parts, out, json_output)
        return
    if action != "check":
        raise ConfigError(f"`leyden tasks {action}` is neither split nor check")
    settings = read_config(config, override)
    if not settings.tasks.holdout:
        raise ConfigError("tasks.holdout is not set, so there is nothing to leak")
    paths: list[tuple[Literal["train", "val"], str]] = [("train", settings.tasks.train), ("val", settings.tasks.val)]
    others = [task for name, path in paths if path for task in load_tasks(settings.resolve(path), split=name)]
    demos = load_demos(settings.resolve(settings.tasks.demos)) if settings.tasks.demos else []
    guard = guard_of(settings, load_tasks(settings.resolve(settings.tasks.holdout), split="holdout"))
    found = [*guard.of_tasks(others), *guard.of_demos(demos)]
    nearest = max(guard.similarity(others), default=0.0)
    if json_output:
        rows = [asdict(leak) for leak in found]
        typer.echo(json.dumps({"leaks": rows, "tasks": len(others), "demos": len(demos), "nearest": nearest}))
    else:
        for leak in found:
            typer.echo(str(leak))
        typer.echo(
            f"{len(found)} of {len(others)} tasks and {len(demos)} demonstrations are like one of {guard.num_tasks} "
            f"holdout tasks (tasks.near = {settings.tasks.near:g}; the nearest task has {nearest:.2f})."
        )
    if found:
        raise typer.Exit(1)


def _split(tasks: Sequence[Task], by: str, key: str, holdout: str, val: str, seed: int) -> splitting.Parts:
    if by == "domain":
        return splitting.by_domain(tasks, holdout=_names(holdout), val=_names(val))
    shares = _share("--holdout", holdout), _share("--val", val or "0")
    if by == "time":
        if not key:
            raise ConfigError("--by time needs --key, the field of `input` that holds the time")
        return splitting.by_time(tasks, key, holdout=shares[0], val=shares[1])
    return splitting.by_chance(tasks, holdout=shares[0], val=shares[1], seed=seed)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _share(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option} {text!r} is no share; write 0.2 for a fifth") from None


def _write(parts: splitting.Parts, out: Path, json_output: bool) -> None:
    existing = [out / f"{name}.jsonl" for name, tasks in parts.items() if tasks and (out / f"{name}.jsonl").exists()]
    if existing:
        raise ConfigError(f"{existing[0]} exists; give another --out, a holdout that changes is none")
    out.mkdir(parents=True, exist_ok=True)
    for name, tasks in parts.items():
        rows = [
            {
                "id": t.id,
                "split": t.split,
                "domain": t.domain,
                "input": t.input,
                "answer": t.answer,
                "purpose": t.purpose,
            }
            for t in tasks
        ]
        if rows:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (out / f"{name}.jsonl").write_text(text, encoding="utf-8")
    sizes = {name: len(tasks) for name, tasks in parts.items()}
    if json_output:
        typer.echo(json.dumps({"out": str(out), **sizes}))
        return
    typer.echo(f"Wrote {', '.join(f'{count} {name}' for name, count in sizes.items() if count)} to {out}")
