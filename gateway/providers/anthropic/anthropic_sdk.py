"""Anthropic as a provider. The official SDK gives the address and the headers.

Requests are translated by `anthropic_request`, or adapted by `anthropic_native` if they came through the Messages API;
events are translated by `anthropic_events`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager

import orjson
from anthropic import AsyncAnthropic

from gateway.apis.lenient_json import dumps
from gateway.apis.messages_body import CountedRequest
from gateway.apis.openai.frames import Endpoint, Frame
from gateway.apis.openai.generation_request import AnyRequest, ChatRequest
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.anthropic import anthropic_request
from gateway.providers.anthropic.anthropic_events import AnthropicStream
from gateway.providers.anthropic.anthropic_native import to_native
from gateway.providers.anthropic.anthropic_request import (
    SAMPLING_VERSION,
    check_supported,
    needs_sampling_version,
    to_anthropic,
)
from gateway.providers.cloud_http import CloudAnswer, CloudHttp, CloudSender
from gateway.providers.cloud_stream import CloudStream, build_request
from gateway.providers.http_clients import make_unused_client
from gateway.providers.openai.openai_request import no_endpoint
from gateway.providers.provider import Call
from headgate.shared.bodies.body_decoder import as_json

BASE_URL = "https://api.anthropic.com"

_COUNTED = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "cache_control")
"""The fields that the token-counting endpoint accepts."""


class AnthropicProvider:
    """A cloud at the address and with the headers that the `anthropic` SDK knows; `base_url` None is Anthropic itself.

    `http` is closed by `aclose`.
    """

    def __init__(self, name: str, *, api_key: str, base_url: str | None, http: CloudHttp) -> None:
        self.name = name
        sdk = AsyncAnthropic(api_key=api_key, base_url=base_url or BASE_URL, http_client=make_unused_client())
        self._host = sdk.base_url.host
        self._secrets = (api_key,)
        self._sender = CloudSender(sdk, http, self._secrets)

    def unsupported_params(self, endpoint: Endpoint, body: AnyRequest, model: str) -> Mapping[str, str]:
        """See `gateway.providers.provider.Provider`."""
        if not isinstance(body, ChatRequest):
            return {"model": no_endpoint(endpoint).message}
        return anthropic_request.unsupported_params(body, model)

    def stream(self, call: Call) -> AbstractAsyncContextManager[AsyncIterator[Frame]]:
        """Opens `call` as a stream; see the contract in `gateway.providers.provider`."""
        native = isinstance(call.body, ChatRequest) and call.body.origin is not None
        reader = AnthropicStream(int(time.time()), self._secrets, native=native)
        return CloudStream(lambda: self._send(call), reader, self._host, self._secrets)

    async def unary(self, call: Call) -> bytes:
        """Raises UpstreamError: Anthropic has no embeddings and no reranking."""
        raise no_endpoint(call.endpoint)

    async def count_tokens(self, call: Call) -> int:
        """See `gateway.providers.provider.CountsTokens`."""
        body = build_request(lambda: _request(call))
        counted = {name: value for name, value in as_json(body).items() if name in _COUNTED}
        raw = await self._sender.whole("v1/messages/count_tokens", dumps(counted), call.connect_seconds, call.headers)
        try:
            answer = orjson.loads(raw)
        except ValueError:
            answer = None
        tokens = answer.get("input_tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, int):
            raise UpstreamError(UpstreamKind.MALFORMED, f"the answer from {self._host} has no number of input_tokens")
        return tokens

    async def aclose(self) -> None:
        """Closes every connection."""
        await self._sender.aclose()

    async def _send(self, call: Call) -> CloudAnswer:
        body = build_request(lambda: _request(call))
        headers = {**call.headers, **(_ACCEPT_SAMPLING if needs_sampling_version(body) else _ACCEPT)}
        return await self._sender.open(
            "v1/messages", dumps({**as_json(body), "stream": True}), call.connect_seconds, headers
        )


_ACCEPT = {"accept": "text/event-stream", "accept-encoding": "identity"}
"""A compressed stream would arrive in the compressor's blocks instead of token by token."""
_ACCEPT_SAMPLING = {**_ACCEPT, "anthropic-version": SAMPLING_VERSION}


def _request(call: Call) -> CountedRequest:
    """The request to send; raises UpstreamError for what Anthropic or the model cannot do."""
    body = call.body
    if not isinstance(body, ChatRequest):
        raise no_endpoint(call.endpoint)
    if body.origin is None:
        return to_anthropic(body, call.model)
    check_supported(body, call.model)
    return to_native(body.origin, call.model)
