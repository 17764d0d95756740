"""The ledger is never negative, always balances, and ends every reservation exactly once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from inference.authority.placement.ledger import Account, Ledger, LedgerError, Phase, Sums

DEVICES = ("gpu-0", "gpu-1", "cpu")
amounts = st.integers(0, 400)
needs = st.dictionaries(st.sampled_from(DEVICES), amounts, min_size=1)


class LedgerMachine(RuleBasedStateMachine):
    """Reserve, commit, leave, release, forfeit and observe in any order."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(limit_bytes=1500)
        for device in DEVICES:
            self.ledger = self.ledger.open(Account(device, capacity_bytes=1000, budget_bytes=800))
        self.count = 0
        self.gone: set[str] = set()

    @rule(target=live, need=needs)
    def reserve(self, need: dict[str, int]) -> str:
        self.count += 1
        id = f"r{self.count}"
        fits = not self.ledger.lacks(need)
        before = self.ledger
        if fits:
            self.ledger = self.ledger.reserve(id, "m", need)
            without = self.ledger.without([id])
            assert [without.room(device) for device in DEVICES] == [before.room(device) for device in DEVICES]
        else:
            with pytest.raises(LedgerError):
                self.ledger.reserve(id, "m", need)
            assert self.ledger is before
            self.gone.add(id)
        return id

    @rule(id=live, actual=needs)
    def commit(self, id: str, actual: dict[str, int]) -> None:
        holding = self.ledger.holdings.get(id)
        try:
            self.ledger = self.ledger.commit(id, actual)
        except LedgerError:
            assert self.ledger.holdings.get(id) == holding
        else:
            assert holding is not None
            assert holding.phase is Phase.RESERVED
            assert self.ledger.holdings[id].phase is Phase.RESIDENT

    @rule(id=live, device=st.sampled_from(DEVICES), count=amounts)
    def grow(self, id: str, device: str, count: int) -> None:
        before = self.ledger
        try:
            self.ledger = self.ledger.grow(id, device, count)
        except LedgerError:
            assert self.ledger is before
            return
        assert before.holdings[id].phase is Phase.RESIDENT
        assert self.ledger.loaded_bytes == before.loaded_bytes + count
        assert self.ledger.balance(device).shortfall_bytes == 0

    @rule(id=live, rest=needs)
    def shrink(self, id: str, rest: dict[str, int]) -> None:
        before = self.ledger
        try:
            self.ledger = before.shrink(id, rest)
        except LedgerError:
            assert self.ledger is before
            return
        held = before.holdings[id].bytes
        assert before.holdings[id].phase is Phase.RESIDENT
        assert all(held.get(device, 0) >= count for device, count in rest.items())
        assert before.loaded_bytes - self.ledger.loaded_bytes == sum(held.values()) - sum(rest.values())

    @rule(id=live, other=consumes(live))
    def absorb(self, id: str, other: str) -> None:
        before = self.ledger
        try:
            self.ledger = before.absorb(id, other)
        except LedgerError:
            assert self.ledger is before
            if other in before.holdings:
                self.ledger = before.release(other)
            return
        assert other not in self.ledger.holdings
        for device in DEVICES:
            assert self.ledger.balance(device) == before.balance(device)

    @rule(id=live)
    def leave(self, id: str) -> None:
        holding = self.ledger.holdings.get(id)
        may = holding is not None and holding.phase is not Phase.RELEASING
        if may:
            self.ledger = self.ledger.leave(id)
        else:
            with pytest.raises(LedgerError):
                self.ledger.leave(id)

    @rule(id=consumes(live), forfeit=st.booleans())
    def end(self, id: str, forfeit: bool) -> None:
        if id in self.gone:
            with pytest.raises(LedgerError):
                self.ledger.release(id)
            return
        before = self.ledger
        held = dict(before.holdings[id].bytes)
        if forfeit and before.holdings[id].phase is Phase.RELEASING:
            self.ledger = before.forfeit(id)
            for device, count in held.items():
                assert self.ledger.accounts[device].foreign_bytes == before.accounts[device].foreign_bytes + count
        else:
            self.ledger = before.release(id)
            for device, count in held.items():
                assert self.ledger.balance(device).ours_bytes == before.balance(device).ours_bytes - count
        with pytest.raises(LedgerError):
            self.ledger.release(id)

    @rule(device=st.sampled_from(DEVICES), budget=amounts, used=amounts)
    def cache(self, device: str, budget: int, used: int) -> None:
        """A budget for stored sequences changes nothing for models, whatever its size."""
        before = self.ledger
        id = f"cache of {device}"
        self.ledger = before.cache(id, "m", device, budget).note_use(id, used)
        assert self.ledger.cache(id, "m", device, budget) == self.ledger
        assert self.ledger.loaded_bytes == before.loaded_bytes
        for other in DEVICES:
            after, was = self.ledger.balance(other), before.balance(other)
            assert (after.ours_bytes, after.foreign_bytes) == (was.ours_bytes, was.foreign_bytes)

    @rule(device=st.sampled_from(DEVICES))
    def lose(self, device: str) -> None:
        """The device is lost with its bookings; bytes on other devices do not change, and no holding ends."""
        before = self.ledger
        self.ledger = before.write_off(device)
        after = self.ledger.balance(device)
        assert (after.ours_bytes, after.foreign_bytes) == (0, 0)
        assert set(self.ledger.holdings) == set(before.holdings)
        for other in set(DEVICES) - {device}:
            assert self.ledger.balance(other).ours_bytes == before.balance(other).ours_bytes
            assert self.ledger.balance(other).foreign_bytes == before.balance(other).foreign_bytes

    @rule(device=st.sampled_from(DEVICES), used=st.integers(0, 1200))
    def observe(self, device: str, used: int) -> None:
        before, stored = self.ledger.balance(device), self.ledger.sums.get(device, Sums()).cache_used_bytes
        self.ledger = self.ledger.observe(device, used, max(0, 1000 - used))
        after = self.ledger.balance(device)
        if before.reserved_bytes or before.releasing_bytes:
            assert after.foreign_bytes >= before.foreign_bytes
        else:
            assert after.foreign_bytes == max(0, used - before.ours_bytes - stored)

    @invariant()
    def balances(self) -> None:
        for device in DEVICES:
            b = self.ledger.balance(device)
            used = b.foreign_bytes + b.reserved_bytes + b.resident_bytes + b.releasing_bytes + b.cached_bytes
            assert b.capacity_bytes + b.shortfall_bytes == b.free_bytes + used
            assert min(b.free_bytes, b.shortfall_bytes) == 0
            assert min(b.free_bytes, b.shortfall_bytes, b.foreign_bytes, b.room_bytes, b.ours_bytes) >= 0

    @invariant()
    def kept_sums_are_the_sums_of_the_holdings(self) -> None:
        anew = Ledger(self.ledger.accounts, self.ledger.holdings, self.ledger.limit_bytes)
        for device in DEVICES:
            assert self.ledger.balance(device) == anew.balance(device)
        models = [item for item in self.ledger.holdings.values() if not item.cache]
        assert self.ledger.loaded_bytes == sum(sum(item.bytes.values()) for item in models)

    @invariant()
    def caches_take_no_room_from_models(self) -> None:
        """What fits beside caches is what would fit if they had been given back."""
        caches = {id: item for id, item in self.ledger.holdings.items() if item.cache}
        rest = {id: item for id, item in self.ledger.holdings.items() if not item.cache}
        accounts = {}
        for device, account in self.ledger.accounts.items():
            free = account.observed_free_bytes
            stored = sum(item.used_bytes for item in caches.values() if device in item.bytes)
            accounts[device] = replace(account, observed_free_bytes=None if free is None else free + stored)
        without = Ledger(accounts, rest, self.ledger.limit_bytes)
        for device in DEVICES:
            for exempt in (False, True):
                assert self.ledger.room(device, exempt=exempt) == without.room(device, exempt=exempt)
            assert self.ledger.excess(device) == without.excess(device)
            assert self.ledger.missing({device: 300}) == without.missing({device: 300})

    @invariant()
    def stays_within_limits(self) -> None:
        assert self.ledger.loaded_bytes <= 1500
        for device in DEVICES:
            assert self.ledger.balance(device).ours_bytes <= 800


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase


