"""One suite over every built-in verifier: finite, never raising on what an agent may leave, deterministic."""

import json
import math
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from leyden.base.errors import VerifierError
from leyden.base.records import Task, check_reward
from leyden.rewards import library

SETTINGS: Mapping[str, dict[str, Any]] = {
    "exact": {"normalise": ["unicode", "case", "punctuation", "articles", "space"], "answer": "text"},
    "numeric": {"answer": "number"},
    "pattern": {"must": [r"\d+"], "must_not": ["(?i)sorry"]},
    "json_schema": {"inline": {"type": "object", "required": ["a"]}, "equals": "object"},
    "sql_rows": {"root": "."},
    "unit_tests": {"tests": "tests", "timeout_s": 15.0},
    "retrieval": {"answer": "documents"},
    "tool_rules": {
        "called": ["look"], "never": ["drop"], "order": ["look", "say"], "at_most": {"look": 3},
        "arguments": {"look": {"type": "object", "required": ["id"]}}, "spans": True,
    },
    "cost": {"usd_per_million": {"input": 1.0, "output": 2.0}},
    "safety": {
        "forbidden_tools": ["drop*"], "forbidden_arguments": {"*": "(?i)delete"}, "protected_files": ["keep/*"],
        "frozen_rows": ["orders"],
    },
}  # fmt: skip
ANSWER = {
    "text": "The Hague", "number": "1,234.5", "object": {"a": 1}, "sql": "select x from t order by x",
    "databases": ["one.db", "two.db"], "documents": ["doc-1", "doc-2"],
}  # fmt: skip
TASK = {"id": "t", "split": "train", "domain": "", "input": {"q": "?"}, "answer": ANSWER}
HOSTILE = [
    "", " ", "\0", "\ud800", "\ufffe\u202e", "x" * 300_000, "9" * 5000, "1e999", "nan", "-inf", "[" * 100_000,
    '{"a":' * 20_000, '{"a": NaN}', '{"a": 1e400}', "'; drop table t; --", "select 1; select 2",
    "select randomblob(1e9)",
    "with recursive r(x) as (select 1 union all select x + 1 from r) select x from r", "attach 'x.db' as y",
    "{}{0}{input.q}%s%n", '{"reward": 1.0}', "((((((((((a+)+)+)+)+)+)+)+)+)+", "\\", "<xml/>", "1" + ",000" * 1000,
]  # fmt: skip


