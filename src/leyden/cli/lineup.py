"""From the words of `leyden compare` to methods: which stored evaluation or version is meant, and what it cost to make.

Promises: an evaluation is only used for the tasks that it was made on (equal fingerprint); an unknown name is an
error that lists the known ones; what is missing is named, not guessed.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from leyden.base.config import Config
from leyden.base.errors import ConfigError
from leyden.base.records import PolicyVersion
from leyden.release.budget import step_s
from leyden.release.costs import Cost, total
from leyden.release.pooling import pooled
from leyden.release.results import Evaluation
from leyden.release.side_by_side import Method, Training
from leyden.store import ledger
from leyden.store.base import Store

_VERSION = re.compile(r"(?P<policy>.+)@(?P<number>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """What one argument means."""

    name: str
    """What it is called in the report."""
    policy: str
    """Which policy."""
    version: int
    """Which version of it."""
    stored: Evaluation | None = field(default=None)
    """Its evaluation on these tasks; None when there is none yet."""
    runs: tuple["Entrant", ...] = ()
    """What it is the pool of, where several runs stand for one method."""

    @property
    def each(self) -> tuple["Entrant", ...]:
        """Its runs, or itself."""
        return self.runs or (self,)


def line_up(store: Store, asked: Sequence[str], fingerprint: str, split: str) -> list[Entrant]:
    """What each of `asked` means: `POLICY@N`, `LABEL` or `RUN/LABEL` of a stored evaluation, several of them joined
    by `+` for the runs of one method, each with `NAME=` before it to call it something else.

    Of several evaluations that fit the newest counts. Raises ConfigError for a name that means nothing here.
    """
    versions = store.read(ledger.policy_versions)
    stored = store.read(ledger.evaluations)
    return [_entrant(one, versions, stored, fingerprint, split) for one in asked]


def methods(
    store: Store, config: Config, entrants: Sequence[Entrant], evaluated: Mapping[tuple[str, int], Evaluation]
) -> list[Method]:
    """The entrants as methods; `evaluated` has the evaluations of those that had none."""
    found = []
    for entrant in entrants:
        runs = [one.stored or evaluated[(one.policy, one.version)] for one in entrant.each]
        training = _mean([training_of(store, config, one.policy, one.version) for one in entrant.each])
        several = len(runs) > 1
        found.append(
            Method(
                name=entrant.name,
                evaluation=pooled(runs) if several else runs[0],
                training=training,
                runs=tuple(runs) if several else (),
            )
        )
    return found


def _mean(trainings: Sequence[Training]) -> Training:
    """Of one run."""
    money = [one.usd for one in trainings if one.usd is not None]
    return Training(
        minutes=fmean(one.minutes for one in trainings),
        tokens=round(fmean(one.tokens for one in trainings)),
        usd=fmean(money) if len(money) == len(trainings) else None,
    )


def training_of(store: Store, config: Config, policy: str, version: int) -> Training:
    """Minutes, tokens and money of all steps that led to a version, in its run and in those that it started from.

    Money is None when steps were made and neither their calls nor the machine has a price.
    """
    known = {one.version: one for one in store.read(lambda c: ledger.policy_versions(c, policy))}
    steps: list[ledger.Step] = []
    current, seen = known.get(version), set()
    while current is not None and current.run_id and current.version not in seen:
        seen.add(current.version)
        reached, made = current.version, _steps(store, current.run_id, policy)
        # A search chooses among all that it tried, so all of it is what the chosen prompts cost.
        steps += [step for step in made if current.kind == "prompt" or _reached(step, policy) <= reached]
        current = _started_from(current, known)
    minutes = sum(step_s(step.report) for step in steps) / 60
    cost = total(_cost(step.report) for step in steps)
    machine = minutes / 60 * config.costs.machine_usd_per_hour
    # What a search has paid its reflection model so far, in each of its rounds.
    reflection = max((float(step.report.get("reflection_usd") or 0.0) for step in steps), default=0.0)
    priced = not steps or cost.usd is not None or machine > 0
    usd = (cost.usd or 0.0) + machine + reflection
    return Training(minutes=minutes, tokens=cost.tokens, usd=usd if priced else None)


def _steps(store: Store, run_id: str, policy: str) -> Iterable[ledger.Step]:
    every = store.read(lambda c: ledger.steps(c, run_id))
    return [step for step in every if step.policy == policy or policy in step.report.get("policies", ())]


def _reached(step: ledger.Step, policy: str) -> int:
    """The version of the policy that came out of a step."""
    if step.policy == policy:
        return step.version_after
    return int(step.report["policies"][policy]["version"])


def _cost(report: Mapping[str, object]) -> Cost:
    recorded = report.get("cost")
    if isinstance(recorded, Mapping):
        return Cost.from_json(recorded)
    # A step from before costs were kept: what it sampled is known, what it read is not.
    sampled, rollouts = report.get("tokens_per_rollout"), report.get("num_rollouts")
    if isinstance(sampled, int | float) and isinstance(rollouts, int):
        return Cost(num_rollouts=rollouts, completion_tokens=round(sampled * rollouts))
    return Cost()


def _started_from(version: PolicyVersion, known: Mapping[int, PolicyVersion]) -> PolicyVersion | None:
    """The version of another run whose checkpoint this one's run began with, if it was one."""
    base = known.get(version.parent) if version.parent is not None else version
    if base is None or not base.path:
        return None
    # Several base versions may name the same model folder; only a trained one has a parent. Prompts are in no folder.
    made = [one for one in known.values() if one.parent is not None and one.kind == "weights" and one.path]
    made = [one for one in made if one.version < base.version and one.run_id != base.run_id]
    fits = [one for one in made if Path(str(one.path)) == Path(base.path)]
    return fits[-1] if fits else None


