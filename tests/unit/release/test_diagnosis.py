"""Each rule on a trace made for it, the order of the rules, rules of one's own, and the judge."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.release.test_evaluation import CONFIG, call, trace

from leyden.base.errors import ConfigError, EngineError, RecordError
from leyden.base.records import Choice, Outcome, Reward, Span, Trace
from leyden.release.diagnosis import CATEGORIES, RULES, Diagnosis, diagnose
from leyden.release.diagnosis.custom import load_rules
from leyden.release.diagnosis.judge import MAX_CHARS, Judge, transcript
from leyden.release.diagnosis.summary import ADVICE, TRAINABLE

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"required": ["q"]}}}]


def failed(
    text: str = "42",
    finish: str = "stop",
    *,
    request: Any = None,
    response: Any = None,
    scores: Any = None,
    **attempt: Any,
) -> Trace:
    """A rollout that answered `text` and did not solve its task."""
    made = trace(correct=0.0, tokens=(5,))
    ids = call(5).choices[0].completion_ids
    choice = Choice(index=0, completion_ids=ids, logprobs=ids.astype("f4"), finish_reason=finish, text=text)
    one = replace(call(5), choices=(choice,), request=request or {}, response=response)
    rewards = [Reward(name=name, value=value) for name, value in {"correct": 0.0, **(scores or {})}.items()]
    return replace(made, calls=[one], rewards=rewards, attempt=replace(made.attempt, **attempt))


def asked(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"choices": [{"message": {"tool_calls": [{"id": "1", "function": function}]}}]}


def answered(text: str) -> dict[str, Any]:
    return {"tools": TOOLS, "messages": [{"role": "tool", "tool_call_id": "1", "content": text}]}


def span(kind: str, **attributes: Any) -> Span:
    return Span(id="s", rollout_id="r", attempt_id="a", name="lookup", kind=kind, attributes=attributes)


CASES: list[tuple[str, Trace]] = [
    ("infrastructure/broken", failed(outcome=Outcome.INFRA_ERROR, detail="engine gone")),
    ("infrastructure/broken", failed(outcome=Outcome.ENV_ERROR)),
    ("infrastructure/set_up", failed(diagnosis="wrong_url", detail="calls another address")),
    ("infrastructure/engine", replace(failed(), calls=[replace(call(0), status="error", http_status=502, choices=())])),
    ("budget/time", failed(outcome=Outcome.TIMEOUT)),
    ("budget/context", failed(outcome=Outcome.OVERLONG)),
    ("budget/cut_off", failed("an answer that never", "length")),
    ("format/arguments", failed("", "tool_calls", request={"tools": TOOLS}, response=asked("search", "{q:"))),
    ("format/markup", failed('<tool_call>{"name": "search"</tool_call>')),
    ("format/malformed", failed(scores={"format_ok": 0.0})),
    ("format/empty", failed("  ")),
    ("tool/wrong_call", failed(request={"tools": TOOLS}, response=asked("serch", "{}"))),
    ("tool/wrong_call", failed(request={"tools": TOOLS}, response=asked("search", "{}"))),
    ("tool/tool_score", failed(scores={"right_tool": 0.0})),
    ("data/not_retrieved", failed(scores={"retrieval_hit": 0.0})),
    ("data/nothing_found", replace(failed(), spans=[span("custom", documents=[])])),
    ("data/nothing_found", replace(failed(), spans=[span("tool", num_results=0)])),
    ("data/empty_result", failed(request=answered("[]"))),
    ("data/empty_result", failed(request=answered("Error: document 7 not found"))),
    ("tool/tool_failed", failed(request=answered("Error: rate limit reached"))),
    ("tool/tool_span", replace(failed(), spans=[span("tool", error="boom")])),
    ("execution/does_not_run", failed(scores={"executes": 0.0})),
    ("execution/crashed", failed(outcome=Outcome.AGENT_ERROR, exit_code=1)),
    ("execution/error_output", failed(stderr_tail="Traceback (most recent call last)\n  ...\nKeyError: 'x'")),
    ("reasoning/wrong_answer", failed(request=answered("the capital is Rome"), scores={"safe": 1.0})),
]


@pytest.mark.parametrize(("expected", "one"), CASES, ids=[f"{n}-{name}" for n, (name, _) in enumerate(CASES)])
def test_each_failure_is_sorted_by_its_cause(expected: str, one: Trace) -> None:
    (failure,) = diagnose([one], CONFIG, RULES).failures
    assert f"{failure.finding.category}/{failure.finding.rule}" == expected, failure
    assert failure.finding.evidence


def test_every_rule_has_a_case_and_a_name_of_its_own_and_every_category_advice() -> None:
    assert {f"{rule.category}/{rule.name}" for rule in RULES} == {name for name, _ in CASES}
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert set(TRAINABLE) == set(ADVICE) == set(CATEGORIES)


def test_counts_add_up_and_solved_rollouts_are_no_failures() -> None:
    result = diagnose([trace(), *(one for _, one in CASES)], CONFIG, RULES)
    assert result.num_solved == 1 and sum(result.counts.values()) == len(CASES) == len(result.failures)
    assert json.loads(json.dumps(result.to_json()))["counts"] == dict(result.counts)
    assert len(result.examples("data")) == 3
    assert {f.finding.rule for f in result.examples("data")} == {"not_retrieved", "nothing_found", "empty_result"}


def test_a_rollout_that_does_not_count_is_never_blamed_on_the_policy() -> None:
    unscored = replace(failed(""), rewards=[])
    (failure,) = diagnose([unscored], CONFIG, RULES).failures
    assert (failure.finding.category, failure.finding.rule) == ("infrastructure", "unscored")


def of(category: str, count: int) -> list[Trace]:
    one = next(one for name, one in CASES if name.startswith(category))
    return [replace(one, rollout=replace(one.rollout, id=f"{category}{n}")) for n in range(count)]


@pytest.mark.parametrize(
    ("failures", "remedy", "said"),
    [
        ([*of("data", 6), *of("reasoning", 4)], "no", "60 % of failures are missing data: training will not help"),
        ([*of("data", 2), *of("reasoning", 8)], "yes", "right remedy for 8 of 10 failures (80 %)"),
        ([*of("budget", 6), *of("reasoning", 4)], "partly", "part of it: 4 of 10"),
        ([trace()], "partly", "nothing to mend"),
    ],
)
def test_the_remedy_follows_from_the_counts(failures: list[Trace], remedy: str, said: str) -> None:
    result = diagnose(failures, CONFIG, RULES)
    assert result.remedy == remedy and said in " ".join(result.sentences())


def test_several_samples_say_whether_there_is_something_to_reinforce() -> None:
    def signal(*correct: float) -> Diagnosis:
        return diagnose([trace(correct=value) for value in correct], CONFIG, RULES)

    assert "1 of 1 tasks" in " ".join(signal(1.0, 0.0).sentences())
    assert "nothing to reinforce yet" in " ".join(signal(0.0, 0.0).sentences())
    assert "eval.samples" in " ".join(signal(0.0).sentences())
    with pytest.raises(RecordError, match="leyden eval"):
        diagnose([], CONFIG, RULES)


OWN = """
[[rule]]
name = "stale"
category = "data"
field = "tool_result"
pattern = "index is (old|empty)"