def trace(text: str = "", **fields: Any) -> dict[str, Any]:
    state = {"files": {"keep/a": {"bytes": 1, "sha256": "0"}}, "num_files": 1, "num_bytes": 1}
    rows = {"rows": [[1, "a"]], "num_rows": 1}
    return {
        "num_calls": 1, "num_prompt_tokens": 3, "num_completion_tokens": 2, "messages": [], "final_text": text,
        "outcome": "completed", "exit_code": 0, "stdout_tail": text, "duration_s": 0.5,
        "calls": [{"id": "c", "text": text, "tool_calls": [{"name": "look", "arguments": {"id": 1}}]}],
        "spans": [
            {"name": name, "kind": kind, "attributes": attributes}
            for name, attributes in (("workspace", state), ("orders", rows))
            for kind in ("state_before", "state_after")
        ],
        **fields,
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Databases and tests of the project."""
    folder = tmp_path_factory.mktemp("project")
    for name, rows in (("one.db", (1, 2)), ("two.db", (3, 5))):
        with sqlite3.connect(folder / name) as connection:
            connection.execute("create table t (x)")
            connection.executemany("insert into t values (?)", [(row,) for row in rows])
        connection.close()
    (folder / "tests").mkdir()
    (folder / "tests" / "test_it.py").write_text("import made\ndef test_it(): assert made.double(2) == 4\n")
    return folder


@pytest.fixture
def score(folder: Path, tmp_path: Path) -> Any:
    def run(name: str, seen: Mapping[str, Any], task: Mapping[str, Any] = TASK, **settings: Any) -> dict[str, float]:
        verifier = library.make(f"builtin:{name}", {name: {**SETTINGS[name], **settings}}, folder)
        return verifier(task, seen, tmp_path)

    return run


def test_the_suite_has_settings_for_every_member() -> None:
    assert set(SETTINGS) == set(library.MEMBERS)


@pytest.mark.parametrize("name", [name for name in library.MEMBERS if name != "unit_tests"])
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_nothing_that_an_agent_says_raises_and_every_number_is_finite(name: str, text: str, score: Any) -> None:
    found = score(name, trace(text))
    assert tuple(sorted(found)) == tuple(sorted(library.MEMBERS[name].components))
    assert all(math.isfinite(check_reward(key, value)) for key, value in found.items())
    json.dumps(found, allow_nan=False)
    assert found == score(name, trace(text)), "equal evidence gives equal numbers"


@pytest.mark.parametrize("name", library.MEMBERS)
def test_a_workspace_full_of_traps_does_not_raise(name: str, folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "answer.txt")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "out").symlink_to("/etc/passwd")
    (tmp_path / "deep").mkdir(mode=0o000)
    (tmp_path / "made.py").write_bytes(b"\xff\xfe\0 not python")
    (tmp_path / "conftest.py").write_text("raise SystemExit(0)")
    settings: dict[str, Any] = dict(SETTINGS[name])
    if "source" in library.MEMBERS[name].settings.model_fields:
        settings["source"] = "file:answer.txt"
    found = library.make(f"builtin:{name}", {name: settings}, folder)(TASK, trace(), tmp_path)
    assert all(math.isfinite(value) for value in found.values())
    (tmp_path / "deep").chmod(0o700)


@pytest.mark.parametrize(
    "spoiled",
    [
        {"calls": [{"id": "c", "tool_calls": [{"name": "look", "arguments": "not json"}]}]},
        {"calls": [{"id": "c", "tool_calls": [{"name": "", "arguments": None}]}]},
        {"messages": ["text", None, {"role": "tool", "content": None}, {"role": "tool", "content": [{"text": 1}]}]},
        {"final_text": None, "stdout_tail": None, "duration_s": None},
    ],
    ids=["arguments", "nameless", "messages", "nothing"],
)
@pytest.mark.parametrize("name", [name for name in library.MEMBERS if name != "unit_tests"])
def test_broken_evidence_does_not_raise(name: str, spoiled: Mapping[str, Any], score: Any) -> None:
    assert all(math.isfinite(value) for value in score(name, trace("", **spoiled)).values())


@pytest.mark.parametrize("name", library.MEMBERS)
def test_an_unknown_setting_is_refused_by_name(name: str, folder: Path) -> None:
    with pytest.raises(VerifierError, match=rf"rewards.settings.{name}: colour = 'red'"):
        library.make(f"builtin:{name}", {name: {**SETTINGS[name], "colour": "red"}}, folder)


@pytest.mark.parametrize("name", ["exact", "numeric", "json_schema", "sql_rows", "retrieval"])
def test_a_task_without_an_answer_is_refused_before_the_run_and_raises_in_it(
    name: str, folder: Path, score: Any
) -> None:
    made = library.make(f"builtin:{name}", {name: SETTINGS[name]}, folder)
    made.check([Task(id="good", answer=ANSWER)])
    with pytest.raises(VerifierError, match=r"1 of 2 tasks have none .the first is 'bad'"):
        made.check([Task(id="good", answer=ANSWER), Task(id="bad", answer=None)])
    with pytest.raises(VerifierError, match="task 't' has no"):
        score(name, trace('{"a": 1}'), {**TASK, "answer": None})


@pytest.mark.parametrize(
    ("verifier", "settings", "says"),
    [
        ("builtin:exat", {}, "did you mean 'exact'"),
        ("builtin:", {}, "there are: exact"),
        ("builtin:exact+exact", {}, "names a member twice"),
        ("builtin:exact", {"cost": {}}, "does not use it"),
        ("builtin:pattern", {"pattern": {"must": ["("]}}, "no regular expression"),
        ("builtin:exact", {"exact": {"source": "file:../x"}}, "inside the workspace"),
        ("builtin:json_schema", {}, "give schema_file or inline"),
        ("builtin:tool_rules", {"tool_rules": {"arguments": {"a": {"type": 3}}}}, "JSON schema cannot be used"),
        ("builtin:cost", {"cost": {"usd_per_million": {"input": -1}}}, r"usd_per_million\.input = -1"),
    ],
)
def test_what_cannot_be_meant_is_refused(verifier: str, settings: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(VerifierError, match=says):
        library.make(verifier, settings, tmp_path)


def test_several_members_give_their_components_together(folder: Path, tmp_path: Path) -> None:
    made = library.make("builtin:exact + cost", {"exact": {"answer": "text", "normalise": ["case"]}}, folder)
    assert made(TASK, trace("the hague"), tmp_path)["exact"] == 1.0
    assert made(TASK, trace("the hague"), tmp_path)["cost_calls"] == 1.0
