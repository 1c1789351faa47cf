"""Matchers as functions of a request: nothing of the gateway runs."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.base.config import from_tree
from leyden.base.errors import RequestRefused
from leyden.gateway.matching import Matchers, system_of, tools_of

POLICIES: dict[str, Any] = {
    "planner": {"match": {"system": "plan"}},
    "writer": {"match": {"system": "^you write$", "tools": ["edit", "read"]}},
    "critic": {"match": {"tools": ["score"]}},
}


def matchers(**match: Any) -> Matchers:
    return Matchers(from_tree({"policies": POLICIES, "match": {"models": ["agent"], **match}}, base_dir=Path()))


def engine(system: str, tools: list[str]) -> dict[str, Any]:
    offered = [{"type": "function", "function": {"name": name}} for name in tools]
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "plan"}], "tools": offered}


_TOOLS = st.lists(st.sampled_from(["edit", "read", "score", "other"]), unique=True)


@given(
    system=st.sampled_from(["plan", "you write", "you write a plan", "", "else"]), tools=_TOOLS, default=st.booleans()
)
def test_one_fitting_policy_is_chosen_and_anything_else_is_the_default_or_refused(
    system: str, tools: list[str], default: bool
) -> None:
    fits = [
        name
        for name, holds in {
            "planner": "plan" in system,
            "writer": system == "you write" and {"edit", "read"} <= set(tools),
            "critic": "score" in tools,
        }.items()
        if holds
    ]
    found = matchers(default="writer" if default else "")
    body = engine(system, tools)
    if len(fits) == 1 or (not fits and default):
        assert found.policy_of("agent", lambda: body) == (fits[0] if fits else "writer")
        assert found.policy_of("agent", lambda: body) == found.policy_of("agent", lambda: engine(system, tools[::-1]))
        return
    with pytest.raises(RequestRefused) as caught:
        found.policy_of("agent", lambda: body)
    assert caught.value.kind == ("ambiguous_match" if fits else "no_match")
    assert all(f"{name} (" in str(caught.value) for name in fits or POLICIES)


def test_a_name_that_is_not_shared_is_left_alone_and_its_body_not_even_made() -> None:
    def never() -> dict[str, Any]:
        raise AssertionError("looked at")

    assert matchers().policy_of("planner", never) == "planner"


def test_only_system_and_developer_texts_are_read_in_order() -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    body = {
        "messages": [
            {"role": "system", "content": "a"},
            {"role": "user", "content": "no"},
            {"role": "developer", "content": parts},
            {"role": "system", "content": None},
        ]
    }
    assert system_of(body) == "a\nbc\n"
    assert system_of({"prompt": "you plan"}) == "" and tools_of({"prompt": "x"}) == frozenset()
