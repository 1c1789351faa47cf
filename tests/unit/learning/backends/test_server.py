"""The engine over HTTP: the openai SDK and raw requests against a real server with a tiny model."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from tests.unit.learning.backends.sampler_model import TOOL_TEMPLATE, build

from leyden.learning.backends.embedded.chat import ChatFormat
from leyden.learning.backends.embedded.model import LoadedModel, load_model
from leyden.learning.backends.embedded.sampler import Sampler
from leyden.learning.backends.embedded.server import EngineServer

MODEL = "main@3"
ASK: list[Any] = [{"role": "user", "content": "hi"}]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class Engine:
    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.sampler = Sampler(loaded, version=3, seed=5)
        self.server = EngineServer("main", self.sampler, ChatFormat(loaded), tool_parser="hermes", default_max_tokens=9)
        self.url = self.server.start()
        self.sdk = openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.server.key, max_retries=0, timeout=30)
        self.http = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {self.server.key}"},
            timeout=30,
            trust_env=False,
        )

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/v1/{path}", json={"model": MODEL, **body})

    def close(self) -> None:
        self.sdk.close()
        self.http.close()
        self.server.close()
        self.sampler.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    torch.set_num_threads(1)
    made = Engine(load_model(build(tmp_path_factory.mktemp("tiny")), dtype="float32", max_context=256))
    yield made
    made.close()


def test_models_names_the_policy_with_its_version_and_context(engine: Engine) -> None:
    entry = engine.http.get("/v1/models").json()["data"][0]
    assert entry["id"] == MODEL and entry["max_model_len"] == 256
    assert engine.sdk.models.list().data[0].id == MODEL


def test_a_chat_is_counted_as_it_would_be_read(engine: Engine) -> None:
    counted = engine.http.post("/tokenize", json={"model": MODEL, "messages": ASK}).json()
    read = engine.post("chat/completions", messages=ASK, max_tokens=1, return_token_ids=True).json()
    assert counted["tokens"] == read["prompt_token_ids"]
    assert counted["count"] == read["usage"]["prompt_tokens"] and counted["max_model_len"] == 256
    with_tools = engine.http.post("/tokenize", json={"model": MODEL, "messages": ASK, "tools": TOOLS}).json()
    assert with_tools["count"] > counted["count"]
    assert engine.http.post("/tokenize", json={"model": "main@9", "messages": ASK}).status_code == 404


def test_health_needs_no_key_and_the_rest_does(engine: Engine) -> None:
    with httpx.Client(base_url=engine.url, trust_env=False) as stranger:
        assert stranger.get("/health").status_code == 200
        assert stranger.get("/v1/models").status_code == 401
        wrong = {"authorization": "Bearer wrong"}
        assert stranger.post("/v1/chat/completions", json={}, headers=wrong).status_code == 401


def test_chat_by_the_sdk_equals_its_stream(engine: Engine) -> None:
    options: Any = {"model": MODEL, "messages": ASK, "seed": 4, "max_tokens": 40, "logprobs": True,
                    "extra_body": {"return_token_ids": True}}  # fmt: skip
    whole = engine.sdk.chat.completions.create(**options)
    chunks = list(engine.sdk.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    raw: Any = whole.choices[0]
    assert len(raw.token_ids) == len(raw.logprobs.content) == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens == len(whole.prompt_token_ids)
    middle: list[Any] = [c.choices[0] for c in chunks if c.choices]
    assert "".join(c.delta.content or "" for c in middle) == raw.message.content
    assert [i for c in middle for i in getattr(c, "token_ids", [])] == raw.token_ids
    assert [e.logprob for c in middle if c.logprobs for e in c.logprobs.content] == pytest.approx(
        [e.logprob for e in raw.logprobs.content], abs=1e-4
    )
    assert middle[0].delta.role == "assistant" and middle[-1].finish_reason == raw.finish_reason
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert chunks[-1].usage == whole.usage


def test_completions_by_the_sdk_equal_their_stream_for_text_and_ids(engine: Engine) -> None:
    ids = engine.loaded.encode("hello")
    for prompt in ("hello", ids):
        options: Any = {"model": MODEL, "prompt": prompt, "seed": 4, "max_tokens": 30, "logprobs": 0,
                        "extra_body": {"return_token_ids": True}}  # fmt: skip
        whole: Any = engine.sdk.completions.create(**options)
        chunks: list[Any] = [c.choices[0] for c in engine.sdk.completions.create(**options, stream=True)]
        choice = whole.choices[0]
        assert choice.prompt_token_ids == ids
        assert "".join(c.text for c in chunks) == choice.text
        assert [i for c in chunks for i in c.token_ids] == choice.token_ids
        assert chunks[0].prompt_token_ids == choice.prompt_token_ids
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) == len(choice.token_ids)


def test_several_prompts_with_several_choices_keep_their_order(engine: Engine) -> None:
    answer = engine.post("completions", prompt=[[1, 2], [3, 4, 5]], n=2, seed=1, max_tokens=4, return_token_ids=True)
    choices = answer.json()["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2, 3]
    assert [c["prompt_token_ids"] for c in choices] == [[1, 2], [1, 2], [3, 4, 5], [3, 4, 5]]
    usage = answer.json()["usage"]
    assert usage["prompt_tokens"] == 5 and usage["completion_tokens"] == sum(len(c["token_ids"]) for c in choices)
    alone = engine.post("completions", prompt=[3, 4, 5], n=2, seed=1, max_tokens=4, return_token_ids=True).json()
    assert [c["token_ids"] for c in alone["choices"]] == [c["token_ids"] for c in choices[2:]]


def test_ids_and_logprobs_are_absent_unless_asked_for(engine: Engine) -> None:
    body = engine.post("chat/completions", messages=ASK).json()
    assert "prompt_token_ids" not in body and "token_ids" not in body["choices"][0]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] <= 9


def test_another_version_is_a_404(engine: Engine) -> None:
    for name in ("main@2", "main", "other@3", None):
        answer = engine.post("chat/completions", messages=ASK, model=name)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="main@3"):
        engine.sdk.chat.completions.create(model="main@2", messages=ASK)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("logit_bias", {"5": 1}),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("guided_json", {}),
        ("top_logprobs", 3),
        ("parallel_tool_calls", False),
        ("no_such_field", 1),
        ("tool_choice", "required"),
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", 1e-9),
        ("top_p", 0),
        ("n", 0),
        ("n", True),
        ("max_tokens", 0),
        ("seed", 1.5),
        ("stop", [""]),
        ("stop_token_ids", "x"),
        ("stream", "yes"),
        ("logprobs", 1),
        ("stream_options", {"include_usage": True}),
        ("tools", "x"),
        ("messages", []),
    ],
)
def test_what_cannot_be_honoured_is_a_400_that_names_the_field(engine: Engine, field: str, value: Any) -> None:
    answer = engine.post("chat/completions", **{"messages": ASK, "tools": TOOLS, field: value})
    assert answer.status_code == 400, answer.text
    assert field in answer.json()["error"]["message"] and answer.json()["error"]["param"].startswith(field)


@pytest.mark.parametrize(
    ("field", "value"), [("echo", True), ("suffix", "x"), ("best_of", 2), ("logprobs", 5), ("prompt", []),
                         ("prompt", None), ("prompt", [1.5]), ("prompt", [[]])]
)  # fmt: skip
def test_completions_refuse_what_they_cannot_honour(engine: Engine, field: str, value: Any) -> None:
    answer = engine.post("completions", **{"prompt": "x", field: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_neutral_values_are_taken(engine: Engine) -> None:
    answer = engine.post(
        "chat/completions", messages=ASK, frequency_penalty=0.0, logit_bias={}, user="u",
        response_format={"type": "text"}, top_logprobs=None, store=None,
        parallel_tool_calls=True, max_completion_tokens=3,
    )  # fmt: skip
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] <= 3


def test_a_body_that_is_no_json_object_is_a_400(engine: Engine) -> None:
    for content in (b"{", b"[1]", b""):
        assert engine.http.post("/v1/chat/completions", content=content).status_code == 400


def test_a_prompt_longer_than_the_context_is_a_400_with_openais_code(engine: Engine) -> None:
    answer = engine.post("chat/completions", messages=[{"role": "user", "content": "x" * 300}])
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    streamed = engine.post("completions", prompt=[1] * 256, stream=True)
    assert streamed.status_code == 400


def test_forty_clients_at_once_get_what_each_would_get_alone(engine: Engine) -> None:
    def call(i: int) -> Any:
        body = {"prompt": [i, i + 1, i + 2], "seed": i, "max_tokens": 12, "return_token_ids": True}
        return engine.post("completions", **body).json()["choices"][0]["token_ids"]

    with ThreadPoolExecutor(40) as pool:
        crowd = list(pool.map(call, range(40)))
    assert crowd[::8] == [call(i) for i in range(0, 40, 8)]


def test_a_client_that_leaves_frees_its_slots(engine: Engine) -> None:
    usual, engine.loaded.eos_ids = engine.loaded.eos_ids, ()
    try:
        before = engine.sampler.counters.num_aborted
        body = {"model": MODEL, "prompt": [1], "max_tokens": 255, "n": 30, "stream": True}
        with engine.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            engine.http.post("/v1/completions", json={**body, "stream": False}, timeout=httpx.Timeout(30, read=0.05))
        engine.sampler.pause(30)
        assert engine.sampler.num_active == 0
        assert engine.sampler.counters.num_aborted > before
        engine.sampler.resume()
    finally:
        engine.loaded.eos_ids = usual


def test_a_held_request_is_answered_after_resume(engine: Engine) -> None:
    engine.sampler.pause(30)
    answers: list[httpx.Response] = []
    caller = threading.Thread(target=lambda: answers.append(engine.post("completions", prompt=[1], max_tokens=2)))
    caller.start()
    caller.join(0.05)
    engine.sampler.resume()
    caller.join(30)
    assert answers[0].status_code == 200


def test_an_aborted_stream_says_so_in_its_finish_reason(engine: Engine) -> None:
    usual, engine.loaded.eos_ids = engine.loaded.eos_ids, ()
    body = {"model": MODEL, "prompt": [1], "max_tokens": 255, "n": 20, "stream": True}
    try:
        with engine.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            engine.sampler.pause(0.0)
            engine.sampler.resume()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    finally:
        engine.loaded.eos_ids = usual
    reasons = {e["choices"][0]["index"]: e["choices"][0]["finish_reason"] for e in events}
    assert set(reasons.values()) <= {"abort", "length"} and len(reasons) == 20


def teach(loaded: LoadedModel, prompt: list[int], answer: str) -> None:
    """Fit the model to one continuation, so that a real sample holds a tool call."""
    from leyden.learning.backends.embedded.attention import attention_scope, causal_kernel

    ids_BT = torch.tensor([[*prompt, *loaded.encode(answer), loaded.eos_ids[0]]])
    optimizer = torch.optim.Adam(loaded.model.parameters(), lr=3e-3)
    for _ in range(400):
        with attention_scope(causal_kernel):
            logits = loaded.head(loaded.hidden(ids_BT, torch.arange(ids_BT.shape[1])[None]))[0]
        loss = torch.nn.functional.cross_entropy(logits[len(prompt) - 1 : -1], ids_BT[0, len(prompt) :])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if loss.item() < 0.02:
            return


def test_a_sampled_tool_call_reaches_the_sdk_whole_and_streamed(tmp_path: Path) -> None:
    loaded = load_model(build(tmp_path, template=TOOL_TEMPLATE), dtype="float32", max_context=400)
    prompt = ChatFormat(loaded).encode(ASK, TOOLS).ids
    said = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    teach(loaded, prompt, f"Sure. {said}")
    engine = Engine(loaded)
    try:
        options: Any = {"model": MODEL, "messages": ASK, "tools": TOOLS, "temperature": 0, "max_tokens": 100}
        whole = engine.sdk.chat.completions.create(**options).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content == "Sure. "
        assert whole.message.tool_calls is not None
        function: Any = whole.message.tool_calls[0]
        assert function.function.name == "add" and json.loads(function.function.arguments) == {"a": 1}
        chunks: list[Any] = [c.choices[0] for c in engine.sdk.chat.completions.create(**options, stream=True)]
        assert "".join(c.delta.content or "" for c in chunks) == "Sure. "
        calls = [call for c in chunks for call in c.delta.tool_calls or []]
        assert [c.function.name for c in calls] == ["add"] and chunks[-1].finish_reason == "tool_calls"
        plain = engine.sdk.chat.completions.create(**options, tool_choice="none").choices[0]
        assert plain.message.content == f"Sure. {said}" and plain.finish_reason == "stop"
        answer = engine.post("chat/completions", messages=ASK, tools=TOOLS, temperature=0, max_tokens=5)
        assert answer.headers["x-leyden-rendering"] == "template" and answer.headers["x-leyden-template"]
    finally:
        engine.close()