def test_new_account_has_its_whole_budget() -> None:
    """The room is the smallest of its limits, and a lack names that limit."""
    ledger = Ledger().open(Account("cpu", 1000, 600))
    assert (ledger.balance("cpu").room_bytes, ledger.lacks({"cpu": 600})) == (600, ())
    (lack,) = ledger.lacks({"cpu": 601})
    assert (lack.free_bytes, lack.bound) == (600, "Headgate's share of the device")
    seen = ledger.observe("cpu", 900, 100)
    assert seen.lacks({"cpu": 101})[0].free_bytes == 100


def test_the_limit_counts_all_devices_together() -> None:
    """A need that fits on each device may still exceed the sum."""
    ledger = Ledger(limit_bytes=1000)
    for device in ("a", "b"):
        ledger = ledger.open(Account(device, 1000, 1000))
    assert not ledger.lacks({"a": 500, "b": 500})
    (lack,) = ledger.lacks({"a": 600, "b": 500})
    assert (lack.need_bytes, lack.free_bytes, lack.bound) == (1100, 1000, "INFERENCE_MEMORY_LIMIT_GB")


def test_excess_over_a_lowered_limit_is_reported() -> None:
    """The excess is zero while the limit is not exceeded."""
    ledger = Ledger().open(Account("a", 1000, 800)).reserve("one", "m", {"a": 600})
    assert ledger.excess("a") == 0
    assert ledger.open(Account("a", 1000, 500)).excess("a") == 100
    assert replace(ledger, limit_bytes=350).spare_altogether == -250


