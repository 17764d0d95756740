"""A chain keeps no candidate that is ruled out and drops none without a reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.providers.local.candidate_facts import Facts, LikelyFailure, Speed
from gateway.routing.chain import DEFERRING, Candidate, Requirements, select

pytestmark = pytest.mark.unmeasured

CAPABILITIES = st.frozensets(st.sampled_from(("chat", "tools", "vision")))
FACTS = st.builds(
    Facts,
    present=st.booleans(),
    breaker_open_for=st.none() | st.floats(0, 60),
    queue_full_for=st.none() | st.floats(0, 60),
    capabilities=st.none() | CAPABILITIES,
    unsupported=st.sampled_from(({}, {"seed": "no seed"})),
    same_vectors=st.booleans(),
    foreign_ids=st.sampled_from((None, "prompt")),
    context_length=st.none() | st.integers(1, 9000),
    speed=st.builds(Speed, st.none() | st.floats(0, 100)),
    fits=st.none() | st.booleans(),
    likely_failure=st.none() | st.just(LikelyFailure("it failed")),
)
WANTS = st.builds(Requirements, capabilities=CAPABILITIES, cloud_allowed=st.booleans(), fit_check=st.booleans())
CHAINS = st.lists(st.tuples(st.sampled_from(("local", "openai")), FACTS), max_size=6)


@given(CHAINS, WANTS)
def test_selection_keeps_or_drops_each_candidate_once_in_order(
    entries: list[tuple[str, Facts]], wants: Requirements
) -> None:
    candidates = [Candidate(provider, f"m{at}", at) for at, (provider, _) in enumerate(entries)]
    known = dict(zip(candidates, (facts for _, facts in entries), strict=True))
    chain = select(candidates, known.__getitem__, wants)
    dropped = [item.candidate for item in chain.dropped]
    deferred = [item.candidate for item in chain.deferred]
    assert sorted((*chain.kept, *dropped), key=lambda one: one.position) == candidates, "each once"
    assert dropped == sorted(dropped, key=lambda one: one.position)
    first = [one for one in chain.kept if one not in deferred]
    assert list(chain.kept) == [*first, *deferred], "deferred candidates come last"
    assert first == sorted(first, key=lambda one: one.position)
    assert all(item.drop not in DEFERRING and item.message for item in chain.dropped)
    assert all(item.drop in DEFERRING for item in chain.deferred)
    for candidate in chain.kept:
        facts = known[candidate]
        assert facts.present
        assert facts.same_vectors
        assert facts.foreign_ids is None
        assert facts.breaker_open_for is None
        assert facts.queue_full_for is None
        assert not facts.unsupported
        assert candidate.is_local or wants.cloud_allowed
        assert facts.capabilities is None or wants.capabilities <= facts.capabilities
        assert not (candidate.is_local and wants.fit_check and facts.fits is False)


@given(st.lists(st.sampled_from(("local", "openai")), max_size=6), WANTS)
def test_unknown_facts_drop_no_candidate(providers: list[str], wants: Requirements) -> None:
    candidates = [Candidate(provider, f"m{at}", at) for at, provider in enumerate(providers)]
    chain = select(candidates, lambda _: Facts(), wants)
    assert [one for one in candidates if one.is_local or wants.cloud_allowed] == list(chain.kept)
