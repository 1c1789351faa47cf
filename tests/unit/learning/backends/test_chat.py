"""The chat template: what is rendered, what is refused, and where demonstrations are cut."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.learning.backends.sampler_model import TEMPLATE, TOOL_TEMPLATE, build

from leyden.base.errors import ModelUnusable, RequestRefused
from leyden.learning.backends.embedded.chat import ChatFormat
from leyden.learning.backends.embedded.model import load_model
from leyden.learning.backends.embedded.tools import parse

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ASK = [{"role": "user", "content": "1+2?"}]


def chat_with(folder: Path, template: str = TEMPLATE) -> ChatFormat:
    return ChatFormat(load_model(build(folder, template=template), dtype="float32", max_context=512))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return chat_with(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return chat_with(tmp_path_factory.mktemp("tooled"), TOOL_TEMPLATE)


def text(chat: ChatFormat, ids: list[int]) -> str:
    return chat.loaded.decode(ids)


def test_the_prompt_is_the_rendered_template_with_the_generation_prompt(plain: ChatFormat) -> None:
    prompt = plain.encode([{"role": "system", "content": "be brief"}, *ASK])
    assert text(plain, prompt.ids) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.rendering == "template"


def test_text_parts_are_joined_and_images_are_refused_by_name(plain: ChatFormat) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\na\nb<|im_end|>" in text(plain, plain.encode([{"role": "user", "content": parts}]).ids)
    image = [{"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(RequestRefused, match=r"messages\[0\].content\[0\].*image_url"):
        plain.encode([{"role": "user", "content": image}])


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "at least one"),
        ("hello", "list"),
        ([3], r"messages\[0\]"),
        ([{"role": "developer", "content": "x"}], "developer"),
        ([{"role": "user", "content": None}], "no content"),
        ([{"role": "user", "content": 3}], "int"),
        ([{"role": "user", "content": "x", "audio": {"id": 1}}], "audio"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "not JSON"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]}],
            "no JSON object",
        ),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused_by_name(plain: ChatFormat, messages: Any, named: str) -> None:
    with pytest.raises(RequestRefused, match=named) as refused:
        plain.encode(messages)
    assert refused.value.status == 400


def test_null_extras_of_an_sdk_message_are_no_obstacle(plain: ChatFormat) -> None:
    message = {"role": "assistant", "content": "3", "refusal": None, "audio": None, "tool_calls": None}
    assert "assistant\n3<|im_end|>" in text(plain, plain.encode([*ASK, message, *ASK]).ids)


def test_tools_go_through_a_template_that_knows_them_and_change_the_hash(tooled: ChatFormat) -> None:
    with_tools, without = tooled.encode(ASK, TOOLS), tooled.encode(ASK)
    assert with_tools.rendering == "template" and "Tools: [" in text(tooled, with_tools.ids)
    assert with_tools.template_hash != without.template_hash


def test_a_template_that_ignores_tools_gets_them_in_the_system_message_and_says_so(plain: ChatFormat) -> None:
    prompt = plain.encode([{"role": "system", "content": "be brief"}, *ASK], TOOLS)
    assert prompt.rendering == "hermes"
    rendered = text(plain, prompt.ids)
    assert rendered.startswith("<|im_start|>system\nbe brief\n\n") and json.dumps(TOOLS[0]) in rendered


def test_a_parsed_call_and_its_answer_are_rendered_back_as_they_were_sampled(plain: ChatFormat) -> None:
    sampled = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    _, calls, _ = parse(sampled, "hermes")
    call = {
        "id": calls[0].id,
        "type": "function",
        "function": {"name": "add", "arguments": calls[0].arguments},
    }
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    answers = [{"role": "tool", "tool_call_id": calls[0].id, "content": str(n)} for n in (3, 4)]
    rendered = text(plain, plain.encode([*ASK, turn, *answers], TOOLS).ids)
    assert f"assistant\n{sampled}<|im_end|>" in rendered
    response = "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert f"<|im_start|>user\n{response}<|im_end|>" in rendered


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}, "sometimes"])
def test_a_forced_tool_call_is_refused_by_name(plain: ChatFormat, choice: Any) -> None:
    with pytest.raises(RequestRefused, match="tool_choice"):
        plain.encode(ASK, TOOLS, choice)


def test_a_template_that_raises_is_a_400(tmp_path: Path) -> None:
    chat = chat_with(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestRefused, match="roles must alternate"):
        chat.encode(ASK)


def test_a_demonstration_is_cut_where_generation_would_begin(plain: ChatFormat) -> None:
    ids, prompt_len = plain.encode_demo([*ASK, {"role": "assistant", "content": "3"}])
    assert ids[:prompt_len] == plain.encode(ASK).ids
    assert text(plain, ids[prompt_len:]) == "3<|im_end|>"
    assert ids[-1] in plain.loaded.eos_ids


def test_a_demonstration_must_end_with_the_assistant(plain: ChatFormat) -> None:
    with pytest.raises(RequestRefused, match="end with an assistant"):
        plain.encode_demo(ASK)


def test_a_template_that_renders_another_beginning_cannot_cut_demonstrations(tmp_path: Path) -> None:
    chat = chat_with(tmp_path, "{{ messages | length }}" + TEMPLATE)
    with pytest.raises(ModelUnusable, match=r"'1<\|im_start\|>user.*'2<\|im_start\|>user"):
        chat.encode_demo([*ASK, {"role": "assistant", "content": "3"}])


def test_a_template_without_an_end_token_cannot_cut_demonstrations(tmp_path: Path) -> None:
    chat = chat_with(tmp_path, "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
                               "{% if add_generation_prompt %}assistant: {% endif %}")  # fmt: skip
    with pytest.raises(ModelUnusable, match="end token"):
        chat.encode_demo([*ASK, {"role": "assistant", "content": "3"}])
