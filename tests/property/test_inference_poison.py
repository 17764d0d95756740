"""Whatever crashes in whatever order: only who was alone is convicted, answers acquit, nothing grows without bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference.authority.quarantine import MOST_IN_A_ROW, SUSPECT_SECONDS, Crash, Docket, Standing
from inference.protocol import ExitCause

KEYS = st.sampled_from("abcdef")
CRASHES = st.builds(
    Crash, st.sampled_from([ExitCause.ASSERT, ExitCause.OOM_COMPUTE]), st.just(""), st.booleans(), st.booleans()
)
STEPS = st.lists(st.tuples(KEYS, st.one_of(st.none(), CRASHES), st.floats(0, SUSPECT_SECONDS / 2)), max_size=60)


@given(STEPS)
def test_a_conviction_needs_evidence_of_that_very_request(steps: list[tuple[str, Crash | None, float]]) -> None:
    docket, now = Docket(), 0.0
    telling: dict[str, int] = {}
    for key, crash, seconds in steps:
        now += seconds
        before = docket
        if crash is None:
            docket = docket.answered(key)
            telling.pop(key, None)
            assert docket.standing(key, now) is Standing.INNOCENT
        else:
            docket = docket.crashed(key, crash, now)
            telling[key] = telling.get(key, 0) + crash.is_telling
            assert docket.standing(key, now) is not Standing.INNOCENT
        for other in "abcdef":
            standing = docket.standing(other, now)
            if standing in (Standing.CONVICTED, Standing.ACCUSED):
                assert telling[other] > 0
            if other != key and not docket.doubted:
                assert standing is before.standing(other, now), "nobody pays for another"
        assert len(docket.row) <= MOST_IN_A_ROW
        assert len(docket.cases) <= len("abcdef")
        assert not (docket.doubted and docket.row)
