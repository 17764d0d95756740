"""Sends requests to the gateways of a fleet and records how each ended."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from tests.chaos.judge import End
from tests.fleet.judge import NEW, Outcome
from tests.fleet.system import KEY, MODEL, TOTAL_SECONDS, Fleet
from tests.rigs.fault_runs import Users

CLIENT_TIMEOUT_SECONDS = TOTAL_SECONDS + 15.0
"""Longer than a gateway lets a request wait for its first token, and then be silent."""
ANSWER_TOKENS, MIN_TOKENS = 24, 10
SURE = 0.5
"""Difference of log probabilities; ten times what the batch changes in the demo model."""
_QUESTIONS = (
    "What is a mill?", "Tell me about water.", "How does a gate work?", "Hello!", "Name three rivers.",
    "What is the sun?", "What are you?", "What is a bridge?", "Tell me a story.", "How do birds fly?",
    "What is bread?", "Why is the sky blue?", "What is a lock?", "Say something nice.", "What is a tree?",
    "How does rain begin?",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reference:
    """A prompt and its greedy answer, whose tokens do not depend on rounding."""

    question: str
    tokens: int
    text: str


async def references(fleet: Fleet, node: str) -> tuple[Reference, ...]:
    """Asks an undisturbed node. An answer has the tokens up to the first one that rounding could change."""
    found = []
    for question in _QUESTIONS:
        more = {"logprobs": True, "top_logprobs": 2}
        answer = await fleet.node(node, "/v1/chat/completions", "POST", body(question, ANSWER_TOKENS, **more), 30.0)
        tokens = 0
        for token in answer["choices"][0]["logprobs"]["content"]:
            best = sorted((one["logprob"] for one in token["top_logprobs"]), reverse=True)
            if best[0] - best[1] < SURE:
                break
            tokens += 1
        if tokens >= MIN_TOKENS:
            answer = await fleet.node(node, "/v1/chat/completions", "POST", body(question, tokens), 30.0)
            found.append(Reference(question, tokens, answer["choices"][0]["message"]["content"]))
    assert len(found) >= 3, "the demo model is not sure of its answers"
    return tuple(found)


def body(question: str, tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy request whose answer has this number of tokens."""
    return {
        "model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": tokens,
        "ignore_eos": True, **more,
    }  # fmt: skip


class Load(Users):
    """Requests to the gateways of `fleet`; `outcomes` is filled as they end."""

    def __init__(self, fleet: Fleet, known: Sequence[Reference], clock: Callable[[], float], seed: int) -> None:
        super().__init__()
        self._fleet, self.prompts, self._clock, self._seed = fleet, known, clock, seed
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
        self._http = httpx2.AsyncClient(timeout=httpx2.Timeout(CLIENT_TIMEOUT_SECONDS), limits=limits)
        self._numbers = itertools.count(1)
        self.outcomes: list[Outcome] = []
        self.open: dict[str, Outcome] = {}

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        await self._http.aclose()

    def begin(self, users: int) -> None:
        """`users` send one request after the other from now until `end`."""
        for number in range(users):
            self._spawn(self._user(random.Random(f"{self._seed}/{number}")))

    async def _user(self, luck: random.Random) -> None:
        while not self._stopping.is_set():
            gateway = luck.randrange(len(self._fleet.gateways))
            prompt = NEW if luck.random() < 0.3 else luck.randrange(len(self.prompts))
            outcome = await self.ask(gateway, prompt, stream=luck.random() < 0.7)
            await self._pause(luck.uniform(0.05, 0.5) + (0.5 if outcome.end is End.BROKEN else 0.0))

    def start(self, gateway: int, prompt: int, *, stream: bool = True) -> Outcome:
        """Sends one request concurrently; the outcome is filled as the answer arrives."""
        outcome = self._new(gateway, prompt, stream)
        self._spawn(self._run(outcome))
        return outcome

    async def ask(self, gateway: int, prompt: int, *, stream: bool = True) -> Outcome:
        """Sends a request and returns how it ended."""
        return await self._run(self._new(gateway, prompt, stream))

    def _new(self, gateway: int, prompt: int, stream: bool) -> Outcome:
        outcome = Outcome(f"fleet-{self._seed}-{next(self._numbers)}", gateway, prompt, stream, self._clock())
        self.open[outcome.id] = outcome
        return outcome

    async def _run(self, outcome: Outcome) -> Outcome:
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT_SECONDS):
                await self._ask(outcome)
        except (httpx2.TimeoutException, TimeoutError) as error:
            outcome.end, outcome.detail = End.SILENT, repr(error)
        except httpx2.TransportError as error:
            outcome.end, outcome.detail = End.BROKEN, repr(error)
        except (ValueError, LookupError, TypeError) as error:
            outcome.end, outcome.detail = End.STRANGE, repr(error)
        finally:
            outcome.ended = self._clock()
            self.outcomes.append(outcome)
            del self.open[outcome.id]
        return outcome

    async def _ask(self, outcome: Outcome) -> None:
        # the seed has no effect at temperature 0: no two requests are equal, so none is suspected of ending workers
        number = next(self._numbers)
        known = Reference(f"{number} {outcome.id}", MIN_TOKENS, "")
        if outcome.prompt != NEW:
            known = self.prompts[outcome.prompt]
        sent = body(known.question, known.tokens, stream=outcome.stream, seed=number)
        headers = {"authorization": f"Bearer {KEY}", "x-request-id": outcome.id}
        url = self._fleet.gateways[outcome.gateway].service.url + "/v1/chat/completions"
        async with self._http.stream("POST", url, json=sent, headers=headers) as answer:
            outcome.node = answer.headers.get("x-headgate-node", "")
            outcome.attempts = int(answer.headers.get("x-headgate-attempts") or 0)
            if answer.status_code != 200:
                error = json.loads(await answer.aread())["error"]
                outcome.end, outcome.status = End.REFUSED, answer.status_code
                outcome.code, outcome.detail = error.get("code"), error.get("message", "")
            elif outcome.stream:
                await _read_stream(outcome, answer)
            else:
                choice = json.loads(await answer.aread())["choices"][0]
                outcome.text = choice["message"]["content"]
                outcome.end = End.COMPLETE if choice["finish_reason"] else End.CUT

    async def admitted(self, gateway: int, key: str) -> bool:
        """Whether a gateway admits the smallest request with this key; raises httpx2.HTTPError for other failures."""
        url = self._fleet.gateways[gateway].service.url + "/v1/chat/completions"
        headers = {"authorization": f"Bearer {key}"}
        answer = await self._http.post(url, json=body("Hello!", 1), headers=headers)
        if answer.status_code == 429 and answer.json()["error"]["code"] == "rate_limit_exceeded":
            return False
        answer.raise_for_status()
        return True


async def _read_stream(outcome: Outcome, answer: httpx2.Response) -> None:
    finish, done = None, False
    async for line in answer.aiter_lines():
        if line == "data: [DONE]":
            done = True
        elif line.startswith("data: "):
            chunk: Mapping[str, Any] = json.loads(line[6:])
            if error := chunk.get("error"):
                outcome.end, outcome.code, outcome.detail = End.ERROR_FRAME, error.get("code"), error["message"]
                return
            for choice in chunk["choices"]:
                outcome.text += choice["delta"].get("content") or ""
                finish = choice.get("finish_reason") or finish
    outcome.end = End.COMPLETE if done and finish else End.CUT
