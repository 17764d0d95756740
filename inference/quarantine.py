"""Holds requests that may end their worker: runs suspects again, each alone, and refuses the convicted.

Judges by `inference.authority.quarantine.docket`. Never sends anything itself: a request's relay asks what to do.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING, Any

import orjson

from headgate.shared.amounts import format_duration
from inference.authority.quarantine.docket import MOST_IN_A_ROW, SUSPICIOUS, Crash, Standing
from inference.errors import InferenceError, InvalidRequestError, PoisonRequest
from inference.model import Model, Running
from inference.protocol import Code
from inference.workers.worker_process import WorkerExit

if TYPE_CHECKING:
    from inference.authority.shell import Authority

log = logging.getLogger(__name__)

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


class Quarantine:
    """One per authority, on its loop. Each model's docket is kept with the model, and forgotten when it changes."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    def trial(self, path: str, body: bytes) -> Trial:
        """What accompanies one request."""
        return Trial(self._authority, path, body)

    def charges(self, model: Model, running: Running, exit: WorkerExit) -> bool:
        """Whether this exit counts as the model's own failure, for which it rests longer and longer.

        A worker that ended under somebody's trial is the request's doing as far as is known.
        """
        docket = model.docket
        is_tried = Crash(exit.cause, exit.message, alone=running.solo is not None).is_telling
        return exit.cause not in SUSPICIOUS or not is_tried or docket.doubted or len(docket.row) >= MOST_IN_A_ROW

    def listing(self) -> list[dict[str, Any]]:
        """Every case that is held now, by model, the oldest first; times in seconds."""
        now = self._authority.loop.time()
        return [
            {
                "key": key,
                "model": model.id,
                "standing": str(case.standing),
                "crashes": case.crashes,
                "cause": str(case.cause),
                "message": case.said,
                "age_seconds": round(now - case.since, 3),
                "seconds_left": round(case.until - now, 3),
            }
            for model in self._authority.models.values()
            for key, case in model.docket.cases.items()
            if model.docket.standing(key, now) is not Standing.INNOCENT
        ]

    def clear(self, key: str | None = None) -> list[dict[str, Any]]:
        """Forgets one case, or all; returns them. Raises InvalidRequestError for a key that is not held."""
        found = [case for case in self.listing() if key is None or case["key"] == key]
        if key is not None and not found:
            raise InvalidRequestError(
                f"no request {key[:100]!r} is in quarantine; GET /quarantine lists them",
                code=Code.NOT_FOUND,
                param="key",
            )
        for case in found:
            model = self._authority.models[case["model"]]
            model.docket = model.docket.forget(case["key"])
            log.info("request %s to %s is out of quarantine, by hand", case["key"], model.id)
        return found


class CrashedError(Exception):
    """The worker ended by what it computed, and this request was in flight; `told` is for who is not run again."""

    def __init__(self, crash: Crash, told: InferenceError, *, relayed: bool) -> None:
        self.crash = crash
        self.told = told
        self.relayed = relayed


class Trial:
    """One request on its way, from the first run to its answer. `alone` says that its next run must be."""

    def __init__(self, authority: Authority, path: str, body: bytes) -> None:
        self._authority = authority
        self._path = path
        self._body = body
        self._key: str | None = None
        self.alone = False
        self.crashes = 0

    async def admit(self, model: Model) -> None:
        """Looks whether the request may run, and how; raises PoisonRequest."""
        if not model.docket.cases:
            self.alone = False
            return
        key = await self._get_key()
        standing = model.docket.standing(key, self._authority.loop.time())
        if standing is Standing.CONVICTED:
            raise self._refusal(model, key)
        self.alone = standing is not Standing.INNOCENT

    async def crashed(self, model: Model, error: CrashedError) -> bool:
        """The worker ended under the request: True when it is to run again. Raises PoisonRequest once it is convicted.

        Whoever has had a part of the answer is not run again, nor who lacked memory while it was alone.
        """
        crash = error.crash
        self.crashes += 1
        key = await self._get_key()
        now = self._authority.loop.time()
        model.docket = model.docket.crashed(key, crash, now)
        standing = model.docket.standing(key, now)
        log.warning(
            "request %s to %s is %s: %s%s", key, model.id, standing, crash.said, " (alone)" if crash.alone else ""
        )
        if standing is Standing.CONVICTED and not error.relayed:
            raise self._refusal(model, key)
        self.alone = True
        is_vain = crash.alone and not crash.is_telling
        return not (error.relayed or is_vain or model.docket.doubted) and self.crashes < MOST_RUNS

    def answered(self, model: Model) -> None:
        """The worker answered, and lives: acquitted."""
        if self.crashes:
            self._authority.metrics.recoveries.labels("rerun").inc()
        docket = model.docket
        if not docket.cases and not docket.row and not docket.doubted:
            return
        key = self._key or ""
        if docket.standing(key, self._authority.loop.time()) is not Standing.INNOCENT:
            log.info("request %s to %s is acquitted", key, model.id)
        model.docket = docket.answered(key)

    async def _get_key(self) -> str:
        if self._key is None:
            big = len(self._body) > BIG_BODY_BYTES
            self._key = (
                await asyncio.to_thread(key_of, self._path, self._body) if big else key_of(self._path, self._body)
            )
        return self._key

    def _refusal(self, model: Model, key: str) -> InferenceError:
        case = model.docket.cases[key]
        left = case.until - self._authority.loop.time()
        return PoisonRequest(
            f"this request ended the worker of {model.id!r} while nothing else ran ({case.said}); it is not tried "
            f"again for {format_duration(left)}, or until `headgate quarantine clear {key}`",
            details={"key": key, "cause": str(case.cause), "crashes": case.crashes, "seconds_left": round(left, 1)},
        )
