"""What a forked harness finds done: the first use of SDKs, and certificates that are read when they are needed."""

import runpy
import socket
import ssl
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.contract.test_runner_launchers import ENV

from leyden.runner import forkserver
from leyden.runner.base import Finished, LaunchSpec
from leyden.runner.local import LocalLauncher
from leyden.testing.fake_engine import FakeEngine

WARM = Path(forkserver.__file__).with_name("warm.py")


async def run(folder: Path, text: str, *args: str, preload: list[str]) -> Finished:
    """A harness of this text, forked."""
    (folder / "agent.py").write_text(textwrap.dedent(text))
    launcher = LocalLauncher(preload=preload)
    try:
        argv = [sys.executable, str(folder / "agent.py"), *args]
        return await launcher.launch(LaunchSpec(argv=argv, cwd=folder, env=ENV, timeout_s=30))
    finally:
        await launcher.close()


CALLS = {
    "openai": "openai.OpenAI(base_url=url + '/v1', api_key='k').chat.completions.create(model='m', messages=said)",
    "anthropic": "anthropic.Anthropic(base_url=url, api_key='k')"
    ".messages.create(model='m', max_tokens=4, messages=said)",
}


@pytest.mark.parametrize(("library", "answer"), [("openai", "ChatCompletion"), ("anthropic", "Message")])
async def test_the_first_call_of_a_forked_harness_imports_nothing(tmp_path: Path, library: str, answer: str) -> None:
    text = f"""
        import sys, {library}
        url, said = sys.argv[1], [{{"role": "user", "content": "hi"}}]
        before = set(sys.modules)
        print(type({CALLS[library]}).__name__, sorted(set(sys.modules) - before))
    """
    with FakeEngine() as engine:
        finished = await run(tmp_path, text, engine.url, preload=[library])
    assert (finished.stdout_tail, finished.exit_code) == (f"{answer} []\n", 0), finished.stderr_tail


def test_the_exercises_work_with_the_libraries_that_are_installed_and_leave_no_thread() -> None:
    before = threading.active_count()
    for exercise in runpy.run_path(str(WARM))["EXERCISES"].values():
        exercise()
    assert threading.active_count() == before


@pytest.fixture
def https(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A port that speaks TLS, and the certificate of its authority."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(20)

        def serve() -> None:
            while True:
                try:
                    with context.wrap_socket(listening.accept()[0], server_side=True) as connection:
                        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
                        connection.recv(1000)
                except ssl.SSLError:
                    continue
                except OSError:
                    return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1], tmp_path / "ca.pem"


TLS = """
    import asyncio, http.client, ssl, sys
    port, file = int(sys.argv[1]), sys.argv[2]

    def get(context):
        try:
            connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=10)
            connection.request("GET", "/")
            return connection.getresponse().read().decode()
        except ssl.SSLCertVerificationError as error:
            return "not trusted"

    async def stream(context):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(b"x")
            return (await reader.read())[-2:].decode()
        except ssl.SSLCertVerificationError as error:
            return "not trusted"

    print(get(ssl.create_default_context(cafile=file)), get(ssl.create_default_context()))
    print(asyncio.run(stream(ssl.create_default_context(cafile=file))))
    twice = ssl.create_default_context(cafile=file)
    print(get(twice), get(twice), len(twice.get_ca_certs()), twice.cert_store_stats()["x509_ca"])
    print(len(ssl.create_default_context(cafile=file).get_ca_certs()))
    try:
        ssl.create_default_context(cafile=file + ".missing")
    except FileNotFoundError as error:
        print("missing", error.errno)
    print("load_verify_locations" in vars(ssl.SSLContext))
"""


@pytest.mark.parametrize("preload", [[], ["ssl"]])
async def test_a_forked_harness_trusts_whom_a_plain_one_trusts(
    tmp_path: Path, https: tuple[int, Path], preload: list[str]
) -> None:
    finished: Any = await run(tmp_path, TLS, str(https[0]), str(https[1]), preload=preload)
    assert finished.exit_code == 0, finished.stderr_tail
    *said, is_deferred = finished.stdout_tail.splitlines()
    assert said == ["ok not trusted", "ok", "ok ok 1 1", "1", "missing 2"]
    assert (is_deferred == "True") == bool(preload)
