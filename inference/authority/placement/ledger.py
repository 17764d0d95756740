"""The ledger of device memory. Every reservation ends exactly once.

There is one account per device, including host memory, with

    capacity + shortfall = free + foreign + reserved + resident + releasing + cached   and   free = 0 or shortfall = 0

`capacity` is the limit of all use of the device, `budget` the limit of Headgate's share, `foreign` the use by other
programs. A holding is the bytes of one model on all its devices: `reserved` before a process starts, `resident` when
the worker is ready, `releasing` while the worker ends. `foreign` is measured only while nothing is reserved or
releasing on the device; otherwise it may only rise, because a loading or ending worker uses less than is booked for it.

`cached` are budgets for stored sequences of models, which may be unused in part. They never stand in the way: what is
available to a model is computed without them. After each booking they are reduced to what is left.

A device without its own memory (unified memory) shares the account of the host.

The memory limit applies to the sum over loaded models. Memory of models that are not loaded (warm pool) is `exempt`: it
counts on its device, but not for the memory limit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar

from headgate.shared.units import format_bytes
from inference.errors import Shortage

K = TypeVar("K")
V = TypeVar("V")


class LedgerError(Exception):
    """The booking is impossible; nothing changed."""


class Phase(StrEnum):
    """The phase of a holding."""

    RESERVED = "reserved"
    RESIDENT = "resident"
    RELEASING = "releasing"
    CACHED = "cached"
    """a budget for stored sequences"""


@dataclass(frozen=True, slots=True)
class Account:
    """One device. `observed_free_bytes` is the last reading, None before the first."""

    device: str
    capacity_bytes: int
    budget_bytes: int
    foreign_bytes: int = 0
    observed_free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes of one owner per device, in one phase. `exempt`: they do not count for the memory limit.

    `used_bytes`: how much of a cache is in use; it may exceed a budget that has just been reduced.
    """

    id: str
    owner: str
    phase: Phase
    bytes: Mapping[str, int]
    exempt: bool = False
    used_bytes: int = 0

    @property
    def cache(self) -> bool:
        """Whether it is a budget for stored sequences."""
        return self.phase is Phase.CACHED


@dataclass(frozen=True, slots=True)
class Balance:
    """An account in bytes. `room_bytes` is available for a new reservation, `bound` is the limit that applies."""

    capacity_bytes: int
    free_bytes: int
    foreign_bytes: int
    reserved_bytes: int
    resident_bytes: int
    releasing_bytes: int
    cached_bytes: int
    shortfall_bytes: int
    room_bytes: int
    bound: str

    @property
    def ours_bytes(self) -> int:
        """The bytes of models in all phases, without caches."""
        return self.reserved_bytes + self.resident_bytes + self.releasing_bytes


@dataclass(frozen=True, slots=True)
class Sums:
    """The bytes of all holdings on a device, by phase. `exempt_bytes` are included in the phases.

    `cache_used_bytes`: how much of the caches is in use.
    """

    reserved_bytes: int = 0
    resident_bytes: int = 0
    releasing_bytes: int = 0
    cached_bytes: int = 0
    exempt_bytes: int = 0
    cache_used_bytes: int = 0

    @property
    def ours_bytes(self) -> int:
        """The bytes of models in all phases, without caches."""
        return self.reserved_bytes + self.resident_bytes + self.releasing_bytes


