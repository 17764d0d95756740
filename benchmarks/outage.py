"""Measures an outage of the inference service and of a paid provider: affected requests and time to recover.

    python -m benchmarks.outage     OUTAGE=60 SITUATIONS=gone,silent; QUICK=1: twenty seconds

Two complete stacks with the bundled models and the fake provider as a cloud run side by side. In one the local model is
the first tier and the cloud the second, in the other it is the reverse. A request is sent every four seconds, also if
the one before has no answer yet. Then the first tier is killed (gone) or stopped (silent), and a minute later started
or continued. A request is affected if its explain record has an attempt at the first tier. The tier has recovered when
it answers a request. Probes of the gateway do not count as attempts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx2

from benchmarks.figures import Bar, is_quick
from tests.rigs.stack import MODELS, Stack, chat_body, fake_cloud

PERIOD_SECONDS = 4.0
OPEN_SECONDS = 30.0
BEFORE_SECONDS = 10.0
"""Requests before the outage."""
AFTER_SECONDS = OPEN_SECONDS + 2 * PERIOD_SECONDS + 4.0
MOST = {"local": 4, "paid": 6}
"""Maximum number of affected requests, for every kind of outage."""
MAX_SECONDS_TO_USE = {"local": 10.0, "paid": OPEN_SECONDS + PERIOD_SECONDS}
"""Maximum time from the end of an outage until the first tier is used again."""
RAW = Path("benchmarks/results/outage.json")
TIERS = {"local": "local/demo", "paid": "openai/gpt-test"}
"""The first tier of each situation."""
_PROBES = re.compile(r"gateway_probes_total\{.*\} (\d+)")

CONFIG = """
providers:
  openai: {{kind: openai, api_key: fake-openai, base_url: {url}/v1}}
routes:
  local: {{chain: [local/demo, openai/gpt-test]}}
  paid:  {{chain: [openai/gpt-test, local/demo]}}
