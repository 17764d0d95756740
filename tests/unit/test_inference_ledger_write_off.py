"""What was booked on a lost device is struck out at once; what its models have elsewhere ends with their processes."""

from __future__ import annotations

from inference.authority.placement.ledger import Account, Ledger

MIB = 2**20


def books() -> Ledger:
    ledger = Ledger(limit_bytes=5000 * MIB)
    for name in ("gpu-0", "gpu-1", "cpu"):
        ledger = ledger.open(Account(name, 1000 * MIB, 1000 * MIB))
    ledger = ledger.reserve("a#1", "a", {"gpu-0": 100 * MIB, "cpu": 10 * MIB})
    ledger = ledger.reserve("b#2", "b", {"gpu-0": 200 * MIB, "gpu-1": 300 * MIB}).leave("b#2")
    return ledger.observe("gpu-0", 700 * MIB, 300 * MIB)


def test_nothing_is_held_or_used_on_a_device_that_lost_its_memory() -> None:
    ledger = books().write_off("gpu-0")
    balance = ledger.balance("gpu-0")
    assert (balance.ours_bytes, balance.foreign_bytes, balance.free_bytes) == (0, 0, 1000 * MIB)
    assert ledger.balance("gpu-1").releasing_bytes == 300 * MIB
    assert ledger.balance("cpu").reserved_bytes == 10 * MIB
    assert ledger.owned_by("a") == {"cpu": 10 * MIB}
    assert ledger.write_off("gpu-0") == ledger


def test_what_is_left_is_released_once_as_ever() -> None:
    ledger = books().write_off("gpu-0").release("a#1").forfeit("b#2")
    assert not ledger.holdings
    assert ledger.balance("gpu-0").free_bytes == 1000 * MIB
    assert ledger.balance("gpu-1").foreign_bytes == 300 * MIB


def test_host_memory_is_not_lost_with_the_device_that_shares_it() -> None:
    ledger = Ledger().open(Account("cpu", 1000, 1000)).share("gpu-0", "cpu").reserve("a#1", "a", {"gpu-0": 400})
    assert ledger.write_off("gpu-0") == ledger
