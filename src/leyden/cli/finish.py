"""The end of a run: what the store knows about it becomes the report, and the verdict is said.

Everything is read back from the store, so the report of a resumed run covers all of it.
"""

import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leyden.base import recipes, several, stats
from leyden.base.config import Config, LearnConfig
from leyden.base.errors import ConfigError
from leyden.base.prompts import as_read
from leyden.base.records import Call, RolloutState, Trace, Verdict
from leyden.cli.decoding import decoder
from leyden.cli.prompting import prompt_data
from leyden.cli.report import ReportData, render
from leyden.cli.report.forest import forest_data
from leyden.cli.report.sections import STAGES
from leyden.cli.wiring import versions
from leyden.house import House
from leyden.learning.credit import GroupStats
from leyden.learning.schedule import diagnose
from leyden.loop import Improvement, assemble_for
from leyden.prompt_loop import STAGE
from leyden.release import evaluation, gate, holdout
from leyden.step_report import MINOR_CREDIT, finite
from leyden.store import ledger, lookups
from leyden.traces.conversation import messages_of
from leyden.traces.picture import Picture
from leyden.traces.reader import Reader

LABELS = {"base": "Base", "sft": "SFT", "final": "Trained"}
"""For people; `final` is `SFT + RL` where both stages ran."""
NUM_TRANSCRIPTS = 12
"""Pairs that the report shows: first tasks that were won, then lost, then unchanged."""


def finish(house: House, improvement: Improvement) -> dict[str, Any]:
    """Write `report.html` and `summary.json` into the run folder and say the verdict; returns the summary."""
    data = report_data(house, improvement)
    path = house.folder / "report.html"
    path.write_text(render(data), encoding="utf-8")
    found = {**summary(house, improvement, data), "report": str(path)}
    (house.folder / "summary.json").write_text(json.dumps(found, indent=2), "utf-8")
    house.store.write(lambda connection: ledger.set_run_state(connection, house.store, house.run_id, "done")).result(30)
    for label, verdict in improvement.verdicts.items():
        house.progress.say(f"Verdict against {LABELS[label].lower()} ({verdict.incumbent}): {gate.explain(verdict)}")
    for line in data.get("diagnostics", ()):
        house.progress.say(f"Note: {line}")
    house.progress.say(f"Report: {path}")
    return found


def summary(house: House, improvement: Improvement, data: ReportData) -> dict[str, Any]:
    """What a program wants to know of a run: evaluations, verdicts, minutes, tokens."""
    return {
        "run": house.run_id,
        "seed": house.config.run.seed,
        "evaluations": list(data["evaluations"]),
        "verdicts": {
            label: {**_verdict(verdict), "explanation": gate.explain(verdict)}
            for label, verdict in improvement.verdicts.items()
        },
        "diagnostics": list(data["diagnostics"]),
        "facts": dict(data["run"]["facts"]),
    }


def report_data(house: House, improvement: Improvement) -> ReportData:
    """Everything that the report shows, from the store and the evaluations of this run."""
    rows = house.store.read(lambda connection: ledger.steps(connection, house.run_id))
    steps = [{**row.report, "step": row.step + 1, "stage": row.stage} for row in rows if row.stage != STAGE]
    reinforced = [step for step in steps if step["stage"] == "rl"]
    judged = improvement.evaluations
    verdict = improvement.verdicts.get("base")
    before = judged.get("base")
    after = judged.get("final")
    data: ReportData = {
        "title": f"Leyden run {house.run_id}",
        "subtitle": ", ".join(_subtitle(house)),
        "verdict": None if verdict is None else _verdict(verdict),
        "sentence": _sentence(improvement, house.config),
        "level": house.config.eval.level,
        "run": {"facts": _facts(house, rows), "config": _config_text(house.folder)},
        "evaluations": [_evaluation(house, label, judged[label], rows) for label in judged],
        "steps": [_step(step, learn) for step, learn in _of_policies(house, steps)],
        "outcomes": [{"stage": step["stage"], "step": step["step"], "counts": step["outcomes"]} for step in reinforced],
        "conservation": [
            {
                "stage": step["stage"],
                "step": step["step"],
                "sampled": step["conservation"]["sampled"],
                "trained": step["conservation"]["trained"],
                "dropped": step["conservation"]["dropped"],
            }
            for step in reinforced
        ],
        "diagnostics": diagnostics(house.config, reinforced, judged),
    }
    if house.config.learn.improves_prompts:
        data["prompts"] = prompt_data(house, rows)
    else:
        data["forest"] = _example_forest(house)
    if before is not None and after is not None:
        data["looks"] = _looks(house, after)
        data["domains"] = _domains(before, after)
        data["transcripts"] = _transcripts(house, before, after)
    return data


