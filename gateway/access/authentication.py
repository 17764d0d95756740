"""Decides who a caller is by the key it shows and what that key may do; keeps only hashes of keys and logs none."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.access.rate_limits import NO_LIMITS, Limits
from gateway.errors import RequestError
from gateway.settings import KeySettings, LimitSettings
from headgate.shared.state import GATEWAY_KEY, StateDir
from inference.protocol import Code, Priority

Scope = Literal["use", "admin"]
GENERATED = "generated"
EVERYBODY = "all"
"""The tenant that every key stands for where prefixes are shared by all."""

_RANKS = (Priority.HIGH, Priority.NORMAL, Priority.LOW)


@dataclass(frozen=True, slots=True)
class Key:
    """One key that is accepted. `digest` is its SHA-256, `ceiling` the highest priority it may ask for."""

    name: str
    digest: bytes
    scopes: frozenset[Scope]
    ceiling: Priority = Priority.HIGH
    limits: Limits = NO_LIMITS

    def cap(self, asked: Priority) -> Priority:
        """`asked`, or the key's own ceiling when that is lower."""
        return asked if self.ceiling is _RANKS[0] else max(asked, self.ceiling, key=_RANKS.index)


class Keys:
    """Every accepted key. Comparing takes the same time whichever key, if any, is right; one that was right before is
    known again by a digest that nobody outside can aim at.
    """

    def __init__(self, keys: Sequence[Key], tenant_secret: bytes, *, one_tenant: bool = False) -> None:
        self._keys = tuple(keys)
        self._one_tenant = one_tenant
        self._secret = os.urandom(32)
        self._accepted: dict[bytes, tuple[Key, str]] = {}
        """What was shown before, by its digest under the secret. A process that just woke up takes 20 us for OpenSSL's
        SHA-256, and 5 us for this one."""
        self._tenants = {
            key.digest: hmac.new(tenant_secret, key.digest, hashlib.sha256).hexdigest()[:32] for key in self._keys
        }

    @classmethod
    def load(
        cls,
        configured: Sequence[KeySettings],
        environ: Mapping[str, str],
        state: StateDir,
        *,
        one_tenant: bool = False,
        limits: LimitSettings | None = None,
    ) -> Keys:
        """Keys of the environment and the file; with none at all, the one in the state directory, made on first use.
        With `one_tenant` they all stand for the same one; `limits` are those of keys that name none.

        Raises HeadgateError when the state directory cannot be used.
        """
        common = _limits(limits)
        found: list[Key] = []
        if use := environ.get("GATEWAY_API_KEY"):
            found.append(Key("GATEWAY_API_KEY", _digest(use), frozenset({"use"}), limits=common))
        if admin := environ.get("GATEWAY_ADMIN_KEY"):
            found.append(Key("GATEWAY_ADMIN_KEY", _digest(admin), frozenset({"use", "admin"}), limits=common))
        found += [
            Key(
                key.name,
                bytes.fromhex(key.hash.removeprefix("sha256:")),
                frozenset(key.scopes),
                key.priority,
                common if key.limits is None else _limits(key.limits),
            )
            for key in configured
        ]
        if not found:
            generated = state.secret(GATEWAY_KEY, "hg-")
            found.append(Key(GENERATED, _digest(generated), frozenset({"use", "admin"}), limits=common))
        return cls(found, state.secret("tenant.secret").encode(), one_tenant=one_tenant)

    @property
    def is_generated(self) -> bool:
        """Whether the only key is the one made at the first start."""
        return [key.name for key in self._keys] == [GENERATED]

    @property
    def all(self) -> tuple[Key, ...]:
        """Every accepted key."""
        return self._keys

    def identify(self, headers: Mapping[str, str]) -> tuple[Key, str] | None:
        """The key shown in `headers` (lower-case names) and the tenant it stands for; None when it is not ours."""
        shown = _shown(headers)
        mark = hashlib.blake2b(_bytes(shown), digest_size=32, key=self._secret).digest()
        found = self._accepted.get(mark)
        if found is None and (found := self._find(shown)) is not None:
            self._accepted[mark] = found
        return found

    def _find(self, shown: str) -> tuple[Key, str] | None:
        digest = _digest(shown)
        found: Key | None = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None or not shown:
            return None
        if self._one_tenant:
            return found, EVERYBODY
        return found, self._tenants[found.digest]

    def admit(self, headers: Mapping[str, str], scope: Scope) -> tuple[Key, str]:
        """The key and tenant of a caller that may do `scope`; raises RequestError (401, 403)."""
        found = self.identify(headers)
        if found is None:
            said = "the API key is not valid" if _shown(headers) else "an API key is needed"
            raise RequestError(
                Code.INVALID_API_KEY,
                f"{said}; send `Authorization: Bearer KEY` (`headgate key show` prints a generated key)",
            )
        if scope not in found[0].scopes:
            if not any(scope in key.scopes for key in self._keys):
                advice = (
                    "no key with this scope is configured; set GATEWAY_ADMIN_KEY" if scope == "admin" else "none can"
                )
            else:
                advice = "use another key"
            raise RequestError(Code.PERMISSION_DENIED, f"this key may not do that (scope `{scope}`); {advice}")
        return found


def _limits(said: LimitSettings | None) -> Limits:
    return NO_LIMITS if said is None else Limits(said.requests_per_minute, said.tokens_per_minute, said.concurrent)


def _digest(key: str) -> bytes:
    return hashlib.sha256(_bytes(key)).digest()


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _shown(headers: Mapping[str, str]) -> str:
    """The key a caller shows: a bearer token, or x-api-key as Anthropic's clients send it."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip()
