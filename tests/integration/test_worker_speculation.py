"""Answers with proposed tokens on real models: equal to the byte, with the same cells. Some models propose none.

With one thread, flash attention and Q8_0 weights (`demo`), a step with several tokens of one sequence has the bits of
single steps. With other weights (`tiny`) the last digits of logits differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headgate.shared.parameters import Sampling
from inference.demo import bundled_path
from inference.estimate import estimate_job
from inference.worker import llama
from inference.worker.llama import sequence_state
from inference.worker.llama.llama_process import LogTail
from inference.worker.loading import load, reopen
from tests.rigs import tiny_families, tiny_gguf
from tests.rigs.engine_rig import GREEDY, EngineRig, engine_rig
from tests.rigs.tiny_families import Form
from tests.rigs.worker_rig import grant_for

Rigs = tuple[EngineRig, EngineRig]


@pytest.fixture(scope="module", params=["tiny", "demo", "draft"])
def rigs(request: pytest.FixtureRequest) -> Iterator[Rigs]:
    """Without proposals, and with all that fit into a step, from earlier text or from a draft model."""
    path = tiny_gguf.generative() if request.param == "tiny" else bundled_path("demo")
    draft = str(bundled_path("demo-mini")) if request.param == "draft" else None
    with (
        engine_rig(path, speculation="off") as plain,
        engine_rig(path, is_eager=True, speculation="ngram", draft=draft) as proposing,
    ):
        yield plain, proposing


def prompt_of(rig: EngineRig, seed: int) -> list[int]:
    """Random words that occur twice."""
    words = np.random.default_rng(seed).integers(10, rig.model.n_vocab - 4, 20).tolist()
    return words * 2


def has_equal_bits(rig: EngineRig) -> bool:
    return rig.model.metadata.get("general.file_type") == "7"  # mostly Q8_0


def test_greedy_answers_are_equal_to_the_byte(rigs: Rigs) -> None:
    plain, proposing = rigs
    greedy = Sampling(temperature=0.0, ignore_eos=True)
    for seed in range(4):
        prompt = prompt_of(plain, seed)
        logprobs = 2 if has_equal_bits(plain) else None
        answers = [rig.answer(prompt, max_tokens=150, sampling=greedy, logprobs=logprobs) for rig in rigs]
        assert [output._replace(cached=0) for output in answers[0]] == [out._replace(cached=0) for out in answers[1]]
    counters = proposing.engine.counters
    assert counters.proposed_tokens > 50
    assert counters.accepted_tokens > 10 or not has_equal_bits(plain), "the random model does not repeat itself"
    assert plain.engine.counters.proposed_tokens == 0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=1, temperature=0.2),
        Sampling(seed=2, temperature=0.5, top_k=3, ignore_eos=True),
        Sampling(seed=3, temperature=0.3, top_p=0.8, repeat_penalty=1.05, frequency_penalty=0.05, min_tokens=30),
        Sampling(seed=4, temperature=0.3, mirostat=2, mirostat_tau=1.0),
        Sampling(seed=5, temperature=0.3, dry_multiplier=0.2, xtc_probability=0.2, min_p=0.02),
        Sampling(temperature=0.0, logit_bias=((40, 3.0),), presence_penalty=0.1),
    ],
    ids=["temperature", "top_k", "penalties", "mirostat", "dry", "bias"],
)
def test_sampled_answers_are_equal_to_the_byte(rigs: Rigs, sampling: Sampling) -> None:
    """The sampler draws as often and from the same logits, so that a seeded answer does not change."""
    for seed in range(2):
        prompt = prompt_of(rigs[0], 50 + seed)
        texts = ["".join(out.text for out in rig.answer(prompt, max_tokens=100, sampling=sampling)) for rig in rigs]
        assert texts[0] == texts[1]


def test_slot_has_the_cells_of_its_answer(rigs: Rigs) -> None:
    """Rejected proposals leave no trace: the state has the same bytes, and a later prompt continues from it."""
    prompt = prompt_of(rigs[0], 99)
    states = []
    for rig in rigs:
        rig.engine._scheduler.slots.forget()
        rig.answer(prompt, max_tokens=90, sampling=Sampling(temperature=0.0, ignore_eos=True))
        (slot,) = rig.engine._scheduler.slots.held()
        state = np.zeros(sequence_state.count_bytes(rig.context.handle, slot.number, partial=False), np.uint8)
        assert sequence_state.read(rig.context.handle, slot.number, state.ctypes.data, state.size, partial=False)
        states.append((slot.computed, state.size, state.tobytes() if has_equal_bits(rig) else b""))
        (*_, last) = rig.answer([*slot.tokens, 7, 8, 9], max_tokens=4)
        assert last.cached == states[-1][0]
    assert states[0] == states[1]


@pytest.mark.parametrize("family", ["window", "hybrid", "recurrent"])
def test_models_that_cannot_go_back_have_no_proposals(family: str) -> None:
    path = tiny_families.path(Form(family, layers=2))
    with engine_rig(path, speculation="ngram", checkpoint_bytes=2**20) as rig:
        rig.answer(prompt_of(rig, 1), max_tokens=30, sampling=GREEDY)
        counters = rig.engine.counters
        assert (counters.proposed_tokens, counters.steps >= counters.generated_tokens) == (0, True)


def test_draft_model_that_cannot_propose_is_refused_with_the_reason(tmp_path: Path) -> None:
    """At the estimate, so that nothing is loaded."""
    demo, mini = bundled_path("demo"), bundled_path("demo-mini")
    window, hybrid = (tiny_families.path(Form(family, layers=2)) for family in ("window", "hybrid"))
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"GGUF")
    cases = [
        (
            demo,
            tiny_gguf.generative(),
            f"the draft model {tiny_gguf.generative()} has another vocabulary than the model",
        ),
        (window, window, "where rejected tokens cannot be removed; set swa_full: true, or remove draft"),
        (hybrid, hybrid, "this model has recurrent layers, where rejected tokens cannot be removed; remove draft"),
        (tiny_gguf.embedding(), mini, "draft is set, but this model does not generate; remove draft"),
        (demo, junk, f"{junk} is not a usable GGUF file"),
        (demo, tmp_path / "none.gguf", f"{tmp_path / 'none.gguf'} cannot be read"),
    ]
    for path, draft, reason in cases:
        job = {"path": str(path), "draft": str(draft), "parameters": {"context_length": 2048, "parallel": 1}}
        assert reason in estimate_job.run(job).get("error", ""), path


@pytest.mark.parametrize("cells", [None, 1500])
def test_memory_of_the_draft_model_is_estimated_exactly(cells: int | None) -> None:
    """The estimate of both models is what the buffers of a load have, and of a context that is opened again."""
    demo, mini = bundled_path("demo"), str(bundled_path("demo-mini"))
    parameters = {"context_length": 1024, "parallel": 4, "batch": 512, "ubatch": 256, "kv_cells": cells}
    job = {"path": str(demo), "parameters": parameters}
    alone, both = estimate_job.run(job), estimate_job.run({**job, "draft": mini})
    draft_bytes = both["draft_bytes"]["cpu"]
    assert {**both, "draft_bytes": {}, "output_bytes": 0} == {**alone, "output_bytes": 0}
    assert both["output_bytes"] == 2 * alone["output_bytes"]
    assert 0.5 < estimate_job.run({**job, "draft": mini, "exact": False})["draft_bytes"]["cpu"] / draft_bytes < 2
    tail = LogTail(lambda _line: None)
    llama.start(tail)
    grant = grant_for(demo, draft=mini, kv_cells=cells)
    loaded = load(grant, tail, lambda _fraction: True)
    planned = sum(both["parts"]["cpu"].values()) + draft_bytes
    for _ in range(2):
        found = sum(buffer.bytes for buffer in loaded.ready.buffers if buffer.kind != "other")
        assert abs(found - planned) < 2**16
        for context in loaded.contexts:
            context.close()
        loaded = reopen(loaded, grant, tail)
    for context in loaded.contexts:
        context.close()
    llama.start(LogTail(lambda _line: None))
