"""What the gateway's local provider needs from the inference service: frames, progress, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.apis.openai.frames import Comment, Data, DeltaKind, Done, Endpoint, Frame, frame_of
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.local.inference_snapshot import InferenceView
from gateway.providers.local.local_provider import LocalProvider
from inference.protocol import DONE, Code, ModelState, ModelStatus, Progress, Restored
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.typed_bodies import call as typed_call

pytestmark = pytest.mark.timeout(30)

BODY = {"model": "requested", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
async def provider(fake: FakeInference) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(fake.url, "token")
    yield provider
    await provider.aclose()


async def _frames(provider: LocalProvider, model: str = "demo") -> list[Frame]:
    async with asyncio.timeout(10), provider.stream(typed_call(Endpoint.CHAT, model, BODY, "id-1")) as stream:
        return [frame async for frame in stream]


async def test_progress_is_sent_as_readable_comments(fake: FakeInference, provider: LocalProvider) -> None:
    fake.answers["demo"] = Answer(comments=2)
    frames = await _frames(provider)
    comments = [frame for frame in frames if isinstance(frame, Comment)]
    assert [Progress.parse(comment.frame) for comment in comments] == [
        Progress("loading", 0, 100),
        Progress("loading", 1, 100),
    ]
    assert frames[-1] == Done()
    assert [frame.kind for frame in frames if isinstance(frame, Data)] == [
        DeltaKind.OTHER,
        *[DeltaKind.CONTENT] * 3,
        DeltaKind.FINISH,
        DeltaKind.USAGE,
    ]


async def test_restores_reach_the_call_and_not_the_client(fake: FakeInference, provider: LocalProvider) -> None:
    restores = [Restored("disk", 1024, 5.4), Restored("hot", 3, 0.0, choice=1)]
    fake.answers["demo"] = Answer(raw=b"".join(one.frame() for one in restores) + DONE)
    call = typed_call(Endpoint.CHAT, "demo", BODY, "id-1")
    with pytest.raises(UpstreamError):
        async with provider.stream(call) as stream:
            assert [frame async for frame in stream] == []
    assert call.restored == restores
    assert Restored.parse(b": headgate restored tape 3 0.0 0") is None


@pytest.mark.parametrize("code", [Code.MEMORY_LIMIT_EXCEEDED, Code.QUEUE_FULL, Code.CONTEXT_LENGTH_EXCEEDED])
async def test_refusal_keeps_its_code_numbers_and_retry_after(
    fake: FakeInference, provider: LocalProvider, code: Code
) -> None:
    fake.answers["demo"] = Answer(refuse=code, retry_after=2.5)
    with pytest.raises(UpstreamError) as caught:
        await _frames(provider)
    error = caught.value
    assert (error.kind, error.code, error.retry_after) == (UpstreamKind.STATUS, code, 2.5)
    assert error.details == {"needed_bytes": 1, "retry_after": 2.5}


async def test_error_frame_has_the_status_of_its_code_and_follows_the_text(
    fake: FakeInference, provider: LocalProvider
) -> None:
    fake.answers["demo"] = Answer(words=("one",), error=Code.DEVICE_LOST, retry_after=7.5)
    seen: list[Frame] = []
    with pytest.raises(UpstreamError) as caught:
        async with provider.stream(typed_call(Endpoint.CHAT, "demo", BODY, "id-1")) as stream:
            async for frame in stream:
                seen.append(frame)  # noqa: PERF401  # frames before the error count
    assert len(seen) == 2
    assert (caught.value.kind, caught.value.status) == (UpstreamKind.ERROR_FRAME, 503)
    assert caught.value.retry_after == 7.5, "a frame has no headers"


async def test_frames_that_arrive_together_can_be_read_together(fake: FakeInference, provider: LocalProvider) -> None:
    chunk = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    fake.answers["demo"] = Answer(raw=chunk * 3 + b"data: oops\n\n")
    async with provider.stream(typed_call(Endpoint.CHAT, "demo", BODY, "id-1")) as stream:
        first = await anext(stream)
        ready = stream.take_ready()  # type: ignore[attr-defined]
        assert [first, *ready] == [frame_of(chunk[6:-2])] * 3
        with pytest.raises(UpstreamError, match="oops"):
            await anext(stream)


async def test_other_requests_return_json_or_the_error_of_the_service(
    fake: FakeInference, provider: LocalProvider
) -> None:
    fake.counts["demo"] = 7
    assert await provider.post_json("/tokenize", b'{"model":"demo","prompt":"x"}', 1.5) == {"tokens": [], "count": 7}
    assert fake.counted == [{"model": "demo", "prompt": "x"}]
    with pytest.raises(UpstreamError, match="this is not counted") as refused:
        await provider.post_json("/tokenize", b'{"model":"demo-mini"}', 1.5)
    assert (refused.value.status, refused.value.code) == (400, Code.UNSUPPORTED_PARAMETER)
    with pytest.raises(UpstreamError, match="GET /nowhere: 404") as missing:
        await provider.get_json("/nowhere", 1.0)
    assert missing.value.status == 404
    await fake.stop()
    with pytest.raises(UpstreamError) as gone:
        await provider.post_json("/tokenize", b"{}", 1.0)
    assert gone.value.kind is UpstreamKind.CONNECT


async def test_view_keeps_the_models_of_a_stopped_service_until_they_are_stale(
    fake: FakeInference, provider: LocalProvider
) -> None:
    now = [0.0]
    fake.models["demo"] = ModelStatus(id="demo", state=ModelState.COLD, aliases=("d",), fits=False, reason="no room")
    view = InferenceView(provider.get_json, lambda: now[0])
    assert (view.is_fresh, view.reachable, view.models) == (False, None, {})
    await asyncio.gather(view.refresh(), view.refresh(), view.ensure(1.0))
    assert (view.is_fresh, view.reachable) == (True, True)
    assert (view.models["demo"].fits, view.models["demo"].reason, view.aliases) == (False, "no room", {"d": "demo"})
    await fake.stop()
    await view.refresh()
    assert (view.is_fresh, view.reachable) == (True, False)
    now[0] = 11.0
    assert (view.is_fresh, view.models, view.aliases) == (False, {}, {"d": "demo"})


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b'{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}', DeltaKind.OTHER),
        (b'{"choices":[{"delta":{"role":"assistant","content":null}}]}', DeltaKind.OTHER),
        (b'{"choices":[{"delta":{"content":"x"}}]}', DeltaKind.CONTENT),
        (b'{"choices": [{"delta": {"content": "\\n"}}]}', DeltaKind.CONTENT),
        (b'{"choices":[{"delta":{"reasoning_content":"x"}}]}', DeltaKind.CONTENT),
        (b'{"choices":[{"delta":{"refusal":"x"}}]}', DeltaKind.CONTENT),
        (b'{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}', DeltaKind.CONTENT),
        (b'{"choices":[{"delta":{"tool_calls":[]}}]}', DeltaKind.OTHER),
        (b'{"choices":[{"text":"x"}]}', DeltaKind.CONTENT),
        (b'{"choices":[{"text":"","finish_reason":null}]}', DeltaKind.OTHER),
        (b'{"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}', DeltaKind.FINISH),
        (b'{"choices":[{"delta":{"content":"\\"finish_reason\\":\\"stop\\""}}]}', DeltaKind.CONTENT),
        (b'{"choices":[],"usage":{"total_tokens":1}}', DeltaKind.USAGE),
    ],
)
def test_each_chunk_has_its_kind(payload: bytes, kind: DeltaKind) -> None:
    assert frame_of(payload).kind is kind


async def _receive(provider: LocalProvider, seconds: float) -> None:
    async with provider.events(seconds) as pieces:
        async for piece in pieces:
            assert piece.startswith(b"event: snapshot\n")


async def test_event_stream_that_is_silent_cut_off_refused_or_missing_is_an_error(
    fake: FakeInference, provider: LocalProvider
) -> None:
    with pytest.raises(UpstreamError) as caught:
        await _receive(provider, 0.05)
    assert caught.value.kind is UpstreamKind.TIMEOUT
    hearing = asyncio.create_task(_receive(provider, 20.0))
    async with asyncio.timeout(10):
        while not fake.listeners:
            await asyncio.sleep(0.01)
        await fake.stop()
        with pytest.raises(UpstreamError) as caught:
            await hearing
        assert caught.value.kind is UpstreamKind.CONNECT
        with pytest.raises(UpstreamError) as caught:
            await _receive(provider, 20.0)
        assert caught.value.kind is UpstreamKind.CONNECT
    await fake.start()
    elsewhere = LocalProvider(fake.url + "/elsewhere", "token")
    with pytest.raises(UpstreamError) as caught:
        await _receive(elsewhere, 20.0)
    assert caught.value.status == 404
    await elsewhere.aclose()
