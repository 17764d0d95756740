"""A damaged GGUF header is read or refused with a message, without any other exception."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.estimate.gguf import BadGgufError, read_facts
from inference.estimate.header_formula import Facts, Parameters, formula
from tests.rigs import tiny_gguf
from tests.rigs.damaged_gguf import Damaged, Parts, corpus

GOOD = tiny_gguf.generative(layers=1, width=32, heads=2, heads_kv=1, feed=64).read_bytes()
CORPUS = list(corpus(GOOD))
REFUSED_BY_HEADER = (
    "cut-", "magic-", "empty", "zeros", "version-", "alignment-", "entries-", "text-", "type-", "layers-none",
    "layers-too-many", "layers-missing", "layers-predicted", "context-", "epsilon-", "experts-", "width-zero",
    "rope-base-nan", "rope-scaling-unknown",
)  # fmt: skip
MAX_BYTES = 2**62
"""Upper limit of an estimate: figures are 64-bit numbers."""


def facts_of(content: bytes, directory: Path) -> Facts:
    path = directory / "model.gguf"
    path.write_bytes(content)
    return read_facts(path)


def sane(facts: Facts) -> bool:
    """Whether it can be estimated as an amount of bytes."""
    parts = formula(facts, Parameters(context_length=4096, parallel=4))
    return all(0 <= count < MAX_BYTES for count in (parts.weights_bytes, parts.kv_bytes, parts.compute_bytes))


@pytest.mark.parametrize("damaged", CORPUS, ids=lambda damaged: damaged.name)
def test_damaged_header_is_read_or_refused_with_a_message(damaged: Damaged, tmp_path: Path) -> None:
    try:
        facts = facts_of(damaged.content, tmp_path)
    except BadGgufError as error:
        assert 10 < len(str(error)) < 300
        assert str(error).isprintable()
    else:
        assert sane(facts)
        assert not damaged.name.startswith(REFUSED_BY_HEADER) or damaged.may_load, facts


def test_names_of_the_corpus_are_unique() -> None:
    assert len({damaged.name for damaged in CORPUS}) == len(CORPUS) > 100


HEADER_BYTES = len(b"".join(Parts.read(GOOD).sections()))


@given(st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.binary(min_size=1, max_size=8)), min_size=1, max_size=4))
def test_header_with_overwritten_bytes_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]]
) -> None:
    content = bytearray(GOOD)
    for at, fresh in changes:
        content[at : at + len(fresh)] = fresh
    try:
        assert sane(facts_of(bytes(content), tmp_path_factory.getbasetemp()))
    except BadGgufError as error:
        assert str(error).isprintable()
