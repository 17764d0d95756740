"""Authentication by API key, and the scopes of keys. Only hashes of keys are kept, and none is logged."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.access.budgets import NO_BUDGET, Budget
from gateway.access.rate_limits import NO_LIMITS, Limits
from gateway.errors import RequestError
from gateway.settings import KeySettings, LimitSettings
from headgate.shared.state_directory import GATEWAY_KEY, StateDir
from inference.protocol import Code, Priority

Scope = Literal["use", "admin"]
GENERATED = "generated"
SHARED_TENANT = "all"
"""The tenant of all keys when prefixes are shared."""

_RANKS = (Priority.HIGH, Priority.NORMAL, Priority.LOW)


@dataclass(frozen=True, slots=True)
class Key:
    """One accepted key. `digest` is its SHA-256, `max_priority` the highest priority of its requests."""

    name: str
    digest: bytes
    scopes: frozenset[Scope]
    max_priority: Priority = Priority.HIGH
    limits: Limits = NO_LIMITS
    models: tuple[str, ...] = ()
    """Names that it may use, NAME or PREFIX*; empty: all."""
    budget: Budget = NO_BUDGET

    def may_use(self, model: str) -> bool:
        """Whether a request with this key may name `model`."""
        return not self.models or any(
            model.startswith(entry[:-1]) if entry.endswith("*") else model == entry for entry in self.models
        )

    def cap(self, priority: Priority) -> Priority:
        """`priority`, or the `max_priority` of the key if that is lower."""
        return priority if self.max_priority is _RANKS[0] else max(priority, self.max_priority, key=_RANKS.index)


class Keys:
    """All accepted keys. A comparison takes the same time for every key."""

    def __init__(self, keys: Sequence[Key], tenant_secret: bytes, *, one_tenant: bool = False) -> None:
        self._keys = tuple(keys)
        self._one_tenant = one_tenant
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
        stored: Sequence[KeySettings] = (),
        fleet_token: str | None = None,
    ) -> Keys:
        """Keys of the environment and the file; without any, a generated key in the state directory.

        With `one_tenant` all keys have the same tenant; `limits` apply to keys without their own. `stored`: keys that
        were created at run time, besides the others; a name that is configured too has the configured key.
        `fleet_token`: of several gateways, which thus have the same tenant for a key.

        Raises HeadgateError when the state directory cannot be used.
        """
        common = _limits(limits)
        found: list[Key] = []
        if use := environ.get("GATEWAY_API_KEY"):
            found.append(Key("GATEWAY_API_KEY", _digest(use), frozenset({"use"}), limits=common))
        if admin := environ.get("GATEWAY_ADMIN_KEY"):
            found.append(Key("GATEWAY_ADMIN_KEY", _digest(admin), frozenset({"use", "admin"}), limits=common))
        found += [_key(settings, common) for settings in configured]
        if not found:
            generated = state.secret(GATEWAY_KEY, "hg-")
            found.append(Key(GENERATED, _digest(generated), frozenset({"use", "admin"}), limits=common))
        names = {key.name for key in found}
        found += [_key(settings, common) for settings in stored if settings.name not in names]
        if fleet_token is None:
            secret = state.secret("tenant.secret").encode()
        else:
            secret = hmac.digest(fleet_token.encode("utf-8", "surrogateescape"), b"tenant", "sha256")
        return cls(found, secret, one_tenant=one_tenant)

    @property
    def is_generated(self) -> bool:
        """Whether the generated key is accepted."""
        return any(key.name == GENERATED for key in self._keys)

    @property
    def all(self) -> tuple[Key, ...]:
        """All accepted keys."""
        return self._keys

    def identify(self, headers: Mapping[str, str]) -> tuple[Key, str] | None:
        """The key in `headers` (lower-case names) and its tenant; None when it is not accepted."""
        presented = _key_in(headers)
        digest = _digest(presented)
        found: Key | None = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None or not presented:
            return None
        return found, self._tenant(found)

    def _tenant(self, key: Key) -> str:
        return SHARED_TENANT if self._one_tenant else self._tenants[key.digest]

    def by_digest(self, digest: bytes) -> tuple[Key, str] | None:
        """The key with this SHA-256 and its tenant; None when it is no longer accepted."""
        found = next((key for key in self._keys if key.digest == digest), None)
        return None if found is None else (found, self._tenant(found))

    def admit(self, headers: Mapping[str, str], scope: Scope) -> tuple[Key, str]:
        """The key and tenant of a client with `scope`; raises RequestError (401, 403)."""
        found = self.identify(headers)
        if found is None:
            problem = "the API key is not valid" if _key_in(headers) else "an API key is required"
            raise RequestError(
                Code.INVALID_API_KEY,
                f"{problem}; send `Authorization: Bearer KEY` (`headgate key show` prints a generated key)",
            )
        if scope not in found[0].scopes:
            if not any(scope in key.scopes for key in self._keys):
                variable = "GATEWAY_ADMIN_KEY" if scope == "admin" else "GATEWAY_API_KEY"
                advice = f"no key with this scope is configured; set {variable}"
            else:
                advice = "use another key"
            raise RequestError(Code.PERMISSION_DENIED, f"this key lacks the scope `{scope}`; {advice}")
        return found


def _key(settings: KeySettings, common: Limits) -> Key:
    return Key(
        settings.name,
        bytes.fromhex(settings.hash.removeprefix("sha256:")),
        frozenset(settings.scopes),
        settings.priority,
        common if settings.limits is None else _limits(settings.limits),
        settings.models,
        Budget(settings.budget.dollars_per_month, settings.budget.tokens_per_month),
    )


def _limits(settings: LimitSettings | None) -> Limits:
    if settings is None:
        return NO_LIMITS
    return Limits(settings.requests_per_minute, settings.tokens_per_minute, settings.concurrent)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _key_in(headers: Mapping[str, str]) -> str:
    """The presented key: a bearer token, or x-api-key of Anthropic's clients."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key", "").strip()
