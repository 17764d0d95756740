"""Any parameters on distributions of any flatness give the result of the chain of llama.cpp over all
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.shared.parameters import Sampling
from inference.worker.llama import Sampler
from inference.worker.sampling import ChainSampler
from inference.worker.steps import Row
from tests.rigs import tiny_gguf
from tests.rigs.engine_rig import EngineRig, engine_rig

VOCABULARY = 12_000


@pytest.fixture(scope="module")
def rig() -> Iterator[EngineRig]:
    """A context whose logits the tests overwrite, with a vocabulary large enough for the fast path."""
    with engine_rig(tiny_gguf.generative(extra_words=VOCABULARY), context_length=64, threads=1) as opened:
        _status, last = opened.context.decode([Row(0, 0, 0, [5, 6, 7], True)])
        assert last == [2]
        yield opened


def _chain(rig: EngineRig, sampling: Sampling) -> Sampler:
    """The chain of llama.cpp in its order."""
    whole = Sampler()
    penalties = (sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    if penalties != (1.0, 0.0, 0.0):
        whole.add("penalties", rig.model.n_vocab, 64, *penalties)
    whole.add("top_n_sigma", sampling.top_n_sigma)
    if sampling.top_k > 0:
        whole.add("top_k", sampling.top_k)
    if sampling.typical_p < 1.0:
        whole.add("typical", sampling.typical_p, 1)
    if sampling.top_p < 1.0:
        whole.add("top_p", sampling.top_p, 1)
    if sampling.min_p > 0.0:
        whole.add("min_p", sampling.min_p, 1)
    return whole.add("temp", sampling.temperature).add("dist", sampling.seed)


def _draws(rig: EngineRig, sampling: Sampling, spreads: list[float], seed: int) -> tuple[list[int], list[int], int]:
    """The draws of a sampler, those of llama.cpp, and how often the first one used the fast path."""
    short = ChainSampler(rig.model, rig.context, sampling, 0)
    whole = _chain(rig, sampling)
    among, few = short._chain.sample_among, []
    short._chain.sample_among = lambda *found: (few.append(1), among(*found))[1]  # type: ignore[method-assign, func-returns-value]
    logits = rig.context.logits(2)
    random = np.random.default_rng(seed)
    drawn: list[int] = []
    expected: list[int] = []
    for spread in spreads:
        logits[:] = random.standard_normal(len(logits)) * spread
        expected.append(whole.sample(rig.context, 2))
        drawn.append(short.sample(2))
    short.close()
    whole.close()
    return drawn, expected, len(few)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spreads=st.lists(st.sampled_from([0.01, 0.5, 0.85, 2.0, 6.0, 30.0]), min_size=1, max_size=24),
    top_n_sigma=st.sampled_from([-1.0, 0.5, 3.0]),
    top_k=st.sampled_from([-1, 0, 1, 40, 500, 5000]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.01, 0.05, 0.5]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_flat_distributions_are_sampled_as_in_llama_cpp(
    rig: EngineRig,
    seed: int,
    spreads: list[float],
    top_n_sigma: float,
    top_k: int,
    top_p: float,
    min_p: float,
    temperature: float,
) -> None:
    """The candidates are the tokens within a distance of the best logit. Adapting the distance changes no result."""
    sampling = Sampling(
        temperature=temperature, top_n_sigma=top_n_sigma, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    drawn, expected, _few = _draws(rig, sampling, spreads, seed)
    assert drawn == expected


EFFECTS: list[dict[str, float]] = [
    {"top_n_sigma": 1.5},
    {"typical_p": 0.2},
    {"typical_p": 0.5, "top_k": 40},
    {"presence_penalty": 2.0},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 1.5},
    {"repeat_penalty": 1.8},
    {"repeat_penalty": 0.5},
    {"repeat_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.7, "typical_p": 0.6},
]


@pytest.mark.parametrize("changes", EFFECTS, ids=lambda changes: " ".join(f"{k}={v}" for k, v in changes.items()))
def test_typicality_and_penalties_give_the_draws_of_llama_cpp(rig: EngineRig, changes: dict[str, float]) -> None:
    """At every step, counting earlier tokens; and each parameter changes the result."""
    logits = rig.context.logits(2)
    shape = np.full(len(logits), -20.0, np.float32)
    shape[100:130] = np.random.default_rng(5).standard_normal(30) * 1.5 + 1.0
    drawn: list[list[int]] = []
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 11}
    for parameters in (plain | changes, plain):
        sampling = Sampling(**parameters)  # type: ignore[arg-type]
        ours, whole = ChainSampler(rig.model, rig.context, sampling, 0), _chain(rig, sampling)
        ours.accept([101, 102, 101])
        for token in (101, 102, 101):
            whole.accept(token)
        drawn.append([])
        for _step in range(40):
            logits[:] = shape
            drawn[-1].append(ours.sample(2))
            logits[:] = shape
            assert drawn[-1][-1] == whole.sample(rig.context, 2)
        ours.close()
        whole.close()
    assert drawn[0] != drawn[1]


def test_penalties_apply_to_greedy_sampling(rig: EngineRig) -> None:
    """Presence penalizes once, frequency for each occurrence, repetition by a factor."""
    logits = rig.context.logits(2)
    penalties = (
        ("presence_penalty", 1.0, [100, 101, 100, 100]),
        ("frequency_penalty", 1.0, [100, 101, 100, 102]),
        ("repeat_penalty", 1.6, [100, 101, 102, 100]),
    )
    for name, value, expected in penalties:
        sampler = ChainSampler(rig.model, rig.context, Sampling(temperature=0.0, **{name: value}), 0)  # type: ignore[arg-type]
        drawn = []
        for _step in range(4):
            logits[:] = 0.0
            logits[100:103] = (3.0, 2.5, 1.95)
            drawn.append(sampler.sample(2))
        sampler.close()
        assert drawn == expected, name


@pytest.mark.parametrize("spread", [0.85, 2.0, 6.0])
def test_fast_path_is_used_for_flat_distributions(rig: EngineRig, spread: float) -> None:
    _drawn, _expected, few = _draws(rig, Sampling(seed=3), [spread] * 64, 3)
    assert few >= 48


def test_search_for_few_tokens_ends_without_a_result(rig: EngineRig) -> None:
    """Thousands of tokens have the best logit, so no distance leaves only few candidates."""
    drawn, expected, few = _draws(rig, Sampling(seed=3), [0.0] * 24 + [2.0] * 24, 3)
    assert (few, drawn) == (0, expected)


def test_search_that_cannot_be_narrowed_is_done_once(rig: EngineRig) -> None:
    """Without `top_k` every token that `min_p` leaves has to be found."""
    drawn, expected, few = _draws(rig, Sampling(seed=3, top_k=0), [2.0, 0.85, 6.0, 6.0], 3)
    assert (few, drawn) == (1, expected)


def test_views_of_logits_are_cached_and_current(rig: EngineRig) -> None:
    view = rig.context.logits(2)
    assert rig.context.logits(2) is view
    rig.context.remove(0)
    rig.context.decode([Row(0, 0, 0, [5, 6, 9], True)])
    again = rig.context.logits(2).copy()
    rig.context.remove(0)
    rig.context.decode([Row(0, 0, 0, [5, 6, 7], True)])
    assert not np.array_equal(rig.context.logits(2), again)
