"""`leyden inspect`: what is recorded, down to the token; why anything was dropped."""

import json
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leyden.base.config import Config
from leyden.base.errors import ModelUnusable
from leyden.base.records import Call, RolloutState, Trace
from leyden.cli import wiring
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, read_config
from leyden.learning import algorithms
from leyden.learning.credit import credit_groups
from leyden.loop import assemble_for
from leyden.store import ledger, lookups
from leyden.store.base import Store
from leyden.traces.assemble import Action
from leyden.traces.reader import Reader

HELP = "Show a rollout: calls, tokens with mask and credit, why anything was dropped. Without an id: what there is."


def command(
    rollout: str = typer.Argument("", help="Id of a rollout, or the beginning of one.", metavar="[ROLLOUT]"),
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    tokens: bool = typer.Option(True, "--tokens/--no-tokens", help="Show every token."),
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
    assembly = assemble_for(settings, over)
    credit = credit_groups(assembly, algorithms.make(settings.learn)).by_rollout
    return [a for a in assembly.actions if a.rollout_id == rollout_id], credit.get(rollout_id)


def _as_json(trace: Trace, actions: Sequence[Action], credit: float | None) -> dict[str, Any]:
    return {
        "rollout": trace.rollout.id,
        "task": trace.rollout.task.id,
        "state": trace.rollout.state.value,
        "outcome": None if trace.rollout.outcome is None else trace.rollout.outcome.value,
        "reward": trace.rollout.reward,
        "rewards": {r.name: r.value for r in trace.rewards},
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
    if trace.rewards:
        console.print(
            "components: " + ", ".join(f"{r.name} {r.value:g}" for r in trace.rewards), markup=False, soft_wrap=True
        )
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
                fate = "trained"
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
    """Ids to text with the policy's tokenizer, or to numbers where it cannot be loaded (no extra `train`)."""
    policy = settings.policies[settings.learn.policy]
    try:
        from leyden.learning.backends.embedded.model import load_tokenizer

        local = settings.resolve(policy.model)
        tokenizer = load_tokenizer(str(local) if local.exists() else policy.model)
    except (ModuleNotFoundError, ModelUnusable):
        return lambda ids: " ".join(map(str, ids)) + " "
    return lambda ids: tokenizer.decode(ids)
