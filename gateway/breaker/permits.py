"""Keeps a breaker's permits: who may pass, whose result still counts, when the open period ends; never reads a clock.

pybreaker is the state machine (consecutive failures, closed/open/half-open); this book adds what it lacks for
concurrent, cancellable attempts: an epoch per state so that late results are known as such, exactly one permit while
half-open, expiry of a permit that nobody returned, a failure ratio over a window, and an open period on a monotonic
clock that a provider's Retry-After may set, probes of ours that may end it early, and a ramp after the recovery. All
functions are `(book, ...) -> (book, answer)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from gateway.breaker import ramp as ramps
from gateway.breaker.ramp import Ramp

_BUCKETS = 10  # the window moves in tenths of its length

MOMENT_SECONDS = 1.0
"""When to ask again where only a probe that is out decides, or the next step of a ramp."""

ONE_EVENT_SECONDS = 1.0
"""Attempts that ran side by side and broke off within so long broke by one event, which counts once."""


class State(IntEnum):
    """A breaker's state; the number is the value of `gateway_breaker_state`."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2

    @property
    def label(self) -> str:
        """The name operators read: closed, half-open, open."""
        return self.name.lower().replace("_", "-")


CLOSED, HALF_OPEN, OPEN = State
"""By themselves, because every request asks a dozen times: Python 3.11 is slow to find a member in its enum."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When a breaker opens and for how long. `open` and `window` are seconds.

    `failures` in a row open it, or a share of `failure_ratio` among at least `min_requests` within `window`. `probes`
    successes in a row close it again.
    """

    failures: int = 5
    open: float = 30.0
    probes: int = 1
    window: float = 60.0
    failure_ratio: float = 0.5
    min_requests: int = 20


class Permit(NamedTuple):
    """The right to make one attempt. A result counts only in the epoch that gave the permit.

    `on_trial` is what is left of a probe's attempt whose beginning was taken for a recovery.
    """

    epoch: int
    number: int
    is_probe: bool
    expires: float
    on_trial: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """No attempt now; `retry_in` seconds until asking again may help.

    While the state is closed either the ramp is full, or the tier is `silent`.
    """

    retry_in: float
    state: State
    silent: bool = False


class Tally(NamedTuple):
    """Results of one tenth of the window."""

    slot: int
    succeeded: int = 0
    failed: int = 0


class Count(IntEnum):
    """What the state machine must be told about a result."""

    NOTHING = 0
    SUCCESS = 1
    FAILURE = 2
    TRIP = 3
    """a failure that opens the breaker whatever the count in a row"""


NOTHING, SUCCESS, FAILURE, TRIP = Count


class Book(NamedTuple):
    """Everything remembered about one breaker.

    `open_until` holds while it is open, `ramp` while it is closed after a recovery. `probe` is the one permit of
    half-open, or while it is open the one under which we ask ourselves.
    """

    state: State = CLOSED
    epoch: int = 0
    issued: int = 0
    open_until: float = 0.0
    asked_pause: float | None = None
    probe: Permit | None = None
    ramp: Ramp | None = None
    tallies: tuple[Tally, ...] = ()
    broke_at: float = 0.0
    broke_below: int = 0
    """The last event that broke attempts off: when it was counted, and the newest permit that ran by then."""


def is_due(book: Book, now: float) -> bool:
    """Whether the open period is over, so that the state machine should become half-open. While we ask ourselves it is
    not: there are never two probes at once."""
    return book.state is OPEN and now >= book.open_until and not is_probed(book, now)


def is_probed(book: Book, now: float) -> bool:
    """Whether somebody, a user's attempt or we ourselves, finds out just now whether the tier is back."""
    return book.probe is not None and now < book.probe.expires


def scout(book: Book, now: float, expires: float) -> tuple[Book, Permit | None]:
    """The permit to ask an open tier off the users' path until `expires`; None when it is not open or probed."""
    if book.state is not OPEN or is_probed(book, now):
        return book, None
    permit = Permit(book.epoch, book.issued + 1, True, expires)
    return book._replace(issued=book.issued + 1, probe=permit), permit


def hasten(book: Book, now: float) -> Book:
    """The book with its open period over: somebody saw the tier come back. The next attempt still is a probe."""
    return book._replace(open_until=min(book.open_until, now)) if book.state is OPEN else book


def postpone(book: Book, until: float) -> Book:
    """The book with an open period that ends no sooner than `until`: the tier was just seen to be away."""
    return book._replace(open_until=max(book.open_until, until)) if book.state is OPEN else book


def entered(book: Book, rule: Rule, state: State, now: float) -> Book:
    """The book after the state machine entered `state`: a new epoch, and no permit of the old one counts."""
    pause = rule.open if book.asked_pause is None else book.asked_pause
    return Book(
        state=state,
        epoch=book.epoch + 1,
        issued=book.issued,
        open_until=now + pause if state is OPEN else 0.0,
        ramp=ramps.begun(now) if state is CLOSED and book.state is HALF_OPEN else None,
    )