[[rule]]
name = "unsafe"
category = "tool"
field = "component.safe"
below = 0.5
"""


def test_rules_of_a_file_come_first(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(OWN, encoding="utf-8")
    rules = (*load_rules(path), *RULES)
    traces = [failed(request=answered("the INDEX is old")), failed(scores={"safe": 0.0}), failed()]
    found = [f.finding for f in diagnose(traces, CONFIG, rules).failures]
    assert [(f.category, f.rule) for f in found] == [
        ("data", "stale"),
        ("tool", "unsafe"),
        ("reasoning", "wrong_answer"),
    ]
    assert found[0].evidence == "tool_result has 'INDEX is old'" and found[1].evidence == "component 'safe' is 0"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[rule]", "cannot be read"),
        ("x = 1", r"holds \['x'\]"),
        (OWN.replace('name = "unsafe"', 'name = "stale"'), "'stale' stands twice"),
        (OWN.replace('"data"', '"luck"'), "'luck' is none of"),
        (OWN.replace("below = 0.5", 'below = 0.5\npattern = "x"'), "not both"),
        (OWN.replace("below = 0.5", ""), "not both"),
        (OWN.replace("component.safe", "stderr"), "below belongs to field component"),
        (OWN.replace('"tool_result"', '"component.x"'), "is no text"),
        (OWN.replace("(old", "((old"), "no regular expression"),
        (OWN.replace("below = 0.5", "below = true"), "not a number"),
        (OWN.replace('field = "tool_result"', 'field = "stdout"\ncolour = 1'), "unknown key 'colour'"),
        (OWN.replace('field = "tool_result"', ""), "name, category and field"),
    ],
)
def test_a_rule_file_that_cannot_be_used_is_refused_by_name(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=complaint):
        load_rules(path)
    with pytest.raises(ConfigError, match="no rule file"):
        load_rules(tmp_path / "missing.toml")


def test_the_judge_sees_only_the_rest_and_what_it_cannot_say_changes_nothing() -> None:
    answers = iter(['Sure! {"category": "data", "reason": "no file was given"}', "I refuse", '{"category": "luck"}'])

    def ask(prompt: str) -> str:
        assert "Transcript:" in prompt and "assistant: 42" in prompt
        try:
            return next(answers)
        except StopIteration:
            raise EngineError("the judge is down") from None

    judge = Judge(ask)
    result = diagnose([failed(), failed(), failed(), failed(), failed("  ")], CONFIG, RULES, judge=judge)
    assert [f.finding.category for f in result.failures] == ["data", "reasoning", "reasoning", "reasoning", "format"]
    assert result.failures[0].finding.rule == "judge" and "no file" in result.failures[0].finding.evidence
    assert (result.judge_asked, result.judge_unusable) == (4, 3)
    assert "3 of 4 answers of the judge named no category" in " ".join(result.sentences())


def test_a_long_transcript_is_cut_in_the_middle() -> None:
    long = failed("END", request={"messages": [{"role": "user", "content": "BEGIN" + "x" * 20_000}]})
    text = transcript(long)
    assert len(text) < MAX_CHARS + 20 and "BEGIN" in text and text.endswith("END") and "[...]" in text
    assert transcript(replace(long, calls=[])) == "(no model call)"