def _entrant(
    asked: str,
    versions: Sequence[PolicyVersion],
    stored: Sequence[ledger.StoredEvaluation],
    fingerprint: str,
    split: str,
) -> Entrant:
    called, equals, what = asked.partition("=")
    name, meant = (called, what) if equals else (asked, asked)
    if not name or not meant:
        raise ConfigError(
            f"{asked!r} is no version; write POLICY@N, a label, RUN/LABEL, or NAME=POLICY@N; + joins runs"
        )
    here = [one for one in stored if one.fingerprint == fingerprint and one.split == split]
    if "+" in meant and not any(meant in (one.label, f"{one.run_id}/{one.label}") for one in here):
        runs = tuple(_entrant(part, versions, stored, fingerprint, split) for part in meant.split("+"))
        return Entrant(name=name, policy=runs[0].policy, version=runs[0].version, runs=runs)
    match = _VERSION.fullmatch(meant)
    if match:
        policy, number = match["policy"], int(match["number"])
        if not any(v.policy == policy and v.version == number for v in versions):
            listed = ", ".join(v.name for v in versions) or "none"
            raise ConfigError(f"no policy version {meant!r}; known: {listed}")
        fits = [one for one in here if one.policy == policy and one.version == number]
        found = Evaluation.from_json(fits[-1].result) if fits else None
        return Entrant(name=name, policy=policy, version=number, stored=found)
    run, _, label = meant.rpartition("/")
    fits = [one for one in here if one.label == label and run in ("", one.run_id)]
    if fits:
        one = fits[-1]
        return Entrant(name=name, policy=one.policy, version=one.version, stored=Evaluation.from_json(one.result))
    raise ConfigError(_why_not(meant, label, run, stored, here, fingerprint))


def _why_not(
    meant: str,
    label: str,
    run: str,
    stored: Sequence[ledger.StoredEvaluation],
    here: Sequence[ledger.StoredEvaluation],
    fingerprint: str,
) -> str:
    elsewhere = [one for one in stored if one.label == label and run in ("", one.run_id)]
    if elsewhere:
        one = elsewhere[-1]
        return (
            f"the evaluation {meant!r} is of other tasks (fingerprint {one.fingerprint[:12]}) than the configuration "
            f"names (fingerprint {fingerprint[:12]}); name {one.policy}@{one.version} to evaluate that on these"
        )
    labels = ", ".join(sorted({f"{one.run_id}/{one.label}" for one in here})) or "none"
    return f"no version and no stored evaluation {meant!r}; evaluations of these tasks: {labels}"
