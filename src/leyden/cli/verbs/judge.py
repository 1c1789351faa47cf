"""`leyden judge`: is the model that judges to be trusted?"""

import asyncio
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from sqlalchemy import Connection

from leyden.base.config import Config, dump
from leyden.base.errors import ConfigError, VerifierError
from leyden.base.records import Attempt, Outcome, Rollout, RolloutState, Task, Trace, new_id
from leyden.cli import wiring
from leyden.cli.processes import Child
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, read_config
from leyden.rewards.agreement import Agreement, agreement
from leyden.rewards.evidence import task_dict, trace_dict
from leyden.runner.environment import openai_url
from leyden.store import lookups, queue
from leyden.store.base import Store
from leyden.traces.reader import Reader

if TYPE_CHECKING:
    from leyden.rewards.judge import Ask, Messages

HELP = "Check the model that judges: agreement with labels or rules, preference for a position, preference for length."


def command(
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    against: str = typer.Option("", "--against", help="Component to compare with; labels of people by default."),
    limit: int = typer.Option(200, "--limit", min=1, help="Newest rollouts that are looked at."),
    samples: int = typer.Option(
        20, "--samples", min=0, help="Answers on which the judge is asked about position and length; 0 asks nothing."
    ),
    json_output: JsonOption = False,
) -> None:
    """Compare scores that are recorded; then ask the judge about recorded answers, in both orders and padded."""
    settings = read_config(config, override)
    if not settings.rewards.judge.policy:
        raise ConfigError("there is no judge; set rewards.judge.policy and rewards.judge.rubric")
    store = wiring.store_of(settings, create=False)
    try:
        rows = store.read(lambda connection: lookups.newest(connection, limit))
        over = [r.id for r in rows if r.state is RolloutState.SUCCEEDED]
        traces = Reader(store).traces(over)
        found = compare(settings, traces, against)
        bias = ask_about(settings, store, traces, samples) if samples else {}
    finally:
        store.close()
    _show(found, bias, json_output)


def compare(settings: Config, traces: Sequence[Trace], against: str) -> tuple[str, Agreement | None]:
    """(what the judge was compared with, how far they agree; None when no rollout has both)."""
    judge = settings.rewards.judge
    ours, theirs, name = [], [], against or "labels of people"
    for trace in traces:
        rewards = [r for r in trace.rewards if r.call_id is None]
        score = next((r.value for r in rewards if r.name == judge.component and r.source == "verifier"), None)
        people = [r for r in rewards if r.source == "human" and (not against or r.name == against)]
        rules = [r for r in rewards if r.source != "human" and against and r.name == against]
        other = next((r.value for r in reversed(people or rules)), None)
        if score is not None and other is not None:
            ours.append(score)
            theirs.append(other)
    middle = (judge.low + judge.high) / 2
    return name, agreement(ours, theirs, threshold_a=middle) if ours else None


def ask_about(settings: Config, store: Store, traces: Sequence[Trace], samples: int) -> dict[str, Any]:
    """Position and length bias on recorded answers, through a gateway that serves the judge alone."""
    from leyden.rewards import judge_check
    from leyden.rewards.judge import ask_at, open_judge

    judge = settings.rewards.judge
    scorer = open_judge(settings)
    assert scorer is not None
    answers = []
    for trace in traces:
        said = str(trace_dict(trace, judge=judge.policy)["final_text"])
        if said.strip():
            answers.append((task_dict(trace.rollout.task), said))
    answers = answers[:samples]
    if not answers:
        raise VerifierError("no recorded rollout has an answer to show to the judge; run some with `leyden run`")
    pairs = [
        (task, said, other)
        for i, (task, said) in enumerate(answers)
        for other_task, other in answers[i + 1 :]
        if other_task["id"] == task["id"] and other != said
    ][:samples]
    rubric = settings.resolve(judge.rubric).read_text(encoding="utf-8")

    async def ask_all(ask: "Ask") -> dict[str, Any]:
        async def score(task: Any, said: str) -> float | None:
            return (await scorer.judge(ask, task, said)).score

        length = await judge_check.length_bias(score, answers)
        position = await judge_check.position_bias(_lenient(ask), rubric, pairs)
        return {"position": position, "length": length}

    with _gateway(settings, store) as (base_url, key):
        return asyncio.run(ask_all(ask_at(base_url, key, judge)))


def _lenient(ask: "Ask") -> "Ask":
    """A pair without an answer counts as none: the check goes on with the others."""

    async def one(messages: "Messages") -> str:
        try:
            return await ask(messages)
        except VerifierError:
            return ""

    return one


@contextmanager
def _gateway(settings: Config, store: Store) -> Iterator[tuple[str, str]]:
    """(base URL, key) of a gateway with the judge alone and of an attempt that may call it."""
    name = settings.rewards.judge.policy
    only = {n: p for n, p in settings.policies.items() if n == name}
    folder = settings.resolve(settings.run.dir) / "judge"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "served.json"
    path.write_text(dump(settings.model_copy(update={"policies": only})), encoding="utf-8")
    env = {**os.environ, settings.gateway.admin_key_env: f"ley-admin-{secrets.token_urlsafe(24)}"}
    child = Child("gateway", ["serve", "--config", str(path)], folder / "logs", env)
    url = child.start()["url"]
    rollout = Rollout(
        id=new_id("ro"), task=Task(id=new_id("judge-check"), split="val"), mode="val", created_at=time.time()
    )

    def begin(connection: Connection) -> tuple[Attempt, str]:
        queue.enqueue(connection, store, [rollout])
        return queue.start_attempt(connection, store, rollout.id, "leyden judge", time.time())

    def end(connection: Connection) -> None:
        now = time.time()
        done = dataclasses.replace(attempt, ended_at=now, outcome=Outcome.COMPLETED, detail="leyden judge")
        queue.end_attempt(connection, store, done)
        queue.finish(
            connection, store, rollout.id, state=RolloutState.SUCCEEDED, outcome=Outcome.COMPLETED, reward=None,
            error_message=None, now=now,
        )  # fmt: skip

    try:
        attempt, token = store.write(begin).result(30)
        try:
            yield openai_url(url, rollout, attempt), token
        finally:
            store.write(end).result(30)
    finally:
        child.stop()


def _show(found: tuple[str, Agreement | None], bias: dict[str, Any], json_output: bool) -> None:
    name, agreed = found
    if json_output:
        rows = {key: {**dataclasses.asdict(value), "biased": value.biased} for key, value in bias.items()}
        whole = None if agreed is None else dataclasses.asdict(agreed)
        print(json.dumps({"against": name, "agreement": whole, **rows}))
        return
    console = Console(highlight=False)
    if agreed is None:
        console.print(
            f"Agreement: no rollout has both a score of the judge and {name}; import labels with `leyden label`, or "
            "name a component with --against.",
            markup=False,
            soft_wrap=True,
        )
    else:
        console.print(f"Agreement with {name}: {agreed.sentence()}.", markup=False, soft_wrap=True)
    if "position" in bias:
        position = bias["position"]
        console.print(
            f"Position: {position.num_consistent} of {position.num_pairs} pairs judged alike in both orders; of the "
            f"others {position.num_first} went to the first place and {position.num_second} to the second "
            f"(p = {position.p_value:.3f}{', BIASED' if position.biased else ''}).",
            soft_wrap=True,
        )
        length = bias["length"]
        console.print(
            f"Length: empty sentences changed the score by {length.mean_gain:+.3f} on average over "
            f"{length.num_answers} answers (p = {length.p_value:.3f}{', BIASED' if length.biased else ''}).",
            soft_wrap=True,
        )
