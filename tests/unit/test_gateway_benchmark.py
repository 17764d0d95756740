"""The gateway benchmark: its bars (required figures), raw samples, upstream and load generator."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from benchmarks import asking, departures, gateway_report, upstream
from benchmarks.gateway_samples import (
    CLOUD_STREAM,
    CLOUD_WHOLE,
    STREAMED,
    WHOLE,
    Alone,
    Crowd,
    Failed,
    Gone,
    Held,
    Paced,
    Results,
)
from benchmarks.gateways import DIRECT, GATEWAY, PASS_THROUGH
from benchmarks.upstream import Upstream
from gateway.apis.openai.assemble import Assembly
from gateway.apis.openai.frames import DeltaKind, frame_of
from headgate.shared.sse import SseSplitter
from inference.protocol import ModelStatus


def _found() -> Results:
    """Two rounds; the second one ran on a machine at half speed."""
    found = Results(versions={GATEWAY: "0"}, load=[1.0, 2.0])
    for number, slow in enumerate((1.0, 2.0)):
        for system, seconds in ((DIRECT, 0.0002), (GATEWAY, 0.0006), (PASS_THROUGH, 0.001)):
            found.alone += [
                Alone(system, kind, number, [seconds * slow] * 5, [seconds * slow] * 5)
                for kind in (WHOLE, STREAMED, CLOUD_WHOLE, CLOUD_STREAM)
            ]
        for system, share in ((GATEWAY, 1.0), (PASS_THROUGH, 0.8), ("litellm", 1.0), ("portkey", 1.0)):
            requests = {GATEWAY: 3000, PASS_THROUGH: 3200, "litellm": 100, "portkey": 2000}[system]
            found.crowds.append(Crowd(system, WHOLE, number, 32, int(requests / slow), 1.0, 0.01, 0.02, share, 0.5))
        found.paced.append(Paced(GATEWAY, number, 256, 250, 0.02, 0.03, [0.05, 0.1 * slow], 0.5))
    found.failed = [Failed("silent", False, [0.51], [0.004]), Failed("silent", True, [0.005], [0.004])]
    found.held = Held(60_000_000, [(0, 60_000_000), (1000, 66_000_000)])
    found.gone = [Gone("worker, streamed", [0.01, 0.02], 0.002)]
    return found


def test_bars_are_computed_from_samples() -> None:
    bars = {bar.name: (pytest.approx(bar.value), bar.reached) for bar in gateway_report.bars(_found())}
    assert bars == {
        "added_p50": (0.6, True),
        f"added_p50_of_{PASS_THROUGH}": (0.5, True),
        "added_p99": (0.6, True),
        f"added_p99_of_{PASS_THROUGH}": (0.5, True),
        "added_ttft_p99": (0.6, True),
        f"added_ttft_p99_of_{PASS_THROUGH}": (0.5, True),
        "added_p50_cloud": (0.6, True),
        "added_ttft_p50_cloud": (0.6, True),
        f"throughput_per_core_over_{PASS_THROUGH}_whole": (0.75, True),
        "throughput_per_core_over_litellm_whole": (30.0, True),
        "throughput_per_core_over_portkey_whole": (1.5, False),
        "longest_gap_of_256_streams": (10.0, True),
        "failover_silent": (6.0, True),
        "failover_silent_open": (1.0, True),
        "rss_idle": (60.0, True),
        "rss_growth_after_1000": (10.0, False),
        "gone_worker_streamed_p99_beyond_step": (17.9, True),
    }


def test_report_of_written_results_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _found()
    found.write(tmp_path / "raw.json")
    gateway_report.show(found)
    output = capsys.readouterr().out
    gateway_report.show(Results.read(tmp_path / "raw.json"))
    assert capsys.readouterr().out == output
    assert "BAR added_p50" in output


def test_peer_that_was_not_measured_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = _found()
    found.crowds = [one for one in found.crowds if one.system != "portkey"]
    gateway_report.show(found)
    output = capsys.readouterr().out
    assert "portkey is not installed and was not measured" in output
    assert "litellm is not installed" not in output
    found.crowds = [replace(one, kind=CLOUD_WHOLE) for one in found.crowds]
    gateway_report.show(found)
    assert "litellm is not installed" not in capsys.readouterr().out


def _chat(service: Upstream, model: str, *, stream: bool) -> bytes:
    return asking.request(service.port, {"model": model, "messages": [], "stream": stream}, {})


async def test_upstream_has_the_protocol_of_the_inference_service() -> None:
    async with Upstream() as service:
        connection = await asking.Connection.open(service.port)
        streamed = asking.check(await connection.answer(_chat(service, upstream.AT_ONCE, stream=True)))
        whole = asking.check(await connection.answer(_chat(service, upstream.AT_ONCE, stream=False)))
        models = await connection.answer(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        busy = await connection.answer(_chat(service, upstream.BUSY, stream=True))
        await asking.close(connection)
    frames = [frame.data for frame in SseSplitter().feed(streamed.text) if frame.data]
    kinds = [frame_of(data).kind for data in frames[:2]]
    assert kinds == [DeltaKind.OTHER, DeltaKind.CONTENT]
    assembly = Assembly()
    assembly.add(orjson.loads(frames[1]))
    assert assembly.result()["model"] == upstream.AT_ONCE
    assert orjson.loads(whole.text)["object"] == "chat.completion"
    assert busy.status == 503
    assert models.status == 200
    listed = [ModelStatus.from_json(item) for item in orjson.loads(upstream.LISTED)["data"]]
    assert {model.id for model in listed} >= {upstream.AT_ONCE, upstream.PACED}


async def test_paced_streams_are_complete_and_a_disconnect_is_noticed() -> None:
    left = asyncio.Event()
    async with Upstream(tokens=3) as service:
        service.on_left = left.set
        paced = await asking.streams(service.port, _chat(service, upstream.PACED, stream=True), 5, 0.0)
        assert [len(pieces) >= 2 for pieces in paced] == [True] * 5
        assert not left.is_set()
        connection = await asking.Connection.open(service.port)
        begun = await connection.begin(_chat(service, upstream.ENDLESS, stream=True))
        assert begun.first
        connection.forget()
        await left.wait()


def test_stream_without_its_end_is_a_failed_request() -> None:
    reply = asking.Reply(200, first=1.0, text=b"data: {}", tail=b"data: {}\n\ndata: [DONE]\n\n")
    assert asking.check(reply) is reply
    with pytest.raises(asking.FailedError, match="without its end"):
        asking.check(replace(reply, tail=b'data: {"error": {}}\n\n'))
    assert asking.check(replace(reply, text=b'{"id": 1}', tail=b"}"))


async def test_load_stops_at_its_number_of_requests_or_at_a_failure() -> None:
    async with Upstream() as service:
        request = _chat(service, upstream.AT_ONCE, stream=False)
        rush = await asking.as_they_come(service.port, request, 3, 60.0, most=20)
        assert 20 <= len(rush.whole) <= 23
        spans = await asking.at_rate(service.port, request, 1000, 0.01)
        assert len(spans.whole) == 10
        with pytest.raises(asking.FailedError, match="status 503"):
            await asking.as_they_come(service.port, _chat(service, upstream.BUSY, stream=False), 2, 60.0, most=5)


def test_added_latency_is_computed_within_rounds() -> None:
    found = Results()
    found.alone = [Alone(DIRECT, WHOLE, 0, [0.001], [0.001]), Alone(GATEWAY, WHOLE, 0, [0.0015], [0.0015])]
    found.alone += [replace(one, round=1, whole=[one.whole[0] + 1]) for one in found.alone]
    added = next(bar for bar in gateway_report.bars(found) if bar.name == "added_p50")
    assert added.value == pytest.approx(0.5)


def _looks(*busy: tuple[int, int]) -> list[tuple[float, float]]:
    """Samples of each millisecond of a process that is busy in the given intervals."""
    return [(at / 1e3, sum(min(max(at - start, 0), end - start) for start, end in busy) / 1e3) for at in range(400)]


def test_busy_process_is_followed_until_it_stops() -> None:
    for ends in (20, 50, 121):
        assert departures.last_busy(_looks((0, ends))) == pytest.approx(ends / 1e3, abs=0.0011)


def test_heartbeats_are_not_busy_time() -> None:
    beats = [(at, at + 1) for at in range(25, 400, 25)]
    assert departures.last_busy(_looks((0, 4), *beats)) <= 0.004 + departures.WINDOW_SECONDS


def test_steps_with_pauses_are_busy_time() -> None:
    steps = [(at, at + 4) for at in range(0, 300, 10)]
    assert departures.last_busy(_looks(*steps)) == pytest.approx(0.294, abs=0.0011)
