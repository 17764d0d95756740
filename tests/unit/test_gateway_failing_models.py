"""What speaks against asking a model, as the inference service tells it."""

from __future__ import annotations

import pytest

from gateway.providers.local.candidate_facts import LikelyFailure, likely_failure
from inference.protocol import DeviceState, ModelState, ModelStatus

FAILED, READY = ModelState.FAILED, ModelState.READY


def test_a_model_that_failed_ails_until_its_rest_is_nearly_over() -> None:
    status = ModelStatus("m", FAILED, retry_after_seconds=8.0, reason="it aborted")
    assert likely_failure(status, {}, 0.0) == LikelyFailure("the model failed: it aborted", 8.0)
    assert likely_failure(status, {}, 5.0) == LikelyFailure("the model failed: it aborted", 3.0)
    assert likely_failure(status, {}, 6.0) is None, "the service waits out the rest of it"
    assert likely_failure(ModelStatus("m", FAILED), {}, 0.0) == LikelyFailure("the model failed: no reason given", None)


@pytest.mark.parametrize("state", list(DeviceState))
def test_a_model_on_a_device_that_may_not_be_used_ails(state: DeviceState) -> None:
    status = ModelStatus("m", READY, devices=("gpu-0", "gpu-1"))
    said = likely_failure(status, {"gpu-0": DeviceState.HEALTHY, "gpu-1": state}, 0.0)
    gone = state in (DeviceState.QUARANTINED, DeviceState.LOST)
    assert said == (LikelyFailure(f"its device gpu-1 is {state}") if gone else None)


def test_what_nothing_is_known_of_is_well() -> None:
    assert likely_failure(ModelStatus("m", ModelState.COLD), {"gpu-0": DeviceState.LOST}, 0.0) is None
    assert likely_failure(ModelStatus("m", READY, devices=("gpu-7",)), {}, 0.0) is None