breaker: {{open: {open:g}s}}
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: when it was sent and answered (seconds of the benchmark's clock), its status, the tier that
    answered, and whether there was an attempt at the first tier.
    """

    sent: float
    answered: float
    status: int
    by: str
    reached: bool


@dataclass
class Situation:
    """One outage of the first tier of `route`, between `began` and `back` (seconds of the benchmark's clock)."""

    how: str
    route: str
    began: float = 0.0
    back: float = 0.0
    probes: int = 0
    answers: list[Answer] = field(default_factory=list)

    @property
    def meanwhile(self) -> list[Answer]:
        """Requests that were sent during the outage."""
        return [answer for answer in self.answers if self.began <= answer.sent < self.back]

    @property
    def reached(self) -> int:
        """Affected requests."""
        return sum(answer.reached for answer in self.meanwhile)

    @property
    def used_again(self) -> float:
        """Seconds from the end of the outage to the next request that the first tier answered; NaN for never."""
        sent = [answer.sent for answer in self.answers if answer.by == TIERS[self.route] and answer.sent >= self.back]
        return min(sent, default=float("nan")) - self.back


class Bench:
    """A complete stack, a cloud, and a client that sends requests at a fixed rate."""

    def __init__(self, root: Path, route: str) -> None:
        self.route = route
        self.cloud = fake_cloud(_made(root / "cloud"))
        self.stack = Stack(_made(root / "stack"), MODELS, CONFIG.format(url=self.cloud.url, open=OPEN_SECONDS))
        self.first = self.stack.inference if route == "local" else self.cloud

    async def run(self, situations: Sequence[Situation], outage_seconds: float) -> None:
        """Runs every situation, one after the other, and ends all processes."""
        try:
            await asyncio.to_thread(self.cloud.start)
            await asyncio.to_thread(self.stack.start)
            async with httpx2.AsyncClient(base_url=self.stack.front.url, timeout=120, trust_env=False) as client:
                client.headers["authorization"] = f"Bearer {self.stack.key}"
                await client.post("/v1/chat/completions", json=chat_body("Hello!", "demo"))
                for situation in situations:
                    await self._live(client, situation, outage_seconds)
        finally:
            with contextlib.suppress(AssertionError, ProcessLookupError):  # it was not started, or has ended
                self.first.signal(signal.SIGCONT)
            self.stack.kill()
            self.cloud.kill()

    async def _live(self, client: httpx2.AsyncClient, situation: Situation, outage_seconds: float) -> None:
        over = asyncio.Event()
        user = asyncio.create_task(self._user(client, situation, over))
        await asyncio.sleep(BEFORE_SECONDS)
        before = await _probes(client)
        situation.began = time.monotonic()
        if situation.how == "gone":
            await asyncio.to_thread(self.first.kill)
        else:
            self.first.signal(signal.SIGSTOP)
        await asyncio.sleep(outage_seconds)
        if situation.how == "gone":
            await asyncio.to_thread(self.first.start, wait_for="/readyz" if situation.route == "local" else "/livez")
        else:
            self.first.signal(signal.SIGCONT)
        situation.back = time.monotonic()
        situation.probes = await _probes(client) - before
        await asyncio.sleep(AFTER_SECONDS)
        over.set()
        await user

    async def _user(self, client: httpx2.AsyncClient, situation: Situation, over: asyncio.Event) -> None:
        """Sends a request every PERIOD_SECONDS until the end and waits for the running ones."""
        asking: list[asyncio.Task[None]] = []
        due = time.monotonic()
        while not over.is_set():
            asking.append(asyncio.create_task(self._ask(client, situation)))
            due += PERIOD_SECONDS
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        await asyncio.gather(*asking)

    async def _ask(self, client: httpx2.AsyncClient, situation: Situation) -> None:
        sent = time.monotonic()
        body = chat_body("What is a mill?", situation.route, max_tokens=4)
        answer = await client.post("/v1/chat/completions", json=body)
        answered, by = time.monotonic(), answer.headers.get("x-headgate-model", "")
        record = (await client.get(f"/admin/requests/{answer.headers['x-request-id']}")).json()
        reached = any(tried["name"] == TIERS[situation.route] for tried in record["attempts"])
        situation.answers.append(Answer(sent, answered, answer.status_code, by, reached))


def _made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


async def _probes(client: httpx2.AsyncClient) -> int:
    """Number of probes by the gateway so far."""
    return sum(int(float(count)) for count in _PROBES.findall((await client.get("/metrics")).text))


def tables(found: Sequence[Situation]) -> Iterator[str]:
    """The table."""
    for one in found:
        slowest = max((answer.answered - answer.sent for answer in one.meanwhile), default=float("nan"))
        failed = sum(answer.status != 200 for answer in one.answers)
        yield (
            f"{one.route}, {one.how}: {one.reached} of {len(one.meanwhile)} user requests reached the first tier, "
            f"{one.probes} probes; used again after {one.used_again:.1f} s; "
            f"the slowest answer took {slowest:.1f} s, {failed} failed"
        )


def bars(found: Sequence[Situation]) -> Iterator[Bar]:
    """The bars of an outage."""
    for one in found:
        name = f"outage_{one.route}_{one.how}"
        yield Bar(f"{name}_user_requests", one.reached, "requests", "<=", MOST[one.route])
        yield Bar(f"{name}_used_again", one.used_again, "s", "<=", MAX_SECONDS_TO_USE[one.route])


async def _run(hows: Sequence[str], seconds: float) -> list[Situation]:
    """Runs all situations; those of one route one after the other."""
    with tempfile.TemporaryDirectory() as root:
        benches = [Bench(Path(root) / route, route) for route in TIERS]
        found = {bench.route: [Situation(how, bench.route) for how in hows] for bench in benches}
        await asyncio.gather(*(bench.run(found[bench.route], seconds) for bench in benches))
    return [situation for situations in found.values() for situation in situations]


def main() -> int:
    """Runs the benchmark and prints the bars. A missed bar does not change the status."""
    quick = is_quick(os.environ)
    hows = os.environ.get("SITUATIONS", "gone,silent").split(",")
    seconds = float(os.environ.get("OUTAGE", "20" if quick else "60"))
    found = asyncio.run(_run(hows, seconds))
    RAW.parent.mkdir(parents=True, exist_ok=True)
    RAW.write_text(json.dumps([asdict(situation) for situation in found], indent=1))
    print(f"an outage of {seconds:g} s, a request every {PERIOD_SECONDS:g} s, breakers open for {OPEN_SECONDS:g} s")
    for line in tables(found):
        print(line)
    print()
    for bar in bars(found):
        print(bar.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
