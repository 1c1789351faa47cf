"""`leyden inspect`: what is recorded, down to the token; why anything was dropped."""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leyden.base.config import Config
from leyden.base.errors import RecordError, VerifierError
from leyden.base.records import Call, RolloutState, Trace
from leyden.cli import forest_tree, wiring
from leyden.cli.decoding import decoder
from leyden.cli.report.forest import forest_data
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, read_config
from leyden.learning import algorithms
from leyden.learning.credit import credit_alone
from leyden.loop import assemble_for
from leyden.rewards.canary import CANARY
from leyden.rewards.components import Total
from leyden.store import ledger, lookups
from leyden.store.base import Store
from leyden.traces.assemble import Action
from leyden.traces.reader import Reader

HELP = "Show a rollout: calls, tokens with mask and credit, why anything was dropped. Without an id: what there is."


def command(
    rollout: str = typer.Argument(
        "", help="Id of a rollout, or the beginning of one; with --forest also of a group.", metavar="[ROLLOUT]"
    ),
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    tokens: bool = typer.Option(True, "--tokens/--no-tokens", help="Show every token."),
    forest: bool = typer.Option(False, "--forest", help="Draw the calls of a rollout or a group by shared prefix."),
    limit: int = typer.Option(20, "--limit", min=1, help="Without an id: how many rollouts."),
    json_output: JsonOption = False,
) -> None:
    """Print one rollout, or a list of the newest."""
    settings = read_config(config, override)
    store = wiring.store_of(settings, create=False)
    try:
        if not rollout:
            _list(store, limit, json_output)
            return
        if forest:
            _forest(settings, store, rollout, json_output)
            return
        found = store.read(lambda connection: lookups.find(connection, rollout))
        reader = Reader(store)
        trace = reader.trace(found.id)
        group = [trace]
        if found.group_id:
            ids = store.read(lambda connection: lookups.group(connection, found.group_id or ""))
            group = reader.traces(ids)
    finally:
        store.close()
    actions, credit = _judge(settings, group, found.id)
    if json_output:
        typer.echo(json.dumps(_as_json(trace, actions, credit)))
        return
    _show(settings, trace, actions, credit, tokens)


def _forest(settings: Config, store: Store, name: str, json_output: bool) -> None:
    """Draw one rollout, or all rollouts of a group."""
    ids = store.read(lambda connection: lookups.group(connection, name))
    title = f"Group {name}, {len(ids)} rollouts"
    if not ids:
        ids = [store.read(lambda connection: lookups.find(connection, name)).id]
        title = f"Rollout {ids[0]}"
    traces = Reader(store).traces(ids)
    over = [t for t in traces if t.rollout.state in (RolloutState.SUCCEEDED, RolloutState.FAILED)]
    actions = assemble_for(settings, over).actions
    data = forest_data(title, traces, actions, decoder(settings), with_ids=True)
    if json_output:
        typer.echo(json.dumps(data))
        return
    forest_tree.show(data, Console(highlight=False))


def _list(store: Store, limit: int, json_output: bool) -> None:
    runs = store.read(ledger.runs)
    rows = store.read(lambda connection: lookups.newest(connection, limit))
    if json_output:
        typer.echo(
            json.dumps(
                {
                    "runs": [{"run": r.run_id, "state": r.state} for r in runs],
                    "rollouts": [
                        {"rollout": r.id, "task": r.task.id, "state": r.state.value, "reward": r.reward} for r in rows
                    ],
                }
            )
        )
        return
    console = Console(highlight=False)
    for run in runs[-5:]:
        console.print(f"run {run.run_id}: {run.state}", markup=False, soft_wrap=True)
    table = Table("rollout", "run", "step", "task", "state", "outcome", "reward", box=None)
    for r in rows:
        table.add_row(
            r.id, r.run_id or "", "" if r.step is None else str(r.step + 1), r.task.id, r.state.value,
            str(r.outcome or ""), "none" if r.reward is None else f"{r.reward:.3f}",
        )  # fmt: skip
    console.print(table if rows else "No rollouts yet: `leyden run` or `leyden train` makes some.")


def _judge(settings: Config, group: Sequence[Trace], rollout_id: str) -> tuple[list[Action], float | None]:
    """(every action of the rollout with its drop, its credit within its group)."""
    over = [t for t in group if t.rollout.state in (RolloutState.SUCCEEDED, RolloutState.FAILED)]
    settings = settings.of(settings.learn.policy)
    assembly = assemble_for(settings, over)
    credit = credit_alone(over, assembly, algorithms.make(settings.learn, settings.base_dir), settings.learn)
    mine = [a for a in assembly.actions if a.rollout_id == rollout_id]
    return mine, None if credit is None else credit.by_rollout.get(rollout_id)


def _as_json(trace: Trace, actions: Sequence[Action], credit: float | None) -> dict[str, Any]:
    return {
        "rollout": trace.rollout.id,
        "task": trace.rollout.task.id,
        "state": trace.rollout.state.value,
        "outcome": None if trace.rollout.outcome is None else trace.rollout.outcome.value,
        "reward": trace.rollout.reward,
        "rewards": {r.name: r.value for r in trace.rewards if r.call_id is None},
        "step_rewards": [{"call": r.call_id, "name": r.name, "value": r.value} for r in trace.rewards if r.call_id],
        "reward_sources": {r.name: {"source": r.source, "version": r.version} for r in trace.rewards},
        "credit": credit,
        "detail": trace.attempt.detail,
        "diagnosis": trace.attempt.diagnosis,
        "calls": [
            {
                "id": c.id,
                "status": c.status,
                "policy": f"{c.policy}@{c.policy_version}",
                "provenance": c.provenance.value,
                "refusal": c.refusal,
                "prompt_ids": c.prompt_ids.tolist(),
                "rewrites": list(c.rewrites),
                "usage": dict(c.usage),
            }
            for c in trace.calls
        ],
        "actions": [
            {
                "call": a.call_id,
                "choice": a.choice_index,
                "completion_ids": a.completion_ids.tolist(),
                "logprobs": a.logprobs.tolist(),
                "drop": None if a.drop is None else a.drop.value,
                "detail": a.detail,
            }
            for a in actions
        ],
    }


