"""Sentences about what an action of an operator would do."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.ui import plan_sentences
from inference.protocol import ModelState, ModelStatus, ReplicaStatus

MIB = 2**20
DEVICES = {
    name: {"id": name, "state": "healthy", "ledger": {"room_bytes": room * MIB}}
    for name, room in (("gpu-0", 600), ("gpu-1", 100))
}
READY = ModelStatus("demo", ModelState.READY, devices=("gpu-0",), actual_bytes=310 * MIB)
COLD = ModelStatus("demo", ModelState.COLD)


def _load(result: str, **more: Any) -> tuple[bool, list[str]]:
    plan = {"result": result, "need_bytes": {"gpu-0": 310 * MIB}, "devices": ["gpu-0"], "evict": [], **more}
    found = plan_sentences.load("demo", plan, DEVICES)
    return found.allowed, list(found.sentences)


def test_load_names_the_device_and_what_is_evicted() -> None:
    need = {"gpu-0": 310 * MIB, "cpu": MIB}
    expected = {"tokens_per_second": 12.345}
    assert _load("FULL", need_bytes=need, evict=["demo-mini"], changes={"context_length": 512}, expected=expected) == (
        True,
        [
            "Loads demo on gpu-0: 310.0 MiB; 600.0 MiB are free.",
            "Also takes memory of cpu: 1.0 MiB.",
            "Evicts demo-mini.",
            "Uses context_length 512, because it does not fit as configured.",
            "About 12.3 tokens per second are expected.",
        ],
    )
    assert _load("FREE") == (True, ["Loads demo on gpu-0: 310.0 MiB; 600.0 MiB are free."])
    assert _load("DEPLOYED") == (True, ["demo is already loaded."])


def test_load_that_is_not_possible_says_why() -> None:
    assert _load("CANT_ACCOMMODATE", reason="too large", waits_for=["a", "b"], fix={"parallel": 1}) == (
        False,
        [
            "demo cannot be loaded now: too large.",
            "It waits for memory of a and b.",
            "It would fit with parallel 1.",
        ],
    )
    assert _load("CANT_ACCOMMODATE") == (False, ["demo cannot be loaded now: no reason given."])


def test_unload_names_what_becomes_free_and_which_requests_are_affected() -> None:
    busy = ModelStatus("demo", ModelState.BUSY, devices=("gpu-0", "gpu-1"), in_flight=1, queued=2)
    assert plan_sentences.unload(READY) == (True, ["Unloads demo from gpu-0: 310.0 MiB become free."])
    assert plan_sentences.unload(busy) == (
        True,
        ["Unloads demo from gpu-0 and gpu-1.", "1 running request may finish first.", "2 requests wait for it."],
    )
    assert plan_sentences.unload(COLD) == (False, ["demo is not loaded; it is cold."])
    assert plan_sentences.unload(ModelStatus("demo", ModelState.WARM))[1] == ["Removes demo from the warm pool."]
    loading = ModelStatus("demo", ModelState.LOADING, in_flight=2, queued=1)
    assert plan_sentences.unload(loading)[1] == [
        "Unloads demo.", "2 running requests may finish first.", "1 request waits for it.",
    ]  # fmt: skip


def test_offload_and_restart() -> None:
    assert plan_sentences.offload(READY)[1] == [
        "Moves demo into the warm pool in host memory from gpu-0: 310.0 MiB become free."
    ]
    assert plan_sentences.offload(COLD) == (False, ["Only a loaded model can be offloaded; demo is cold."])
    assert plan_sentences.restart(READY)[1] == ["Unloads demo from gpu-0: 310.0 MiB become free, then loads it again."]
    assert plan_sentences.restart(COLD) == (True, ["demo is not loaded; loads it."])


@pytest.mark.parametrize(
    ("status", "device", "allowed", "sentences"),
    [
        (READY, "gpu-1", True, [
            "Moves demo from gpu-0 to gpu-1: 310.0 MiB; 100.0 MiB are free there.",
            "Idle models on gpu-1 are evicted if that is enough; otherwise demo stays.",
        ]),
        (ModelStatus("demo", ModelState.READY, devices=("gpu-1",), actual_bytes=MIB), "gpu-0", True,
         ["Moves demo from gpu-1 to gpu-0: 1.0 MiB; 600.0 MiB are free there."]),
        (ModelStatus("demo", ModelState.READY, devices=("gpu-1",)), "gpu-0", True, ["Moves demo from gpu-1 to gpu-0."]),
        (READY, "gpu-0", False, ["demo is already on gpu-0."]),
        (COLD, "gpu-0", False, ["Only a loaded model can be moved; demo is cold."]),
        (ModelStatus("demo", ModelState.READY, replicas=(ReplicaStatus("demo@1", ModelState.READY),) * 2), "gpu-0",
         False, ["demo has several replicas; move one of them."]),
    ],
)  # fmt: skip
def test_move(status: ModelStatus, device: str, allowed: bool, sentences: list[str]) -> None:
    assert plan_sentences.move(status, DEVICES[device]) == (allowed, sentences)


def test_no_model_moves_to_an_unusable_device() -> None:
    lost = {**DEVICES["gpu-1"], "state": "lost"}
    assert plan_sentences.move(READY, lost) == (False, ["gpu-1 is lost."])