def _example_forest(house: House) -> Picture | None:
    """The group that the run asked for last, as its forest."""
    ids = house.store.read(lambda connection: lookups.newest_group(connection, house.run_id))
    if not ids:
        return None
    traces = Reader(house.store).traces(ids)
    over = [t for t in traces if t.rollout.state in (RolloutState.SUCCEEDED, RolloutState.FAILED)]
    title = f"Task {traces[0].rollout.task.id}, {len(traces)} rollouts"
    return forest_data(title, over, assemble_for(house.config, over).actions, decoder(house.config))


def diagnostics(
    config: Config, steps: Sequence[Mapping[str, Any]], judged: Mapping[str, evaluation.Evaluation]
) -> list[str]:
    """Plain sentences about what a reader should know or change."""
    said = [*_about_groups(config, steps), *_about_credit(config, steps)]
    parts = [part for step in steps for part in (step.get("policies") or {"": step}).values()]
    capped = [part["importance_capped"] for part in parts if part.get("importance_capped")]
    if capped and max(capped) > 0.05:
        said.append(
            f"Up to {100 * max(capped):.0f} % of importance weights met the cap {config.learn.importance_cap}: sampler "
            "and trainer disagree; look at the gap and at the dtype of the policy."
        )
    for label, result in judged.items():
        if result.num_excluded:
            said.append(
                f"{result.num_excluded} rollouts of the evaluation {label!r} do not count: the infrastructure failed "
                "or nobody scored them."
            )
    if not judged:
        said.append("There was no holdout, so nothing was proved; set tasks.holdout.")
    return said


def _about_groups(config: Config, steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the groups of all steps say about the tasks."""
    said: list[str] = []
    groups = [
        GroupStats(group_id="", task_id=task, rewards=rewards, num_survivors=len(rewards))
        for step in steps
        for task, rewards in step.get("group_successes", ())
        if rewards
    ]
    if groups:
        found = diagnose(groups)
        share = sum(group.is_flat for group in groups) / len(groups)
        if found.memorised:
            named = ", ".join(found.memorised[:8]) + (" ..." if len(found.memorised) > 8 else "")
            said.append(
                f"{len(found.memorised)} of {found.num_tasks} tasks are memorised: every rollout solved them "
                f"({named}). They teach nothing more, so give RL tasks that were not imitated, or harder ones."
            )
        if found.hopeless:
            named = ", ".join(found.hopeless[:8]) + (" ..." if len(found.hopeless) > 8 else "")
            said.append(
                f"{len(found.hopeless)} of {found.num_tasks} tasks were never solved ({named}); they teach nothing "
                "yet: add demonstrations of their kind, easier tasks, or larger groups."
            )
        if share > 0.5:
            said.append(
                f"{100 * share:.0f} % of the groups had all rollouts solved or none; a larger learn.group_size or "
                "other tasks would waste fewer rollouts."
            )
    return said


def _about_credit(config: Config, steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether policies were pushed towards success or towards something smaller."""
    said: list[str] = []
    for name in several.trained(config):
        parts = [step.get("policies", {name: step}).get(name, {}) for step in steps]
        shares = [part["minor_credit"] for part in parts if part.get("minor_credit") is not None]
        if not shares or statistics.mean(shares) <= MINOR_CREDIT:
            continue
        algorithm = several.learn_of(config, name).algorithm
        sentence = (
            f"{100 * statistics.mean(shares):.0f} % of the credit that {name} learned from was between rollouts of "
            "equal success, where only smaller parts of the reward differ, such as length"
        )
        if recipes.recipe_of(algorithm).scale_free:
            keeping = ", ".join(recipes.keeping_scale())
            sentence += f"; {algorithm} makes differences of any size count alike, {keeping} do not"
        said.append(f"{sentence}. It can unlearn the task for them: lower their weights in rewards.weights.")
    return said


def _sentence(improvement: Improvement, config: Config) -> str:
    start = "the harness's own prompts" if config.learn.improves_prompts else "the untrained model"
    names = {"base": start, "sft": "SFT alone"}
    return " ".join(
        f"Against {names[label]}: {gate.explain(verdict)}." for label, verdict in improvement.verdicts.items()
    )


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        name: (finite(value) if isinstance(value, float) else value)
        for name, value in dataclasses.asdict(verdict).items()
    }


