"""`leyden costs`: what a run cost, per step, per evaluation and altogether; or what one rollout cost."""

import json
from dataclasses import replace
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from leyden.base.config import Config
from leyden.base.errors import ConfigError
from leyden.cli import wiring
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, read_config
from leyden.release.budget import Spent, spent, step_s
from leyden.release.costs import Cost, cost_of
from leyden.store import ledger, lookups, sizes
from leyden.store.base import Store
from leyden.traces.reader import Reader

HELP = "Show what a run cost, per step and version: tokens, money, seconds of engines and verifiers, bytes kept."


def command(
    run: str = typer.Argument("", help="The run; without it the newest.", metavar="[RUN]"),
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    rollout: str = typer.Option(
        "", "--rollout", metavar="ROLLOUT", help="Instead: one rollout, or the beginning of its id."
    ),
    json_output: JsonOption = False,
) -> None:
    """Print a line per step and evaluation with the version that it led to or looked at, and the sum."""
    settings = read_config(config, override)
    store = wiring.store_of(settings, create=False)
    try:
        if rollout:
            found = store.read(lambda connection: lookups.find(connection, rollout))
            one = cost_of(Reader(store).trace(found.id), settings)
            one = replace(one, storage_bytes=store.read(lambda c: sizes.storage_bytes(c, [found.id])))
            typer.echo(
                json.dumps({"rollout": found.id, **one.to_json()}) if json_output else f"{found.id}: {one.sentence()}"
            )
            return
        run_id = _choose(store, run)
        rows, used = _of_run(store, settings, run_id)
    finally:
        store.close()
    if json_output:
        typer.echo(json.dumps({"run": run_id, "rows": rows, "total": used.to_json()}))
        return
    _show(settings, run_id, rows, used)


def _choose(store: Store, run: str) -> str:
    known = [one.run_id for one in store.read(ledger.runs)]
    # `leyden eval` evaluates in runs that are not registered: they make no versions.
    known += [one.run_id for one in store.read(ledger.evaluations) if one.run_id and one.run_id not in known]
    if run and run not in known:
        raise ConfigError(f"there is no run {run!r}; known: {', '.join(known[-5:]) or 'none'}")
    if not known:
        raise ConfigError("there is no run yet; `leyden train` makes one")
    return run or known[-1]


def _of_run(store: Store, settings: Config, run_id: str) -> tuple[list[dict[str, Any]], Spent]:
    steps = store.read(lambda c: ledger.steps(c, run_id))
    results = store.read(lambda c: ledger.evaluations(c, run_id=run_id))
    kept = store.read(lambda c: sizes.storage_bytes(c, sizes.rollouts_of_run(c, run_id)))
    rows = [
        {
            "what": f"{step.stage} {step.step + 1}", "version": f"{step.policy}@{step.version_after}",
            "minutes": step_s(step.report) / 60, "cost": step.report.get("cost"), "at": step.created_at,
        }
        for step in steps
    ]  # fmt: skip
    rows += [
        {
            "what": f"evaluation {one.label}", "version": f"{one.policy}@{one.version}",
            "minutes": (one.result.get("wall_s") or 0.0) / 60, "cost": one.result.get("cost"), "at": one.created_at,
        }
        for one in results
    ]  # fmt: skip
    used = spent([step.report for step in steps], [one.result for one in results], settings.costs)
    return sorted(rows, key=lambda row: row["at"]), replace(used, cost=replace(used.cost, storage_bytes=kept))


def _show(settings: Config, run_id: str, rows: list[dict[str, Any]], used: Spent) -> None:
    console = Console(highlight=False)
    table = Table(title=f"Costs of run {run_id}", title_justify="left", box=None)
    for column in ("what", "version", "minutes", "rollouts", "tokens read", "sampled", "USD", "engine s", "verifier s"):
        table.add_column(column, justify="left" if column in ("what", "version") else "right")
    for row in rows:
        cost = Cost.from_json(row["cost"]) if row["cost"] else None
        cells = ["?"] * 6 if cost is None else [
            str(cost.num_rollouts), f"{cost.prompt_tokens:,}", f"{cost.completion_tokens:,}",
            "?" if cost.usd is None else f"{cost.usd:.4f}", f"{cost.engine_s:.1f}", f"{cost.verifier_s:.1f}",
        ]  # fmt: skip
        table.add_row(row["what"], row["version"], f"{row['minutes']:.1f}", *cells)
    console.print(table)
    machine = f", machine {used.machine_usd:.2f} USD" if settings.costs.machine_usd_per_hour else ""
    line = f"Altogether {used.minutes:.1f} minutes{machine}: {used.cost.sentence()}"
    console.print(line, markup=False, soft_wrap=True)
