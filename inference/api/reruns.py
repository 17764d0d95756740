"""Requests that may end their worker: suspects run again, each alone, and convicted ones are refused."""

from __future__ import annotations

import asyncio
import hashlib

import orjson

from headgate.shared.units import format_duration
from inference.authority.events import CrashReported, RequestAnswered
from inference.authority.quarantine import Crash, Standing
from inference.authority.shell import Authority
from inference.errors import InferenceError, PoisonRequest

MOST_RUNS = 3
"""Of one request: in company, and alone twice, which is what an abort without a word takes to convict."""
BIG_BODY_BYTES = 2**18
IRRELEVANT = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "answer_so_far",
    }
)
"""Fields of a body that change nothing of what is computed, or no more than how far it is."""
_KEY_LETTERS = 16


def key_of(path: str, body: bytes) -> str:
    """What is the same for two requests that compute the same, on the same model; 64 bits in hexadecimal."""
    data = {name: value for name, value in orjson.loads(body).items() if name not in IRRELEVANT}
    plain = orjson.dumps([path, data], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(plain).hexdigest()[:_KEY_LETTERS]


class CrashedError(Exception):
    """The worker ended by what it computed, and this request was in flight; `error` is for one that does not rerun."""

    def __init__(self, crash: Crash, error: InferenceError, *, relayed: bool) -> None:
        self.crash = crash
        self.error = error
        self.relayed = relayed


class Rerun:
    """One request from its first run to its answer. `alone` says that its next run must be."""

    def __init__(self, authority: Authority, path: str, body: bytes) -> None:
        self._authority = authority
        self._path = path
        self._body = body
        self._key: str | None = None
        self.alone = False
        self.crashes = 0

    async def admit(self, model: str) -> None:
        """Looks whether the request may run, and how; raises PoisonRequest."""
        if not self._authority.model(model).quarantine.cases:
            self.alone = False
            return
        key = await self._get_key()
        standing = self._authority.model(model).quarantine.standing(key, self._authority.now)
        if standing is Standing.CONVICTED:
            raise self._refusal(model, key)
        self.alone = standing is not Standing.INNOCENT

    async def crashed(self, model: str, error: CrashedError) -> bool:
        """The worker ended under the request: True when it is to run again. Raises PoisonRequest once it is convicted.

        A request that has had a part of the answer does not run again, nor one that lacked memory while it was alone.
        """
        crash = error.crash
        self.crashes += 1
        key = await self._get_key()
        self._authority.dispatch(CrashReported(model, key, crash))
        quarantine = self._authority.model(model).quarantine
        if quarantine.standing(key, self._authority.now) is Standing.CONVICTED and not error.relayed:
            raise self._refusal(model, key)
        self.alone = True
        is_vain = crash.alone and not crash.is_telling
        return not (error.relayed or is_vain or quarantine.doubted) and self.crashes < MOST_RUNS

    def answered(self, model: str) -> None:
        """The worker answered, and lives: acquitted."""
        self._authority.dispatch(RequestAnswered(model, self._key or "", self.crashes))

    async def _get_key(self) -> str:
        if self._key is None:
            big = len(self._body) > BIG_BODY_BYTES
            self._key = (
                await asyncio.to_thread(key_of, self._path, self._body) if big else key_of(self._path, self._body)
            )
        return self._key

    def _refusal(self, model: str, key: str) -> InferenceError:
        case = self._authority.model(model).quarantine.cases[key]
        left = case.until - self._authority.now
        return PoisonRequest(
            f"this request ended the worker of {model!r} while nothing else ran ({case.message}); it is not tried "
            f"again for {format_duration(left)}, or until `headgate quarantine clear {key}`",
            details={"key": key, "cause": str(case.cause), "crashes": case.crashes, "seconds_left": round(left, 1)},
        )
