"""After any crashes, only a request that ran alone is strongly suspected; answers clear it, and records are limited."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.authority.quarantine import MAX_IN_A_ROW, SUSPECT_SECONDS, Crash, Quarantine, Suspicion
from inference.protocol import ExitCause

KEYS = st.sampled_from("abcdef")
CRASHES = st.builds(
    Crash, st.sampled_from([ExitCause.ASSERT, ExitCause.OOM_COMPUTE]), st.just(""), st.booleans(), st.booleans()
)
STEPS = st.lists(st.tuples(KEYS, st.one_of(st.none(), CRASHES), st.floats(0, SUSPECT_SECONDS / 2)), max_size=60)


@given(STEPS)
def test_request_is_strongly_suspected_only_with_evidence_against_it(
    steps: list[tuple[str, Crash | None, float]],
) -> None:
    quarantine, now = Quarantine(), 0.0
    telling: dict[str, int] = {}
    for key, crash, seconds in steps:
        now += seconds
        before = quarantine
        if crash is None:
            quarantine = quarantine.answered(key)
            telling.pop(key, None)
            assert quarantine.suspicion(key, now) is Suspicion.NONE
        else:
            quarantine = quarantine.crashed(key, crash, now)
            telling[key] = telling.get(key, 0) + crash.can_confirm
            assert quarantine.suspicion(key, now) is not Suspicion.NONE
        for other in "abcdef":
            suspicion = quarantine.suspicion(other, now)
            if suspicion in (Suspicion.CONFIRMED, Suspicion.STRONG):
                assert telling[other] > 0
            if other != key and not quarantine.doubted:
                assert suspicion is before.suspicion(other, now), "other requests are not affected"
        assert len(quarantine.in_a_row) <= MAX_IN_A_ROW
        assert len(quarantine.cases) <= len("abcdef")
        assert not (quarantine.doubted and quarantine.in_a_row)
