"""From any history, good evidence makes a device healthy and bad evidence makes it lost, once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.authority.device_health import (
    AGAIN_SECONDS,
    LAST_READ_SECONDS,
    STOP_SECONDS,
    TRIAL_SECONDS,
    DeviceHealth,
    Effect,
    Read,
    Seen,
    Suspected,
    Tick,
    TrialResult,
    step,
)
from inference.devices.signs import Sign
from inference.protocol import DeviceState

DRAIN_SECONDS = 30.0
LONGEST_SECONDS = DRAIN_SECONDS + STOP_SECONDS + AGAIN_SECONDS + TRIAL_SECONDS + LAST_READ_SECONDS

seen = st.one_of(
    st.builds(Read, st.sampled_from(Sign), st.sampled_from(["", "why"])),
    st.builds(Suspected, st.just("doubted")),
    st.builds(TrialResult, st.integers(0, 4), st.sampled_from([None, "failed"])),
    st.builds(Tick, st.booleans()),
)
histories = st.lists(st.tuples(seen, st.sampled_from([0.0, 0.5, 5.0, 50.0])), max_size=40)


class World:
    """A device with its history; models may be on it while it is usable."""

    def __init__(self) -> None:
        self.case, self.now = DeviceHealth(), 0.0
        self.losses_of_incident = self.restarts_of_incident = 0

    def sees(self, what: Seen) -> tuple[Effect, ...]:
        before = self.case
        self.case, effects = step(self.case, what, self.now, DRAIN_SECONDS)
        self.losses_of_incident += effects.count(Effect.LOSE)
        self.restarts_of_incident += effects.count(Effect.RESTART)
        assert self.losses_of_incident <= 1
        assert self.restarts_of_incident <= 1
        assert (Effect.PROBE in effects) == (self.case.trial > before.trial)
        if self.case.state is DeviceState.PROBING:
            assert before.state is DeviceState.PROBING or Effect.PROBE in effects
        if Effect.RELOAD in effects:
            assert self.case.usable
            assert before.emptied
        if self.case.state in (DeviceState.QUARANTINED, DeviceState.LOST):
            assert self.case.emptied
        if self.case.usable:
            self.losses_of_incident = self.restarts_of_incident = 0
            assert self.case.seconds_to_verdict(self.now) is None
        else:
            assert 0 <= (self.case.seconds_to_verdict(self.now) or 0) <= DRAIN_SECONDS + STOP_SECONDS
        return effects

    def goes_on(self, sign: Sign, failure: str | None) -> None:
        """Reads `sign` at every reading, and ends every trial with `failure`, as long as any timer may run."""
        end = self.now + LONGEST_SECONDS
        self.sees(Read(sign))
        if self.case.state is DeviceState.PROBING:
            self.sees(TrialResult(self.case.trial, failure))
        while self.now < end:
            self.now += 4.0
            effects = list(self.sees(Tick(True)))
            if Effect.READ in effects:
                effects += self.sees(Read(sign))
            if Effect.PROBE in effects:
                self.sees(TrialResult(self.case.trial, failure))


OUTCOMES = {
    (Sign.HEALTHY, None): {DeviceState.HEALTHY},
    (Sign.UNCERTAIN, None): {DeviceState.SUSPECT},
    (Sign.UNREACHABLE, None): {DeviceState.SUSPECT},
    (Sign.DEGRADED, None): {DeviceState.QUARANTINED, DeviceState.LOST},
    (Sign.FAILED, None): {DeviceState.LOST},
    (Sign.MISSING, None): {DeviceState.LOST},
    (Sign.FAILED, "failed"): {DeviceState.LOST},
    (Sign.UNCERTAIN, "failed"): {DeviceState.QUARANTINED, DeviceState.LOST},
    (Sign.UNREACHABLE, "failed"): {DeviceState.QUARANTINED, DeviceState.LOST},
}


@given(histories, st.sampled_from(list(OUTCOMES)))
def test_current_evidence_decides_the_state_of_a_device_after_any_history(
    history: list[tuple[Seen, float]], evidence: tuple[Sign, str | None]
) -> None:
    world = World()
    for what, seconds in history:
        world.now += seconds
        world.sees(what)
    world.goes_on(*evidence)
    assert world.case.state in OUTCOMES[evidence]
    assert world.case.usable or world.case.emptied
