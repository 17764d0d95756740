"""The provider contract of `gateway.providers.provider`, for every provider, over real sockets."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from openai.types.chat import ChatCompletionChunk
from yarl import URL

from gateway.apis.openai.assemble import Assembly
from gateway.apis.openai.frames import Comment, Data, DeltaKind, Done, Endpoint, Flavor, Frame
from gateway.apis.openai.generation_request import ChatRequest
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers import cloud_http
from gateway.providers.anthropic.anthropic_sdk import AnthropicProvider
from gateway.providers.cloud_http import CloudHttp
from gateway.providers.http_clients import make_cloud_http
from gateway.providers.local.local_provider import LocalProvider
from gateway.providers.openai.openai_sdk import OpenAIProvider
from gateway.providers.provider import AnswersWhole, Call, Provider
from inference.protocol import Code
from tests.rigs import fake_inference
from tests.rigs.canned_http import Canned, canned_service
from tests.rigs.fake_provider import KEY, FakeProvider
from tests.rigs.fake_provider.answers import Answer, ToolUse
from tests.rigs.full_backlog import full_backlog
from tests.rigs.typed_bodies import call as typed_call

pytestmark = pytest.mark.timeout(30)

ASK: Mapping[str, Any] = {"messages": [{"role": "user", "content": "What is a mill?"}]}
SECRET = "sk-proj-very-secret-0123456789"


@dataclass
class Rig:
    """A provider and its fake; `dialect` is the name of the API in the fake."""

    name: str
    provider: Provider
    fake: FakeProvider
    dialect: str
    make: Callable[[str, str], Provider] = field(repr=False)

    def call(self, model: str = "m", body: Mapping[str, Any] | None = None, **more: Any) -> Call:
        return typed_call(more.pop("endpoint", Endpoint.CHAT), model, body or ASK, "req-1", **more)

    async def frames(self, call: Call) -> list[Frame]:
        async with asyncio.timeout(10), self.provider.stream(call) as stream:
            return [frame async for frame in stream]

    async def failure(self, call: Call) -> tuple[list[Frame], UpstreamError]:
        """The frames before the error, and the error."""
        seen: list[Frame] = []
        with pytest.raises(UpstreamError) as caught:
            async with asyncio.timeout(10), self.provider.stream(call) as stream:
                async for frame in stream:
                    seen.append(frame)  # noqa: PERF401 - frames before the error count
        return seen, caught.value


def _make_openai(url: str, key: str) -> Provider:
    return OpenAIProvider("openai", api_key=key, base_url=url + "/v1", http=make_cloud_http(url))


def _make_google(url: str, key: str) -> Provider:
    return OpenAIProvider("google", api_key=key, base_url=url + "/v1beta/openai/", http=make_cloud_http(url))


def _make_anthropic(url: str, key: str) -> Provider:
    return AnthropicProvider("anthropic", api_key=key, base_url=url, http=make_cloud_http(url))


def _make_local(url: str, key: str) -> Provider:
    return LocalProvider(url, key)


MAKERS: Mapping[str, tuple[str, Callable[[str, str], Provider]]] = {
    "openai": ("openai", _make_openai),
    "google": ("google", _make_google),
    "anthropic": ("anthropic", _make_anthropic),
    "local": ("openai", _make_local),
}
CLOUDS = ["openai", "google", "anthropic"]


@pytest.fixture(params=list(MAKERS))
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    dialect, make = MAKERS[request.param]
    async with FakeProvider() as fake:
        provider = make(fake.url, KEY)
        yield Rig(request.param, provider, fake, dialect, make)
        await provider.aclose()


only_clouds = pytest.mark.parametrize("rig", CLOUDS, indirect=True)


def chunks(frames: list[Frame]) -> list[dict[str, Any]]:
    return [json.loads(frame.payload) for frame in frames if isinstance(frame, Data)]


def text_of(frames: list[Frame]) -> str:
    parts = [choice["delta"].get("content") or "" for chunk in chunks(frames) for choice in chunk["choices"]]
    return "".join(parts)


# --- one OpenAI stream ------------------------------------------------------------------------------------------------
async def test_answer_of_every_provider_is_one_openai_stream(rig: Rig) -> None:
    frames = await rig.frames(rig.call())
    assert text_of(frames) == f"[{rig.dialect} m] What is a mill?"
    assert frames[-1] == Done()
    assert [frame for frame in frames if isinstance(frame, Done)] == [Done()]
    read = [ChatCompletionChunk.model_validate(chunk) for chunk in chunks(frames)]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in read}) == 1
    assert read[0].choices[0].delta.role == "assistant"
    assert read[-2].choices[0].finish_reason == "stop"
    assert read[-1].choices == []
    assert read[-1].usage is not None
    assert read[-1].usage.total_tokens > 0


async def test_every_chunk_has_the_kind_of_its_content(rig: Rig) -> None:
    kinds = [frame.kind for frame in await rig.frames(rig.call()) if isinstance(frame, Data)]
    content = kinds.count(DeltaKind.CONTENT)
    assert kinds == [DeltaKind.OTHER, *[DeltaKind.CONTENT] * content, DeltaKind.FINISH, DeltaKind.USAGE]
    assert content > 3


async def test_empty_answer_with_a_finish_reason_is_complete(rig: Rig) -> None:
    rig.fake.answers.set(Answer(text=""))
    frames = await rig.frames(rig.call())
    assert text_of(frames) == ""
    assert frames[-1] == Done()


async def test_tool_calls_are_openai_deltas(rig: Rig) -> None:
    calls = (ToolUse("weather", {"city": "Ulm", "days": 2}), ToolUse("clock", {}))
    rig.fake.answers.set(Answer(text="Let me look.", tools=calls, stop="tool_calls"))
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    frames = await rig.frames(rig.call(body={**ASK, "tools": [tool]}))
    built: dict[int, list[str]] = {}
    for chunk in chunks(frames):
        for choice in chunk["choices"]:
            for call in choice["delta"].get("tool_calls") or ():
                at = built.setdefault(call["index"], ["", ""])
                at[0] += call["function"].get("name") or ""
                at[1] += call["function"].get("arguments") or ""
    assert {at: (name, json.loads(arguments)) for at, (name, arguments) in built.items()} == {
        0: ("weather", {"city": "Ulm", "days": 2}),
        1: ("clock", {}),
    }
    assert chunks(frames)[-2]["choices"][0]["finish_reason"] == "tool_calls"


async def test_reasoning_is_content(rig: Rig) -> None:
    rig.fake.answers.set(Answer(text="Yes.", reasoning="Let me think."))
    frames = await rig.frames(rig.call())
    parts = "".join(c["delta"].get("reasoning_content") or "" for chunk in chunks(frames) for c in chunk["choices"])
    assert parts == "Let me think."
    first = next(frame for frame in frames if isinstance(frame, Data) and frame.kind is DeltaKind.CONTENT)
    assert b"reasoning_content" in first.payload


async def test_cached_tokens_are_part_of_the_prompt(rig: Rig) -> None:
    rig.fake.answers.set(Answer(text="Yes.", cached_tokens=40))
    usage = chunks(await rig.frames(rig.call()))[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 40
    assert usage["prompt_tokens"] > 40
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("fault", ["fault-no-done", "fault-no-usage", "fault-slow=0.05", "fault-silence=0.05"])
async def test_stream_with_a_finish_reason_is_complete(rig: Rig, fault: str) -> None:
    frames = await rig.frames(rig.call(fault))
    assert text_of(frames) == f"[{rig.dialect} {fault}] What is a mill?"
    assert frames[-1] == Done()


@only_clouds
async def test_break_after_the_finish_reason_is_ignored(rig: Rig) -> None:
    frames = await rig.frames(rig.call("fault-reset-after-finish"))
    assert text_of(frames).endswith("What is a mill?")
    assert frames[-1] == Done()


async def test_invalid_usage_does_not_break_an_answer(rig: Rig) -> None:
    frames = await rig.frames(rig.call("fault-wrong-usage"))
    assert text_of(frames).endswith("What is a mill?")
    assert frames[-1] == Done()


async def test_body_of_the_client_is_not_changed(rig: Rig) -> None:
    body = {**copy.deepcopy(dict(ASK)), "max_tokens": 50, "temperature": 0.5}
    before = copy.deepcopy(body)
    await rig.frames(rig.call(body=body))
    assert body == before


async def test_headers_of_the_call_are_sent(rig: Rig) -> None:
    """Such as those of a trace."""
    call = rig.call()
    call.headers = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    await rig.frames(call)
    sent = {name.lower(): value for name, value in rig.fake.records[-1].headers.items()}
    assert sent["traceparent"] == call.headers["traceparent"]


async def test_concurrent_streams_are_independent(rig: Rig) -> None:
    bodies = [{"messages": [{"role": "user", "content": word * 5}]} for word in ("ab ", "xy ", "mn ")]
    answers = await asyncio.gather(*(rig.frames(rig.call("fault-pace=0.001", body)) for body in bodies))
    for word, frames in zip(("ab", "xy", "mn"), answers, strict=True):
        assert text_of(frames).count(word) == 5


async def test_connection_is_reused_after_a_finished_stream(rig: Rig) -> None:
    for _ in range(3):
        await rig.frames(rig.call())
    assert len({record.peer for record in rig.fake.records}) == 1


# --- failures ---------------------------------------------------------------------------------------------------------
READ, EMPTY, MALFORMED = UpstreamKind.READ, UpstreamKind.EMPTY, UpstreamKind.MALFORMED


@pytest.mark.parametrize(
    ("fault", "kind", "has_content"),
    [
        ("fault-reset", READ, False),
        ("fault-cut=2", READ, True),
        ("fault-truncate=2", READ, True),
        ("fault-truncate", EMPTY, False),
        ("fault-empty", EMPTY, False),
        ("fault-malformed=2", MALFORMED, True),
        ("fault-html", MALFORMED, False),
        ("fault-error-frame=2", UpstreamKind.ERROR_FRAME, True),
        ("fault-error-frame", UpstreamKind.ERROR_FRAME, False),
    ],
)
async def test_broken_stream_is_an_error_without_done(
    rig: Rig, fault: str, kind: UpstreamKind, has_content: bool
) -> None:
    frames, error = await rig.failure(rig.call(fault))
    assert error.kind is kind, error
    assert bool(text_of(frames)) is has_content
    assert Done() not in frames
    assert len(rig.fake.records) == 1


@pytest.mark.parametrize("status", [400, 403, 404, 429, 500, 503, 529])
async def test_error_status_is_raised_on_entering_and_not_retried(rig: Rig, status: int) -> None:
    frames, error = await rig.failure(rig.call(f"fault-{status}"))
    assert frames == []
    assert (error.kind, error.status) == (UpstreamKind.STATUS, status)
    assert error.message
    assert len(rig.fake.records) == 1


async def test_retry_after_is_in_seconds(rig: Rig) -> None:
    _, error = await rig.failure(rig.call("fault-429=7"))
    assert error.retry_after == 7.0


@only_clouds
@pytest.mark.parametrize(
    ("fault", "code"), [("fault-context", "context_length_exceeded"), ("fault-content-policy", "content_")]
)
async def test_refused_prompt_has_the_same_code_for_every_provider(rig: Rig, fault: str, code: str) -> None:
    _, error = await rig.failure(rig.call(fault))
    assert error.status == 400
    assert (error.code or "").startswith(code)


@only_clouds
async def test_error_frame_has_the_status_of_its_type(rig: Rig) -> None:
    _, error = await rig.failure(rig.call("fault-error-frame=1"))
    assert error.status == {"openai": 500, "google": 503, "anthropic": 529}[rig.dialect]
    assert error.type


@only_clouds
async def test_invalid_key_is_a_401_without_the_key(rig: Rig) -> None:
    provider = rig.make(rig.fake.url, SECRET)
    try:
        with pytest.raises(UpstreamError) as caught:
            async with provider.stream(rig.call()):
                raise AssertionError("a wrong key opened a stream")
    finally:
        await provider.aclose()
    assert caught.value.status == 401
    assert SECRET not in str(caught.value)
    assert "very-secret" not in repr(caught.value)


async def test_closed_port_is_a_connect_error(rig: Rig) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        provider = rig.make(f"http://127.0.0.1:{unused.getsockname()[1]}", SECRET)
        with pytest.raises(UpstreamError) as caught:
            async with provider.stream(rig.call()):
                raise AssertionError("a stream was opened without a server")
        await provider.aclose()
    assert caught.value.kind is UpstreamKind.CONNECT
    assert SECRET not in str(caught.value)


async def test_connect_timeout_is_a_connect_error(rig: Rig) -> None:
    with full_backlog() as address:
        provider = rig.make(f"http://{address}", KEY)
        begun = asyncio.get_running_loop().time()
        with pytest.raises(UpstreamError) as caught:
            async with provider.stream(rig.call(connect_seconds=0.3)):
                raise AssertionError("a stream from a full queue")
        took = asyncio.get_running_loop().time() - begun
        await provider.aclose()
    assert caught.value.kind is UpstreamKind.CONNECT, caught.value
    assert took < 3


# --- leaving ----------------------------------------------------------------------------------------------------------
async def test_leaving_a_stream_closes_its_connection_at_once(rig: Rig) -> None:
    async with rig.provider.stream(rig.call("fault-stall=1")) as stream:
        async for frame in stream:
            if isinstance(frame, Data) and frame.kind is DeltaKind.CONTENT:
                break
    async with asyncio.timeout(2):
        record = await rig.fake.record()
    assert record.outcome == "disconnected"


async def test_leaving_an_unread_stream_closes_its_connection(rig: Rig) -> None:
    async with rig.provider.stream(rig.call("fault-stall")):
        pass
    async with asyncio.timeout(2):
        record = await rig.fake.record()
    assert record.outcome == "disconnected"


async def test_exception_closes_the_connection(rig: Rig) -> None:
    with pytest.raises(ZeroDivisionError):
        async with rig.provider.stream(rig.call("fault-stall=1")) as stream:
            await anext(stream)
            raise ZeroDivisionError
    assert (await rig.fake.record()).outcome == "disconnected"


@pytest.mark.parametrize("fault", ["fault-silence", "fault-stall", "fault-stall=2", "fault-pace=0.2"])
async def test_cancelled_task_closes_the_connection_and_stays_cancelled(rig: Rig, fault: str) -> None:
    task = asyncio.create_task(rig.frames(rig.call(fault)))
    await rig.fake.arrived(1)
    while rig.fake.records[0].frames_sent < 1 and fault != "fault-silence":
        await asyncio.sleep(0.01)  # until the first frame is being sent
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(2):
        record = await rig.fake.record()
    assert record.outcome == "disconnected"
    assert len(rig.fake.records) == 1


async def test_provider_has_no_deadline_for_silence(rig: Rig) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5), rig.provider.stream(rig.call("fault-silence")):
            raise AssertionError("a stream out of silence")
    assert (await rig.fake.record()).outcome == "disconnected"


async def test_provider_works_after_a_failure(rig: Rig) -> None:
    await rig.failure(rig.call("fault-cut=1"))
    await rig.failure(rig.call("fault-503"))
    assert (await rig.frames(rig.call()))[-1] == Done()


# --- the inference service --------------------------------------------------------------------------------------------
@pytest.fixture
async def inference() -> AsyncIterator[tuple[fake_inference.FakeInference, Provider]]:
    async with fake_inference.FakeInference(token="t") as fake:
        provider = LocalProvider(fake.url, "t")
        yield fake, provider
        await provider.aclose()


Inference = tuple[fake_inference.FakeInference, Provider]
LOCAL = typed_call(Endpoint.CHAT, "demo", ASK, "req-1")


async def test_local_answer_is_one_stream_with_progress(inference: Inference) -> None:
    fake, provider = inference
    fake.answers["demo"] = fake_inference.Answer(comments=2)
    async with provider.stream(LOCAL) as stream:
        frames = [frame async for frame in stream]
    assert [type(frame) for frame in frames[:2]] == [Comment, Comment]
    assert text_of(frames) == "Hello there!"
    assert [frame.kind for frame in frames if isinstance(frame, Data)][-2:] == [DeltaKind.FINISH, DeltaKind.USAGE]
    assert frames[-1] == Done()


@pytest.mark.parametrize(
    ("answer", "kind", "code"),
    [
        (fake_inference.Answer(cut=True), READ, None),
        (fake_inference.Answer(finish=None), READ, None),
        (fake_inference.Answer(finish=None, done=False), READ, None),
        (fake_inference.Answer(words=(), finish=None), EMPTY, None),
        (fake_inference.Answer(raw=b""), EMPTY, None),
        (fake_inference.Answer(garbage=b"data: nonsense\n\n"), MALFORMED, None),
        (fake_inference.Answer(error=Code.DEVICE_LOST), UpstreamKind.ERROR_FRAME, "device_lost"),
        (fake_inference.Answer(refuse=Code.MEMORY_LIMIT_EXCEEDED), UpstreamKind.STATUS, "memory_limit_exceeded"),
        (fake_inference.Answer(refuse=Code.QUEUE_FULL), UpstreamKind.STATUS, "queue_full"),
        (fake_inference.Answer(status=500), UpstreamKind.STATUS, None),
    ],
)
async def test_broken_local_answer_is_an_error_without_done(
    inference: Inference, answer: fake_inference.Answer, kind: UpstreamKind, code: str | None
) -> None:
    fake, provider = inference
    fake.answers["demo"] = answer
    frames: list[Frame] = []
    with pytest.raises(UpstreamError) as caught:
        async with provider.stream(LOCAL) as stream:
            async for frame in stream:
                frames.append(frame)  # noqa: PERF401 - frames before the error count
    assert (caught.value.kind, caught.value.code) == (kind, code)
    assert Done() not in frames
    assert len(fake.seen) == 1


@pytest.mark.parametrize(
    "answer", [fake_inference.Answer(stall=True), fake_inference.Answer(stall_before_headers=True)]
)
async def test_leaving_a_local_stream_closes_its_connection(
    inference: Inference, answer: fake_inference.Answer
) -> None:
    fake, provider = inference
    fake.answers["demo"] = answer

    async def read() -> None:
        async with provider.stream(LOCAL) as stream:
            async for _ in stream:
                pass

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await read()
    async with asyncio.timeout(2):
        await fake.seen[0].closed.wait()


# --- single providers and endpoints -----------------------------------------------------------------------------------
async def test_text_completions_are_relayed() -> None:
    async with FakeProvider() as fake:
        for make in (_make_openai, _make_local):
            provider = make(fake.url, KEY)
            async with provider.stream(
                typed_call(Endpoint.COMPLETIONS, "m", {"prompt": "Once upon a time"}, "r")
            ) as stream:
                frames = [frame async for frame in stream]
            await provider.aclose()
            parts = [choice["text"] for chunk in chunks(frames) for choice in chunk["choices"]]
            assert "".join(parts) == "[openai m] Once upon a time"
            assert frames[-1] == Done()


@pytest.mark.parametrize("make", [_make_google, _make_anthropic])
async def test_unsupported_endpoint_is_refused_before_a_request(
    make: Callable[[str, str], Provider],
) -> None:
    async with FakeProvider() as fake:
        provider = make(fake.url, KEY)
        assert list(provider.unsupported_params(Endpoint.COMPLETIONS, {"prompt": "x"}, "m")) == ["model"]
        with pytest.raises(UpstreamError) as caught:
            async with provider.stream(typed_call(Endpoint.COMPLETIONS, "m", {"prompt": "x"}, "r")):
                raise AssertionError("no such endpoint")
        await provider.aclose()
        assert caught.value.code == "unsupported_parameter"
        assert fake.records == []


@only_clouds
async def test_request_that_cannot_be_translated_is_not_a_failure_of_the_provider(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """A defect of the gateway: the tier is not at fault, and the next one may serve the request."""
    defect = ChatRequest(model="m", messages=[None])  # type: ignore[list-item]
    frames, error = await rig.failure(rig.call(body=defect))
    assert frames == []
    assert (error.kind, error.status, error.code) == (UpstreamKind.STATUS, 400, "unsupported_parameter")
    assert rig.fake.records == []
    assert "could not be translated" in caplog.text


@pytest.mark.parametrize("rig", ["openai", "google", "anthropic"], indirect=True)
@pytest.mark.parametrize("extra", [{}, {"seed": 7}, {"n": 2}, {"grammar": "root ::= x"}, {"temperature": 1}])
async def test_unsupported_parameters_agree_with_the_errors_of_attempts(rig: Rig, extra: dict[str, Any]) -> None:
    call = rig.call(body={"messages": [{"role": "user", "content": "x"}], **extra})
    known = rig.provider.unsupported_params(call.endpoint, call.body, call.model)
    met: dict[str | None, str] = {}
    try:
        async with rig.provider.stream(call):
            pass
    except UpstreamError as error:
        assert error.code == "unsupported_parameter"  # most cases raise nothing
        met = {error.param: error.message}
    assert known == met


@pytest.mark.parametrize("rig", ["openai", "google", "local"], indirect=True)
async def test_embeddings_of_the_provider_are_returned(rig: Rig) -> None:
    call = rig.call(body={"input": ["a", "b"]}, endpoint=Endpoint.EMBEDDINGS)
    answer = json.loads(await rig.provider.unary(call))
    assert [item["index"] for item in answer["data"]] == [0, 1]
    assert len(answer["data"][0]["embedding"]) == 8


@pytest.mark.parametrize("rig", ["openai", "google", "local"], indirect=True)
async def test_embeddings_fail_as_streams_do(rig: Rig) -> None:
    for fault, kind in (("fault-503", UpstreamKind.STATUS), ("fault-reset", UpstreamKind.READ)):
        with pytest.raises(UpstreamError) as caught:
            await rig.provider.unary(rig.call(fault, {"input": "a"}, endpoint=Endpoint.EMBEDDINGS))
        assert caught.value.kind is kind
    assert len(rig.fake.records) == 2


@pytest.mark.parametrize("rig", ["openai", "google"], indirect=True)
async def test_answer_in_one_piece_equals_the_assembled_stream(rig: Rig) -> None:
    assert isinstance(rig.provider, AnswersWhole)
    whole = await rig.provider.whole(rig.call())
    assembly = Assembly()
    async with rig.provider.stream(rig.call()) as frames:
        async for frame in frames:
            if isinstance(frame, Data):
                assembly.add(frame.parsed())
    streamed = assembly.result()
    for answer in (whole, streamed):
        assert answer["object"] == "chat.completion"
    assert whole["choices"][0]["message"]["content"] == streamed["choices"][0]["message"]["content"]
    assert whole["choices"][0]["finish_reason"] == streamed["choices"][0]["finish_reason"]
    assert whole["usage"]["total_tokens"] == streamed["usage"]["total_tokens"]


@pytest.mark.parametrize("rig", ["openai", "google"], indirect=True)
async def test_answers_in_one_piece_fail_as_streams_do(rig: Rig) -> None:
    assert isinstance(rig.provider, AnswersWhole)
    faults = {"fault-503": UpstreamKind.STATUS, "fault-reset": UpstreamKind.READ, "fault-html": MALFORMED}
    for fault, kind in faults.items():
        with pytest.raises(UpstreamError) as caught:
            await rig.provider.whole(rig.call(fault))
        assert caught.value.kind is kind, fault


async def test_embedding_that_is_not_a_json_object_is_malformed() -> None:
    async with FakeProvider() as fake:
        provider = _make_openai(fake.url, KEY)
        with pytest.raises(UpstreamError) as caught:
            await provider.unary(typed_call(Endpoint.EMBEDDINGS, "fault-html", {"input": "a"}, "r"))
        assert caught.value.kind is MALFORMED
        await provider.aclose()
        with canned_service({"POST /v1/embeddings": Canned([1])}) as canned:
            provider = _make_openai(canned.url, KEY)
            with pytest.raises(UpstreamError, match="object"):
                await provider.unary(typed_call(Endpoint.EMBEDDINGS, "m", {"input": "a"}, "r"))
        with pytest.raises(UpstreamError, match=r"use stream\(\) or whole\(\)"):
            await provider.unary(typed_call(Endpoint.CHAT, "m", ASK, "r"))
        await provider.aclose()


async def test_answer_in_one_piece_beyond_the_size_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small compressed body may contain gigabytes."""
    monkeypatch.setattr(cloud_http, "MAX_ANSWER_BYTES", 1000)
    monkeypatch.setattr(cloud_http, "MAX_ERROR_BYTES", 1000)
    for status in (200, 500):
        answer = Canned({"data": ["x" * 1000]}, status=status)
        with canned_service({"POST /v1/embeddings": answer}) as canned:
            provider = _make_openai(canned.url, KEY)
            with pytest.raises(UpstreamError, match=f"the answer with status {status} exceeds 1000 bytes"):
                await provider.unary(typed_call(Endpoint.EMBEDDINGS, "m", {"input": "a"}, "r"))
            await provider.aclose()


