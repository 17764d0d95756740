"""Sends requests to the gateway through the official client, streamed and whole, and records how each ended.

The transport below the client is observed, because the client hides whether `[DONE]` was sent.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
import openai

from tests.chaos.judge import End, Outcome
from tests.rigs.fault_runs import Users

CLIENT_TIMEOUT_SECONDS = 60.0
"""Longer than any wait or silence that the gateway allows in the configuration of the suite."""
RECONNECT_SECONDS = 0.7
"""Delay of a user before the next request after a broken connection."""
ENDLESS_TOKENS = 400
"""This number of tokens is always generated: the demo models cannot end their answer before."""
_TAIL_BYTES = 64
TURNS, TURN_WORDS, KEPT = 3, 24, 10
"""Turns of a conversation, words of a question, and conversations that a tenant continues."""
SPYING = 0.3
"""Share of requests with which the second tenant repeats a conversation of the first one."""
_WORDS = (
    "river", "mill", "gate", "water", "morning", "tree", "stone", "road", "house", "bread", "wind", "night", "star",
)  # fmt: skip
_QUESTIONS = ("What is a mill?", "Tell me about water.", "How does a gate work?", "Hello!", "Name three rivers.")


@dataclass
class Wire:
    """The end of the body of an answer."""

    tail: bytes = b""


class _Body(httpx2.AsyncByteStream):
    def __init__(self, inner: Any, wire: Wire) -> None:
        self._inner, self._wire = inner, wire

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._inner:
            self._wire.tail = (self._wire.tail + piece)[-_TAIL_BYTES:]
            yield piece

    async def aclose(self) -> None:
        await self._inner.aclose()


class Tap(httpx2.AsyncBaseTransport):
    """Passes everything on, and keeps the end of every body by x-request-id."""

    def __init__(self) -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
        self._inner = httpx2.AsyncHTTPTransport(limits=limits)
        self.wires: dict[str, Wire] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        wire = self.wires.setdefault(request.headers["x-request-id"], Wire())
        response = await self._inner.handle_async_request(request)
        response.stream = _Body(response.stream, wire)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `leaves_after` is the number of content pieces before the client disconnects (None: all)."""

    route: str
    text: str
    stream: bool
    tokens: int
    priority: str = "normal"
    leaves_after: int | None = None
    conversation: Conversation | None = None
    turn: int = 0
    tenant: int = 0
    spies: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation whose turns are the same whenever it is repeated. Its first word belongs to it alone."""

    number: int
    route: str

    def messages(self, turn: int) -> list[dict[str, str]]:
        """The messages up to the question of this turn."""
        luck = random.Random(self.number)
        found = []
        for at in range(turn + 1):
            words = " ".join(luck.choice(_WORDS) for _ in range(TURN_WORDS))
            found.append({"role": "user", "content": f"{self.number}-{at} {words}"})
            found.append({"role": "assistant", "content": f"{luck.choice(_WORDS)} {luck.choice(_WORDS)}"})
        return found[:-1]


class Load(Users):
    """Requests of all kinds to one gateway; `outcomes` is filled as they end."""

    def __init__(
        self, base_url: str, keys: Sequence[str], routes: Sequence[str], clock: Callable[[], float], seed: int
    ) -> None:
        """`keys`: one for each tenant."""
        super().__init__()
        self._tap = Tap()
        http = httpx2.AsyncClient(transport=self._tap, timeout=httpx2.Timeout(CLIENT_TIMEOUT_SECONDS))
        self._clients = [
            openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, http_client=http) for key in keys
        ]
        self._routes = tuple(routes)
        self._clock = clock
        self._seed = seed
        self._numbers = itertools.count(1)
        self._conversations = itertools.count(1000)
        self._spoken: list[Conversation] = []
        """Conversations of the first tenant whose last turn only this tenant has sent."""
        self.outcomes: list[Outcome] = []
        self.open: dict[str, Outcome] = {}

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        for client in self._clients:
            await client.close()

    # --- users -------------------------------------------------------------------------------------------
    def begin(self, users: int) -> None:
        """`users` send one request after the other from now until `end`."""
        for number in range(users):
            self._spawn(self._user(random.Random(f"{self._seed}/{number}")))
        for tenant in range(len(self._clients)):
            self._spawn(self._talk(random.Random(f"{self._seed}/talk/{tenant}"), tenant))

    async def _user(self, luck: random.Random) -> None:
        while not self._stopping.is_set():
            outcome = await self.ask(self.draw(luck))
            await self._pause(luck.uniform(0.02, 0.4) + (RECONNECT_SECONDS if outcome.end is End.BROKEN else 0.0))

    async def _talk(self, luck: random.Random, tenant: int) -> None:
        """Goes on with conversations in random order. The second tenant also repeats what the first one has sent."""
        kept: list[Conversation] = []
        seen: set[Conversation] = set()
        while not self._stopping.is_set():
            if tenant and self._spoken and luck.random() < SPYING:
                ask = self.turn(self._spoken.pop(), TURNS - 1, tenant, spies=True)
            else:
                if len(kept) < KEPT or luck.random() < 0.1:
                    kept = [*kept, self.conversation(luck)][-KEPT:]
                ask = self.turn(luck.choice(kept), luck.randrange(TURNS), tenant, stream=luck.random() < 0.5)
            outcome = await self.ask(ask)
            conversation = ask.conversation
            has_ended = ask.turn == TURNS - 1 and outcome.answered_by == f"local/{ask.route}"
            if not tenant and has_ended and conversation is not None and conversation not in seen:
                seen.add(conversation)  # it is repeated by the other tenant only once
                self._spoken = [*self._spoken[-KEPT:], conversation]
            await self._pause(luck.uniform(0.02, 0.3) + (RECONNECT_SECONDS if outcome.end is End.BROKEN else 0.0))

    def conversation(self, luck: random.Random) -> Conversation:
        """A new conversation."""
        return Conversation(next(self._conversations), luck.choice(self._routes))

    @staticmethod
    def turn(
        conversation: Conversation, turn: int, tenant: int = 0, *, stream: bool = False, spies: bool = False
    ) -> Ask:
        """The request for a turn."""
        return Ask(conversation.route, "", stream, 8, conversation=conversation, turn=turn, tenant=tenant, spies=spies)

    def draw(self, luck: random.Random) -> Ask:
        """A random request."""
        return Ask(
            luck.choice(self._routes), luck.choice(_QUESTIONS), luck.random() < 0.6, luck.choice((4, 12, 40, 160)),
            luck.choice(("high", "normal", "normal", "low")),
        )  # fmt: skip

    async def burst(self, luck: random.Random, count: int) -> list[Outcome]:
        """Simultaneous requests; returns when all are answered."""
        return list(await asyncio.gather(*(self._spawn(self.ask(self.draw(luck))) for _ in range(count))))

    def start(self, ask: Ask) -> tuple[Outcome, asyncio.Task[Outcome]]:
        """Sends one request concurrently; the outcome is filled as the answer arrives."""
        outcome = self._new(ask)
        return outcome, self._spawn(self.ask(ask, outcome))

    # --- one request -----------------------------------------------------------------------------------------------
    def _new(self, ask: Ask) -> Outcome:
        number, endless = next(self._numbers), ask.tokens >= ENDLESS_TOKENS
        outcome = Outcome(f"chaos-{self._seed}-{number}", ask.route, ask.stream, self._clock(), endless=endless)
        if ask.conversation is not None:
            outcome.prompt, outcome.spies = f"{ask.conversation.number}/{ask.turn}", ask.spies
        self.open[outcome.id] = outcome
        return outcome

    async def ask(self, ask: Ask, outcome: Outcome | None = None) -> Outcome:
        """Sends a request and returns how it ended."""
        outcome = outcome or self._new(ask)
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT_SECONDS * 2):
                await (self._streamed if ask.stream else self._whole)(ask, outcome)
        except (openai.APITimeoutError, httpx2.TimeoutException, TimeoutError) as error:
            outcome.end, outcome.detail = End.SILENT, repr(error)
        except openai.APIStatusError as error:
            self._refused(outcome, error)
        except (openai.APIConnectionError, httpx2.TransportError) as error:
            outcome.end, outcome.detail = End.BROKEN, f"{error!r}, from {error.__cause__!r}"
        except openai.APIError as error:
            outcome.end, outcome.code, outcome.detail = End.ERROR_FRAME, _text(error.code), str(error)
        except Exception as error:
            outcome.end, outcome.detail = End.STRANGE, repr(error)
        finally:
            wire = self._tap.wires.pop(outcome.id, Wire())
            outcome.done = b"[DONE]" in wire.tail
            outcome.ended = self._clock()
            self.outcomes.append(outcome)
            del self.open[outcome.id]
        return outcome

    def _arguments(self, ask: Ask, outcome: Outcome) -> dict[str, Any]:
        """No two requests are equal, so that two crashes under one do not cause the refusal of another."""
        if ask.conversation is not None:
            return {
                "model": ask.route,
                "messages": ask.conversation.messages(ask.turn),
                "max_tokens": ask.tokens,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": 2,
                "seed": next(self._numbers),  # without an effect at temperature 0
                "stream": ask.stream,
                **({"stream_options": {"include_usage": True}} if ask.stream else {}),
                "extra_headers": {"x-request-id": outcome.id},
            }
        return {
            "model": ask.route,
            "messages": [{"role": "user", "content": f"{ask.text} ({outcome.id})"}],
            "max_tokens": ask.tokens,
            "temperature": 0,
            "stream": ask.stream,
            **({"extra_body": {"ignore_eos": True}} if outcome.endless else {}),
            "extra_headers": {"x-request-id": outcome.id, "x-headgate-priority": ask.priority},
        }

    async def _whole(self, ask: Ask, outcome: Outcome) -> None:
        raw = await self._clients[ask.tenant].chat.completions.with_raw_response.create(**self._arguments(ask, outcome))
        _note_headers(outcome, raw.headers)
        outcome.first_token = self._clock()
        answer = raw.parse()
        outcome.finishes = sum(choice.finish_reason is not None for choice in answer.choices)
        _note_tokens(outcome, answer)
        outcome.end = End.COMPLETE if outcome.finishes else End.CUT

    async def _streamed(self, ask: Ask, outcome: Outcome) -> None:
        raw = await self._clients[ask.tenant].chat.completions.with_raw_response.create(**self._arguments(ask, outcome))
        _note_headers(outcome, raw.headers)
        stream: Any = raw.parse()
        pieces = 0
        try:
            if ask.leaves_after == 0:
                outcome.end = End.LEFT
                return
            async for chunk in stream:
                _note_tokens(outcome, chunk)
                for choice in chunk.choices:
                    if choice.delta.content or choice.finish_reason:
                        outcome.first_token = outcome.first_token or self._clock()
                        pieces += 1
                    outcome.finishes += choice.finish_reason is not None
                if ask.leaves_after is not None and pieces >= ask.leaves_after:
                    outcome.end = End.LEFT
                    return
            outcome.end = End.COMPLETE if outcome.finishes else End.CUT
        finally:
            await stream.close()

    @staticmethod
    def _refused(outcome: Outcome, error: openai.APIStatusError) -> None:
        _note_headers(outcome, error.response.headers)
        outcome.end, outcome.status, outcome.code = End.REFUSED, error.status_code, _text(error.code)
        outcome.detail = str(error)


def _note_headers(outcome: Outcome, headers: Any) -> None:
    outcome.tier = headers.get("x-headgate-tier", "")
    outcome.answered_by = headers.get("x-headgate-model", "")
    outcome.attempts = int(headers.get("x-headgate-attempts") or 0)


def _note_tokens(outcome: Outcome, answer: Any) -> None:
    """Notes what a whole answer or a chunk says about tokens."""
    if not outcome.prompt:
        return
    for choice in answer.choices:
        for token in (choice.logprobs and choice.logprobs.content) or ():
            best = sorted((one.logprob for one in token.top_logprobs), reverse=True)
            outcome.steps += ((token.token, best[0] - best[1] if len(best) > 1 else 0.0),)
    if answer.usage is not None and answer.usage.prompt_tokens_details is not None:
        outcome.cached = answer.usage.prompt_tokens_details.cached_tokens


def _text(code: object) -> str | None:
    return None if code is None else str(code)
