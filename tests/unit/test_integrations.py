"""The agents of frameworks, the script that runs them and the page that tells of them name the same frameworks."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.check import play, summary

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.parent.name for path in (ROOT / "tests" / "integrations").glob("*/agent.*"))


def test_the_script_runs_every_agent_that_is_there() -> None:
    script = (ROOT / "scripts" / "test_integrations.sh").read_text(encoding="utf-8")
    [names] = re.findall(r"\|\| set -- (.*)", script)
    assert sorted(names.split()) == FOLDERS


def test_the_page_has_a_result_for_every_agent() -> None:
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    table = page.split("| framework | versions | result |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| (\w+) \|", table, re.MULTILINE)) == FOLDERS


@pytest.mark.parametrize("name", FOLDERS)
def test_an_agent_knows_nothing_of_leyden(name: str) -> None:
    [agent] = (ROOT / "tests" / "integrations" / name).glob("agent.*")
    assert "leyden" not in agent.read_text(encoding="utf-8").lower()


def test_the_scripted_model_uses_the_tool_before_it_knows_the_sum() -> None:
    tools = [{"function": {"name": "add"}}]
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "17 + 25?"}], "tools": tools}
    assert play(asked).tool_calls[0][0] == "add"
    known = {"messages": [*asked["messages"], {"role": "tool", "content": "42"}], "tools": tools}
    assert play(known).tool_calls == () and "42" in play(known).text
    ending = {**known, "tools": [*tools, {"function": {"name": "final_answer"}}]}
    assert play(ending).tool_calls[0][0] == "final_answer"
    react = {"messages": [{"role": "user", "content": "Action Input: ..."}]}
    assert "Action: add" in play(react).text


def test_what_went_wrong_is_shown_and_cannot_break_the_table() -> None:
    assert summary("") == summary("Traceback") == "failed before it could be checked"
    assert summary('log\n{"wrong": ["a | b"]}') == "NOT AS EXPECTED: a / b"
