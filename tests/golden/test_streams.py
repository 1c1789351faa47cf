"""Recorded streams: what a harness gets and what is assembled never depends on where the bytes were cut."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.golden.record import CASES, FOLDER, relayed

from leyden.gateway.dialects import BY_NAME, DIALECTS
from leyden.gateway.stream import Relay


def recorded(name: str) -> tuple[str, dict[str, Any], bytes, bytes, dict[str, Any]]:
    """(dialect, request, the engine's bytes, the harness's bytes, the assembled answer)."""
    told = orjson.loads((FOLDER / f"{name}.json").read_bytes())
    files = [(FOLDER / f"{name}.{end}").read_bytes() for end in ("engine", "client")]
    return Path(name).parts[0], told["request"], files[0], files[1], told["assembled"]


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_stream_is_relayed_and_assembled_as_recorded(name: str) -> None:
    dialect, request, data, public, assembled = recorded(name)
    assert relayed(dialect, request, [data]) == (public, assembled)


@pytest.mark.parametrize("name", ["openai_chat/text", "openai_chat/tools"])
def test_a_cut_at_any_byte_changes_nothing(name: str) -> None:
    dialect, request, data, public, assembled = recorded(name)
    for cut in range(len(data) + 1):
        assert relayed(dialect, request, [data[:cut], data[cut:]]) == (public, assembled), cut


@pytest.mark.parametrize("name", CASES)
def test_a_stream_that_comes_byte_by_byte_changes_nothing(name: str) -> None:
    dialect, request, data, public, assembled = recorded(name)
    assert relayed(dialect, request, [data[k : k + 1] for k in range(len(data))]) == (public, assembled)


@given(st.lists(st.integers(0, 3000), max_size=12))
def test_any_cuts_change_nothing(cuts: list[int]) -> None:
    dialect, request, data, public, assembled = recorded("openai_completions/text")
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    parts = [data[a:b] for a, b in pairwise(edges)]
    assert relayed(dialect, request, parts) == (public, assembled)


@pytest.mark.parametrize("name", CASES)
def test_the_end_of_a_stream_is_held_back_until_it_is_asked_for(name: str) -> None:
    dialect, request, data, public, _ = recorded(name)
    member = BY_NAME[dialect]
    relay = Relay(member, member.parse(request))
    early = relay.feed(data)
    assert public.startswith(early) and public == early + relay.terminal()
    last = orjson.loads(early.rstrip().rpartition(b"data: ")[2])
    reasons = [choice["finish_reason"] for choice in last["choices"]]
    assert reasons == [None], "the event that ends the last choice is not among the early ones"


@pytest.mark.parametrize("name", CASES)
def test_the_assembled_answer_has_the_tokens_of_the_engine(name: str) -> None:
    dialect, _, data, _, assembled = recorded(name)
    sent: dict[int, list[int]] = {}
    for line in data.replace(b"\r", b"").split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in orjson.loads(line[6:])["choices"]:
                sent.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
    capture = BY_NAME[dialect].capture(assembled)
    assert {choice.index: choice.completion_ids for choice in capture.choices} == sent
    assert capture.usage["completion_tokens"] == sum(map(len, sent.values()))


def test_every_dialect_has_a_recorded_stream() -> None:
    assert {Path(name).parts[0] for name in CASES} == {dialect.name for dialect in DIALECTS}
