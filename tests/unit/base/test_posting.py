"""One POST: every end of it is an answer."""

import pytest

from leyden.base.posting import Answered, post
from leyden.testing.fake_engine import FakeEngine
from leyden.testing.scripted import Behaviour, Faults, Reply

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def test_what_a_model_said_is_read_and_the_key_is_sent() -> None:
    with FakeEngine(Behaviour(key="secret", reply=lambda body: Reply(text="hi"))) as engine:
        url = f"{engine.url}/v1/chat/completions"
        answer = post(url, BODY, key="secret", timeout_s=20)
        assert (answer.status, answer.text()) == (200, "hi")
        assert post(url, BODY, timeout_s=20).status == 401


def test_a_status_is_an_answer_and_no_server_is_none() -> None:
    with FakeEngine() as engine:
        engine.behaviour.faults = Faults(status=503)
        answer = post(f"{engine.url}/v1/chat/completions", BODY, timeout_s=20)
    assert answer.status == 503 and answer.text() is None and str(answer).startswith("status 503: ")
    for url in (f"{engine.url}/v1", "http://127.0.0.1:9/", "no address at all", "http://[", "ftp2://x/"):
        answer = post(url, BODY, timeout_s=20)
        assert answer.status is None and answer.body and str(answer).startswith("no answer ("), url


def test_a_proxy_for_the_outside_world_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with FakeEngine() as engine:
        assert post(f"{engine.url}/v1/chat/completions", BODY, timeout_s=20).status == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"no json", b"[]", b"null", b"{}", b'{"choices": []}', b'{"choices": [{"message": null}]}',
     b'{"choices": [{"message": {"content": 3}}]}', b"\xff"],
)  # fmt: skip
def test_an_answer_that_is_none_of_a_model_has_no_text(body: bytes) -> None:
    assert Answered(status=200, body=body).text() is None
