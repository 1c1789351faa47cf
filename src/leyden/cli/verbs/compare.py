"""`leyden compare`: several versions on the same tasks, what each costs, and which to take."""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from leyden.base.config import Config
from leyden.base.errors import ConfigError
from leyden.base.multiplicity import spent_at
from leyden.base.tasks import fingerprint
from leyden.cli import lineup, wiring
from leyden.cli.progress import JsonProgress, TextProgress
from leyden.cli.report.compare import render_comparison
from leyden.cli.verbs.eval import evaluate_versions, tasks_to_judge
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, read_config
from leyden.release import gate, holdout
from leyden.release.results import Evaluation
from leyden.release.side_by_side import SideBySide, side_by_side
from leyden.store import ledger

HELP = "Put versions side by side on the holdout: success, cost per added success, Pareto front, and which to take."


def command(
    versions: list[str] = typer.Argument(
        ...,
        metavar="VERSION...",
        help="POLICY@N, label or RUN/LABEL; NAME=... renames, A+B pools runs of a method. The first is the reference.",
    ),
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    split: str = typer.Option("holdout", "--split", help="holdout or val."),
    calls_per_month: int = typer.Option(
        0, "--calls-per-month", min=0, help="Workload for the projection; 0 takes costs.calls_per_month."
    ),
    stored_only: bool = typer.Option(False, "--stored", help="Run nothing: an evaluation that is missing is an error."),
    out: Path = typer.Option(Path("compare.html"), "--out", help="Where the HTML report goes.", dir_okay=False),
    json_output: JsonOption = False,
) -> None:
    """Print the table, every pair, and the recommendation; write the report."""
    settings = read_config(config, override)
    tasks = tasks_to_judge(settings, split)
    mark = fingerprint(tasks)
    store = wiring.store_of(settings, create=False)
    try:
        entrants = lineup.line_up(store, versions, mark, split)
        missing = [(one.policy, one.version) for entrant in entrants for one in entrant.each if one.stored is None]
        if missing and stored_only:
            named = ", ".join(f"{policy}@{number}" for policy, number in missing)
            raise ConfigError(f"no stored evaluation of {named} on these tasks; leave out --stored to run it")
        evaluated = _evaluate(settings, missing, split, json_output)
        lined_up = lineup.methods(store, settings, entrants, evaluated)
        seen = store.read(lambda connection: ledger.evaluations(connection, fingerprint=mark))
    finally:
        store.close()
    look = max(1, holdout.looks(seen))
    found = side_by_side(
        lined_up,
        alpha=spent_at(look, 1 - settings.eval.level, settings.eval.looks),
        calls_per_month=calls_per_month or settings.costs.calls_per_month,
    )
    looks = holdout.sentence(look, settings.eval.level, settings.eval.looks)
    facts = {
        "tasks": len(tasks), "split": split, "fingerprint": mark[:16], "looks at these tasks": look,
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        **{one.name: one.evaluation.policy_version for one in lined_up},
    }  # fmt: skip
    title = f"{' / '.join(row.name for row in found.rows)}"
    out.write_text(render_comparison(found, title=title, looks=looks, facts=facts), encoding="utf-8")
    if json_output:
        print(json.dumps({**found.to_json(), "looks": look, "report": str(out)}, allow_nan=False))
        return
    _show(found, looks, out)


def _evaluate(
    settings: Config, missing: Sequence[tuple[str, int]], split: str, json_output: bool
) -> dict[tuple[str, int], Evaluation]:
    """Run what has no evaluation yet, one house per policy, since a house holds one policy."""
    made: dict[tuple[str, int], Evaluation] = {}
    for policy in dict.fromkeys(policy for policy, _ in missing):
        numbers = list(dict.fromkeys(number for name, number in missing if name == policy))
        changed = settings.model_copy(update={"learn": settings.learn.model_copy(update={"policy": policy})})
        progress = JsonProgress() if json_output else TextProgress()
        stop = wiring.StopSignal()
        stop.install()
        with wiring.open_house(changed, progress, stop=stop, training=False) as house:
            results = asyncio.run(evaluate_versions(house, numbers, split))
        made |= {(policy, number): result for number, result in zip(numbers, results, strict=True)}
    return made


def _show(found: SideBySide, looks: str, out: Path) -> None:
    console = Console(highlight=False)
    table = Table(box=None)
    table.add_column("version")
    month = found.tasks_per_month is not None
    columns = ["pass@1", "tokens", "latency s", "USD", "training min", f"{found.unit} per added success"]
    for column in columns + (["USD a month"] if month else []):
        table.add_column(column, justify="right")
    for row in found.rows:
        ratio = row.per_success
        per = "" if ratio is None else _bounded(ratio.value, ratio.low, ratio.high)
        cells = [
            f"{100 * row.pass1.mean:.1f} % ({100 * row.pass1.low:.1f} to {100 * row.pass1.high:.1f})",
            *(
                _span(row.axes[axis].mean, row.axes[axis].low, row.axes[axis].high) if row.axes[axis].num_tasks else "?"
                for axis in ("tokens", "latency_s", "usd")
            ),
            f"{row.training.minutes:.1f}",
            per,
        ]
        monthly = row.monthly_usd
        cells += [] if not month else ["?" if monthly is None else f"{monthly.mean:,.2f}"]
        table.add_row(f"{row.name} ({row.policy_version})", *cells)
    console.print(table)
    for pair in found.pairs:
        line = f"{pair.first} against {pair.second}: {gate.explain(pair.verdict)} (Holm p = {pair.adjusted_p:.2g})"
        console.print(line, markup=False, soft_wrap=True)
    for front in found.fronts:
        shares = ", ".join(f"{r.name} {100 * m:.0f} %" for r, m in zip(found.rows, front.membership, strict=True))
        console.print(f"On the front of success against {front.axis}: {shares}", markup=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"Note: {note}", markup=False, soft_wrap=True)
    console.print(looks, markup=False, soft_wrap=True)
    console.print(f"Recommended: {found.recommended}. {found.reason}", markup=False, soft_wrap=True, style="bold")
    console.print(f"Report: {out}", markup=False, soft_wrap=True)


def _span(mean: float, low: float, high: float) -> str:
    return f"{mean:.3g} ({low:.3g} to {high:.3g})"


def _bounded(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "nothing added"
    return f"{value:.3g} ({'?' if low is None else f'{low:.3g}'} to {'no bound' if high is None else f'{high:.3g}'})"
