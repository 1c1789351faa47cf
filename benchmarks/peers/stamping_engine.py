"""A fake engine whose streamed events carry the moment at which they were sent (`created`, nanoseconds of a clock that
all processes of a machine share), so that what lies between engine and harness can be told from what the engine waits.
"""

import argparse
import asyncio
import contextlib
import time

import uvloop

from leyden.testing import fake_engine
from leyden.testing.scripted import Behaviour, Reply

_CREATED = b'"created":1700000000'


class _Connection(fake_engine._Connection):
    def _write_chunk(self, data: bytes) -> None:
        super()._write_chunk(data.replace(_CREATED, b'"created":%d' % time.perf_counter_ns()))


def main() -> None:
    """Run until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--chunk-delay-s", type=float, required=True)
    options = parser.parse_args()
    reply = Reply(text="ok", num_tokens=options.tokens)
    engine = fake_engine.FakeEngine(Behaviour(reply=lambda body: reply, chunk_delay_s=options.chunk_delay_s))

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: _Connection(engine), "127.0.0.1", 0)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await asyncio.Event().wait()

    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(run())


if __name__ == "__main__":
    main()
