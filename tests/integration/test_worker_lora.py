"""Real workers with LoRA adapters: their effect, several adapters together, and refusals at load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from inference import worker_link
from inference.protocol import ExitCause
from tests.rigs import tiny_gguf
from tests.rigs.worker_rig import WorkerRig, grant_for

FIRST, SECOND = (lambda: tiny_gguf.lora(seed=7)), (lambda: tiny_gguf.lora(seed=8))


def top_logprobs(root: Path, *lora: Path) -> dict[str, float]:
    """Log probabilities of the most likely first tokens."""
    root.mkdir()
    with WorkerRig(root, grant_for(tiny_gguf.generative(), lora=tuple(map(str, lora)))) as worker:
        worker.ready()
        body = {"prompt": "the water", "max_tokens": 1, "temperature": 0, "logprobs": 20}
        status, response = worker.post("/v1/completions", body)
    assert status == 200, response
    top: dict[str, float] = response["choices"][0]["logprobs"]["top_logprobs"][0]
    return top


def test_adapters_add_up_in_any_order_and_strength_zero_has_no_effect(tmp_path: Path) -> None:
    plain = top_logprobs(tmp_path / "plain")
    nothing = top_logprobs(tmp_path / "nothing", tiny_gguf.lora(strength=0.0))
    first = top_logprobs(tmp_path / "first", FIRST())
    both = top_logprobs(tmp_path / "both", FIRST(), SECOND())
    swapped = top_logprobs(tmp_path / "swapped", SECOND(), FIRST())
    assert nothing == pytest.approx(plain, abs=1e-4)
    assert both == pytest.approx(swapped, abs=1e-2)
    for one, other in ((plain, first), (first, both), (plain, both)):
        assert one != pytest.approx(other, abs=0.1)


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        (lambda: tiny_gguf.lora(tiny_gguf.Shape(width=128)), "incorrect shape"),
        (lambda: tiny_gguf.lora(tiny_gguf.Shape(layers=3)), "does not exist in base model"),
        (lambda: tiny_gguf.lora(tiny_gguf.Shape(architecture="qwen3")), "arch mismatch"),
        (lambda: tiny_gguf.lora(wakes_at=(256, 257)), "invocation tokens"),
        (lambda: tiny_gguf.generative(), "expect general.type to be 'adapter'"),
        (lambda: Path("/nowhere/adapter.gguf"), "file not found"),
    ],
    ids=["another width", "more layers", "another architecture", "needs invocation", "a model", "no file"],
)
def test_incompatible_adapter_is_named(tmp_path: Path, adapter: Callable[[], Path], says: str) -> None:
    """It is the second of two; the first one is valid."""
    wrong = adapter()
    grant = grant_for(tiny_gguf.generative(), lora=(str(FIRST()), str(wrong)))
    with WorkerRig(tmp_path, grant) as worker:
        failed = worker.expect(worker_link.Failed)
        assert worker.wait() == 1
    assert str(wrong) in failed.message
    assert says in failed.message
    assert failed.cause == ExitCause.STARTUP