def _facts(house: House, rows: Sequence[ledger.Step]) -> dict[str, str | int | float]:
    run = house.store.read(lambda connection: ledger.get_run(connection, house.run_id))
    found = versions()
    tokens = sum(int(row.report.get("num_sequence_tokens", 0)) for row in rows)
    computed = sum(int(row.report.get("num_forward_tokens", 0)) for row in rows)
    return {
        "model": ", ".join(dict.fromkeys(_served(house, one.policy) for one in house.learners)),
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.created_at)),
        "minutes": round((time.time() - run.created_at) / 60, 1),
        "seed": house.config.run.seed,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "train tasks": len(house.train_tasks),
        "holdout tasks": len(house.holdout_tasks),
        "tokens of all trained sequences": tokens,
        "tokens computed (shared prefixes once)": computed,
        **{f"version of {name}": version for name, version in found.items() if name != "machine"},
    }


def _subtitle(house: House) -> list[str]:
    """What was done to which model, for each policy."""
    said = []
    for one in house.learners:
        name = f"{one.policy}: " if len(house.learners) > 1 else ""
        said.append(f"{name}{one.config.learn.algorithm} on {Path(_served(house, one.policy)).name}")
    return said


def _served(house: House, policy: str) -> str:
    """The model, or the engine that serves one that we do not know by name."""
    settings = house.config.policies[policy]
    return settings.model or settings.engine


def _config_text(folder: Path) -> str:
    path = folder / "config.json"
    if not path.exists():
        raise ConfigError(f"{path} is gone; it was written when the run started")
    return path.read_text(encoding="utf-8")


def _mean(interval: stats.Interval) -> dict[str, float | None]:
    return {"mean": finite(interval.mean), "low": finite(interval.low), "high": finite(interval.high)}


def _evaluation(house: House, label: str, result: evaluation.Evaluation, rows: Sequence[ledger.Step]) -> Any:
    run = house.store.read(lambda connection: ledger.get_run(connection, house.run_id))
    trained = {"base": [], "sft": [r for r in rows if r.stage == "sft"], "final": list(rows)}[label]
    last = max((row.created_at for row in trained), default=run.created_at)
    shown = LABELS[label]
    if label == "final":
        learned = "Prompts" if house.config.learn.improves_prompts else "RL"
        stages = (["SFT"] if house.config.sft else []) + ([learned] if house.config.learn.steps else [])
        shown = " + ".join(stages)
    return {
        "label": shown,
        "policy_version": result.policy_version,
        "pass1": _mean(result.pass1),
        "reward": _mean(result.reward),
        "tokens": result.completion_tokens,
        "minutes": (last - run.created_at) / 60 if trained else 0.0,
        "n": len(result.tasks),
        "num_excluded": result.num_excluded,
    }


def _of_policies(house: House, steps: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], LearnConfig]]:
    """Steps with the settings that they were made with; a step of several policies once for each, policy by policy."""
    if len(house.learners) == 1:
        return [(step, house.config.learn) for step in steps]
    return [
        ({**step, **step["policies"][one.policy], "of": one.policy}, one.config.learn)
        for one in house.learners
        for step in steps
        if one.policy in step.get("policies", {})
    ]


