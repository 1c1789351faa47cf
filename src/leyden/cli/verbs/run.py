"""`leyden run`: run the harness at tasks and record what it does; or, with `--worker`, only lease rollouts."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from leyden.base.config import Config
from leyden.base.errors import ConfigError, LearningError, TaskError
from leyden.base.records import Mode, Rollout, RolloutState, Task, new_id
from leyden.cli import wiring
from leyden.cli.processes import Child, die_with_parent, write_ready
from leyden.cli.progress import JsonProgress, TextProgress
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, ReadyFile, SetOption, read_config
from leyden.store import ledger, queue
from leyden.store.base import Store

HELP = "Run the harness at tasks through the gateway and record every call. With --worker: only serve the queue."


def command(
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    split: str = typer.Option("train", "--split", help="Which tasks: train, val or holdout."),
    limit: int = typer.Option(8, "--limit", min=0, help="At most so many tasks; 0 is all."),
    samples: int = typer.Option(1, "--samples", min=1, help="Rollouts per task."),
    worker: bool = typer.Option(False, "--worker", help="Lease rollouts from the store until told to stop."),
    gateway: str = typer.Option("", "--gateway", metavar="URL", help="With --worker: the gateway's address."),
    run: str = typer.Option("", "--run", metavar="RUN", help="With --worker: only rollouts of this run."),
    json_output: JsonOption = False,
    ready_file: ReadyFile = None,
) -> None:
    """Print one line per rollout: how it ended, what it earned, what it used."""
    settings = read_config(config, override)
    wiring.raise_open_files()
    if worker:
        if not gateway:
            raise ConfigError("--worker needs --gateway URL, the address that `leyden serve` printed")
        work(settings, gateway, run, ready_file)
        return
    tasks = _tasks(settings, split)
    tasks = tasks[:limit] if limit else tasks
    progress = JsonProgress() if json_output else TextProgress()
    store = wiring.store_of(settings)
    child = Child("gateway", _serve_arguments(config, override or []), _folder(settings), dict(os.environ))
    try:
        from leyden.rewards.verifiers import check_verifier
        from leyden.runner.lease import check_harness

        check_harness(settings)
        check_verifier(settings)
        url = child.start()["url"]
        rollouts = _rollouts(store, tasks, samples, "train" if split == "train" else "val", settings)
        store.write(lambda connection: queue.enqueue(connection, store, rollouts)).result(60)
        asyncio.run(_until_done(settings, store, url, rollouts, progress))
        _show(store, rollouts, json_output)
    finally:
        child.stop()
        store.close()


def work(settings: Config, gateway: str, run: str, ready_file: Path | None) -> None:
    """Serve the queue until SIGTERM or Ctrl-C; running attempts are ended and their rollouts go back."""
    from leyden.runner.lease import Runner

    if ready_file:
        die_with_parent()
    store = wiring.store_of(settings)

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        runner = Runner(store, settings, gateway, run_id=run or None)
        write_ready(ready_file, {"pid": os.getpid(), "owner": runner.owner})
        await runner.run(stop)

    try:
        asyncio.run(main())
    finally:
        store.close()


def _tasks(settings: Config, split: str) -> list[Task]:
    train, val, held, _ = wiring.tasks_of(settings)
    found = {"train": train, "val": val, "holdout": held}
    if split not in found:
        raise ConfigError(f"--split {split!r} is none of train, val, holdout")
    if not found[split]:
        raise TaskError(f"there are no {split} tasks; set tasks.{split} in the configuration")
    return found[split]


def _serve_arguments(config: Path, overrides: list[str]) -> list[str]:
    arguments = ["serve", "--config", str(config.resolve())]
    for item in overrides:
        arguments += ["--set", item]
    return arguments


def _folder(settings: Config) -> Path:
    return settings.resolve(settings.run.dir) / "serve" / "logs"


def _rollouts(store: Store, tasks: list[Task], samples: int, mode: Mode, settings: Config) -> list[Rollout]:
    names = sorted(settings.policies)
    serving = {n: store.read(lambda c, n=n: ledger.serving(c, n)) for n in names}  # type: ignore[misc]
    versions = {n: (found.version if found else 0) for n, found in serving.items()}
    rollouts = []
    # Where several policies answer, each samples as its own section says.
    alone = len(settings.trained) + len(settings.frozen) == 1
    for task in tasks:
        group = new_id("group")
        evaluated = mode != "train" and alone
        sampling = settings.policies[settings.learn.policy].eval.model_dump() if evaluated else {}
        rollouts += [
            Rollout(
                id=new_id("ro"),
                task=task,
                mode=mode,
                group_id=group,
                policy_versions=versions,
                sampling=sampling,
                seed=k,
                created_at=time.time(),
            )
            for k in range(samples)
        ]
    return rollouts


async def _until_done(
    settings: Config, store: Store, url: str, rollouts: list[Rollout], progress: TextProgress | JsonProgress
) -> None:
    from leyden.runner.lease import Runner
    from leyden.store import aio

    stop = asyncio.Event()
    ids = [r.id for r in rollouts]
    limit_s = settings.harness.timeout_s * settings.harness.max_attempts * len(ids) + 60
    runner = asyncio.create_task(Runner(store, settings, url).run(stop))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    progress.begin(f"running {settings.harness.command or settings.harness.callable}", len(ids))
    deadline = time.monotonic() + limit_s
    while not runner.done() and not stop.is_set():
        seen = store.count("rollouts")
        found = await aio.read(store, lambda connection: queue.get_many(connection, ids))
        over = sum(r.state in (RolloutState.SUCCEEDED, RolloutState.FAILED) for r in found)
        progress.advance(over)
        if over == len(ids):
            break
        if time.monotonic() > deadline:
            raise LearningError(f"{len(ids) - over} of {len(ids)} rollouts were not over after {limit_s:.0f} s")
        await asyncio.sleep(0.1)
        await aio.watch(store, "rollouts", seen, 1.0)
    stop.set()
    await runner
    progress.end()


def _show(store: Store, rollouts: list[Rollout], json_output: bool) -> None:
    from leyden.traces.reader import Reader

    traces = Reader(store).traces([r.id for r in rollouts if _has_attempt(store, r.id)])
    rows = [
        {
            "rollout": t.rollout.id,
            "task": t.rollout.task.id,
            "outcome": str(t.rollout.outcome or t.rollout.state),
            "reward": t.rollout.reward,
            "calls": len(t.calls),
            "tokens": sum(c.num_sampled for c in t.calls),
            "seconds": t.attempt.duration_s,
            "diagnosis": t.attempt.diagnosis,
            "detail": t.attempt.detail,
        }
        for t in traces
    ]
    if json_output:
        for row in rows:
            print(json.dumps(row))
        return
    table = Table(box=None)
    table.add_column("rollout", no_wrap=True)  # whole, because `leyden inspect` is given it
    for column in ("task", "outcome", "reward", "calls", "tokens", "s", "diagnosis"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            str(row["rollout"]), str(row["task"]), str(row["outcome"]),
            "none" if row["reward"] is None else f"{row['reward']:.3f}",
            str(row["calls"]), str(row["tokens"]), f"{row['seconds'] or 0:.1f}", str(row["diagnosis"] or ""),
        )  # fmt: skip
    console = Console(highlight=False)
    console.print(table)
    for detail in sorted({str(r["detail"]) for r in rows if r["diagnosis"] and r["detail"]}):
        console.print(f"  {detail}", markup=False, soft_wrap=True)
    console.print("Look at one with: leyden inspect ROLLOUT")


def _has_attempt(store: Store, rollout_id: str) -> bool:
    return bool(store.read(lambda connection: queue.attempts(connection, rollout_id)))
