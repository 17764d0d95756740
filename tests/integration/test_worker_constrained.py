"""The demo model under constraints on a real llama.cpp context: every answer matches its form."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from headgate.shared.parameters import Sampling
from inference.demo import bundled_path
from inference.worker import llama
from inference.worker.constraints import Compiler
from inference.worker.dialects.forms import Form, Json, Marker, OneOf, Regex, Repeat, Sequence
from inference.worker.sampling import ChainSampler, ConstrainedSampler
from inference.worker.steps import Row
from tests.rigs.engine_rig import EngineRig, engine_rig

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "people": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["large", "small"]},
        "built": {"type": "string", "format": "date"},
    },
    "required": ["city", "people", "kind", "built"],
    "additionalProperties": False,
}
MOST = 400


@pytest.fixture(scope="module")
def rig() -> Iterator[EngineRig]:
    """The smaller demo model, used without its engine."""
    with engine_rig(bundled_path("demo-mini"), context_length=512) as rig:
        yield rig


@pytest.fixture(scope="module")
def compiler(rig: EngineRig) -> Compiler:
    """Over the vocabulary of the model."""
    return Compiler(rig.model)


def _answer(rig: EngineRig, compiler: Compiler, form: Form, **sampling: float) -> tuple[list[int], str]:
    """The answer of the model; fails if it does not end."""
    model, context = rig.model, rig.context
    chain = ChainSampler(model, context, Sampling(seed=7, **sampling), 0)  # type: ignore[arg-type]
    sampler = ConstrainedSampler(chain, context, compiler.compile(form, "f").start())
    context.forget_all()
    tokens, start = model.tokenize("Tell me of a city.", add_special=True), 0
    drawn: list[int] = []
    try:
        while len(drawn) < MOST:
            _status, last = context.decode([Row(job=1, slot=0, start=start, tokens=tuple(tokens), sample=True)])
            start += len(tokens)
            token = sampler.sample(last[0])
            if token in model.end_tokens:
                return drawn, _text(model, drawn)
            drawn.append(token)
            tokens = [token]
    finally:
        sampler.close()
    raise AssertionError(f"no end after {MOST} tokens: {_text(model, drawn)!r}")


def _text(model: llama.Model, tokens: list[int]) -> str:
    return b"".join(model.piece(token) for token in tokens).decode()


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.8, "top_k": 0, "min_p": 0.0}])
def test_json_follows_its_schema(rig: EngineRig, compiler: Compiler, sampling: dict[str, float]) -> None:
    """Greedy and at a high temperature."""
    drawn = json.loads(_answer(rig, compiler, Json(CITY), **sampling)[1])
    assert set(drawn) == set(CITY["required"])
    assert 1 <= len(drawn["city"]) <= 12
    assert 1 <= drawn["people"] <= 99
    assert drawn["kind"] in ("large", "small")
    year, month, day = drawn["built"].split("-")
    assert len(year) == 4
    assert 1 <= int(month) <= 12
    assert 1 <= int(day) <= 31


def test_control_tokens_are_sampled_only_where_the_form_has_them(rig: EngineRig, compiler: Compiler) -> None:
    """Markers are tokens, the text between them is not."""
    call = Sequence((Marker("<|im_start|>"), Regex("[a-z]{1,8}"), Marker("<|pad|>")))
    tokens, _text_of_them = _answer(rig, compiler, Repeat(call, 2, 2), temperature=1.5)
    shown = [rig.model.piece(token, special=True) for token in tokens if not rig.model.piece(token)]
    assert shown == [b"<|im_start|>", b"<|pad|>"] * 2


def test_answer_constrained_to_choices_is_one_of_them(rig: EngineRig, compiler: Compiler) -> None:
    """Also at high temperature."""
    form = OneOf(tuple(Regex(word) for word in ("red", "green", "blue")))
    assert _answer(rig, compiler, form, temperature=2.0)[1] in ("red", "green", "blue")