@pytest.mark.parametrize("rig", ["openai"], indirect=True)
@pytest.mark.parametrize("fault", ["fault-503", "fault-html", "fault-reset"])
async def test_failed_attempt_is_freed_without_the_garbage_collector(rig: Rig, fault: str) -> None:
    """A cycle would keep the answer in memory until a full collection, which is rare in the gateway."""
    assert isinstance(rig.provider, AnswersWhole)
    gc.collect()
    gc.disable()
    try:
        before = sys.getrefcount(rig.provider)
        for _ in range(3):
            with suppress(UpstreamError):
                await rig.provider.whole(rig.call(fault))
            with suppress(UpstreamError):
                await rig.frames(rig.call(fault))
        after = sys.getrefcount(rig.provider)
    finally:
        gc.enable()
    assert after == before


async def test_anthropic_has_no_embeddings() -> None:
    provider = _make_anthropic("http://127.0.0.1:9", KEY)
    with pytest.raises(UpstreamError, match="embeddings"):
        await provider.unary(typed_call(Endpoint.EMBEDDINGS, "m", {"input": "a"}, "r"))
    await provider.aclose()


async def test_pings_of_anthropic_are_keep_alives() -> None:
    async with FakeProvider() as fake:
        provider = _make_anthropic(fake.url, KEY)
        async with provider.stream(typed_call(Endpoint.CHAT, "m", ASK, "r")) as stream:
            assert Comment(b": ping\n\n") in [frame async for frame in stream]
        await provider.aclose()


