"""What the examination of a model sees, on models that are made to have the fault."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tiny_model import CHAT_TEMPLATE, TOOL_TEMPLATE, build_tiny_model

from leyden.base.config import LearnConfig, PolicyConfig, SamplingConfig
from leyden.learning.backends.embedded import examine
from leyden.learning.backends.embedded.backend import EmbeddedBackend

STRIPS = CHAT_TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'].split('</think>')[-1] }}")
REWRITES = CHAT_TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'] | upper }}")
NEVER_STOPS = CHAT_TEMPLATE.replace("<|im_end|>\n", "\n")
BEGINS_TWICE = "<|im_start|><|im_start|>" + CHAT_TEMPLATE.lstrip()
NO_BEGIN = CHAT_TEMPLATE.replace("<|im_start|>", "")
NO_TOOL_ROLE = "{%- if messages[-1]['role'] == 'tool' -%}{{ raise_exception('no tools') }}{%- endif -%}" + TOOL_TEMPLATE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return build_tiny_model(tmp_path_factory.mktemp("model"), pad_is_eos=True, hidden_size=32)


@pytest.fixture
def made(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddedBackend]:
    template = tmp_path / "template.jinja"
    template.write_text(getattr(request, "param", CHAT_TEMPLATE), encoding="utf-8")
    backend = EmbeddedBackend("main", config_of(folder, chat_template=str(template)), LearnConfig(), version=3)
    yield backend
    backend.close()


def config_of(folder: Path, **more: str) -> PolicyConfig:
    return PolicyConfig.model_validate(
        {"model": str(folder), "max_context": 256, "dtype": "float32", "sampling": SamplingConfig(max_tokens=8), **more}
    )


def test_a_model_without_a_fault_has_only_good_findings(made: EmbeddedBackend, folder: Path) -> None:
    found = list(examine.examine(made, config_of(folder), made.start()))
    assert [finding.level for finding in found] == ["ok"] * len(found), found
    names = ["template", "reasoning", "end token", "begin token", "pad token", "tools", "gap", "speed", "memory"]
    assert [finding.name for finding in found] == names
    assert "also ends an answer" in found[4].what and "main" not in found[0].what


@pytest.mark.parametrize("made", [REWRITES], indirect=True)
def test_a_template_that_rewrites_a_turn_is_told_with_the_place(made: EmbeddedBackend) -> None:
    found = examine.appending(made)
    assert found.level == "warning" and "'ure.<" in found.what and "'URE.<" in found.what


@pytest.mark.parametrize("made", [STRIPS], indirect=True)
def test_a_template_that_strips_reasoning_is_told(made: EmbeddedBackend) -> None:
    assert examine.appending(made).level == "ok"
    assert examine.reasoning(made).level == "warning"


@pytest.mark.parametrize("made", [NEVER_STOPS], indirect=True)
def test_an_answer_that_is_not_taught_to_end_is_a_problem(made: EmbeddedBackend) -> None:
    found = examine.end_token(made)
    assert found.level == "problem" and "does not end the last assistant turn" in found.what


@pytest.mark.parametrize("made", [BEGINS_TWICE], indirect=True)
def test_a_begin_token_that_is_there_twice_is_a_problem(made: EmbeddedBackend) -> None:
    assert examine.begin_token(made.loaded).level == "problem"


@pytest.mark.parametrize("made", [NO_BEGIN], indirect=True)
def test_a_begin_token_that_only_the_tokenizer_knows_is_a_warning(
    made: EmbeddedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert examine.begin_token(made.loaded).level == "ok", "this tokenizer adds nothing of its own"
    plain = type(made.loaded).encode

    def adding(self: object, text: str, *, special: bool = False) -> list[int]:
        begin = [made.loaded.tokenizer.bos_token_id] if special else []
        return begin + plain(made.loaded, text)

    monkeypatch.setattr(type(made.loaded), "encode", adding)
    assert examine.begin_token(made.loaded).level == "warning"


@pytest.mark.parametrize("made", [TOOL_TEMPLATE], indirect=True)
def test_tool_calls_are_read_back_by_the_parser_that_fits(made: EmbeddedBackend, folder: Path) -> None:
    assert examine.tools(made, config_of(folder)).level == "ok"
    found = examine.tools(made, config_of(folder, tool_parser="none"))
    assert found.level == "warning" and "'none' does not read it back" in found.what


@pytest.mark.parametrize("made", [NO_TOOL_ROLE], indirect=True)
def test_a_template_that_cannot_render_tools_is_told(made: EmbeddedBackend, folder: Path) -> None:
    found = examine.tools(made, config_of(folder))
    assert found.level == "warning" and "no tools" in found.what


def test_a_sampler_that_disagrees_with_the_trainer_is_a_problem(
    made: EmbeddedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = made.logprobs
    monkeypatch.setattr(made, "logprobs", lambda batch: np.asarray(exact(batch)) - 0.01 * (batch.temperature_A[0] > 1))
    gap, _ = examine.gap(made, made.start())
    assert gap.level == "problem" and "1.0e-02 nats on average at temperature 1.5" in gap.what
