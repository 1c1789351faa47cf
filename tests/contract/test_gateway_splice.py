"""Splicing end to end: an SDK, the gateway, the embedded engine, and what is recorded and would be trained."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.babbling_model import build_babbling_model
from tests.contract.gateway_room import HELLO, Room, gateway_room

from leyden.base.config import EMBEDDED_KEY_ENV, Config, LearnConfig, from_tree
from leyden.base.records import Provenance
from leyden.learning.backends.embedded.backend import EmbeddedBackend
from leyden.loop import assemble_for
from leyden.testing.running import Started
from leyden.traces.divergence import Kind
from leyden.traces.drift import Drift, drift

SEED = 12
"""Of the rollouts that are compared; with it every turn has two letters or more, which have two spellings."""


@contextmanager
def spliced_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, splice: bool) -> Iterator[tuple[Room, Config]]:
    """A gateway in front of the embedded engine of a babbling model."""
    torch.set_num_threads(1)
    policy: dict[str, Any] = {
        "model": str(build_babbling_model(tmp_path / "model")), "dtype": "float32", "max_context": 512,
        "splice": splice, "sampling": {"max_tokens": 8},
    }  # fmt: skip
    with ExitStack() as stack:
        alone = from_tree({"policies": {"main": policy}}, base_dir=tmp_path)
        backend = EmbeddedBackend("main", alone.policies["main"], LearnConfig(), version=0)
        stack.callback(backend.close)
        policy |= {"engine": backend.start(), "engine_key_env": EMBEDDED_KEY_ENV}
        monkeypatch.setenv(EMBEDDED_KEY_ENV, backend.engine_key)
        tree = {"policies": {"main": policy}}
        room = stack.enter_context(gateway_room(tmp_path, tree))
        yield room, from_tree(tree, base_dir=tmp_path)


def converse(room: Room, started: Started, turns: int, *, stream: bool) -> None:
    """An append-only harness on the OpenAI SDK."""
    messages = list(HELLO)
    with room.sdk(started) as sdk:
        for _ in range(turns):
            if stream:
                parts = sdk.chat.completions.create(model="main", messages=messages, stream=True)
                text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            else:
                whole = sdk.chat.completions.create(model="main", messages=messages)
                assert not hasattr(whole, "leyden_prompt")  # a field of the engine, none of the harness's business
                text = whole.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]


def report(room: Room, config: Config, *, stream: bool) -> Drift:
    started = room.start(seed=SEED)
    converse(room, started, 3, stream=stream)
    trace = room.trace(started)
    for call in trace.calls:
        assert call.refusal is None and len(call.choices[0].logprobs) == call.num_sampled > 0
    assert {action.drop for action in assemble_for(config, [trace]).actions} <= {None, "no_reward", "outcome"}
    return drift([trace])


@pytest.mark.parametrize("stream", [False, True])
def test_with_splicing_the_record_is_one_trajectory_of_what_the_engine_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with spliced_room(tmp_path, monkeypatch, splice=True) as (room, config):
        started = room.start()
        converse(room, started, 3, stream=stream)
        calls = room.calls(started)
        assert [call.provenance for call in calls] == [Provenance.SERVED, Provenance.SPLICED, Provenance.SPLICED]
        for earlier, later in pairwise(calls):
            served = np.concatenate([earlier.prompt_ids, earlier.choices[0].completion_ids])
            assert np.array_equal(later.prompt_ids[: len(served)], served)
        found = report(room, config, stream=stream)
        assert (found.num_trajectories, found.num_spliced, found.kinds) == (1, 2, {})


def test_without_splicing_the_same_harness_drifts_and_no_call_is_called_spliced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with spliced_room(tmp_path, monkeypatch, splice=False) as (room, config):
        found = report(room, config, stream=False)
        assert (found.num_trajectories, found.num_spliced, found.num_extending) == (3, 0, 0)
        assert sum(found.kinds.values()) == 2 and Kind.EXTENDS not in found.kinds