def _show(settings: Config, trace: Trace, actions: Sequence[Action], credit: float | None, tokens: bool) -> None:
    console = Console(highlight=False)
    rollout, attempt = trace.rollout, trace.attempt
    reward = "none" if rollout.reward is None else f"{rollout.reward:.4f}"
    console.print(Text(f"Rollout {rollout.id}", style="bold"))
    console.print(
        f"task {rollout.task.id} ({rollout.task.split}), attempt {attempt.number}, "
        f"outcome {rollout.outcome or rollout.state}, reward {reward}, "
        f"credit {'none' if credit is None else f'{credit:+.4f}'}",
        markup=False,
        soft_wrap=True,
    )
    for line in reward_lines(settings, trace):
        console.print(line, markup=False, soft_wrap=True)
    for text in (attempt.diagnosis, attempt.detail):
        if text:
            console.print(f"note: {text}", markup=False, soft_wrap=True)
    decode = _decoder(settings) if tokens else None
    by_call = {(a.call_id, a.choice_index): a for a in actions}
    for call in trace.calls:
        console.print()
        console.print(
            Text(
                f"call {call.seq + 1}: {call.policy}@{call.policy_version}, {call.status}, {call.provenance}, "
                f"{_num_prompt(call)} prompt tokens, {call.latency_ms:.0f} ms"
                + (f", {call.usage['cost_usd']:.6f} USD" if "cost_usd" in call.usage else "")
                + (f", rewritten: {', '.join(call.rewrites)}" if call.rewrites else ""),
                style="bold",
            )
        )
        if call.error:
            console.print(f"  error: {call.error}", markup=False, soft_wrap=True)
        if decode and len(call.prompt_ids):
            console.print(Text(decode(call.prompt_ids.tolist()), style="dim"))
        for choice in call.choices:
            action = by_call.get((call.id, choice.index))
            if action is None:
                fate = "not looked at: the rollout is not over"
            elif action.drop is not None:
                fate = f"dropped: {action.drop} ({action.detail})"
            else:
                fate = f"trained, with {action.num_cut} tokens of its context cut" if action.num_cut else "trained"
            console.print(
                f"  choice {choice.index}: {len(choice.completion_ids)} tokens, {choice.finish_reason}, {fate}",
                markup=False,
                soft_wrap=True,
            )
            if decode:
                style = "green" if action is not None and action.drop is None else "red"
                console.print(_token_line(decode, choice.completion_ids.tolist(), choice.logprobs.tolist(), style))
            elif choice.text:
                console.print(Text(choice.text))
    if attempt.stdout_tail.strip():
        console.print(Text("\nstandard output of the harness:", style="bold"))
        console.print(attempt.stdout_tail.rstrip(), markup=False, soft_wrap=True)
    if attempt.stderr_tail.strip():
        console.print(Text("\nstandard error of the harness:", style="bold"))
        console.print(attempt.stderr_tail.rstrip(), markup=False, soft_wrap=True)


def reward_lines(settings: Config, trace: Trace) -> list[str]:
    """The components, where they come from, how they make up the total, and the rewards of single calls."""
    whole = [r for r in trace.rewards if r.call_id is None]
    lines = []
    if whole:
        shown = (f"{r.name} {r.value:g}" + ("" if r.source == "verifier" else f" ({r.source})") for r in whole)
        lines.append("components: " + ", ".join(shown))
        values = {r.name: r.value for r in whole if r.source not in ("human", CANARY)}
        step = trace.rollout.step if trace.rollout.mode == "train" else None
        with contextlib.suppress(VerifierError, RecordError):  # made under other weights than those of today
            why = Total(settings.rewards).explain(values, step).text()
            lines.append(f"total by the weights of the configuration: {why}")
        versions = sorted({r.version for r in whole if r.version})
        if versions:
            lines.append(f"reward version: {', '.join(versions)}")
    numbers = {call.id: call.seq + 1 for call in trace.calls}
    lines += [f"step reward of call {numbers.get(r.call_id, r.call_id)}: {r.name} {r.value:g}"
              for r in trace.rewards if r.call_id]  # fmt: skip
    return lines


def _num_prompt(call: Call) -> int:
    """Prompt tokens as known by their ids, or as a provider counted them."""
    return len(call.prompt_ids) or int(call.usage.get("prompt_tokens") or 0)


def _token_line(decode: Any, ids: Sequence[int], logprobs: Sequence[float], style: str) -> Text:
    """Each token with its log-probability as a subscript-like number, coloured by whether it is trained."""
    line = Text("  ")
    for token, logprob in zip(ids, logprobs, strict=True):
        line.append(repr(decode([token]))[1:-1], style=style)
        line.append(f"({logprob:.2f}) ", style="dim")
    return line


def _decoder(settings: Config) -> Any:
    """Ids to text with the policy's tokenizer, or to numbers where it cannot be loaded."""
    decode = decoder(settings)
    return decode if decode is not None else lambda ids: " ".join(map(str, ids)) + " "
