"""`leyden export`: the samples of a run, token-exact, as JSON Lines or Parquet; or its traces as OTLP."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from leyden.base.config import Config
from leyden.base.errors import ConfigError
from leyden.base.records import Trace
from leyden.cli import otlp_file, wiring
from leyden.cli.verbs.options import DEFAULT_CONFIG, ConfigOption, JsonOption, SetOption, read_config
from leyden.learning import algorithms
from leyden.learning.credit import credit_alone
from leyden.loop import assemble_for
from leyden.store import queue
from leyden.traces.reader import Reader

HELP = "Write recorded samples (tokens, log-probs, reward, credit, reason of every drop) or traces (OTLP) to a file."

ROLLOUTS_AT_ONCE = 512
"""Rollouts that are decoded together: whole groups stay together and memory stays flat."""


def command(
    out: Path = typer.Argument(..., help="File to write; .jsonl or .parquet, as OTLP .jsonl or .pb.", dir_okay=False),
    config: ConfigOption = DEFAULT_CONFIG,
    override: SetOption = None,
    run: str = typer.Option("", "--run", metavar="RUN", help="Only this run."),
    form: str = typer.Option(
        "samples", "--format", metavar="FORMAT", help="samples, or otlp: every trace as OpenTelemetry spans, text only."
    ),
    live: bool = typer.Option(False, "--live", help="With otlp: the calls of live traffic instead of traces."),
    include_dropped: bool = typer.Option(
        False, "--dropped", help="Also write what would not be trained, with the reason."
    ),
    json_output: JsonOption = False,
) -> None:
    """Print how many samples and tokens were written, and what was left out and why."""
    settings = read_config(config, override)
    if live and (form != "otlp" or run):
        raise ConfigError("--live is for --format otlp without --run: live calls have no run, and are never trained")
    if live:
        otlp_file.write_live(settings, out, json_output=json_output)
        return
    if form == "otlp":
        otlp_file.write(settings, out, run or None, json_output=json_output)
        return
    if form != "samples":
        raise ConfigError(f"--format is {form!r}; use samples or otlp")
    if out.suffix not in (".jsonl", ".parquet"):
        raise ConfigError(f"{out} ends with neither .jsonl nor .parquet; name the format by the ending")
    store = wiring.store_of(settings, create=False)
    try:
        ids = store.read(lambda connection: queue.finished_groups(connection, run_id=run or None, mode="train"))
        counted: Counter[str] = Counter()
        rows = _rows(settings, Reader(store), ids, include_dropped, counted)
        number = _write_parquet(out, rows) if out.suffix == ".parquet" else _write_jsonl(out, rows)
    finally:
        store.close()
    summary = {"file": str(out), "samples": number, "rollouts": sum(map(len, ids)), **counted}
    if json_output:
        typer.echo(json.dumps(summary))
        return
    dropped = ", ".join(f"{v} {k.removeprefix('dropped_')}" for k, v in counted.items() if k.startswith("dropped_"))
    typer.echo(
        f"Wrote {number} samples of {summary['rollouts']} rollouts to {out}: {counted['sampled']} tokens sampled, "
        f"{counted['trained']} to train, dropped: {dropped or 'none'}"
    )


def _rows(
    settings: Config, reader: Reader, groups: list[list[str]], include_dropped: bool, counted: Counter[str]
) -> Iterator[dict[str, Any]]:
    policy = settings.learn.policy
    settings = settings.of(policy)
    algorithm = algorithms.make(settings.learn, settings.base_dir)
    chunk: list[str] = []
    for number, group in enumerate(groups):
        chunk += group
        if len(chunk) < ROLLOUTS_AT_ONCE and number + 1 < len(groups):
            continue
        traces: list[Trace] = reader.traces(chunk)
        chunk = []
        found = assemble_for(settings, traces)
        credit = credit_alone(traces, found, algorithm, settings.learn)
        counted["sampled"] += found.sampled
        counted["trained"] += found.trained
        for reason, tokens in found.dropped.items():
            counted[f"dropped_{reason}"] += tokens
        for action in found.actions:
            if action.drop is None or include_dropped:
                yield {
                    "rollout_id": action.rollout_id,
                    "group_id": action.group_id,
                    "call_id": action.call_id,
                    "choice": action.choice_index,
                    "policy": f"{policy}@{action.policy_version}",
                    "prompt_ids": action.prompt_ids.tolist(),
                    "completion_ids": action.completion_ids.tolist(),
                    "logprobs": action.logprobs.tolist(),
                    "temperature": action.temperature,
                    "finish_reason": action.finish_reason,
                    "outcome": str(action.outcome),
                    "reward": action.reward,
                    "credit": None if credit is None else credit.number_of(action),
                    "drop": None if action.drop is None else str(action.drop),
                }


def _write_jsonl(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    number = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            number += 1
    return number


def _write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ConfigError("Parquet needs pyarrow; install it with: pip install 'leyden[export]'") from None
    ids, numbers = pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.float32())
    text, real = pyarrow.string(), pyarrow.float64()
    kinds = {
        "rollout_id": text, "group_id": text, "call_id": text, "choice": pyarrow.int32(), "policy": text,
        "prompt_ids": ids, "completion_ids": ids, "logprobs": numbers, "temperature": real, "finish_reason": text,
        "outcome": text, "reward": real, "credit": real, "drop": text,
    }  # fmt: skip
    schema = pyarrow.schema(list(kinds.items()))
    number = 0
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        pending: list[dict[str, Any]] = []
        for row in rows:
            pending.append(row)
            number += 1
            if len(pending) == ROLLOUTS_AT_ONCE:
                writer.write_table(pyarrow.Table.from_pylist(pending, schema=schema))
                pending = []
        if pending:
            writer.write_table(pyarrow.Table.from_pylist(pending, schema=schema))
    return number
