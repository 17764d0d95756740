"""DRY, XTC, Mirostat and min_tokens on a real context: same results as the chain of llama.cpp, repeatable with a
seed, and no token that a mask excludes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import starmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.shared.parameters import Sampling
from inference.demo import bundled_path
from inference.worker import llama
from inference.worker.constraints import Compiler
from inference.worker.dialects.forms import Form, Json, Regex
from inference.worker.llama import Sampler
from inference.worker.llama.binding import lib
from inference.worker.llama.llama_model import MAX_PROTOTYPES, Dry, DryPrototypes
from inference.worker.sampling import ChainSampler, ConstrainedSampler, dry_of
from inference.worker.steps import Row
from inference.worker.worker_errors import ConstraintError
from tests.rigs import tiny_spm
from tests.rigs.engine_rig import EngineRig, engine_rig
from tests.rigs.worker_rig import grant_for

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
DRY: dict[str, Any] = {"dry_multiplier": 3.0, "dry_allowed_length": 1}
SETTINGS: list[dict[str, Any]] = [
    {**OFF, **DRY},
    {**OFF, **DRY, "dry_penalty_last_n": 5, "dry_sequence_breakers": ("gate", "é")},
    {**OFF, **DRY, "frequency_penalty": 0.5, "logit_bias": ((101, 2.0),)},
    {**DRY, "temperature": 0.0},
    {**OFF, "xtc_probability": 0.6, "xtc_threshold": 0.1},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05, "temperature": 0.0},
    {"xtc_probability": 0.5, "top_k": 20, "typical_p": 0.9, **DRY},
    {**OFF, "top_n_sigma": 1.0},
    {"top_n_sigma": 5.0, "top_k": 20, "typical_p": 0.9, "xtc_probability": 0.5, **DRY},
    {"mirostat": 1, "mirostat_tau": 2.0},
    {"mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.3},
    {"mirostat": 2, "presence_penalty": 1.0, **DRY},
    {**OFF, "repeat_penalty": 1.3, "logit_bias": ((101, 2.0), (102, -math.inf), (103, 1.0), (101, 0.5))},
    {"repeat_penalty": 0.8, "frequency_penalty": 0.7, "presence_penalty": -0.5, "temperature": 0.0},
]


@pytest.fixture(scope="module")
def rig() -> Iterator[EngineRig]:
    """The smaller demo model, used without its engine."""
    with engine_rig(bundled_path("demo-mini"), context_length=512) as rig:
        yield rig


@pytest.fixture(scope="module")
def compiler(rig: EngineRig) -> Compiler:
    """Over the vocabulary of the model."""
    return Compiler(rig.model)


@pytest.fixture(scope="module")
def sentencepiece(rig: EngineRig) -> Iterator[llama.Model]:
    """A vocabulary with a token for each byte."""
    path = tiny_spm.vocabulary()
    model = llama.Model(str(path), llama.model_params(grant_for(path), vocab_only=True))
    yield model
    model.close()


def _logits(rig: EngineRig) -> np.ndarray:
    """The logits at batch index 2, for a test to overwrite."""
    rig.context.forget_all()
    _status, last = rig.context.decode([Row(0, 0, 0, [5, 6, 7], True)])
    assert last == [2]
    return rig.context.logits(2)


def _reference(rig: EngineRig, sampling: Sampling) -> Sampler:
    """The chain of llama.cpp in the order of its server; Mirostat after penalties."""
    n_vocab, seed = rig.model.n_vocab, sampling.seed
    whole = Sampler()
    if sampling.logit_bias:
        entries = (lib.llama_logit_bias * len(sampling.logit_bias))(*starmap(lib.llama_logit_bias, sampling.logit_bias))
        whole.add("logit_bias", n_vocab, len(entries), entries)
    whole.add("penalties", n_vocab, 64, sampling.repeat_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    if (dry := dry_of(sampling, rig.context)) is not None:
        whole.add_part(rig.model.dry.sampler(dry))
    if sampling.mirostat:
        whole.add("temp", sampling.temperature)
        surprise = (seed, sampling.mirostat_tau, sampling.mirostat_eta)
        version = ("mirostat", n_vocab, *surprise, 100) if sampling.mirostat == 1 else ("mirostat_v2", *surprise)
        return whole.add(*version)
    whole.add("top_n_sigma", sampling.top_n_sigma)
    if sampling.top_k > 0:
        whole.add("top_k", sampling.top_k)
    whole.add("typical", sampling.typical_p, 1).add("top_p", sampling.top_p, 1).add("min_p", sampling.min_p, 1)
    whole.add("xtc", sampling.xtc_probability, sampling.xtc_threshold, 1, seed).add("temp", sampling.temperature)
    return whole.add("dist", seed)


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_samplers_draw_the_same_tokens_as_llama_cpp(rig: EngineRig, changes: dict[str, Any]) -> None:
    """At every step, counting earlier tokens; and each parameter changes the result."""
    logits = _logits(rig)
    shape = np.random.default_rng(5).standard_normal(len(logits)).astype(np.float32)
    shape[100:104] += 5.0
    drawn: list[list[int]] = []
    for sampling in (Sampling(seed=11, **changes), Sampling(seed=11, temperature=changes.get("temperature", 1.0))):
        ours, whole = ChainSampler(rig.model, rig.context, sampling, 0), _reference(rig, sampling)
        ours.accept([101, 102, 101])
        for token in (101, 102, 101):
            whole.accept(token)
        drawn.append([])
        for _step in range(40):
            logits[:] = shape
            drawn[-1].append(ours.sample(2))
            assert np.array_equal(logits, shape), "log probabilities are those of the model"
            assert drawn[-1][-1] == whole.sample(rig.context, 2)
        ours.close()
        whole.close()
    assert drawn[0] != drawn[1]


def _answer(
    rig: EngineRig, sampling: Sampling, form: Form | None = None, compiler: Compiler | None = None, most: int = 120
) -> list[int]:
    """The tokens of an answer up to and including its end, or `most`."""
    model, context = rig.model, rig.context
    sampler: Any = ChainSampler(model, context, sampling, 0)
    if form is not None and compiler is not None:
        sampler = ConstrainedSampler(sampler, context, compiler.compile(form, "f").start())
    context.forget_all()
    tokens, start = model.tokenize("Tell me of a mill.", add_special=True), 0
    drawn: list[int] = []
    try:
        while len(drawn) < most and not (drawn and drawn[-1] in model.end_tokens):
            _status, last = context.decode([Row(job=1, slot=0, start=start, tokens=tuple(tokens), sample=True)])
            start += len(tokens)
            tokens = [sampler.sample(last[0])]
            drawn += tokens
    finally:
        sampler.close()
    return drawn


def _text(rig: EngineRig, tokens: list[int]) -> str:
    return b"".join(rig.model.piece(token) for token in tokens).decode()


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_answers_repeat_with_their_seed(rig: EngineRig, changes: dict[str, Any]) -> None:
    first = _answer(rig, Sampling(seed=3, **changes))
    assert _answer(rig, Sampling(seed=3, **changes)) == first
    if changes.get("temperature") != 0.0:
        assert _answer(rig, Sampling(seed=4, **changes)) != first


HARSH: list[dict[str, Any]] = [
    {"dry_multiplier": 100.0, "dry_base": 100.0, "dry_allowed_length": 0, "dry_sequence_breakers": ("~",)},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"mirostat": 1, "mirostat_tau": 100.0},
    {"mirostat": 1, "mirostat_tau": 0.0, "mirostat_eta": 1.0},
    {"mirostat": 2, "mirostat_tau": 100.0},
    {"mirostat": 2, "mirostat_tau": 0.0, "mirostat_eta": 1.0},
]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("changes", HARSH, ids=str)
def test_masks_apply_to_every_sampler(
    rig: EngineRig, compiler: Compiler, changes: dict[str, Any], temperature: float
) -> None:
    """Including a single allowed token that every sampler would avoid."""
    sampling = Sampling(**{**OFF, **changes, "temperature": temperature, "seed": 9, "min_tokens": 3})
    drawn = _answer(rig, sampling, Regex("(ab){60}"), compiler, most=400)
    assert _text(rig, drawn) == "ab" * 60
    form = Json({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 30, "maxItems": 30})
    found = json.loads(_text(rig, _answer(rig, sampling, form, compiler, most=600)))
    assert len(found) == 30
    assert set(found) <= {"a", "b"}


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    changes=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.0, 0.3, 2.0]),
            "min_p": st.sampled_from([0.0, 0.05]),
            "top_k": st.sampled_from([0, 1, 40]),
            "dry_multiplier": st.sampled_from([0.8, 100.0]),
            "dry_allowed_length": st.integers(0, 4),
            "dry_base": st.sampled_from([1.0, 1.75, 100.0]),
            "xtc_probability": st.sampled_from([0.5, 1.0]),
            "xtc_threshold": st.sampled_from([0.0, 0.1, 0.5]),
            "mirostat": st.integers(0, 2),
            "min_tokens": st.integers(0, 30),
            "presence_penalty": st.sampled_from([-2.0, 2.0]),
        },
    ),
)
def test_constraint_holds_with_any_combination_of_samplers(
    rig: EngineRig, compiler: Compiler, seed: int, changes: dict[str, Any]
) -> None:
    drawn = _answer(rig, Sampling(seed=seed, **changes), Regex("[ab]{4,12}"), compiler)
    assert re.fullmatch("[ab]{4,12}", _text(rig, drawn))
    assert drawn[-1] in rig.model.end_tokens


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"xtc_probability": 1.0}, DRY], ids=str)
def test_parameters_that_exclude_all_allowed_tokens_are_an_error_of_the_request(
    rig: EngineRig, compiler: Compiler, changes: dict[str, Any]
) -> None:
    """After the only answer of the format no token is left but the end, which `ignore_eos` excludes."""
    with pytest.raises(ConstraintError, match="remove logit_bias and ignore_eos"):
        _answer(rig, Sampling(seed=1, ignore_eos=True, **changes), Regex("ab"), compiler)


@pytest.mark.parametrize("changes", [{}, {"mirostat": 2}], ids=str)
def test_penalties_beyond_the_float_range_do_not_exclude_every_token(rig: EngineRig, changes: dict[str, Any]) -> None:
    """Tokens with such a penalty are equally likely, not impossible."""
    logits = _logits(rig)
    drawn = set()
    for seed in range(20):
        sampling = Sampling(seed=seed, frequency_penalty=1e38, presence_penalty=1e38, **{**OFF, **changes})
        sampler = ChainSampler(rig.model, rig.context, sampling, 0)
        sampler.accept([105, 106] * 8)
        logits[:] = -np.inf
        logits[[105, 106]] = 0.0
        drawn.add(sampler.sample(2))
        sampler.close()
    assert drawn == {105, 106}


def test_dry_ends_a_repetition(rig: EngineRig) -> None:
    """The best token is the same at each step. With DRY another one is drawn too, unless the best one is a breaker."""
    logits = _logits(rig)
    best = rig.model.tokenize("a")[-1]
    runs = []
    for breakers in (("~",), ("a",)):
        sampling = Sampling(temperature=0.0, dry_sequence_breakers=breakers, **DRY)
        sampler = ChainSampler(rig.model, rig.context, sampling, 0)
        runs.append([])
        for _step in range(12):
            logits[:] = 0.0
            logits[best], logits[300] = 5.0, 4.0
            runs[-1].append(sampler.sample(2))
        sampler.close()
    assert runs[0].count(300) > 0
    assert runs[1] == [best] * 12


def test_end_token_is_not_sampled_before_min_tokens(rig: EngineRig) -> None:
    """Tokens of a resumed answer count."""
    logits = _logits(rig)
    end = min(rig.model.end_tokens)
    for elsewhere, expected in ((0, 5), (3, 2), (9, 0)):
        sampler = ChainSampler(rig.model, rig.context, Sampling(temperature=0.0, min_tokens=5), 0)
        sampler.accept([300] * elsewhere)
        drawn: list[int] = []
        while end not in drawn:
            logits[:] = 0.0
            logits[end], logits[301] = 5.0, 4.0
            drawn.append(sampler.sample(2))
        sampler.close()
        assert drawn == [301] * expected + [end]


def test_completed_form_ends_the_answer_before_min_tokens(rig: EngineRig, compiler: Compiler) -> None:
    """A form that allows more text continues until then."""
    sampling = Sampling(temperature=1.0, seed=1, min_tokens=20)
    assert _text(rig, _answer(rig, sampling, Regex("yes|no"), compiler)) in ("yes", "no")
    assert len(_answer(rig, sampling, Regex("[a-z ]{1,300}"), compiler)) > 20


BREAKERS = st.lists(
    st.text(min_size=1, max_size=10).filter(lambda text: len(text.encode()) <= 40 and "\0" not in text), max_size=3
)


@settings(max_examples=60, deadline=None)
@given(breakers=BREAKERS)
def test_dry_breakers_of_any_characters_work_with_any_vocabulary(
    rig: EngineRig, sentencepiece: llama.Model, breakers: list[str]
) -> None:
    """Also if a token is a part of a character: llama.cpp tokenizes the rest of it."""
    for model in (rig.model, sentencepiece):
        prototypes = DryPrototypes(model.vocab)
        chain = Sampler().add_part(prototypes.sampler(Dry(1.0, 2.0, 1, 8, tuple(breakers))))
        chain.accept(5)
        chain.close()
        prototypes.close()


def test_dry_settings_are_cached_with_a_limit(rig: EngineRig) -> None:
    """Settings that were dropped from the cache are prepared again."""
    prototypes = DryPrototypes(rig.model.vocab)
    wanted = [Dry(1.0, 2.0, length, 8, ("x",)) for length in range(MAX_PROTOTYPES + 5)]
    for dry in [*wanted, *wanted]:
        prototypes.prepare(dry)
        Sampler().add_part(prototypes.sampler(dry)).close()
    assert prototypes._prototype.cache_info().currsize == MAX_PROTOTYPES
    Sampler().add_part(prototypes.sampler(wanted[0])).close()
    prototypes.close()
