"""Keys that are gone: each is refused with what to write in its place, and that is something that exists."""

import re
from pathlib import Path

import pytest

from leyden.base import renamed
from leyden.base.config import from_tree, known_keys
from leyden.base.errors import ConfigError

NAMED = re.compile(r"(?:policies|providers|prompts|costs)\.[A-Za-z_.]+\w")


@pytest.mark.parametrize("key", renamed.SUCCESSORS)
def test_a_key_that_is_gone_is_refused_with_its_successor(key: str) -> None:
    section, _, name = key.rpartition(".")
    with pytest.raises(ConfigError) as caught:
        from_tree({section: {name: 1.0}}, base_dir=Path("."))
    said = str(caught.value)
    assert said.startswith(f"key {key!r} is gone; ") and renamed.SUCCESSORS[key] in said and "known here" not in said


def test_no_key_that_is_gone_exists_and_every_successor_does() -> None:
    known = set(known_keys())
    assert not known & set(renamed.SUCCESSORS)
    for hint in renamed.SUCCESSORS.values():
        named = NAMED.findall(hint)
        assert named and set(named) <= known, (hint, set(named) - known)


def test_names_of_tables_are_any_and_other_keys_never_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "SUCCESSORS", {"policies.NAME.old": "set policies.NAME.model"})
    with pytest.raises(ConfigError, match=r"key 'policies\.planner\.old' is gone; set policies\.NAME\.model"):
        from_tree({"policies": {"planner": {"old": 1}}}, base_dir=Path("."))
    assert renamed.successor(("policies", "old")) is None
    assert renamed.successor(("costs", "prompt_usd_per_million")) is None
    with pytest.raises(ConfigError, match=r"unknown key 'policies\.planner\.odl'; did you"):
        from_tree({"policies": {"planner": {"odl": 1}}}, base_dir=Path("."))
