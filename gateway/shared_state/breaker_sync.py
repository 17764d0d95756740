"""Shares the breakers of this gateway: open periods and recoveries, and the one probe of each open breaker.

Each gateway reads its own copy of the state (`BreakerFile`), so a closed breaker costs no round trip. Changes are sent
in the background with the time at which they happened; the newest one counts. Failure counters are not shared, and
neither are openings because an inference service could not be reached: that may concern this gateway only.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pybreaker

from gateway.apis.lenient_json import dumps, loads
from gateway.breaker.breaker_file import BreakerFile
from gateway.breaker.breakers import Breakers
from gateway.breaker.outcome import MAX_RETRY_AFTER_SECONDS, is_local
from gateway.breaker.probe_claims import Claim, ClaimRefused
from gateway.errors import StoreLostError
from gateway.shared_state.scripts import BREAKERS, FORGET_SECONDS, VERSION, probe_key
from gateway.shared_state.shared_state import SharedState

log = logging.getLogger("gateway.shared_state")

CLAIM_SECONDS = 10.0
"""A claim ends this long after its last renewal. Each heartbeat renews it, until its gateway is killed."""
REASON_CHARACTERS = 300

Key = tuple[str, str]


class _Entry(NamedTuple):
    """The last change of a breaker, in server seconds. `open_until` None: it was closed."""

    at: float
    open_until: float | None


class BreakerSync:
    """The breakers of one gateway and their shared state. `is_configured`: whether this gateway has a provider."""

    def __init__(
        self, state: SharedState, file: BreakerFile, breakers: Breakers, is_configured: Callable[[str], bool]
    ) -> None:
        self._state = state
        self._file = file
        self._breakers = breakers
        self._is_configured = is_configured
        self._known: dict[Key, _Entry] = {}
        self._version = ""
        self._changed: dict[Key, float] = {}
        """The time of each unsent change by breaker, on this process's clock."""
        self._held: dict[str, str] = {}
        """Token by breaker field, of claims that are renewed."""
        self._released: list[tuple[str, str]] = []
        self._is_following = False
        self._flush_is_due = False
        file.on_change = self._note
        breakers.claims = self
        state.on_up.append(self._came_up)
        state.on_tick.append(self._tick)
        state.on_message["breaker"] = self._on_message

    # --- changes of this gateway -------------------------------------------------------------------------------------
    def _note(self, provider: str, model: str) -> None:
        if not self._is_following:
            self._changed[provider, model] = self._state.clock()
            self._flush_soon()

    def _flush_soon(self) -> None:
        """Once per turn of the event loop, so that a state and its `open_until` are sent together."""
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Sends changes, then released claims: a gateway that gets a claim then knows how the last probe ended."""
        self._flush_is_due = False
        if not self._state.is_up:
            self._released.clear()  # they expire
            return
        changed, self._changed = self._changed, {}
        stored = set(self._file.stored())
        for key, changed_at in changed.items():
            self._send(key, changed_at, is_stored=key in stored)
        released, self._released = self._released, []
        if released:
            keys, tokens = [probe_key(field) for field, _ in released], [token for _, token in released]
            self._state.post("release_probe", "release", keys, tokens)

    def _send(self, key: Key, changed_at: float, *, is_stored: bool) -> None:
        storage = self._file.storage(*key) if is_stored else None
        known, open_until = self._known.get(key), None
        if storage is not None and storage.state == pybreaker.STATE_HALF_OPEN:
            return  # for the others it is open, and its period is over
        if storage is not None and storage.state == pybreaker.STATE_OPEN:
            open_until = self._state.server_time(storage.open_until)
        elif known is None or known.open_until is None:
            return  # it was closed before
        entry = _Entry(self._state.server_time(changed_at), open_until)
        if known is not None and entry.at <= known.at:
            return
        ends = (open_until, None if known is None else known.open_until)
        if all(end is not None and end <= self._state.server_time() for end in ends):
            return  # the others know that its period is over
        breaker = self._breakers.by_model(key[0]).get(key[1])
        if open_until is not None and is_local(key[0]) and (breaker is None or not breaker.provider_answered):
            return  # other gateways may reach the inference service: each has its own probes and events of it
        self._known[key] = entry
        reason = "" if breaker is None else (breaker.last_failure or "")[:REASON_CHARACTERS]
        text = _text({
            "at": entry.at, "open_until": open_until, "reason": reason,
            "needs_memory": breaker is not None and breaker.needs_memory,
        })  # fmt: skip
        message = _text([self._state.gateway, "breaker", *key, text])
        keys = [BREAKERS, VERSION, self._state.channel]
        reply = self._state.post("write_breaker", "write_breaker", keys, [_text(key), text, repr(entry.at), message])
        if reply is not None:
            reply.add_done_callback(lambda done: self._on_written(key, changed_at, done))

    def _on_written(self, key: Key, changed_at: float, reply: asyncio.Future[str | None]) -> None:
        if reply.cancelled() or reply.exception() is not None:
            self._changed.setdefault(key, changed_at)
        elif (newer := reply.result()) is not None:
            self._follow(key, newer)

    # --- changes of other gateways -----------------------------------------------------------------------------------
    def _on_message(self, provider: str, model: str, text: str) -> None:
        self._follow((provider, model), text)

    def _follow(self, key: Key, text: str) -> None:
        """Takes over an entry of the store, unless what this gateway knows or did is newer."""
        found = loads(text)
        entry = _Entry(float(found["at"]), None if found["open_until"] is None else float(found["open_until"]))
        known, changed_at = self._known.get(key), self._changed.get(key)
        if known is not None and entry.at <= known.at:
            return
        if not self._is_configured(key[0]):
            self._version = ""  # read again: it may be a node that this gateway has yet to find
            return
        self._known[key] = entry
        if changed_at is not None and self._state.server_time(changed_at) > entry.at:
            return
        self._changed.pop(key, None)
        provider, model = key
        now = self._state.clock()
        breaker = self._breakers.by_model(provider).get(model)
        open_until = None
        if entry.open_until is not None:
            open_until = min(self._state.local_time(entry.open_until), now + MAX_RETRY_AFTER_SECONDS)
        if breaker is None:
            if open_until is None or open_until <= now:
                return
            breaker = self._breakers.breaker(provider, model)
        self._is_following = True
        try:
            breaker.follow(open_until, str(found["reason"]), bool(found["needs_memory"]))
        finally:
            self._is_following = False

    async def _read(self) -> set[Key]:
        """Takes over every change in the store that is not known; returns what the store has, if anything changed.

        Raises StoreLostError.
        """
        reply = await self._state.call(
            "read_breakers", "read_breakers", [BREAKERS, VERSION], [self._version, FORGET_SECONDS]
        )
        self._version, *rest = reply  # `_follow` may reset it
        found: set[Key] = set()
        for field, text in zip(rest[::2], rest[1::2], strict=True):
            provider, model = loads(field)
            found.add((provider, model))
            self._follow((provider, model), text)
        self._forget_old()
        return found

    def _forget_old(self) -> None:
        """Forgets entries as early as the store does (FORGET_SECONDS): model names may come from clients."""
        since = self._state.server_time() - FORGET_SECONDS
        self._known = {key: one for key, one in self._known.items() if max(one.at, one.open_until or 0.0) >= since}

    async def _came_up(self) -> None:
        """Both sides may have changed: the newest change of each breaker counts, here and in the store."""
        self._version = ""
        found, now = await self._read(), self._state.clock()
        for key in self._file.stored():
            storage = self._file.storage(*key)
            is_open = storage.state == pybreaker.STATE_OPEN and storage.open_until > now
            if is_open and key not in found and key not in self._changed:
                # the store lost its data, or this gateway has the open period from its file
                known = self._known.pop(key, None)
                self._changed[key] = self._state.local_time(0.0 if known is None else known.at)
        self._flush()
        await self._renew()

    async def _tick(self) -> None:
        if self._changed:
            self._flush()
        await self._renew()
        await self._read()

    # --- probes ------------------------------------------------------------------------------------------------------
    async def claim(self, keys: Sequence[Key]) -> Claim | ClaimRefused:
        """See `ProbeClaims`."""
        if self._flush_is_due:
            self._flush()
        token = secrets.token_hex(8)
        fields = {_text(key): key for key in keys}
        values: list[str | int | float] = [token, round(CLAIM_SECONDS * 1000)]
        for field, key in fields.items():
            known = self._known.get(key)
            values += [field, repr(-1.0 if known is None else known.at)]
        try:
            reply = await self._state.call("claim_probe", "claim_probe", [BREAKERS, *map(probe_key, fields)], values)
        except StoreLostError:
            return _Claim(self, {})
        except BaseException:
            self._released.extend((field, token) for field in fields)
            self._flush_soon()
            raise
        if reply[0] == "claimed":
            self._held.update(dict.fromkeys(fields, token))
            return _Claim(self, {key: (field, token) for field, key in fields.items()})
        key = fields[reply[1]]
        if reply[0] == "changed":
            self._follow(key, reply[2])
        return ClaimRefused(*key, changed=reply[0] == "changed")

    def end_claim(self, field: str, token: str) -> None:
        """Releases a claim, after the changes that were made before it are sent."""
        if self._held.get(field) == token:
            del self._held[field]
        self._released.append((field, token))
        self._flush_soon()

    async def _renew(self) -> None:
        if self._held:
            await self._state.call(
                "renew_probe", "renew", [probe_key(field) for field in self._held],
                [round(CLAIM_SECONDS * 1000), *self._held.values()],
            )  # fmt: skip


class _Claim:
    """The claims of one attempt."""

    def __init__(self, sync: BreakerSync, held: dict[Key, tuple[str, str]]) -> None:
        self._sync = sync
        self._held = held

    def release(self, provider: str, model: str) -> None:
        """See `Claim`."""
        if (held := self._held.pop((provider, model), None)) is not None:
            self._sync.end_claim(*held)


def _text(value: object) -> str:
    return dumps(value).decode()
