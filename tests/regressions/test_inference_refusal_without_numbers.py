"""A refusal spoke of the device that is dedicated to another model, although only the other one's bytes were missing.

So it had no numbers and no suggestion, and `oom_policy: reduce` had nothing to reduce by.
"""

from __future__ import annotations

from inference.authority.placement.ledger import Account, Ledger
from inference.authority.placement.plan import Held, Option, Policy, Refusal, Request, Standing, plan

MIB = 2**20


def test_of_two_devices_the_one_where_memory_is_missing_is_told() -> None:
    ledger = Ledger()
    for name in ("gpu-0", "gpu-1"):
        ledger = ledger.open(Account(name, 150 * MIB, 135 * MIB)).observe(name, 0, 150 * MIB)
    holding = {"gpu-0": 7 * MIB}
    ledger = ledger.reserve("owner#1", "owner", holding).commit("owner#1", holding)
    owner = Held("owner", "owner#1", Standing.FIXED, holding, 0.0, 1.0, dedicated=True)
    ledger = ledger.observe("gpu-1", 120 * MIB, 30 * MIB)
    options = tuple(Option(name, {name: 60 * MIB}) for name in ("gpu-0", "gpu-1"))
    refusal = plan(Request("new", options), ledger, [owner], Policy(0.0))
    assert isinstance(refusal, Refusal)
    (lack,) = refusal.lacks
    assert (lack.device, lack.need_bytes, lack.room_bytes) == ("gpu-1", 60 * MIB, 30 * MIB)
    assert any("dedicated to owner" in line for line in refusal.trace), "and why not the other one"