def test_allocated_bytes_of_a_loading_worker_reduce_the_room_and_are_not_foreign() -> None:
    """Until the worker is ready, the room lacks its whole reservation and what it has allocated of it."""
    ledger = Ledger().open(Account("cpu", 1000, 1000)).observe("cpu", 0, 1000)
    ledger = ledger.reserve("one", "m", {"cpu": 400}).observe("cpu", 300, 700)
    assert ledger.balance("cpu").foreign_bytes == 0
    assert ledger.balance("cpu").room_bytes == 300
    ledger = ledger.commit("one", {"cpu": 400}).observe("cpu", 400, 600)
    assert ledger.balance("cpu").room_bytes == 600


def test_reading_during_a_load_does_not_count_its_bytes_twice() -> None:
    """A model on more than half of a device may use a little more than it reserved."""
    ledger = Ledger().open(Account("gpu-0", 1000, 1000)).reserve("one", "m", {"gpu-0": 600}).observe("gpu-0", 600, 400)
    assert ledger.commit("one", {"gpu-0": 604}).balance("gpu-0").resident_bytes == 604
    other = ledger.reserve("other", "n", {"gpu-0": 0}).observe("gpu-0", 998, 2)
    with pytest.raises(LedgerError, match="needs more than its reservation"):
        other.commit("one", {"gpu-0": 604})


@pytest.mark.parametrize("need", [{"nowhere": 1}, {"cpu": -1}])
def test_impossible_bookings_change_nothing(need: dict[str, int]) -> None:
    ledger = Ledger().open(Account("cpu", 1000, 1000))
    with pytest.raises(LedgerError):
        ledger.reserve("x", "m", need)


def test_reservation_id_is_used_once() -> None:
    """Two reservations never share an id, and only a reservation can be committed."""
    ledger = Ledger().open(Account("cpu", 1000, 1000)).reserve("x", "m", {"cpu": 1})
    with pytest.raises(LedgerError):
        ledger.reserve("x", "m", {"cpu": 1})
    with pytest.raises(LedgerError):
        ledger.commit("x", {"cpu": 1}).commit("x", {"cpu": 1})
    with pytest.raises(LedgerError):
        ledger.commit("x", {"cpu": 2000})
    assert ledger.owned_by("m") == {"cpu": 1}
    assert ledger.owned_by("n") == {}


def test_only_a_cache_can_get_another_budget() -> None:
    """The known use of the cache stays, and a cache can be released only once."""
    ledger = Ledger().open(Account("cpu", 1000, 1000)).reserve("x", "m", {"cpu": 1})
    with pytest.raises(LedgerError):
        ledger.cache("x", "m", "cpu", 5)
    with pytest.raises(LedgerError):
        ledger.note_use("x", 5)
    ledger = ledger.cache("y", "m", "cpu", 900).note_use("y", 300).cache("y", "m", "cpu", 100)
    assert ledger.caches["m"].used_bytes == 300
    assert ledger.owned_by("m") == {"cpu": 1}
    assert not ledger.lacks({"cpu": 999})
    with pytest.raises(LedgerError):
        ledger.leave("y")
    with pytest.raises(LedgerError):
        ledger.release("y").release("y")
