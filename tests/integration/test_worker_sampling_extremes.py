"""With any sampling parameters, llama.cpp neither ends the process nor returns an invalid token.

The model runs in this process, so that an assertion of llama.cpp would end the test run.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headgate.shared.parameters import Sampling
from inference import demo
from inference.protocol import Code
from inference.worker.backend import Decode
from inference.worker.llama import MAX_CANDIDATES, Sampler
from inference.worker.llama import sampler as samplers
from inference.worker.llama.binding import lib
from inference.worker.sampling import ChainSampler
from inference.worker.steps import Row
from tests.rigs.engine_rig import EngineRig, engine_rig

EXTREMES = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 5e-324, 1e-40, 1e-30, 1e-4, 1.0, 2.0]) | st.floats(0.0, 2.0),
    top_k=st.sampled_from([-1, 0, 1, 2, 40, 1536]),
    top_p=st.sampled_from([0.0, 1e-30, 0.5, 1.0]) | st.floats(0.0, 1.0),
    min_p=st.sampled_from([0.0, 1e-40, 0.05, 1.0]) | st.floats(0.0, 1.0),
    typical_p=st.sampled_from([0.0, 1e-30, 0.5, 1.0]),
    repeat_penalty=st.sampled_from([0.01, 1.0, 10.0]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
    logit_bias=st.lists(
        st.tuples(st.integers(0, 1535), st.sampled_from([-100.0, 0.0, 100.0])), max_size=40, unique_by=lambda b: b[0]
    ).map(tuple),
    seed=st.none() | st.sampled_from([-(2**63), -1, 0, 2**32 - 1, 2**32, 2**64 - 1]),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 1, 5]),
    xtc_probability=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 1e-30, 0.1, 0.5, 0.6, 1.0]),
    mirostat=st.sampled_from([0, 0, 1, 2]),
    mirostat_tau=st.sampled_from([0.0, 1e-30, 5.0, 100.0]),
    mirostat_eta=st.sampled_from([0.0, 0.1, 1.0]),
    dry_multiplier=st.sampled_from([0.0, 0.0, 1e-30, 0.8, 100.0]),
    dry_base=st.sampled_from([1.0, 1.0000001, 1.75, 100.0]),
    dry_allowed_length=st.sampled_from([0, 1, 2, 2**31 - 1]),
    dry_penalty_last_n=st.sampled_from([-1, 0, 1, 3, 64, 2**31 - 1]),
    dry_sequence_breakers=st.lists(
        st.text(min_size=1, max_size=6).filter(lambda text: "\0" not in text), max_size=4
    ).map(tuple),
)


@pytest.fixture(scope="module")
def rig() -> Iterator[EngineRig]:
    with engine_rig(demo.bundled_path("demo"), context_length=256, parallel=16) as opened:
        yield opened


@pytest.fixture
def fresh() -> Iterator[EngineRig]:
    """A context with empty memory that its engine does not use."""
    with engine_rig(demo.bundled_path("demo"), context_length=256) as opened:
        yield opened


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sampling=EXTREMES, n=st.sampled_from([1, 1, 2, 16]), logprobs=st.sampled_from([None, 0, 20]))
def test_every_combination_of_parameters_draws_tokens(
    rig: EngineRig, sampling: Sampling, n: int, logprobs: int | None
) -> None:
    """Every choice ends, with log probabilities that are numbers."""
    prompt = rig.model.tokenize("Water runs over the wheel of the")
    outputs = rig.answer(prompt, sampling=sampling, n=n, logprobs=logprobs, max_tokens=5)
    assert sorted(output.choice for output in outputs if output.finish) == list(range(n))
    assert not any(output.error for output in outputs)
    for output in outputs:
        assert 0 <= output.tokens <= 5
        for item in output.logprobs:
            assert item.logprob is not None
            assert -math.inf < item.logprob <= 1e-4
            assert len(item.top) == logprobs


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(top_k=0, min_p=0.0), Sampling(typical_p=0.5)])
def test_logits_that_are_not_finite_fail_only_one_request(rig: EngineRig, wrong: float, sampling: Sampling) -> None:
    """The other sequences of the same batch continue."""
    make = rig.engine._make_sampler

    class Poisoned(ChainSampler):
        def sample(self, index: int) -> int:
            logits = rig.context.logits(index)
            if wrong < 0:
                logits[:] = wrong
            else:
                logits[7] = wrong
            return super().sample(index)

    rig.engine._make_sampler = lambda parameters, choice, _none: Poisoned(rig.model, rig.context, parameters, choice)
    bad = rig.ask([3, 4, 5], sampling=sampling)
    rig.engine._run_commands()
    rig.engine._make_sampler = make
    good = rig.ask([3, 4, 6])
    rig.run()
    (failed,) = rig.outputs(bad)
    assert failed.error is not None
    assert failed.error.code is Code.MODEL_FAILED
    assert rig.outputs(good)[-1].finish in ("stop", "length")


def test_step_with_more_outputs_than_reserved_is_refused(fresh: EngineRig) -> None:
    """llama.cpp itself would end the process."""
    tokens = [1] * (fresh.context.n_outputs + 1)
    assert fresh.context.decode([Row(0, 0, 0, tokens, True, True)]) == (Decode.BAD_BATCH, [])
    with pytest.raises(LookupError):
        fresh.context.logits(10_000)
    status, _last = fresh.context.decode([Row(0, 0, 0, tokens[1:], True, True)])
    assert status is Decode.OK


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 2),  # 2**32 - 1 makes llama.cpp draw a seed
    spread=st.sampled_from([0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    min_p=st.floats(0.01, 1.0),
    temperature=st.floats(0.1, 2.0),
)
def test_sampling_among_few_tokens_has_the_result_of_all_tokens(
    seed: int, spread: float, top_k: int, min_p: float, temperature: float
) -> None:
    """Also after many draws: both use the same number of random numbers."""
    values = (np.random.default_rng(seed).standard_normal(MAX_CANDIDATES) * spread).astype(np.float32)
    chains = [Sampler(), Sampler()]
    for chain in chains:
        if top_k:
            chain.add("top_k", top_k)
        chain.add("min_p", min_p, 1).add("temp", temperature).add("dist", seed)
    near = (values >= values.max() - np.float32(1e-3 - math.log(min_p))).nonzero()[0]
    everything = np.arange(len(values))
    for _ in range(5):
        assert chains[0].sample_among(near, values[near]) == chains[1].sample_among(everything, values)
    for chain in chains:
        chain.close()


def test_sampling_among_few_tokens_has_the_result_of_llama_cpp(fresh: EngineRig) -> None:
    """The vocabulary of the demo model is too small for the fast path, so the test calls it directly."""
    _status, last = fresh.context.decode([Row(0, 0, 0, [5, 6, 7], True)])
    logits = fresh.context.logits(last[0])
    near = (logits >= logits.max() - np.float32(3.5)).nonzero()[0]
    for seed in range(20):
        long, short = (Sampler().add("top_k", 40).add("min_p", 0.05, 1).add("dist", seed) for _ in range(2))
        assert short.sample_among(near, logits[near]) == long.sample(fresh.context, last[0])
        long.close()
        short.close()
    assert ctypes.sizeof(lib.llama_token_data) == samplers._CANDIDATE.itemsize
