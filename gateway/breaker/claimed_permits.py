"""Permits whose probes are claimed among all gateways that share their state."""

from __future__ import annotations

from gateway.breaker.breaker import SHORT_WAIT_SECONDS
from gateway.breaker.breakers import Breakers, Lease
from gateway.breaker.permits import Refused
from gateway.breaker.probe_claims import ClaimRefused, ProbeClaims

CLAIM_TRIES = 3
"""A claim is tried again when another gateway changed the state meanwhile."""


async def acquire_claimed(
    breakers: Breakers, provider: str, model: str, expires: float, forced: bool = False, generation: int | None = None
) -> Lease | Refused:
    """Like `Breakers.acquire`; a probe is also claimed among all gateways, by one round trip to their store per try."""
    refused = ClaimRefused(provider, model, changed=True)
    for _ in range(CLAIM_TRIES):
        lease = breakers.acquire(provider, model, expires, forced, generation)
        if breakers.claims is None or isinstance(lease, Refused) or not lease.is_probe:
            return lease
        if (now_refused := await _claim(lease, breakers.claims)) is None:
            return lease
        if not (refused := now_refused).changed:
            break
    return Refused(breakers.breaker(refused.provider, refused.model).name, SHORT_WAIT_SECONDS)


async def _claim(lease: Lease, claims: ProbeClaims) -> ClaimRefused | None:
    """Claims the probes of `lease`: None if that succeeded, else the refusal, and `lease` is released."""
    try:
        claim = await claims.claim(lease.probes)
    except BaseException:
        lease.release()
        raise
    if isinstance(claim, ClaimRefused):
        lease.release()
        return claim
    lease.hold_claim(claim)
    return None
