"""The check of a llama.cpp build: the installed one passes, every broken one fails, within seconds."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headgate.build import this_cpu
from headgate.engine_build import EngineBuild
from headgate.virtual_environment import VirtualEnvironment
from inference.devices import build_proof_job
from inference.devices.device import HIDDEN
from inference.worker.backend import Decode
from inference.workers.helper_client import HelperError, run_helper
from tests.rigs.broken_llama import BrokenLlama

pytestmark = pytest.mark.unmeasured

ROOT = Path(__file__).resolve().parents[2]
needs_preloading = pytest.mark.skipif(sys.platform != "linux", reason="preloads a library")


@pytest.fixture
def broken(tmp_path: Path) -> BrokenLlama:
    return BrokenLlama(tmp_path)


async def test_installed_build_passes_within_seconds() -> None:
    started = time.monotonic()
    answer = await run_helper("proof", {}, seconds=60.0)
    assert "error" not in answer
    assert "CPU" in answer["buffers"]
    assert answer["answer"].startswith("I am a small demo model")
    assert time.monotonic() - started < 30.0


def test_check_sees_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full or lost accelerator says nothing about the code for the CPU."""
    seen: list[str | None] = []
    monkeypatch.setattr(
        build_proof_job, "_check_products", lambda: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES")) or []
    )
    monkeypatch.setattr(build_proof_job, "_check_model", lambda: "")
    for name in HIDDEN:
        monkeypatch.setenv(name, "0")  # monkeypatch restores it
    answer = build_proof_job.run({})
    assert (answer["buffers"], answer["answer"]) == ([], "")
    assert "CPU : " in answer["system_info"]
    assert seen == [""]


@needs_preloading
@pytest.mark.parametrize("how", ["sigill", "sigsegv"])
async def test_build_whose_decode_crashes_is_reported_with_its_signal(broken: BrokenLlama, how: str) -> None:
    broken.breaks(how)
    with pytest.raises(HelperError, match=f"ended with signal {how.upper()}"):
        await run_helper("proof", {}, seconds=60.0, environment=broken.env)


@needs_preloading
async def test_build_that_computes_zeros_fails(broken: BrokenLlama) -> None:
    broken.breaks("zero")
    answer = await run_helper("proof", {}, seconds=60.0, environment=broken.env)
    assert answer == {"error": "the demo model's logits are zero or not finite"}
    broken.computes()
    assert "error" not in await run_helper("proof", {}, seconds=60.0, environment=broken.env)


@needs_preloading
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("sigill", "this build is broken: its first computation ended with signal SIGILL"),
        ("sigsegv", "this build is broken: its first computation ended with signal SIGSEGV"),
        ("zero", "this build computes wrong results: the demo model's logits are zero or not finite"),
    ],
)
def test_set_up_detects_a_broken_build(broken: BrokenLlama, how: str, message: str) -> None:
    broken.breaks(how)
    environment = VirtualEnvironment(ROOT, {**os.environ, **broken.env})
    assert EngineBuild(environment, this_cpu()).proof() == message


# --- what counts as a wrong result -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found * 0, "all 12 numbers are zero"),
        (lambda found: np.where(found == found.max(), np.nan, found), "1 of 12 numbers are not finite"),
        (lambda found: found[::-1], "the numbers are off by"),
        (lambda found: found * 1.05, "the numbers are off by 5%"),
    ],
)
def test_numbers_far_from_the_expected_ones_fail(change: Any, message: str) -> None:
    expected = np.arange(1.0, 13.0).reshape(3, 4)
    with pytest.raises(build_proof_job.ProofError, match=message):
        build_proof_job.check_close("it", change(expected), expected)


def test_numbers_within_the_error_of_quantization_pass() -> None:
    expected = np.arange(1.0, 13.0).reshape(3, 4)
    build_proof_job.check_close("it", expected * 1.01, expected)


def test_quantized_weights_are_close_to_their_originals() -> None:
    matrix = np.random.default_rng(2).standard_normal((4, 64)).astype(np.float32)
    sizes = {weights.name: (len(weights.data), weights.values) for weights in build_proof_job.quantized(matrix)}
    assert {name: size for name, (size, _values) in sizes.items()} == {"f16": 512, "q8_0": 8 * 34, "q4_0": 8 * 18}
    for name, most in (("f16", 1e-3), ("q8_0", 0.01), ("q4_0", 0.15)):
        error = np.linalg.norm(sizes[name][1] - matrix) / np.linalg.norm(matrix)
        assert error < most


class FixedContext:
    """A context whose logits select the tokens of `answer` in turn, the same for every row."""

    def __init__(self, answer: list[int], status: Decode = Decode.OK) -> None:
        self._answer = answer
        self._status = status
        self._logits = np.zeros(0)

    def decode(self, rows: list[Any]) -> tuple[Decode, list[int]]:
        self._logits = np.full(256, 0.1)
        self._logits[self._answer.pop(0)] = 1.0
        return self._status, list(range(len(rows)))

    def logits(self, _index: int) -> np.ndarray:
        return self._logits


def _answered(text: str) -> str:
    letters = [ord(letter) for letter in text]
    return build_proof_job._check_answer(
        FixedContext(letters[1:]), lambda tokens: "".join(map(chr, tokens)), 9, letters[0]
    )


def test_answer_with_the_learned_beginning_passes() -> None:
    assert _answered(build_proof_job.ANSWER) == build_proof_job.ANSWER[: build_proof_job.TOKENS + 1]


def test_check_of_the_build_fails_with_another_answer() -> None:
    with pytest.raises(build_proof_job.ProofError, match="instead of 'I am a small demo model"):
        _answered("I an a small demo model")


def test_batch_that_is_not_computed_fails() -> None:
    context = FixedContext([1], Decode.COMPUTE_FAILED)
    with pytest.raises(build_proof_job.ProofError, match=r"could not decode 1 rows \(compute_failed\)"):
        build_proof_job._decoded(context, [SimpleNamespace()])  # type: ignore[list-item]
