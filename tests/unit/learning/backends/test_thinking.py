"""Thinking and begun answers of the embedded engine: thoughts apart from answers however text is cut, prompts that end
in the middle of a turn, and a real model that goes on with either."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.babbling_model import build_babbling_model
from tests.tiny_model import CHAT_TEMPLATE
from tests.unit.learning.backends.sampler_model import TEMPLATE, TOOL_TEMPLATE, build
from tests.unit.learning.backends.test_server import ASK, MODEL, TOOLS, Engine, teach

from leyden.base.errors import RequestRefused
from leyden.learning.backends.embedded.chat import ChatFormat
from leyden.learning.backends.embedded.model import load_model
from leyden.learning.backends.embedded.splice import Splicer, Turn
from leyden.learning.backends.embedded.thinking import Speech, Style, Thinks, ThoughtStream, style_of
from leyden.learning.backends.embedded.wire import Piece

SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
"""What released templates of hybrid models put behind the generation prompt."""
THINKING = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n" + SWITCH + "{% endif %}")
ALWAYS = TEMPLATE.replace(
    "assistant\n{% endif %}", "assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
"""A template that begins the thoughts itself."""
BEGUN = {"continue_final_message": True, "add_generation_prompt": False}
ON, OFF = ({"chat_template_kwargs": {"enable_thinking": value}} for value in (True, False))


def separated(text: str, thinks: Thinks) -> tuple[str, str]:
    """The obvious way: with the whole text at hand."""
    if thinks == "begun":
        text = "<think>" + text
    if thinks == "no" or not text.lstrip().startswith("<think>"):
        return "", text
    inside = text.lstrip()[len("<think>") :]
    thought, tag, rest = inside.partition("</think>")
    return (thought.strip(), rest.lstrip()) if tag else (inside.strip(), "")


WORDS = st.lists(st.sampled_from(["<think>", "</think>", "<", "</thi", "a", "b c", "\n", " ", "\n\n"]), max_size=9)


@given(WORDS, st.lists(st.integers(0, 60), max_size=8), st.sampled_from(["no", "may", "begun"]))
def test_however_text_is_cut_thoughts_and_answer_are_those_of_the_whole(
    words: list[str], cuts: list[int], thinks: Thinks
) -> None:
    text = "".join(words)
    stream = ThoughtStream(thinks)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [stream.push(text[a:b]) for a, b in itertools.pairwise(edges)] + [stream.finish()]
    assert ("".join(thought for thought, _ in parts), "".join(said for _, said in parts)) == separated(text, thinks)


def test_calls_are_found_behind_thoughts_and_not_in_them() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    speech = Speech("hermes", "may")
    thought, parsed = speech.push(f"<think>\nmaybe {call}\n</think>\n\n{call}", last=True)
    assert thought == f"maybe {call}" and len(parsed.calls) == 1 and parsed.content == ""


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({**BEGUN, "continue_final_message": 1}, "continue_final_message"),
        ({**BEGUN, **ON}, "continue_final_message"),
        ({"chat_template_kwargs": {"mood": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"enable_thinking": True, "thinking": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ],
)
def test_a_style_that_makes_no_sense_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        style_of(body)
    assert caught.value.field == field


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat(load_model(build(tmp_path_factory.mktemp("plain")), dtype="float32", max_context=256))


def chat_of(folder: Path, template: str) -> ChatFormat:
    return ChatFormat(load_model(build(folder, template=template), dtype="float32", max_context=256))


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_begun_prompt_is_the_usual_one_and_the_words_that_began(plain: ChatFormat) -> None:
    fresh = plain.encode(ASK).ids
    begun = plain.encode([*ASK, said("It is")], style=Style(begun=True)).ids
    assert begun == fresh + plain.loaded.encode("It is")


@pytest.mark.parametrize("last", [said(""), said("ends "), {"role": "user", "content": "x"}])
def test_what_cannot_go_on_is_refused_by_name(plain: ChatFormat, last: Any) -> None:
    with pytest.raises(RequestRefused, match="continue_final_message"):
        plain.encode([*ASK, last], style=Style(begun=True))


def test_a_template_that_rewrites_the_turn_cannot_go_on_with_it(tmp_path: Path) -> None:
    shouting = chat_of(tmp_path, TEMPLATE.replace("m['content'] or ''", "(m['content'] or '') | upper"))
    with pytest.raises(RequestRefused, match="does not show the begun answer 'It is'"):
        shouting.encode([*ASK, said("It is")], style=Style(begun=True))


def test_a_switch_reaches_the_template_and_one_that_is_missing_is_named(tmp_path: Path, plain: ChatFormat) -> None:
    hybrid, always = chat_of(tmp_path / "hybrid", THINKING), chat_of(tmp_path / "always", ALWAYS)
    on, off = (hybrid.encode(ASK, style=Style(thinking=value)) for value in (True, False))
    assert hybrid.loaded.decode(off.ids[len(on.ids) :]) == "<think>\n\n</think>\n\n"
    assert (on.thinks, off.thinks, hybrid.encode(ASK).thinks) == ("may", "no", "no")
    assert always.encode(ASK, style=Style(thinking=True)).thinks == "begun"
    assert plain.encode(ASK, style=Style(thinking=False)).ids == plain.encode(ASK).ids
    with pytest.raises(RequestRefused, match="no switch for thinking"):
        plain.encode(ASK, style=Style(thinking=True))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    template = TOOL_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n" + SWITCH + "{% endif %}")
    loaded = load_model(build(tmp_path_factory.mktemp("thinker"), template=template), dtype="float32", max_context=400)
    prompt = ChatFormat(loaded).encode(ASK, TOOLS).ids
    teach(loaded, prompt, '<think>\nI add\n</think>\n\nOk: <tool_call>{"name": "add", "arguments": {}}</tool_call>')
    made = Engine(loaded)
    yield made
    made.close()


def ask(engine: Engine, **body: Any) -> Any:
    told = {"temperature": 0, "max_tokens": 120, "return_token_ids": True, "logprobs": True, **body}
    answer = engine.post("chat/completions", **told)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_model_that_thinks_gives_thoughts_answer_and_call_apart_whole_and_streamed(engine: Engine) -> None:
    whole = ask(engine, messages=ASK, tools=TOOLS, **ON)["choices"][0]
    assert whole["message"]["reasoning_content"] == "I add" and whole["message"]["content"] == "Ok: "
    assert [call["function"]["name"] for call in whole["message"]["tool_calls"]] == ["add"]
    assert len(whole["token_ids"]) == len(whole["logprobs"]["content"]), "ids are of everything that was sampled"
    plain = ask(engine, messages=ASK, tools=TOOLS)["choices"][0]
    assert plain["token_ids"] == whole["token_ids"] and plain["message"]["content"].startswith("<think>\nI add")
    chunks = engine.sdk.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, temperature=0, max_tokens=120, stream=True, extra_body=ON
    )
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "I add"
    assert "".join(delta.content or "" for delta in deltas) == "Ok: "
    assert sum(len(delta.tool_calls or ()) for delta in deltas) == 1


def test_thoughts_that_were_cut_off_are_thoughts_and_no_answer(engine: Engine) -> None:
    cut = ask(engine, messages=ASK, tools=TOOLS, max_tokens=12, **ON)["choices"][0]
    assert cut["finish_reason"] == "length" and cut["message"]["content"] is None
    assert "I add".startswith(cut["message"]["reasoning_content"]) and cut["message"]["reasoning_content"]


def test_a_begun_answer_goes_on_with_the_tokens_that_the_whole_answer_has(engine: Engine) -> None:
    whole = ask(engine, messages=ASK, tools=TOOLS)
    begun = "<think>\nI add\n</think>\n\nOk:"
    rest = ask(engine, messages=[*ASK, said(begun)], tools=TOOLS, **BEGUN)
    cut = len(engine.loaded.encode(begun))
    ids, more = whole["choices"][0]["token_ids"], rest["choices"][0]["token_ids"]
    assert rest["prompt_token_ids"] == whole["prompt_token_ids"] + ids[:cut] and more == ids[cut:]
    assert rest["usage"]["completion_tokens"] == len(more), "what was begun is context, not sampled"
    whole_logprobs, rest_logprobs = (
        [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]] for answer in (whole, rest)
    )
    np.testing.assert_allclose(rest_logprobs, whole_logprobs[cut:], atol=1e-4)
    assert rest["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"


def test_a_count_includes_what_is_begun(engine: Engine) -> None:
    def count(messages: Any, **body: Any) -> int:
        answer = engine.http.post("/tokenize", json={"model": MODEL, "messages": messages, **body})
        assert answer.status_code == 200, answer.text
        counted: int = answer.json()["count"]
        return counted

    assert count([*ASK, said("It is")], **BEGUN) == count(ASK) + len(engine.loaded.encode("It is"))
    assert count(ASK, **OFF) > count(ASK, **ON) == count(ASK)


def test_a_begun_answer_and_thoughts_are_spliced_once_the_turn_comes_back_whole(tmp_path: Path) -> None:
    loaded = load_model(build_babbling_model(tmp_path, CHAT_TEMPLATE), dtype="float32", max_context=512)
    splicer = Splicer(ChatFormat(loaded), "none")
    asked = {"role": "user", "content": "say: abcd"}
    prepared = splicer.prepare("at", [asked, said("ab")], style=Style(begun=True))
    assert prepared.skip == "no_earlier" and re.search(r"assistant\nab$", loaded.decode(prepared.prompt.ids))
    ids = [i for letter in "cd" for i in loaded.encode(letter)]
    Turn(splicer, "at", prepared).hear(Piece(0, "cd", [], [*ids, splicer.probe.end_id], [], "stop"))
    made = splicer.prepare("at", [asked, said("abcd"), {"role": "user", "content": "more"}])
    assert made.skip is None
    served = [*prepared.prompt.ids, *ids, splicer.probe.end_id]
    assert made.prompt.ids[: len(served)] == served, "the seam between what was begun and sampled is kept"