def _step(step: Mapping[str, Any], learn: LearnConfig) -> Any:
    """The keys that the report knows, under its names."""
    shown = ("stage", "step", "reward_mean", "reward_low", "reward_high", "success", "loss", "grad_norm", "kl",
             "entropy", "gap_mean", "gap_max", "num_groups", "num_zero_variance", "minor_credit")  # fmt: skip
    seconds = {name: s for name, s in step.get("seconds", {}).items() if name in ("rollouts", "update")}
    unmeasured = {name for name, weight in (("kl", learn.kl), ("entropy", learn.entropy)) if weight == 0}
    if step["stage"] == "sft":  # demonstrations were sampled by nobody
        unmeasured |= {"kl", "entropy", "gap_mean", "gap_max"}
    whose = {"stage": f"{STAGES[step['stage']]} of {step['of']}"} if "of" in step else {}
    return {
        **{name: step[name] for name in shown if name in step and name not in unmeasured},
        **whose,
        "completion_tokens_mean": step.get("tokens_per_rollout"),
        "seconds": seconds,
    }


def _looks(house: House, result: evaluation.Evaluation) -> str:
    seen = house.store.read(lambda c: ledger.evaluations(c, fingerprint=result.fingerprint))
    settings = house.config.eval
    return holdout.sentence(holdout.look_of(seen, house.run_id), settings.level, settings.looks)


def _domains(before: evaluation.Evaluation, after: evaluation.Evaluation) -> Any:
    then = {row.domain: row for row in before.domains()}
    return [
        {
            "domain": row.domain,
            "n": row.num_tasks,
            "before": _mean(then[row.domain].pass1),
            "after": _mean(row.pass1),
        }
        for row in after.domains()
    ]


def _transcripts(house: House, before: evaluation.Evaluation, after: evaluation.Evaluation) -> Any:
    """The same tasks before and after, those that changed first."""

    def solved(result: evaluation.Evaluation) -> dict[str, float]:
        return {t.task_id: sum(t.successes) / len(t.successes) for t in result.tasks if t.successes}

    was, now = solved(before), solved(after)
    both = sorted(was.keys() & now.keys(), key=lambda task: (was[task] - now[task] == 0, was[task] - now[task], task))
    won = [task for task in both if now[task] > was[task]][: NUM_TRANSCRIPTS // 2]
    lost = [task for task in both if now[task] < was[task]][: NUM_TRANSCRIPTS // 4]
    same = [task for task in both if now[task] == was[task]][: NUM_TRANSCRIPTS - len(won) - len(lost)]
    reader = Reader(house.store)
    ids = house.store.read(lambda connection: lookups.evaluation_ids(connection, house.run_id))
    pairs = []
    for task in won + lost + same:
        sides = [reader.trace(ids[(label, task)]) for label in ("base", "final")]
        asked = sides[0].rollout.task
        pairs.append(
            {
                "task_id": task,
                "domain": asked.domain,
                "title": str(asked.input.get("question") or asked.input.get("prompt") or task),
                "before": _transcript(house, sides[0], before),
                "after": _transcript(house, sides[1], after),
            }
        )
    return pairs


def _transcript(house: House, trace: Trace, result: evaluation.Evaluation) -> dict[str, Any]:
    success = evaluation.successes([trace], house.config)
    return {
        "policy_version": result.policy_version,
        "outcome": str(trace.attempt.outcome or trace.rollout.state),
        "success": success[0] if success else None,
        "reward": trace.rollout.reward,
        "components": {reward.name: reward.value for reward in trace.rewards if reward.call_id is None},
        "messages": conversation(trace.calls),
        "answer": trace.attempt.stdout_tail.strip().rpartition("\n")[2],
    }


def conversation(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """The messages of the last call and its answer: for an append-only harness, the whole conversation."""
    if not calls:
        return []
    last = calls[-1]
    request = as_read(last.request, last.slots.get("texts", {}))
    messages = [dict(message) for message in messages_of(request)]
    if not messages and "prompt" in request:
        messages = [{"role": "user", "content": str(request["prompt"])}]
    for choice in last.choices[:1]:
        messages.append({"role": "assistant", "content": choice.text})
    return messages
