"""Splicing with a tokenizer that has two spellings: what the engine reads next is what it served before."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tests.babbling_model import ENDLESS, LETTERS, REWRITING, STRIPPING, TRIMMING, build_babbling_model
from tests.tiny_model import CHAT_TEMPLATE, TOOL_TEMPLATE
from tests.unit.traces.making import make_call, make_trace

from leyden.base import config
from leyden.base.config import LearnConfig, PolicyConfig, SamplingConfig
from leyden.base.errors import ConfigError, ModelUnusable
from leyden.base.records import Call, Provenance
from leyden.learning.backends.embedded.backend import EmbeddedBackend
from leyden.learning.backends.embedded.chat import ChatFormat
from leyden.learning.backends.embedded.model import load_model
from leyden.learning.backends.embedded.splice import Splicer, Turn, probe
from leyden.learning.backends.embedded.tools import ToolCall
from leyden.learning.backends.embedded.wire import Piece
from leyden.traces.divergence import Kind
from leyden.traces.drift import drift

ASK = {"role": "user", "content": "say: abcd"}
MORE = {"role": "user", "content": "and now?"}


class Engine:
    """The engine of one policy, and a harness that appends to its conversation."""

    def __init__(self, folder: Path, *, splice: bool) -> None:
        torch.set_num_threads(1)
        policy = PolicyConfig(
            model=str(folder), dtype="float32", max_context=512, sampling=SamplingConfig(max_tokens=12), splice=splice
        )
        self.backend = EmbeddedBackend("main", policy, LearnConfig(), version=1)
        self.http = httpx.Client(
            base_url=self.backend.start(),
            headers={"authorization": f"Bearer {self.backend.engine_key}"},
            timeout=30,
            trust_env=False,
        )

    def ask(self, messages: list[Any], attempt: str = "at", **body: Any) -> Any:
        answer = self.http.post(
            "/v1/chat/completions",
            headers={"x-leyden-attempt": attempt},
            json={"model": "main@1", "messages": messages, "return_token_ids": True, "logprobs": True, **body},
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def converse(self, turns: int, attempt: str = "at", **body: Any) -> list[Call]:
        """An append-only agent: its calls as they would be recorded."""
        messages: list[Any] = [ASK]
        calls = []
        for turn in range(turns):
            answer = self.ask(messages, attempt, seed=turn, **body)
            choice = answer["choices"][0]
            spliced = answer.get("leyden_prompt") == "spliced"
            calls.append(
                make_call(
                    f"{attempt}-{turn}",
                    prompt=answer["prompt_token_ids"],
                    completions=[choice["token_ids"]],
                    seq=turn,
                    provenance=Provenance.SPLICED if spliced else Provenance.SERVED,
                    request={"messages": list(messages)},
                    response=answer,
                )
            )
            messages += [{"role": "assistant", "content": choice["message"]["content"]}, MORE]
        return calls

    def close(self) -> None:
        self.http.close()
        self.backend.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_babbling_model(tmp_path_factory.mktemp("models") / "babbling")


@pytest.fixture
def engine_of(folder: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(where: Path = folder, *, splice: bool = True) -> Engine:
        made.append(Engine(where, splice=splice))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_with_splicing_an_append_only_agent_is_one_trajectory_and_without_it_drifts(
    engine_of: Callable[..., Engine],
) -> None:
    reports = {}
    for splice in (False, True):
        engine = engine_of(splice=splice)
        traces = [make_trace(f"r{n}", calls=engine.converse(4, f"at{n}")) for n in range(3)]
        reports[splice] = drift(traces, decode=engine.backend.loaded.decode)
    without, with_it = reports[False], reports[True]
    assert (without.num_spliced, with_it.num_spliced) == (0, 3 * 3)
    assert without.kinds == {Kind.RETOKENIZED: 3 * 3} and without.num_extending == 0
    assert with_it.kinds == {} and with_it.num_extending == 3 * 3
    assert (without.num_trajectories, with_it.num_trajectories) == (3 * 4, 3)
    assert with_it.num_unique < without.num_unique
    assert "9 spliced" in with_it.sentence() and "retokenized" in without.sentence()


def test_a_spliced_prompt_begins_with_all_served_ids_and_says_what_the_template_says(
    engine_of: Callable[..., Engine],
) -> None:
    engine = engine_of()
    first, second = engine.converse(2)
    served = np.concatenate([first.prompt_ids, first.choices[0].completion_ids])
    assert np.array_equal(second.prompt_ids[: len(served)], served)
    loaded = engine.backend.loaded
    text = loaded.render(second.request["messages"])
    assert loaded.decode(second.prompt_ids.tolist()) == text
    assert second.prompt_ids.tolist() != loaded.encode(text)
    splicer = engine.backend.server.splicer
    assert splicer is not None
    assert (splicer.counts.num_spliced, splicer.counts.num_drift_prevented) == (1, 1)
    assert splicer.counts.num_shared_tokens == len(served)
    assert splicer.counts.skipped == {"no_earlier": 1}


def test_streams_are_remembered_and_marked_as_whole_answers_are(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()
    body = {"model": "main@1", "messages": [ASK], "return_token_ids": True, "seed": 0, "stream": True}
    texts: list[str] = []
    ids: list[int] = []
    prompt: list[int] = []
    with engine.http.stream("POST", "/v1/chat/completions", json=body, headers={"x-leyden-attempt": "at"}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "leyden_prompt" not in chunk
                prompt = chunk.get("prompt_token_ids", prompt)
                for choice in chunk["choices"]:
                    texts.append(choice["delta"].get("content") or "")
                    ids += choice.get("token_ids", [])
    messages = [ASK, {"role": "assistant", "content": "".join(texts)}, MORE]
    answer = engine.ask(messages)
    assert answer["leyden_prompt"] == "spliced"
    assert answer["prompt_token_ids"][: len(prompt) + len(ids)] == prompt + ids
    chunks = engine.http.post(
        "/v1/chat/completions", json={**body, "messages": messages}, headers={"x-leyden-attempt": "at"}
    ).text
    assert json.loads(chunks.split("\n")[0][6:])["leyden_prompt"] == "spliced"


def test_another_attempt_and_no_attempt_get_a_rendered_prompt(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()
    call = engine.converse(1)[0]
    content = call.response["choices"][0]["message"]["content"]  # type: ignore[index]
    messages = [ASK, {"role": "assistant", "content": content}, MORE]
    for attempt in ("other", ""):
        answer = engine.ask(messages, attempt)
        assert "leyden_prompt" not in answer
        assert answer["prompt_token_ids"] == engine.backend.loaded.encode(engine.backend.loaded.render(messages))


def test_an_answer_that_the_harness_edited_is_rendered_anew(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()
    engine.converse(1)
    assert "leyden_prompt" not in engine.ask([ASK, {"role": "assistant", "content": "edited"}, MORE])


def test_a_turn_that_was_cut_by_length_gets_the_end_of_its_turn_as_read_tokens(
    engine_of: Callable[..., Engine],
) -> None:
    engine = engine_of()
    calls = engine.converse(2, max_tokens=2)
    first, second = calls
    assert first.response["choices"][0]["finish_reason"] == "length"  # type: ignore[index]
    served = [*first.prompt_ids.tolist(), *first.choices[0].completion_ids.tolist()]
    assert second.provenance is Provenance.SPLICED
    end = engine.backend.loaded.eos_ids[-1]
    assert second.prompt_ids[: len(served) + 1].tolist() == [*served, end]


def test_a_turn_that_was_cut_at_a_stop_string_is_not_spliced(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()
    (call,) = engine.converse(1, stop=list(LETTERS[:4]), max_tokens=40)
    choice = call.response["choices"][0]  # type: ignore[index]
    assert choice["stop_reason"] in LETTERS
    messages = [ASK, {"role": "assistant", "content": choice["message"]["content"]}, MORE]
    assert "leyden_prompt" not in engine.ask(messages)
    assert engine.backend.server.splicer is not None
    assert engine.backend.server.splicer.counts.skipped["stop_string"] == 1


def test_each_of_several_choices_can_be_gone_on_from(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of()
    answer = engine.ask([ASK], n=3, seed=1)
    for choice in answer["choices"]:
        messages = [ASK, {"role": "assistant", "content": choice["message"]["content"]}, MORE]
        then = engine.ask(messages)
        served = [*answer["prompt_token_ids"], *choice["token_ids"]]
        assert then["leyden_prompt"] == "spliced" and then["prompt_token_ids"][: len(served)] == served


def test_a_template_that_trims_drifts_without_splicing_and_not_with_it(
    tmp_path: Path, engine_of: Callable[..., Engine]
) -> None:
    where = build_babbling_model(tmp_path / "m", TRIMMING, extra=" " * 8)
    seen = {}
    for splice in (False, True):
        calls = engine_of(where, splice=splice).converse(4)
        seen[splice] = drift([make_trace(calls=calls)])
    assert seen[False].num_extending == 0
    assert (seen[True].num_extending, seen[True].num_spliced, seen[True].num_trajectories) == (3, 3, 1)


# -- templates, without a server ---------------------------------------------------------------------------------


def splicer_of(folder: Path, template: str = CHAT_TEMPLATE, parser: str = "none") -> Splicer:
    loaded = load_model(build_babbling_model(folder, template), dtype="float32", max_context=512)
    return Splicer(ChatFormat(loaded), parser)


def say(splicer: Splicer, messages: list[Any], text: str, calls: list[ToolCall] | None = None, **how: Any) -> None:
    """An answer in single letters to `messages`, remembered."""
    tools = how.pop("tools", None)
    loaded = splicer.chat.loaded
    ids = [i for letter in how.pop("sampled", text) for i in loaded.encode(letter)]
    prepared = splicer.prepare("at", messages, tools)
    piece = Piece(0, text, calls or [], [*ids, splicer.probe.end_id], [], how.pop("finish_reason", "stop"), **how)
    Turn(splicer, "at", prepared).hear(piece)


def test_the_probe_tells_how_a_turn_ends_and_whether_thoughts_are_stripped(tmp_path: Path) -> None:
    plain, stripping = splicer_of(tmp_path / "a"), splicer_of(tmp_path / "b", STRIPPING)
    assert plain.probe.turn_end == "<|im_end|>\n"
    assert plain.probe.end_id in plain.chat.loaded.eos_ids
    assert (plain.probe.strips_reasoning, stripping.probe.strips_reasoning) == (False, True)


@pytest.mark.parametrize(("template", "says"), [(REWRITING, "prefix-preserving"), (ENDLESS, "ends a generation")])
def test_a_template_that_can_never_be_spliced_is_refused_by_name(tmp_path: Path, template: str, says: str) -> None:
    loaded = load_model(build_babbling_model(tmp_path / "m", template), dtype="float32", max_context=512)
    with pytest.raises(ModelUnusable, match=says) as caught:
        probe(ChatFormat(loaded))
    assert "splice" in str(caught.value)


def test_stripped_thoughts_are_not_put_back(tmp_path: Path) -> None:
    splicer = splicer_of(tmp_path / "m", STRIPPING)
    say(splicer, [ASK], "<think>ab</think>cd")
    said = {"role": "assistant", "content": "<think>ab</think>cd"}
    assert splicer.prepare("at", [ASK, said, MORE]).skip == "turn_rewritten"
    say(splicer, [ASK], "abcd")
    assert splicer.prepare("at", [ASK, {"role": "assistant", "content": "abcd"}, MORE]).skip is None


def test_another_end_token_than_the_templates_is_not_spliced(tmp_path: Path) -> None:
    splicer = splicer_of(tmp_path / "m")
    loaded = splicer.chat.loaded
    loaded.eos_ids = (0, splicer.probe.end_id)
    prepared = splicer.prepare("at", [ASK])
    Turn(splicer, "at", prepared).hear(Piece(0, "ab", [], [*loaded.encode("a"), *loaded.encode("b"), 0], [], "stop"))
    assert splicer.prepare("at", [ASK, {"role": "assistant", "content": "ab"}, MORE]).skip == "other_end"


def test_tool_calls_that_the_template_prints_in_its_own_way_are_spliced_as_they_were_sampled(tmp_path: Path) -> None:
    splicer = splicer_of(tmp_path / "m", TOOL_TEMPLATE, "hermes")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    sampled = '<tool_call>{"name":"add",  "arguments":{"a":1}}</tool_call>'
    call = ToolCall("call_1", "add", '{"a": 1}')
    say(splicer, [ASK], "", [call], sampled=sampled, finish_reason="tool_calls", tools=tools)
    answered = [
        ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    made = splicer.prepare("at", answered, tools)
    assert made.skip is None
    assert sampled in splicer.chat.loaded.decode(made.prompt.ids)
    assert splicer.prepare("at", answered, None).skip == "no_earlier"  # other tools, another prompt


def test_the_longest_earlier_call_wins_whatever_was_called_in_between(tmp_path: Path) -> None:
    splicer = splicer_of(tmp_path / "m")
    said = {"role": "assistant", "content": "ab"}
    say(splicer, [ASK], "ab")
    say(splicer, [ASK, said, MORE], "ab")
    say(splicer, [{"role": "user", "content": "a sub-agent"}], "cd")
    longer = splicer.prepare("at", [ASK, said, MORE, said, MORE])
    shorter = splicer.prepare("at", [ASK, said, MORE])
    assert longer.skip is None and shorter.skip is None
    assert longer.prompt.num_shared > shorter.prompt.num_shared
    assert longer.prompt.ids[: len(shorter.prompt.ids)] == shorter.prompt.ids


def test_what_is_kept_is_bounded_and_the_oldest_attempt_goes_first(tmp_path: Path) -> None:
    loaded = load_model(build_babbling_model(tmp_path / "m"), dtype="float32", max_context=512)
    splicer = Splicer(ChatFormat(loaded), "none", max_tokens=100)
    said = {"role": "assistant", "content": "ab"}
    for attempt in range(6):
        prepared = splicer.prepare(f"at{attempt}", [ASK])
        Turn(splicer, f"at{attempt}", prepared).hear(Piece(0, "ab", [], [5, 6, splicer.probe.end_id], [], "stop"))
    skips = [splicer.prepare(f"at{attempt}", [ASK, said, MORE]).skip for attempt in range(6)]
    assert skips[0] == "no_earlier" and skips[-1] != "no_earlier"
    assert splicer._num_tokens <= 100


def test_an_aborted_answer_is_not_remembered(tmp_path: Path) -> None:
    splicer = splicer_of(tmp_path / "m")
    say(splicer, [ASK], "ab", finish_reason="abort")
    assert splicer.prepare("at", [ASK, {"role": "assistant", "content": "ab"}, MORE]).skip == "no_earlier"


def test_splicing_with_an_engine_that_renders_by_itself_is_refused() -> None:
    tree = {"policies": {"main": {"model": "m", "splice": True, "engine": "http://somewhere"}}}
    with pytest.raises(ConfigError, match="renders prompts by itself"):
        config.from_tree(tree, base_dir=Path())
    tree["policies"]["main"]["engine_key_env"] = config.EMBEDDED_KEY_ENV  # as the children of a run read it
    assert config.from_tree(tree, base_dir=Path()).policies["main"].splice
