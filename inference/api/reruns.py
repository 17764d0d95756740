"""Requests that may end their worker: suspects run again, each alone, and confirmed ones are rejected."""

from __future__ import annotations

import asyncio
import hashlib

import orjson

from headgate.shared.units import format_duration
from inference.authority.events import CrashReported, RequestAnswered
from inference.authority.quarantine import Crash, Suspicion
from inference.authority.shell import Authority
from inference.errors import InferenceError, PoisonRequest

MAX_RUNS = 3
"""Runs of one request: with others, and twice alone, because one abort without a message confirms nothing."""
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
"""Fields in which bodies of the same request may differ."""
_KEY_CHARS = 16


def key_of(path: str, body: bytes) -> str:
    """A key that is equal for bodies that differ in IRRELEVANT fields only; 64 bits in hexadecimal."""
    try:
        data = {name: value for name, value in orjson.loads(body).items() if name not in IRRELEVANT}
        plain = orjson.dumps([path, data], option=orjson.OPT_SORT_KEYS)
    except orjson.JSONDecodeError:  # the worker rejects this body
        plain = body
    return hashlib.sha256(plain).hexdigest()[:_KEY_CHARS]


class CrashedError(Exception):
    """The worker crashed while this request was in flight. `error` is for a request that is not run again."""

    def __init__(self, crash: Crash, error: InferenceError, *, relayed: bool) -> None:
        self.crash = crash
        self.error = error
        self.relayed = relayed


class Rerun:
    """One request with its runs. `alone`: the next run must be alone."""

    def __init__(self, authority: Authority, path: str, body: bytes) -> None:
        self._authority = authority
        self._path = path
        self._body = body
        self._key: str | None = None
        self.alone = False
        self.crashes = 0

    async def admit(self, model: str) -> None:
        """Sets `alone` for the next run; raises PoisonRequest if the request may not run."""
        if not self._authority.first_replica(model).quarantine.cases:
            self.alone = False
            return
        key = await self._get_key()
        suspicion = self._authority.first_replica(model).quarantine.suspicion(key, self._authority.now)
        if suspicion is Suspicion.CONFIRMED:
            raise self._refusal(model, key)
        self.alone = suspicion is not Suspicion.NONE

    async def crashed(self, model: str, error: CrashedError) -> bool:
        """Records a crash; returns whether the request is run again. Raises PoisonRequest if it is confirmed.

        A request whose client has a part of the answer is not run again, nor one that ran out of memory alone.
        """
        crash = error.crash
        self.crashes += 1
        key = await self._get_key()
        self._authority.dispatch(CrashReported(model, key, crash))
        quarantine = self._authority.first_replica(model).quarantine
        if quarantine.suspicion(key, self._authority.now) is Suspicion.CONFIRMED and not error.relayed:
            raise self._refusal(model, key)
        self.alone = True
        is_vain = crash.alone and not crash.can_confirm
        return not (error.relayed or is_vain or quarantine.doubted) and self.crashes < MAX_RUNS

    def answered(self, model: str) -> None:
        """Records that the worker answered and is alive."""
        self._authority.dispatch(RequestAnswered(model, self._key or "", self.crashes))

    async def _get_key(self) -> str:
        if self._key is None:
            big = len(self._body) > BIG_BODY_BYTES
            self._key = (
                await asyncio.to_thread(key_of, self._path, self._body) if big else key_of(self._path, self._body)
            )
        return self._key

    def _refusal(self, model: str, key: str) -> InferenceError:
        case = self._authority.first_replica(model).quarantine.cases[key]
        left = case.until - self._authority.now
        return PoisonRequest(
            f"this request ended the worker of {model!r} while nothing else ran ({case.message}); it is not tried "
            f"again for {format_duration(left)}, or until `headgate quarantine clear {key}`",
            details={"key": key, "cause": str(case.cause), "crashes": case.crashes, "seconds_left": round(left, 1)},
        )
