"""All failures of an evaluation, sorted; and whether training is the remedy.

Promises: every rollout is solved or failed for exactly one named reason; counts add up; the remedy follows from the
counts by the rules written here, so the same traces give the same advice.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from leyden.base.config import Config
from leyden.base.errors import RecordError
from leyden.base.records import Trace
from leyden.release import evaluation
from leyden.release.diagnosis.base import CATEGORIES, Category, Facts, Finding, Rule
from leyden.release.diagnosis.judge import Judge

Remedy = Literal["yes", "partly", "no"]

TRAINABLE: Mapping[Category, Remedy] = {
    "infrastructure": "no",
    "budget": "partly",
    "format": "yes",
    "tool": "yes",
    "data": "no",
    "execution": "yes",
    "reasoning": "yes",
}
"""Whether learning from more attempts can mend a category."""

ADVICE: Mapping[Category, str] = {
    "infrastructure": "mend the set-up first: see the diagnoses of the attempts",
    "budget": "raise the limit, or train for shorter answers; look at which of both it is",
    "format": "a prompt with an example, or a few demonstrations (SFT), mends form fastest",
    "tool": "declare tools more clearly first; then demonstrations or RL",
    "data": "supply what is missing: documents, index, access. Training cannot teach what is not there",
    "execution": "RL has a clear signal here: whether it runs",
    "reasoning": "prompt, demonstrations and RL in that order of cost; compare them with `leyden compare`",
}
"""What to do about a category."""

NUM_EXAMPLES = 3
"""Rollouts that are named per category."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failed rollout and why."""

    rollout_id: str
    """For `leyden inspect`."""
    task_id: str
    """The task."""
    finding: Finding
    """Why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What went wrong in an evaluation."""

    num_rollouts: int
    """Rollouts looked at."""
    num_solved: int
    """Those that solved their task."""
    failures: tuple[Failure, ...]
    """The others, in their order."""
    num_sometimes: int
    """Tasks that some rollouts solved and some did not: RL has a signal on them."""
    num_repeated: int
    """Tasks with at least two rollouts that count."""
    judge_asked: int = 0
    """Failures that a judge was shown."""
    judge_unusable: int = 0
    """Of those, answers that could not be used."""

    @property
    def counts(self) -> dict[Category, int]:
        """Failures per category, most frequent first."""
        counted = Counter(failure.finding.category for failure in self.failures)
        return {name: counted[name] for name in sorted(CATEGORIES, key=lambda c: -counted[c]) if counted[name]}

    def num(self, remedy: Remedy) -> int:
        """Failures in categories that training mends that far."""
        return sum(count for name, count in self.counts.items() if TRAINABLE[name] == remedy)

    @property
    def remedy(self) -> Remedy:
        """Whether training is the right remedy: `yes` or `no` when that is more than half of the failures."""
        for answer in ("yes", "no"):
            if 2 * self.num(answer) > len(self.failures):
                return answer
        return "partly"

    def sentences(self) -> list[str]:
        """The advice in plain words."""
        if not self.failures:
            return [f"All {self.num_rollouts} rollouts solved their task; there is nothing to mend."]
        total = len(self.failures)
        said = [f"{total} of {self.num_rollouts} rollouts failed."]
        cannot = {name: count for name, count in self.counts.items() if TRAINABLE[name] == "no"}
        for name, count in cannot.items():
            what = {"data": "are missing data", "infrastructure": "are failures of the infrastructure"}[name]
            said.append(f"{100 * count / total:.0f} % of failures {what}: training will not help with them.")
        mended = self.num("yes")
        said.append(
            {
                "yes": f"Training is a right remedy for {mended} of {total} failures ({100 * mended / total:.0f} %).",
                "no": "Training is not the right remedy now: most failures are none of the policy's.",
                "partly": f"Training is the remedy for part of it: {mended} of {total} failures.",
            }[self.remedy]
        )
        said += [f"{name}: {ADVICE[name]}." for name in self.counts]
        if self.num_repeated:
            said.append(
                f"{self.num_sometimes} of {self.num_repeated} tasks with several rollouts were solved sometimes"
                + (
                    ": RL has something to reinforce there."
                    if self.num_sometimes
                    else ": RL has nothing to reinforce yet; begin with demonstrations or a better prompt."
                )
            )
        else:
            said.append("With eval.samples above 1 this would also say whether RL has something to reinforce.")
        if self.judge_unusable:
            said.append(f"{self.judge_unusable} of {self.judge_asked} answers of the judge named no category.")
        return said

    def examples(self, category: Category) -> list[Failure]:
        """A few failures of a category, of different rules first."""
        mine = [failure for failure in self.failures if failure.finding.category == category]
        firsts = {failure.finding.rule: failure for failure in reversed(mine)}
        ordered = [*dict.fromkeys([f for f in mine if firsts[f.finding.rule] is f] + mine)]
        return ordered[:NUM_EXAMPLES]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, with every failure."""
        return {**asdict(self), "counts": self.counts, "remedy": self.remedy, "sentences": self.sentences()}


def diagnose(
    traces: Sequence[Trace], config: Config, rules: Sequence[Rule], *, judge: Judge | None = None
) -> Diagnosis:
    """Sort the failures among `traces`. Raises RecordError for no traces, or rules that leave one without a reason."""
    if not traces:
        raise RecordError("no rollouts to diagnose; evaluate first, with `leyden eval` or `leyden train`")
    failures, by_task = [], dict[str, list[bool]]()
    num_solved = 0
    for trace in traces:
        counted = evaluation.successes([trace], config)
        by_task.setdefault(trace.rollout.task.id, []).extend(counted)
        if counted == [True]:
            num_solved += 1
            continue
        finding = _finding(trace, rules, counted=bool(counted))
        if judge is not None:
            finding = judge.refine(trace, finding)
        failures.append(Failure(rollout_id=trace.rollout.id, task_id=trace.rollout.task.id, finding=finding))
    repeated = [solved for solved in by_task.values() if len(solved) > 1]
    return Diagnosis(
        num_rollouts=len(traces),
        num_solved=num_solved,
        failures=tuple(failures),
        num_sometimes=sum(0 < sum(solved) < len(solved) for solved in repeated),
        num_repeated=len(repeated),
        judge_asked=judge.num_asked if judge else 0,
        judge_unusable=judge.num_unusable if judge else 0,
    )


def _finding(trace: Trace, rules: Sequence[Rule], *, counted: bool) -> Finding:
    facts = Facts(trace)
    for rule in rules:
        evidence = rule.find(facts)
        if evidence is None:
            continue
        if not counted and rule.category != "infrastructure":
            break  # it did not count for the policy, so the fault lies elsewhere
        return Finding(rule=rule.name, category=rule.category, evidence=evidence)
    if not counted:
        return Finding(rule="unscored", category="infrastructure", evidence="completed, and nobody gave it a reward")
    raise RecordError(f"no rule explains rollout {trace.rollout.id!r}; keep the built-in rules behind your own")