@pytest.mark.parametrize(
    ("model", "version", "temperature"), [("claude-sonnet-4-6", "2023-06-01", 0.2), ("claude-opus-5", None, None)]
)
async def test_sampling_is_sent_only_to_anthropic_models_that_accept_it(
    model: str, version: str | None, temperature: float | None
) -> None:
    async with FakeProvider() as fake:
        provider = _make_anthropic(fake.url, KEY)
        async with provider.stream(typed_call(Endpoint.CHAT, model, {**ASK, "temperature": 0.2}, "r")) as stream:
            assert [frame async for frame in stream][-1] == Done()
        await provider.aclose()
        record = fake.records[0]
        assert record.body.get("temperature") == temperature
        assert version in (None, record.headers["anthropic-version"])


class _Redirecting(CloudHttp):
    """Sends the requests for any host to one server."""

    def __init__(self, url: str) -> None:
        super().__init__(aiohttp.ClientSession)
        self._server = URL(url)

    async def post(
        self, url: URL, body: bytes, headers: Mapping[str, str], connect_seconds: float
    ) -> aiohttp.ClientResponse:
        return await super().post(self._server.with_path(url.path), body, headers, connect_seconds)


async def test_openai_gets_the_new_name_of_max_tokens() -> None:
    async with FakeProvider() as fake:
        http = _Redirecting(fake.url)
        provider = OpenAIProvider("openai", api_key=KEY, base_url=None, http=http)
        body = {**ASK, "max_tokens": 2, "top_k": 40}
        async with provider.stream(typed_call(Endpoint.CHAT, "gpt-5-mini", body, "r")) as stream:
            frames = [frame async for frame in stream]
        await provider.aclose()
        assert fake.records[0].body["max_completion_tokens"] == 2
        assert chunks(frames)[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("flavor", [None, *Flavor])
async def test_account_headers_of_openai_are_sent_to_openai_only(
    monkeypatch: pytest.MonkeyPatch, flavor: Flavor | None
) -> None:
    """Another address with the same API does not get them."""
    monkeypatch.setenv("OPENAI_ORG_ID", "org-ours")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "proj-ours")
    async with FakeProvider() as fake:
        for base_url, is_sent in ((None, True), (fake.openai_url, False)):
            http = _Redirecting(fake.url)
            provider = OpenAIProvider("openai", api_key=KEY, base_url=base_url, http=http, flavor=flavor)
            async with provider.stream(typed_call(Endpoint.CHAT, "m", ASK, "r")) as stream:
                assert [frame async for frame in stream]
            await provider.aclose()
            assert ("ours" in str(fake.records[-1].headers)) is is_sent
