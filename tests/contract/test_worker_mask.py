"""Guarantees of every mask to the engine, for the real one and the fake."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from inference.worker.backend import Constraint, Mask
from inference.worker.constraints import Compiler
from inference.worker.dialects.forms import Literal, OneOf
from inference.worker.worker_errors import ConstraintError, WorkerError
from tests.rigs.fake_mask import FakeConstraint
from tests.rigs.vocabularies import PieceVocabulary

VOCABULARY = PieceVocabulary()
A, B, C = (ord(char) for char in "xyz")
Make = Callable[[], Constraint]


def _real() -> Constraint:
    return Compiler(VOCABULARY).compile(OneOf((Literal("xy"), Literal("xz"))), "f")


def _fake() -> Constraint:
    return FakeConstraint([{A}, {B, C}, set(VOCABULARY.end_tokens)])


@pytest.fixture(params=[_real, _fake], ids=["llguidance", "fake"])
def constraint(request: pytest.FixtureRequest) -> Constraint:
    """`xy` or `xz`."""
    make: Make = request.param
    return make()


def _allowed(mask: Mask) -> frozenset[int]:
    logits = np.ones(VOCABULARY.n_vocab, np.float32)
    mask.apply(logits)
    assert set(np.unique(logits).tolist()) <= {1.0, -np.inf}
    return frozenset(np.flatnonzero(logits == 1.0).tolist())


def test_only_allowed_tokens_keep_their_logits(constraint: Constraint) -> None:
    """At every step; the end token when the form is complete."""
    mask = constraint.start()
    assert _allowed(mask) == {A}
    mask.accept(A)
    assert _allowed(mask) == {B, C}
    mask.accept(C)
    assert _allowed(mask) == VOCABULARY.end_tokens
    mask.accept(min(VOCABULARY.end_tokens))


def test_applying_a_mask_twice_gives_the_same_result(constraint: Constraint) -> None:
    """A step may be repeated before a token is sampled."""
    mask = constraint.start()
    assert _allowed(mask) == _allowed(mask) == {A}


def test_masks_of_one_constraint_are_independent(constraint: Constraint) -> None:
    """Every choice has its own."""
    first, second = constraint.start(), constraint.start()
    first.accept(A)
    assert _allowed(second) == {A}
    assert _allowed(first) == {B, C}


def test_token_that_is_not_allowed_is_a_client_error(constraint: Constraint) -> None:
    """ConstraintError: an error of the client, not a failure of the model."""
    mask = constraint.start()
    with pytest.raises(ConstraintError) as caught:
        mask.accept(B)
    assert isinstance(caught.value, WorkerError)
    assert caught.value.status == 400
