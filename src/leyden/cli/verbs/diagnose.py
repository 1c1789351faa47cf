"""`leyden diagnose`: why rollouts of an evaluation failed, and whether training is the remedy."""

import json
import os
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from leyden.base.config import Config
from leyden.base.errors import ConfigError, EngineError
from leyden.base.posting import post
from leyden.cli import wiring
from leyden.cli.backends import policy_of
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, read_config
from leyden.release.diagnosis import RULES, Diagnosis, diagnose
from leyden.release.diagnosis.custom import load_rules
from leyden.release.diagnosis.judge import Ask, Judge
from leyden.release.diagnosis.summary import TRAINABLE
from leyden.store import ledger, lookups
from leyden.traces.reader import Reader

HELP = "Sort the failures of an evaluation by cause, with examples, and say whether training is the right remedy."


def command(
    run: str = typer.Argument("", help="The run; without it the newest that was evaluated.", metavar="[RUN]"),
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    label: str = typer.Option("", "--label", help="Which evaluation of the run; by default `base`, else the newest."),
    rules: Path = typer.Option(None, "--rules", help="TOML file with rules of your own.", dir_okay=False),
    judge: str = typer.Option("", "--judge", metavar="POLICY", help="Ask this policy's engine about the rest."),
    json_output: JsonOption = False,
) -> None:
    """Print counts per cause, examples, and the advice."""
    settings = read_config(config, override)
    own = load_rules(rules) if rules else ()
    referee = Judge(ask_of(settings, judge)) if judge else None
    store = wiring.store_of(settings, create=False)
    try:
        stored = [one for one in store.read(ledger.evaluations) if one.run_id and run in ("", one.run_id)]
        found = _choose(stored, run, label)
        ids = store.read(lambda connection: lookups.evaluation_rollouts(connection, found.run_id or "", found.label))
        if not ids:
            raise ConfigError(
                f"the rollouts of evaluation {found.run_id}/{found.label} are gone from the store, though its result "
                "is kept; evaluate again with `leyden eval`"
            )
        traces = Reader(store).traces(ids)
    finally:
        store.close()
    result = diagnose(traces, settings, (*own, *RULES), judge=referee)
    about = {"run": found.run_id, "label": found.label, "policy_version": f"{found.policy}@{found.version}"}
    if json_output:
        typer.echo(json.dumps({**about, **result.to_json()}))
        return
    _show(result, f"{found.run_id}/{found.label}, {found.policy}@{found.version}")


def ask_of(settings: Config, policy: str) -> Ask:
    """How to ask the model behind a policy with an engine of its own. Raises ConfigError when it has none."""
    found = policy_of(settings, policy)
    if not found.engine:
        raise ConfigError(f"policies.{policy}.engine is empty; a judge needs the URL of an engine that is running")
    key = os.environ.get(found.engine_key_env, "") if found.engine_key_env else ""

    def ask(prompt: str) -> str:
        base = found.engine.rstrip("/").removesuffix("/v1") + "/v1"
        body = {
            "model": found.model or policy,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": found.eval.max_tokens,
            "temperature": found.eval.temperature,
        }
        answer = post(f"{base}/chat/completions", body, key=key, timeout_s=settings.gateway.upstream_timeout_s)
        text = answer.text() if answer.status == 200 else None
        if text is None:
            raise EngineError(f"the judge at {base} said nothing: {answer}", status=answer.status)
        return text

    return ask


def _choose(stored: list[ledger.StoredEvaluation], run: str, label: str) -> ledger.StoredEvaluation:
    if not stored:
        what = f"run {run!r} has no evaluation" if run else "no run was evaluated yet"
        raise ConfigError(f"{what}; `leyden eval` makes one, `leyden inspect` lists runs")
    newest = stored[-1].run_id
    mine = [one for one in stored if one.run_id == newest]
    wanted = label or ("base" if any(one.label == "base" for one in mine) else mine[-1].label)
    fits = [one for one in mine if one.label == wanted]
    if not fits:
        labels = ", ".join(one.label for one in mine)
        raise ConfigError(f"run {newest} has no evaluation {label!r}; it has: {labels}")
    return fits[-1]


def _show(result: Diagnosis, title: str) -> None:
    console = Console(highlight=False)
    table = Table(title=f"Failures of {title}", title_justify="left", box=None)
    for column in ("cause", "failures", "share", "training helps", "examples"):
        table.add_column(column, justify="right" if column in ("failures", "share") else "left")
    for name, count in result.counts.items():
        examples = result.examples(name)
        table.add_row(
            name, str(count), f"{100 * count / len(result.failures):.0f} %", TRAINABLE[name],
            "\n".join(failure.rollout_id for failure in examples),
        )  # fmt: skip
    console.print(table)
    for name in result.counts:
        for failure in result.examples(name):
            line = f"  {name}/{failure.finding.rule}, task {failure.task_id}: {failure.finding.evidence}"
            console.print(line, markup=False, soft_wrap=True)
    for sentence in result.sentences():
        console.print(sentence, markup=False, soft_wrap=True)