_NOTHING = Sums()
_PHASES = (Phase.RESERVED, Phase.RESIDENT, Phase.RELEASING, Phase.CACHED)
"""In the order of the fields of `Sums`."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """All accounts and holdings. `limit_bytes` limits the sum of loaded models over all devices.

    `sums` is derived from `holdings` and cached, because a decision needs it hundreds of times.
    """

    accounts: Mapping[str, Account] = field(default_factory=dict)
    holdings: Mapping[str, Holding] = field(default_factory=dict)
    limit_bytes: int | None = None
    sums: Mapping[str, Sums] = field(default_factory=dict, compare=False, repr=False)
    shared: Mapping[str, str] = field(default_factory=dict)
    """The account of each device without its own memory."""

    loaded_bytes: int = field(default=0, init=False, compare=False, repr=False)
    """The sum over all devices and phases, without caches and exempt bytes."""
    _rooms: dict[str, tuple[int, str]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """The results of `room` for holdings that are not exempt; a search for smaller settings needs them again."""

    def __post_init__(self) -> None:
        if self.holdings and not self.sums:
            held: Iterable[Holding] = self.holdings.values()
            if self.shared:
                held = (replace(item, bytes=self._booked(item.bytes)) for item in held)
            object.__setattr__(self, "sums", _changed({}, held, 1))
        loaded_bytes = sum(sums.ours_bytes - sums.exempt_bytes for sums in self.sums.values())
        object.__setattr__(self, "loaded_bytes", loaded_bytes)

    def balance(self, device: str) -> Balance:
        """The account of `device` in numbers; raises LedgerError for an unknown device."""
        account = self._account(device)
        sums = self._sums(device)
        used = account.foreign_bytes + sums.ours_bytes + sums.cached_bytes
        room, bound = self._room(account, sums)
        return Balance(
            capacity_bytes=account.capacity_bytes,
            free_bytes=max(0, account.capacity_bytes - used),
            foreign_bytes=account.foreign_bytes,
            reserved_bytes=sums.reserved_bytes,
            resident_bytes=sums.resident_bytes,
            releasing_bytes=sums.releasing_bytes,
            cached_bytes=sums.cached_bytes,
            shortfall_bytes=max(0, used - account.capacity_bytes),
            room_bytes=room,
            bound=bound,
        )

    def lacks(self, need: Mapping[str, int], *, exempt: bool = False) -> tuple[Shortage, ...]:
        """The devices on which `need` (bytes per device) does not fit; empty when it does."""
        found = []
        need = self._booked(need)
        spare = None if exempt else self.spare_altogether
        total = sum(need.values())
        for device, count in need.items():
            room, bound = self.room(device, exempt=exempt)
            if count > room:
                found.append(Shortage(device, count, room, bound))
        if not found and spare is not None and total > spare:
            device = max(need, key=lambda name: need[name])
            found.append(Shortage(device, total, max(0, spare), "INFERENCE_MEMORY_LIMIT_GB"))
        return tuple(found)

    def room(self, device: str, *, exempt: bool = False) -> tuple[int, str]:
        """The bytes that are available for a new reservation on `device`, and the limit that applies.

        Caches count as available.
        """
        if exempt or device not in self._rooms:
            found = self._room(self._account(device), self._sums(device), exempt=exempt)
            if exempt:
                return found
            self._rooms[device] = found
        return self._rooms[device]

    def account_of(self, device: str) -> str:
        """The account of `device`: its own, or that of the memory it shares."""
        return self.shared.get(device, device)

    def open(self, account: Account) -> Ledger:
        """Adds `account`, or replaces its capacity and budget."""
        known = self.accounts.get(account.device)
        if known is not None:
            account = replace(account, foreign_bytes=known.foreign_bytes, observed_free_bytes=known.observed_free_bytes)
        return replace(self, accounts=_with(self.accounts, account.device, account))

    def share(self, device: str, account: str) -> Ledger:
        """Books the bytes of `device` on `account`; raises LedgerError if the device has its own account."""
        if device in self.accounts or account not in self.accounts:
            raise LedgerError(f"{device} cannot share the memory of {account}")
        return self if self.shared.get(device) == account else replace(self, shared=_with(self.shared, device, account))

    def reserve(self, id: str, owner: str, need: Mapping[str, int], *, exempt: bool = False) -> Ledger:
        """Books `need` as reserved; raises LedgerError when it does not fit, is negative, or `id` is in use."""
        if id in self.holdings:
            raise LedgerError(f"reservation {id} exists already")
        if any(count < 0 for count in need.values()):
            raise LedgerError(f"reservation {id} has a negative amount")
        if lacking := self.lacks(need, exempt=exempt):
            raise LedgerError(f"reservation {id} does not fit: {_text(lacking)}")
        return self._put(Holding(id, owner, Phase.RESERVED, MappingProxyType(dict(self._booked(need))), exempt))

    def set_exempt(self, id: str, *, exempt: bool = True) -> Ledger:
        """Marks a holding as not part of a loaded model, or as part of one again; this may exceed the limit."""
        return self._put(replace(self._holding(id, *Phase), exempt=exempt))

    def commit(self, id: str, actual: Mapping[str, int]) -> Ledger:
        """Turns a reservation into resident bytes, `actual` per device.

        If `actual` is less than reserved, the rest is released; if it is more, it must fit (else LedgerError).
        """
        holding = self._holding(id, Phase.RESERVED)
        actual = self._booked(actual)
        growth = {
            device: count - holding.bytes.get(device, 0)
            for device, count in actual.items()
            if count > holding.bytes.get(device, 0)
        }
        resident = replace(holding, phase=Phase.RESIDENT)
        # free memory as read since the load began lacks the reserved bytes already: they are not subtracted again
        if growth and (lacking := self._put(resident).lacks(growth, exempt=holding.exempt)):
            raise LedgerError(f"{holding.owner} needs more than its reservation: {_text(lacking)}")
        return self._put(replace(resident, bytes=MappingProxyType(dict(actual))))

    def grow(self, id: str, device: str, count: int, *, beyond: bool = False) -> Ledger:
        """Books `count` more bytes for a resident holding that already uses them; a reading showed them as foreign.

        Raises LedgerError if they exceed the device, Headgate's share of it, or the memory limit, except with `beyond`,
        for a model that leaves because of them.
        """
        holding = self._holding(id, Phase.RESIDENT)
        device = self.account_of(device)
        account = self._account(device)
        account = replace(account, foreign_bytes=max(0, account.foreign_bytes - count))
        more = {**holding.bytes, device: holding.bytes.get(device, 0) + count}
        grown = replace(self, accounts=_with(self.accounts, device, account))._put(
            replace(holding, bytes=MappingProxyType(more))
        )
        balance = grown.balance(device)
        for used, bound, name in (
            (balance.ours_bytes + account.foreign_bytes, account.capacity_bytes, "the device"),
            (balance.ours_bytes, account.budget_bytes, "Headgate's share of the device"),
            (grown.loaded_bytes, grown.limit_bytes, "INFERENCE_MEMORY_LIMIT_GB"),
        ):
            if bound is not None and used > bound and not beyond:
                more_text = f"{format_bytes(count)} more than its reservation on {device}"
                raise LedgerError(f"{holding.owner} uses {more_text}, and exceeds {name} ({format_bytes(bound)})")
        return grown

    def shrink(self, id: str, rest: Mapping[str, int]) -> Ledger:
        """Reduces a resident holding to `rest`; raises LedgerError if it has less than that on a device."""
        holding = self._holding(id, Phase.RESIDENT)
        rest = self._booked(rest)
        if any(not 0 <= count <= holding.bytes.get(device, 0) for device, count in rest.items()):
            raise LedgerError(f"{holding.owner} cannot shrink to more than it holds")
        return self._put(replace(holding, bytes=MappingProxyType(dict(rest))))

    def absorb(self, id: str, other: str) -> Ledger:
        """Merges the resident holding `other` into the resident holding `id` of the same owner."""
        holding, part = self._holding(id, Phase.RESIDENT), self._holding(other, Phase.RESIDENT)
        if id == other or holding.owner != part.owner:
            raise LedgerError(f"{other} cannot become a part of {id}")
        both = {name: holding.bytes.get(name, 0) + part.bytes.get(name, 0) for name in {**holding.bytes, **part.bytes}}
        return self.release(other)._put(replace(holding, bytes=MappingProxyType(both)))

    def cache(self, id: str, owner: str, device: str, budget_bytes: int) -> Ledger:
        """Books `budget_bytes` for stored sequences of `owner`, instead of the budget that `id` had until now.

        It may exceed the room, which the caller has computed. Raises LedgerError if `id` is not a cache.
        """
        known = self.holdings.get(id)
        if known is not None and not known.cache:
            raise LedgerError(f"{id} is not a cache")
        self._account(device)
        budget = MappingProxyType({self.account_of(device): budget_bytes})
        return self._put(Holding(id, owner, Phase.CACHED, budget, used_bytes=known.used_bytes if known else 0))

    def note_use(self, id: str, used_bytes: int) -> Ledger:
        """Enters how much of a cache is in use."""
        return self._put(replace(self._holding(id, Phase.CACHED), used_bytes=used_bytes))

    @property
    def caches(self) -> Mapping[str, Holding]:
        """The caches, by owner."""
        return {holding.owner: holding for holding in self.holdings.values() if holding.cache}

    def leave(self, id: str) -> Ledger:
        """The worker is ending or has ended: its bytes are releasing until `release`."""
        holding = self._holding(id, Phase.RESERVED, Phase.RESIDENT)
        return self._put(replace(holding, phase=Phase.RELEASING))

    def release(self, id: str) -> Ledger:
        """The bytes are free again; raises LedgerError the second time."""
        holding = self._holding(id, *Phase)
        holdings = dict(self.holdings)
        del holdings[id]
        return replace(self, holdings=holdings, sums=_changed(self.sums, (holding,), -1))

    def forfeit(self, id: str) -> Ledger:
        """The worker has ended without its bytes becoming free: they count as foreign."""
        holding = self._holding(id, Phase.RELEASING)
        accounts = dict(self.accounts)
        for device, count in holding.bytes.items():
            account = accounts[device]
            accounts[device] = replace(account, foreign_bytes=account.foreign_bytes + count)
        return replace(self.release(id), accounts=accounts)

    def write_off(self, device: str) -> Ledger:
        """Removes all bytes on a lost device; holdings keep their bytes on other devices.

        Host memory is not lost with a device that shares it.
        """
        if self.account_of(device) != device:
            return self
        held = [holding for holding in self.holdings.values() if device in holding.bytes]
        after = replace(self, accounts=_with(self.accounts, device, replace(self._account(device), foreign_bytes=0)))
        for holding in held:
            rest = {name: count for name, count in holding.bytes.items() if name != device}
            after = after._put(replace(holding, bytes=MappingProxyType(rest)))
        return after

    def observe(self, device: str, used_bytes: int, free_bytes: int, min_foreign_bytes: int = 0) -> Ledger:
        """Enters a reading of the device: bytes in use by all programs, and free bytes.

        `min_foreign_bytes` are known to be foreign, although the reading may be older than the bookings.
        """
        device = self.account_of(device)
        account = self._account(device)
        sums = self._sums(device)
        foreign = max(min_foreign_bytes, used_bytes - sums.ours_bytes - sums.cache_used_bytes)
        if sums.reserved_bytes or sums.releasing_bytes:
            foreign = max(foreign, account.foreign_bytes)
        seen = replace(account, foreign_bytes=foreign, observed_free_bytes=max(0, free_bytes))
        return replace(self, accounts=_with(self.accounts, device, seen))

    def without(self, ids: Collection[str]) -> Ledger:
        """The ledger as if these holdings had been released; for what-if questions.

        The devices then show more free memory where the holdings use it: of a cache what is in use, of a reservation
        nothing.
        """
        gone = [self._holding(id, *_PHASES) for id in ids]
        freed: dict[str, int] = {}
        for holding in gone:
            if holding.phase is not Phase.RESERVED:
                for device, count in holding.bytes.items():
                    freed[device] = freed.get(device, 0) + (holding.used_bytes if holding.cache else count)
        accounts = dict(self.accounts)
        for device, count in freed.items():
            account = accounts[device]
            if account.observed_free_bytes is not None:
                accounts[device] = replace(account, observed_free_bytes=account.observed_free_bytes + count)
        holdings = {id: holding for id, holding in self.holdings.items() if id not in ids}
        return replace(self, accounts=accounts, holdings=holdings, sums=_changed(self.sums, gone, -1))

    def assume(self, id: str, owner: str, need: Mapping[str, int]) -> Ledger:
        """The ledger as if `need` were reserved, whether it fits or not; for what-if questions."""
        return self._put(Holding(id, owner, Phase.RESERVED, MappingProxyType(dict(self._booked(need)))))

    def missing(self, need: Mapping[str, int]) -> tuple[Mapping[str, int], int]:
        """Bytes that resident holdings must release before `need` fits: per device, and in total.

        A set of holdings suffices exactly if its sums reach all figures (none is negative).
        """
        need = self._booked(need)
        per_device = {device: max(0, count - self.spare(device)) if count else 0 for device, count in need.items()}
        spare = self.spare_altogether
        return per_device, 0 if spare is None else max(0, sum(need.values()) - spare)

    def spare(self, device: str) -> int:
        """`room` without the memory limit; negative if too much is booked. Each released byte adds one."""
        return min(count for count, _ in self._device_bounds(self._account(device), self._sums(device)))

    @property
    def spare_altogether(self) -> int | None:
        """The rest of the memory limit; negative if too much is booked; None without a limit."""
        return None if self.limit_bytes is None else self.limit_bytes - self.loaded_bytes

    def excess(self, device: str) -> int:
        """The bytes of models above Headgate's share of `device`; 0 unless a limit was lowered or a model grew."""
        return max(0, self._sums(device).ours_bytes - self._account(device).budget_bytes)

    def owned_by(self, owner: str) -> Mapping[str, int]:
        """Bytes per device of `owner`, in all phases, without its cache."""
        found: dict[str, int] = {}
        for holding in self.holdings.values():
            if holding.owner == owner and not holding.cache:
                for device, count in holding.bytes.items():
                    found[device] = found.get(device, 0) + count
        return found

    def _sums(self, device: str) -> Sums:
        return self.sums.get(self.account_of(device), _NOTHING)

    def _booked(self, need: Mapping[str, int]) -> Mapping[str, int]:
        """`need` by account."""
        if not self.shared:
            return need
        found: dict[str, int] = {}
        for device, count in need.items():
            found[self.account_of(device)] = found.get(self.account_of(device), 0) + count
        return found

    def _room(self, account: Account, sums: Sums, *, exempt: bool = False) -> tuple[int, str]:
        bounds = self._device_bounds(account, sums)
        if self.limit_bytes is not None and not exempt:
            bounds.append((self.limit_bytes - self.loaded_bytes, "INFERENCE_MEMORY_LIMIT_GB"))
        room, bound = min(bounds, key=lambda item: item[0])
        return max(0, room), bound

    @staticmethod
    def _device_bounds(account: Account, sums: Sums) -> list[tuple[int, str]]:
        ours = sums.ours_bytes
        bounds = [
            (account.capacity_bytes - account.foreign_bytes - ours, "the capacity of the device minus foreign use"),
            (account.budget_bytes - ours, "Headgate's share of the device"),
        ]
        if account.observed_free_bytes is not None:
            free = account.observed_free_bytes + sums.cache_used_bytes - sums.reserved_bytes
            bounds.append((free, "the free memory of the device"))
        return bounds

    def _account(self, device: str) -> Account:
        try:
            return self.accounts[self.account_of(device)]
        except KeyError:
            raise LedgerError(f"no device {device}") from None

    def _holding(self, id: str, *phases: Phase) -> Holding:
        holding = self.holdings.get(id)
        if holding is None:
            raise LedgerError(f"no reservation {id}; it was released or never made")
        if holding.phase not in phases:
            raise LedgerError(f"reservation {id} is {holding.phase}")
        return holding

    def _put(self, holding: Holding) -> Ledger:
        before = self.holdings.get(holding.id)
        sums = self.sums if before is None else _changed(self.sums, (before,), -1)
        return replace(self, holdings=_with(self.holdings, holding.id, holding), sums=_changed(sums, (holding,), 1))


def _text(lacking: Iterable[Shortage]) -> str:
    return ", ".join(
        f"needs {format_bytes(item.need_bytes)} on {item.device}, available are {format_bytes(item.free_bytes)}"
        for item in lacking
    )


def _with(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    return {**mapping, key: value}


def _changed(sums: Mapping[str, Sums], holdings: Iterable[Holding], sign: int) -> Mapping[str, Sums]:
    """`sums` with these holdings (1) or without them (-1)."""
    changes: dict[str, list[int]] = {}
    for holding in holdings:
        column = _PHASES.index(holding.phase)
        for device, count in holding.bytes.items():
            change = changes.setdefault(device, [0] * (len(_PHASES) + 2))
            change[column] += sign * count
            if holding.exempt:
                change[-2] += sign * count
            change[-1] += sign * holding.used_bytes
    after = dict(sums)
    for device, (reserved, resident, releasing, cached, exempt, used) in changes.items():
        before = after.get(device, _NOTHING)
        after[device] = Sums(
            before.reserved_bytes + reserved,
            before.resident_bytes + resident,
            before.releasing_bytes + releasing,
            before.cached_bytes + cached,
            before.exempt_bytes + exempt,
            before.cache_used_bytes + used,
        )
    return after
