"""Invariants of the restart policy of the supervisor."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headgate.cli.supervise.restart_policy import (
    Begin,
    Due,
    Exited,
    GiveUp,
    Phase,
    Policy,
    ProcessEvent,
    ProcessState,
    Spawn,
    Stop,
    Wait,
    delay,
    step,
)

POLICY = Policy()
events = st.one_of(
    st.builds(Begin, now=st.just(0.0)),
    st.builds(Exited, now=st.just(0.0), status=st.sampled_from([0, 1, 2, 70, -9, -15])),
    st.builds(Due, now=st.just(0.0)),
    st.just(Stop()),
)
histories = st.lists(st.tuples(st.floats(0, 120), events), max_size=60)


def _at(event: ProcessEvent, now: float) -> ProcessEvent:
    match event:
        case Exited(_, status):
            return Exited(now, status)
        case Begin():
            return Begin(now)
        case Due():
            return Due(now)
        case Stop():
            return event


@given(histories)
def test_at_most_one_process_and_none_after_stop(history: list[tuple[float, ProcessEvent]]) -> None:
    """A process is started only if none runs, and after Stop only Begin starts one."""
    state, now, running, wanted = ProcessState(), 0.0, False, False
    for passed, event in history:
        now += passed
        happened = _at(event, now)
        if isinstance(happened, Exited):
            running = False if state.phase is Phase.RUNNING else running
        if isinstance(happened, Stop):
            running = wanted = False
        if isinstance(happened, Begin):
            wanted = True
        state, effects = step(state, happened, POLICY)
        for effect in effects:
            if isinstance(effect, Spawn):
                assert not running
                assert wanted
                running = True
        assert running == (state.phase is Phase.RUNNING)
        assert (state.due_at is not None) == (state.phase is Phase.WAITING)


@given(st.integers(1, 1000))
def test_delays_double_from_the_first_to_the_cap(exits: int) -> None:
    """Every delay is between the first and the longest, and each is double the one before up to the longest."""
    here, following = delay(exits, POLICY), delay(exits + 1, POLICY)
    assert POLICY.first_seconds <= here <= POLICY.cap_seconds
    assert following == min(here * POLICY.factor, POLICY.cap_seconds)


@given(st.lists(st.sampled_from([0, 1, 70, -6, -9]), min_size=1, max_size=30))
def test_quick_exits_increase_the_delay_and_a_healthy_run_resets_it(statuses: list[int]) -> None:
    """Delays grow with consecutive exits; a run of ten seconds resets them."""
    state, _ = step(ProcessState(), Begin(0.0), POLICY)
    now, last = 0.0, 0.0
    for status in statuses:
        state, (wait,) = step(state, Exited(now, status), POLICY)
        assert isinstance(wait, Wait)
        assert wait.seconds >= last
        last = wait.seconds
        now += wait.seconds
        state, effects = step(state, Due(now), POLICY)
        assert effects == (Spawn(),)
    state, (wait,) = step(state, Exited(now + POLICY.healthy_seconds, 1), POLICY)
    assert wait == Wait(POLICY.first_seconds)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_early_timer_starts_nothing(exited: float, woken: float) -> None:
    """A stray timer cannot break the backoff."""
    state, _ = step(ProcessState(), Begin(exited), POLICY)
    waiting, (wait,) = step(state, Exited(exited, 1), POLICY)
    assert isinstance(wait, Wait)
    after, effects = step(waiting, Due(woken), POLICY)
    due = waiting.due_at
    assert due is not None
    assert (effects == (Spawn(),)) == (woken >= due)
    assert woken >= due or after == waiting


def test_usage_error_is_not_repeated() -> None:
    """Exit status 2 stops at once; Begin (a changed configuration) starts it again."""
    running, _ = step(ProcessState(), Begin(1.0), POLICY)
    given_up, effects = step(running, Exited(2.0, 2), POLICY)
    assert effects == (GiveUp(2),)
    assert step(given_up, Due(99.0), POLICY) == (given_up, ())
    again, effects = step(given_up, Begin(100.0), POLICY)
    assert effects == (Spawn(),)
    assert again.phase is Phase.RUNNING
