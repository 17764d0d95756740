"""Check at start that llama.cpp computes correctly."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from headgate.build import Build
from headgate.shared.errors import Exit
from headgate.shared.state_directory import StateDir
from inference.devices.build_check import BrokenBuildError, BuildCheck
from inference.workers.helper_client import HelperError

CRASHED = HelperError("the proof helper ended with signal SIGILL", status=-4)
LATE = HelperError("the proof helper did not answer within 30 s")


class Helper:
    """Answers each check with `result` after `gate` is set, and counts them."""

    def __init__(self, result: dict[str, Any] | HelperError) -> None:
        self.result = result
        self.runs = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, job: str, data: Any, *, seconds: float) -> dict[str, Any]:
        assert job == "proof"
        self.runs += 1
        await self.gate.wait()
        if isinstance(self.result, HelperError):
            raise self.result
        return self.result


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages" / "llama_cpp"
    folder.mkdir(parents=True)
    (folder / "libllama.so").write_bytes(b"1")
    return folder


def _check(tmp_path: Path, engine: Path | None, result: Any = None) -> tuple[BuildCheck, Helper]:
    helper = Helper(result if result is not None else {"buffers": ["CPU"]})
    state = StateDir.from_env({"HEADGATE_STATE_DIR": str(tmp_path / "state")})
    return BuildCheck(state, run=helper, find=lambda: engine, stamp=tmp_path / "headgate.json"), helper


async def test_build_is_checked_once(tmp_path: Path, engine: Path) -> None:
    check, helper = _check(tmp_path, engine)
    await check.at_start()
    assert helper.runs == 1
    again, helper = _check(tmp_path, engine)
    await again.at_start()
    assert helper.runs == 0


async def test_build_that_set_up_has_checked_is_not_checked_again(tmp_path: Path, engine: Path) -> None:
    (tmp_path / "headgate.json").write_text(json.dumps({"digest": "1", "build": asdict(Build.at(engine))}))
    check, helper = _check(tmp_path, engine)
    await check.at_start()
    assert helper.runs == 0


async def test_replaced_library_is_checked_again(
    tmp_path: Path, engine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await _check(tmp_path, engine)[0].at_start()
    (engine / "libllama.so").write_bytes(b"22")
    check, helper = _check(tmp_path, engine)
    await check.at_start()
    assert helper.runs == 1
    assert "checking that llama.cpp computes on this CPU: llama.cpp changed" in caplog.text


async def test_moved_environment_is_checked_again(tmp_path: Path, engine: Path) -> None:
    await _check(tmp_path, engine)[0].at_start()
    moved = engine.rename(tmp_path / "llama_cpp")
    check, helper = _check(tmp_path, moved, {"error": "all numbers are zero"})
    with pytest.raises(BrokenBuildError, match=r"the folder of llama\.cpp changed"):
        await check.at_start()
    assert helper.runs == 1


@pytest.mark.parametrize("kept", ["", "[]", "{", '{"passed": 3}', '{"passed": {"cpu": "1"}}'])
async def test_damaged_record_is_ignored(tmp_path: Path, engine: Path, kept: str) -> None:
    check, helper = _check(tmp_path, engine)
    (tmp_path / "state" / "build.json").write_text(kept)
    await check.at_start()
    assert helper.runs == 1


@pytest.mark.parametrize(
    ("result", "reason"), [({"error": "all numbers are zero"}, "all numbers are zero"), (CRASHED, "signal SIGILL")]
)
async def test_failed_build_ends_the_service_with_a_reason_and_advice(
    tmp_path: Path, engine: Path, result: Any, reason: str
) -> None:
    check, _helper = _check(tmp_path, engine, result)
    with pytest.raises(BrokenBuildError) as caught:
        await check.at_start()
    assert caught.value.exit_code == Exit.RESTART_OUTSIDE
    assert reason in str(caught.value)
    assert "`make clean`, then `make serve`" in str(caught.value)
    again, helper = _check(tmp_path, engine)
    await again.at_start()  # a failure is not recorded as a pass
    assert helper.runs == 1


async def test_without_an_engine_nothing_is_checked(tmp_path: Path) -> None:
    check, helper = _check(tmp_path, None)
    await check.at_start()
    assert helper.runs == 0


async def test_concurrent_checks_after_crashes_share_one_run(tmp_path: Path, engine: Path) -> None:
    check, helper = _check(tmp_path, engine)
    helper.gate.clear()
    checks = [asyncio.ensure_future(check.computes()) for _ in range(3)]
    await asyncio.sleep(0)
    helper.gate.set()
    assert await asyncio.gather(*checks) == [True] * 3
    assert helper.runs == 1
    assert check.is_trusted
    assert await check.computes()
    assert helper.runs == 1


async def test_failed_check_of_a_running_service_is_reported_once_and_repeated_at_the_next_start(
    tmp_path: Path, engine: Path
) -> None:
    (tmp_path / "headgate.json").write_text(json.dumps({"build": asdict(Build.at(engine))}))
    check, helper = _check(tmp_path, engine, CRASHED)
    reports: list[str] = []
    check.broken = reports.append
    assert await check.computes() is False
    assert await check.computes() is False
    assert helper.runs == 1
    assert len(reports) == 1
    assert "signal SIGILL" in reports[0]
    again, helper = _check(tmp_path, engine)
    await again.at_start()
    assert helper.runs == 1


async def test_check_without_a_result_attributes_the_crash_to_the_model(tmp_path: Path, engine: Path) -> None:
    check, helper = _check(tmp_path, engine, LATE)
    assert await check.computes()
    assert not check.is_trusted
    helper.result = {}
    assert await check.computes()
    assert (helper.runs, check.is_trusted) == (2, True)