def ruled(book: Book, before: Rule, now: Rule) -> Book:
    """The book under another rule: results are counted by tenths of the window, so those of another one say nothing."""
    return book if now.window == before.window else book._replace(tallies=())


def pausing(book: Book, seconds: float) -> Book:
    """The book whose next open period lasts exactly `seconds`."""
    return book._replace(asked_pause=seconds)


def ask(
    book: Book, now: float, expires: float, running: int = 0, forced: bool = False
) -> tuple[Book, Permit | Refusal]:
    """A permit that is valid until `expires`, or the refusal. In half-open at most one unexpired permit exists.

    After a recovery the ramp refuses while `running` attempts fill it, unless the attempt is `forced`.
    """
    if book.state is OPEN:
        return book, Refusal(max(MOMENT_SECONDS if is_probed(book, now) else 0.0, book.open_until - now), book.state)
    is_probe = book.state is HALF_OPEN
    if is_probe and is_probed(book, now):
        return book, Refusal(MOMENT_SECONDS, book.state)
    if not forced and book.ramp is not None:
        width = ramps.width(book.ramp, now)
        if width is not None and running >= width:
            return book, Refusal(MOMENT_SECONDS, book.state)
    number = book.issued + 1
    permit = Permit(book.epoch, number, is_probe, expires)
    return Book(  # every good request meets this, and `_replace` takes three times as long
        book.state, book.epoch, number, book.open_until, book.asked_pause, permit if is_probe else None, book.ramp,
        book.tallies, book.broke_at, book.broke_below,
    ), permit  # fmt: skip


def renew(book: Book, permit: Permit, on_trial: bool = False) -> tuple[Book, Permit]:
    """A permit of the present epoch for what is left of a probe's attempt, once its success was recorded.

    While more probes are needed it holds no probe's place, and its failure still counts. `on_trial`: a failure that
    comes before anybody else's success takes the recovery back.
    """
    fresh = permit._replace(epoch=book.epoch, number=book.issued + 1, is_probe=False, on_trial=on_trial)
    return book._replace(issued=book.issued + 1), fresh


def give_back(book: Book, permit: Permit) -> Book:
    """The permit's attempt says nothing about the tier (cancelled, ignored): a probe's place is free again."""
    return book._replace(probe=None) if book.probe == permit else book


def counts(book: Book, permit: Permit) -> bool:
    """Whether a result under `permit` may still move the breaker."""
    return permit.epoch == book.epoch and (not permit.is_probe or book.probe == permit)


def settle(
    book: Book,
    rule: Rule,
    permit: Permit,
    ok: bool,
    now: float,
    pause: float | None = None,
    trip: bool = False,
    broke: bool = False,
) -> tuple[Book, Count]:
    """Records a result; the answer says what to tell the state machine.

    `pause` (seconds) is a provider's Retry-After: it lengthens the open period that may follow, and with `trip` the
    breaker opens now for exactly so long. `broke`: the attempt ran and was broken off; others that ran beside it and
    broke off within ONE_EVENT_SECONDS are the same event, so that one death with many requests in flight is one
    failure.
    """
    if not counts(book, permit):
        return book, NOTHING
    if permit.is_probe:
        book = give_back(book, permit)
    if ok:
        climbed = None if book.ramp is None else ramps.won(book.ramp)
        tallies = _tally(book, rule, now, succeeded=1)
        return Book(
            book.state, book.epoch, book.issued, book.open_until, book.asked_pause, book.probe, climbed, tallies,
            book.broke_at, book.broke_below,
        ), SUCCESS  # fmt: skip
    if broke:
        if permit.number <= book.broke_below and now - book.broke_at < ONE_EVENT_SECONDS:
            return book, NOTHING
        book = book._replace(broke_at=now, broke_below=book.issued)
    asked = pause if pause is None or trip else max(pause, rule.open)
    trip = trip or (permit.on_trial and book.ramp is not None and not book.ramp.wins)
    anew = None if book.ramp is None else ramps.lost(book.ramp, now)
    book = book._replace(ramp=anew, tallies=_tally(book, rule, now, failed=1), asked_pause=asked)
    return book, TRIP if trip or _ratio_exceeded(book, rule) else FAILURE


def _tally(book: Book, rule: Rule, now: float, succeeded: int = 0, failed: int = 0) -> tuple[Tally, ...]:
    """The window's tallies with one more result; tenths that left the window are dropped."""
    slot = int(now * _BUCKETS / rule.window)
    kept = book.tallies
    if kept and slot - kept[0].slot >= _BUCKETS:
        kept = tuple(tally for tally in kept if slot - tally.slot < _BUCKETS)
    if kept and kept[-1].slot == slot:
        last = kept[-1]
        return (*kept[:-1], Tally(slot, last.succeeded + succeeded, last.failed + failed))
    return (*kept, Tally(slot, succeeded, failed))


def _ratio_exceeded(book: Book, rule: Rule) -> bool:
    failed = sum(tally.failed for tally in book.tallies)
    seen = failed + sum(tally.succeeded for tally in book.tallies)
    return seen >= rule.min_requests and failed >= rule.failure_ratio * seen
