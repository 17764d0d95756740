"""One pool of KV cells for all sequences: answers, copies and states are those of sequences with own cells."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator

import pytest

from inference.protocol import ExitCause
from inference.worker.backend import Decode
from inference.worker.steps import Checkpoint, Row
from inference.worker.worker_errors import LoadError
from tests.rigs import tiny_gguf
from tests.rigs.store_rig import StoreRig, family, random_tokens, store_rig
from tests.rigs.tiny_families import WINDOW_TOKENS

CONTEXT, PARALLEL, CELLS = 2048, 4, 3072
OWN = {"context_length": CONTEXT, "parallel": PARALLEL}
POOL = {**OWN, "kv_cells": CELLS}
FAMILIES = ("gqa", "window", "hybrid", "recurrent")
PROMPT = random_tokens(1, WINDOW_TOKENS + 200)
"""Longer than a window, so that layers with a window have dropped its beginning."""
EVERY = 100


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    """Attention; with sliding windows; with recurrent layers; only recurrent layers."""
    return str(request.param)


@pytest.fixture(scope="module")
def own(name: str) -> Iterator[StoreRig]:
    with store_rig(family(name), **OWN) as opened:
        yield opened


@pytest.fixture(scope="module")
def pool(name: str) -> Iterator[StoreRig]:
    with store_rig(family(name), **POOL) as opened:
        yield opened


@pytest.fixture
def keep() -> Iterator[int]:
    handle = os.memfd_create("test-keep")
    yield handle
    os.close(handle)


@pytest.fixture(autouse=True)
def empty(own: StoreRig, pool: StoreRig) -> None:
    own.context.forget_all()
    pool.context.forget_all()


def has_room(rig: StoreRig, tokens: int) -> bool:
    """Whether that many tokens fit beside the present ones; the last slot is empty before and after."""
    slot = PARALLEL - 1
    status = Decode.OK
    for start in range(0, tokens, 512):
        row = Row(0, slot, start, [20] * min(512, tokens - start), sample=True)
        status = rig.context.decode([row])[0]
        if status is not Decode.OK:
            break
    rig.context.remove(slot)
    return status is Decode.OK


def test_context_reports_its_pool(own: StoreRig, pool: StoreRig, name: str) -> None:
    """Recurrent models need no cells, so they have no pool."""
    assert own.context.cells == 0
    assert pool.context.cells == (0 if name == "recurrent" else CELLS)
    assert pool.loaded.facts.context_length == CONTEXT
    assert pool.context.can_trim is own.context.can_trim
    assert pool.context.checkpoint_bytes == pytest.approx(own.context.checkpoint_bytes, rel=0.02)


def test_answers_are_the_same_in_both_layouts(own: StoreRig, pool: StoreRig) -> None:
    assert pool.cold(PROMPT, 2) == own.cold(PROMPT, 2)


def test_answers_of_sequences_in_one_batch_do_not_depend_on_each_other(own: StoreRig, pool: StoreRig) -> None:
    """Sequences of different lengths in slots that are not consecutive."""
    prompts = {slot: random_tokens(slot, 300 + 200 * slot) for slot in (0, 1, 3)}
    known = {slot: own.cold(prompt)[:4] for slot, prompt in prompts.items()}
    for slot, prompt in prompts.items():
        pool.fill(slot, prompt[:-1])
    last = {slot: prompt[-1] for slot, prompt in prompts.items()}
    answers: dict[int, list[int]] = {slot: [] for slot in prompts}
    for step in range(4):
        rows = [Row(0, slot, len(prompts[slot]) - 1 + step, [last[slot]], sample=True) for slot in prompts]
        status, indexes = pool.context.decode(rows)
        assert status is Decode.OK
        for slot, index in zip(prompts, indexes, strict=True):
            last[slot] = int(pool.context.logits(index).argmax())
            answers[slot].append(last[slot])
    assert answers == known


def test_a_copy_goes_on_like_its_source_which_is_unchanged(own: StoreRig, pool: StoreRig) -> None:
    """At once, without a step between, and after the source has continued and was removed."""
    known = own.cold(PROMPT)
    pool.fill(0, PROMPT[:-1])
    pool.context.copy(0, 1, len(PROMPT) - 1)
    pool.context.copy(1, 2, len(PROMPT) - 1)
    assert pool.go_on(1, PROMPT) == known
    assert pool.go_on(0, PROMPT) == known
    pool.context.remove(0)
    pool.context.remove(1)
    assert pool.go_on(2, PROMPT) == known


@pytest.mark.parametrize("name", ["gqa", "window", "hybrid"], indirect=True)
def test_copies_share_cells(pool: StoreRig) -> None:
    """Two copies of 1,200 tokens leave room for a third sequence; without sharing they would not."""
    prompt = random_tokens(3, 1200)
    pool.fill(0, prompt)
    pool.context.copy(0, 1, len(prompt))
    pool.context.copy(0, 2, len(prompt))
    assert has_room(pool, 1700)
    assert not has_room(pool, 2000)
    pool.context.remove(0)
    assert not has_room(pool, 2000)
    pool.context.remove(1)
    pool.context.remove(2)
    assert has_room(pool, 2000)


def test_part_of_a_sequence_is_copied(own: StoreRig, pool: StoreRig, name: str) -> None:
    """The source has more tokens. Models with states and windows go back by a checkpoint."""
    count = 6 * EVERY
    beginning = array("i", [*PROMPT[:count], *random_tokens(4, 30)])
    known = own.cold(beginning)
    checkpoints = pool.fill(0, PROMPT, EVERY)
    pool.context.copy(0, 1, count)
    if name != "gqa":
        assert pool.context.restore(1, checkpoints[5].state, count)
    pool.fill(1, beginning[:-1], start=count)
    assert pool.go_on(1, beginning) == known
    assert pool.go_on(0, [*PROMPT, 20]) == own.cold(array("i", [*PROMPT, 20]))


@pytest.mark.parametrize("name", ["window"], indirect=True)
def test_windows_of_all_sequences_always_have_room(pool: StoreRig) -> None:
    """Copies that continue with different tokens: each has the cells of its window, also a copy of a copy."""
    prompt = random_tokens(5, 600)
    pool.fill(0, prompt)
    for slot in (1, 2, 3):
        pool.context.copy(slot - 1, slot, len(prompt))
    for at in range(600, 1100, 20):
        tokens = random_tokens(at, 20)
        rows = [Row(0, slot, at, tokens, sample=True) for slot in range(PARALLEL)]
        assert pool.context.decode(rows)[0] is Decode.OK


def test_sequences_of_one_layout_continue_in_the_other(own: StoreRig, pool: StoreRig, keep: int) -> None:
    """From every slot to every other one; with a checkpoint also from an earlier position."""
    earlier = array("i", [*PROMPT[: 6 * EVERY], *random_tokens(6, 30)])
    known, known_earlier = own.cold(PROMPT), own.cold(earlier)
    for first, second, slot in ((own, pool, 2), (pool, own, 3)):
        saved = first.fill(slot, PROMPT[:-1], EVERY)
        with first.store(keep) as store:
            store.save(slot, PROMPT[:-1], [Checkpoint(item.position, item.oldest, item.state) for item in saved])
        with second.store(keep) as store:
            sequence = store.found(PROMPT[:-1])
            assert sequence is not None
            loaded = [Checkpoint(item.position, item.oldest) for item in saved]
            assert store.store.load(1, sequence, loaded)
            assert second.go_on(1, PROMPT) == known
            if second.context.checkpoint_bytes:
                assert second.context.restore(1, loaded[5].state, loaded[5].position)
            else:
                assert second.context.remove(1, loaded[5].position)
            second.fill(1, earlier[:-1], start=loaded[5].position)
            assert second.go_on(1, earlier) == known_earlier
        first.context.forget_all()
        second.context.forget_all()


@pytest.mark.parametrize("kv_cells", [255, 2**31])
def test_a_pool_of_impossible_size_fails_the_load(kv_cells: int) -> None:
    rig = store_rig(tiny_gguf.generative(), context_length=256, parallel=2, kv_cells=kv_cells)
    with pytest.raises(LoadError, match=f"kv_cells {kv_cells} must be at least context_length") as failed, rig:
        pass
    assert failed.value.cause is ExitCause.STARTUP


def test_a_pool_may_be_as_small_as_one_sequence() -> None:
    """Every slot can use all of its cells."""
    with store_rig(tiny_gguf.generative(), context_length=256, parallel=64, kv_cells=256) as rig:
        assert rig.context.cells == 256
        assert rig.cold(random_tokens(1, 200)) == rig.cold(random_tokens(1, 200), 63)
