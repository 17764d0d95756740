"""Runs the fake provider as a process of its own until SIGTERM; decides nothing."""

from __future__ import annotations

import argparse
import asyncio
import signal

from tests.rigs.fake_provider.server import FakeProvider


async def serve(host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with FakeProvider(host, port) as fake:
        print(f"fake provider on {fake.url}", flush=True)  # noqa: T201 - a program of its own
        await stop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    asyncio.run(serve(given.host, given.port))


if __name__ == "__main__":
    main()
