"""What each built-in measure says, on cases whose answer is known."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.contract.test_reward_library import ANSWER, TASK, folder, trace

from leyden.base.config import from_tree
from leyden.base.errors import VerifierError
from leyden.base.records import Attempt, Rollout, Task, Trace
from leyden.rewards import library
from leyden.rewards.library import (
    exact_match,
    in_order,
    normalised,
    numbers_in,
    numeric_match,
    pattern_match,
    retrieval_scores,
    schema_match,
    sql_match,
    wrong_arguments,
)
from leyden.rewards.verifiers import check_verifier, open_verifier, reward_files

__all__ = ["folder"]


def test_exact_match_counts_only_what_is_not_normalised_away() -> None:
    assert exact_match(" The  Hague ", "The Hague") == 1.0
    assert exact_match("the hague", "The Hague") == 0.0
    assert exact_match("hague!", "The Hague", ("case", "punctuation", "articles", "space")) == 1.0
    assert exact_match("Paris", ["Lyon", "Paris"]) == 1.0
    assert exact_match("the", "the", ("articles", "space")) == 0.0, "nothing is left, and nothing is never right"
    assert exact_match("\ufb01ne", "fine", ("unicode",)) == 1.0


@given(st.text(max_size=40))
def test_normalising_twice_is_normalising_once(text: str) -> None:
    once = normalised(text, ("case", "punctuation", "space"))
    assert normalised(once, ("case", "punctuation", "space")) == once


@given(st.floats(-1e9, 1e9), st.floats(0, 0.5), st.floats(-2, 2))
def test_a_number_matches_exactly_within_its_tolerance(wanted: float, relative: float, times: float) -> None:
    said = wanted + times * relative * abs(wanted)
    inside = abs(float(f"{said:.12f}") - wanted) <= max(relative * abs(wanted), 0.0)
    assert numeric_match(f"{said:.12f}", wanted, relative=relative, absolute=0.0) == float(inside)


def test_numbers_are_found_as_people_write_them() -> None:
    assert numbers_in("It was 1,234.5 in 2020, -3e2 and .5; v2 and x9 are names, 1e999 is none") == [
        1234.5, 2020.0, -300.0, 0.5,
    ]  # fmt: skip
    assert numeric_match("between 3 and 4", 3, which="first") == 1.0
    assert numeric_match("between 3 and 4", 4, which="only") == 0.0


def test_patterns_must_and_must_not() -> None:
    assert pattern_match("code 42", [r"\d+"]) == 1.0
    assert pattern_match("code 42", [r"\d+"], whole=True) == 0.0
    assert pattern_match("sorry, 42", [r"\d+"], ["sorry"]) == 0.0


def test_json_has_to_parse_fit_and_equal() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    assert schema_match('{"a": 1}', schema) == 1.0
    assert schema_match('{"a": "1"}', schema) == 0.0
    assert schema_match('```json\n{"a": 1}\n```', schema) == 0.0, "nothing is repaired"
    with pytest.raises(VerifierError, match="schema cannot be used"):
        schema_match("{}", {"type": "nonsense"})


def test_a_query_that_is_right_on_one_database_only_is_wrong(folder: Path) -> None:
    both = [folder / "one.db", folder / "two.db"]
    assert sql_match("select x from t order by 1", "select x from t order by x", both) == 1.0
    assert sql_match("select 1 union select 2 order by 1", "select x from t order by x", both[:1]) == 1.0
    assert sql_match("select 1 union select 2 order by 1", "select x from t order by x", both) == 0.0
    assert sql_match("select x from t order by x desc", "select x from t order by x", both) == 0.0
    assert sql_match("select x from t order by x desc", "select x from t", both) == 1.0
    assert sql_match("delete from t", "select x from t", both) == 0.0
    with pytest.raises(VerifierError, match="reference query fails"):
        sql_match("select 1", "select nothing from nowhere", both)


def test_retrieval_ranks_the_first_hit_and_ignores_repeats() -> None:
    assert retrieval_scores(["x", "x", "b", "a"], ["a", "b"]) == (1.0, 1.0, 0.5)
    assert retrieval_scores(["x", "b", "a"], ["a"], top=2) == (0.0, 0.0, 0.0)
    made = library.make("builtin:retrieval", {"retrieval": {"answer": "documents"}}, Path())
    told = [{"role": "tool", "content": "found doc-2 and doc-10"}, {"role": "assistant", "content": "doc-1"}]
    assert made(TASK, trace(messages=told), Path())["retrieval_recall"] == 0.5, "doc-10 is not doc-1, nor is talk"


def test_tool_rules_know_order_arguments_and_counts() -> None:
    assert in_order(["a", "b", "a"], ["a", "b"]) and not in_order(["b", "a"], ["a", "b"])
    assert not in_order(["a"], ["a", "b"])
    schema = {"look": {"type": "object", "required": ["id"]}}
    assert wrong_arguments([("look", {"id": 1}), ("look", {}), ("look", "text"), ("say", {})], schema) == 2


def ran_on(tmp_path: Path, made: str, folder: Path, **settings: Any) -> dict[str, float]:
    (tmp_path / "made.py").write_text(textwrap.dedent(made))
    verifier = library.make("builtin:unit_tests", {"unit_tests": {"tests": "tests", **settings}}, folder)
    return verifier(TASK, trace(), tmp_path)


def test_unit_tests_pass_on_right_code_and_fail_on_wrong(tmp_path: Path, folder: Path) -> None:
    assert ran_on(tmp_path, "def double(x): return 2 * x", folder)["unit_tests"] == 1.0
    assert ran_on(tmp_path, "def double(x): return x", folder)["unit_tests"] == 0.0


@pytest.mark.parametrize(
    "made",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "import time; time.sleep(100)",
        "import sys, types; sys.modules['pytest'] = types.ModuleType('pytest')",
        "def double(x): x = 'a' * 2**40; return 4",
    ],
    ids=["exit", "system-exit", "hang", "replace-pytest", "memory"],
)
def test_code_that_evades_its_tests_earns_nothing(tmp_path: Path, made: str, folder: Path) -> None:
    assert ran_on(tmp_path, made, folder, timeout_s=5.0)["unit_tests"] == 0.0


def test_tampering_with_tests_and_their_configuration_does_not_help(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    (tmp_path / "conftest.py").write_text("def pytest_runtest_makereport(): raise SystemExit(0)\n")
    (tmp_path / "pytest.py").write_text("def main(a): return 0\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --collect-only\n")
    assert ran_on(tmp_path, "def double(x): return x", folder)["unit_tests"] == 0.0
    assert (tmp_path / "test_it.py").read_text() == "def test_it(): pass\n", "the workspace itself is left alone"


async def test_a_builtin_runs_in_a_worker_and_is_checked_with_the_tasks(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "rewards": {
            "verifier": "builtin:exact+cost",
            "settings": {"exact": {"answer": "text"}},
            "weights": {"exact": 1},
        }
    }
    config = from_tree(tree, base_dir=tmp_path)
    task = Task(id="t", answer=ANSWER)
    check_verifier(config, [task])
    with pytest.raises(VerifierError, match="1 of 1 tasks have none"):
        check_verifier(config, [Task(id="t")])
    pool = open_verifier(config, num_workers=1)
    assert pool is not None
    rollout = Rollout(id="r", task=task)
    attempt = Attempt(id="a", rollout_id="r", number=1, started_at=0.0)
    try:
        found = await pool.verify(task, Trace(rollout=rollout, attempt=attempt, calls=()), tmp_path)
        with pytest.raises(VerifierError, match="task 'u' has no 'text' in its answer"):
            await pool.verify(Task(id="u"), Trace(rollout=rollout, attempt=attempt, calls=()), tmp_path)
    finally:
        await pool.close()
    assert found is not None and found["exact"] == 0.0 and found["cost_calls"] == 0.0
    assert {path.name for path in reward_files(config)} == {"base.py", "exact.py", "cost.py"}


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        ({"verifier": "verify.py:verify", "settings": {"exact": {}}}, "no built-in verifier of that name is used"),
        (
            {
                "verifier": "builtin:unit_tests",
                "weights": {"unit_tests": 1},
                "settings": {"unit_tests": {"tests": "t", "timeout_s": 60}},
            },
            "not below",
        ),
        ({"verifier": "builtin:exact", "canary_verifier": "builtin:none"}, "no built-in verifier 'none'"),
        ({"verifier": "builtin:sql_rows"}, "there are no weights; set rewards.weights, for example { sql_rows = 1.0 }"),
        ({"verifier": "builtin:exact", "clip": {"exact": [1, 0]}}, "is empty"),
    ],
)
def test_settings_that_contradict_are_refused_before_the_run(tmp_path: Path, rewards: Any, says: str) -> None:
    with pytest.raises(VerifierError, match=says):
        check_verifier(from_tree({"rewards": rewards}, base_dir=tmp_path))
