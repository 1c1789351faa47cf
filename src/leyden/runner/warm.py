"""What every forked harness would do anew: the first use of an SDK, and the certificates of connections it never makes.

Read by `forkserver.py` as a file beside it; standard library only. A library is exercised against a transport in
memory, so nothing is sent and no thread or connection is left. What a library of another version does not have is left
out: then an attempt takes as long as it would have.
"""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

_SENDING = ("anyio.streams.tls", "encodings.idna", "h11", "httpcore", "httpcore2", "jiter")
LAZY = {
    "openai": ("openai.resources.chat.completions", "openai.lib.streaming.chat", "truststore", *_SENDING),
    "anthropic": ("anthropic.resources.messages", *_SENDING),
}
"""What these libraries import when the first client is made and the first call is sent: 100 ms per attempt. Which of
them exist depends on their versions."""
HTTP_LIBRARIES = ("httpx2", "httpx")
"""What SDKs send with, newest first."""
NOWHERE = "http://127.0.0.1:9/v1"
USER = [{"role": "user", "content": "hello"}]


def warm(modules: Sequence[str]) -> None:
    """Do for the libraries among `modules` what their first call does. Never raises."""
    for module in modules:
        for lazy in LAZY.get(module, ()):
            with contextlib.suppress(ImportError):
                importlib.import_module(lazy)
        exercise = EXERCISES.get(module)
        if exercise is not None:
            with contextlib.suppress(Exception):
                exercise()
    if "ssl" in sys.modules:
        defer_certificates()


def _openai() -> None:
    """A chat completion: 50 ms of imports, of schemas of the answer and of asking for the platform."""
    openai = importlib.import_module("openai")
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "x", "choices": [choice], "usage": usage}
    with _client(openai.OpenAI, answer) as client:
        client.chat.completions.create(model="x", messages=USER)


def _anthropic() -> None:
    anthropic = importlib.import_module("anthropic")
    answer = {
        "id": "x",
        "type": "message",
        "role": "assistant",
        "model": "x",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    with _client(anthropic.Anthropic, answer) as client:
        client.messages.create(model="x", max_tokens=1, messages=USER)


EXERCISES: dict[str, Callable[[], None]] = {"openai": _openai, "anthropic": _anthropic}


def _client(make: Any, answer: dict[str, Any]) -> Any:
    """A client of an SDK that gets this answer to everything, from memory. Raises TypeError if it takes none."""
    body = json.dumps(answer).encode()
    headers = {"content-type": "application/json"}
    for library in HTTP_LIBRARIES:
        with contextlib.suppress(ImportError, TypeError):  # it is not there, or the SDK uses another
            http = importlib.import_module(library)
            transport = http.MockTransport(lambda request, http=http: http.Response(200, headers=headers, content=body))
            return make(api_key="none", base_url=NOWHERE, max_retries=0, http_client=http.Client(transport=transport))
    raise TypeError(f"{make} takes a client of none of {HTTP_LIBRARIES}")


def defer_certificates() -> None:
    """Read a file of trusted certificates at the first TLS connection of a context instead of when it is made.

    HTTP libraries give every client a context with 140 certificates, which takes 60 ms of CPU, and a harness whose
    models are behind plain HTTP makes no such connection. A file that is not there is an error at once, as it was.
    """
    import ssl

    load = ssl.SSLContext.load_verify_locations
    kept = "_certificates_to_read"

    def load_verify_locations(self: Any, cafile: Any = None, capath: Any = None, cadata: Any = None) -> None:
        if cafile is not None and capath is None and cadata is None:
            with open(os.fspath(cafile), "rb"):  # raises what loading it would raise
                self.__dict__.setdefault(kept, []).append(cafile)
        else:
            load(self, cafile, capath, cadata)

    def reading_first(name: str) -> Callable[..., Any]:
        method = getattr(ssl.SSLContext, name)

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            for cafile in self.__dict__.pop(kept, ()):
                load(self, cafile)
            return method(self, *args, **kwargs)

        return wrapped

    ssl.SSLContext.load_verify_locations = load_verify_locations  # type: ignore[method-assign]
    for name in ("wrap_socket", "wrap_bio", "get_ca_certs", "cert_store_stats"):
        setattr(ssl.SSLContext, name, reading_first(name))
