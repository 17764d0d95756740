"""OpenAI and OpenAI-compatible providers, through the official SDK.

Chunks are relayed byte for byte. The SDK's retries are off: the chain is the only retry loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx2
import orjson
from openai import AsyncOpenAI

from gateway.apis.lenient_json import dumps
from gateway.apis.openai.frames import Endpoint, Flavor, Frame
from gateway.apis.openai.generation_request import AnyRequest, choices_of
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.openai import openai_request
from gateway.providers.openai.openai_events import OpenAIStream, whole_answer
from gateway.providers.openai.openai_request import flavor_of, to_openai
from gateway.providers.provider import Call
from gateway.providers.sdk_stream import RawSender, SdkStream, build_request, upstream_error

BASE_URL = "https://api.openai.com/v1"


class OpenAIProvider:
    """A cloud behind the `openai` SDK. `base_url` None means OpenAI; `flavor` None means the flavor of the address.

    `http` is used as it is and closed by `aclose`.
    """

    def __init__(
        self, name: str, *, api_key: str, base_url: str | None, http: httpx2.AsyncClient, flavor: Flavor | None = None
    ) -> None:
        self.name = name
        self._client = AsyncOpenAI(api_key=api_key, base_url=base_url or BASE_URL, http_client=http, max_retries=0)
        url = self._client.base_url
        self.flavor = flavor or flavor_of(url.host, url.path)
        if not openai_request.is_openai(url.host):
            # the SDK reads them from OPENAI_ORG_ID and OPENAI_PROJECT_ID; other providers must not get them
            self._client.organization = self._client.project = None
        self._host = url.host
        self._secrets = (api_key,)
        self._sender = RawSender(self._client, http, self._secrets)

    def unsupported_params(self, endpoint: Endpoint, body: AnyRequest, model: str) -> Mapping[str, str]:
        """See `gateway.providers.provider.Provider`."""
        return openai_request.unsupported_params(body, self.flavor, endpoint, model)

    def stream(self, call: Call) -> AbstractAsyncContextManager[AsyncIterator[Frame]]:
        """Opens `call` as a stream; see the contract in `gateway.providers.provider`."""
        reader = OpenAIStream(choices_of(call.body), self._secrets)
        return SdkStream(lambda: self._send(call, stream=True), reader, self._host, self._secrets)

    async def unary(self, call: Call) -> bytes:
        """The JSON bytes that answer a call without a stream; raises UpstreamError."""
        if call.endpoint.streams:
            raise UpstreamError(UpstreamKind.MALFORMED, f"/v1/{call.endpoint} is always streamed")
        try:
            response = await self._send(call, stream=False)
            if not isinstance(orjson.loads(response.content), dict):
                raise ValueError("a JSON object was expected")
        except Exception as error:
            raise upstream_error(error, self._host, self._secrets) from error
        return response.content

    async def whole(self, call: Call) -> dict[str, Any]:
        """See `gateway.providers.provider.AnswersWhole`."""
        try:
            response = await self._send(call, stream=False)
            return whole_answer(response.content, self._secrets)
        except Exception as error:
            raise upstream_error(error, self._host, self._secrets) from error

    async def aclose(self) -> None:
        """Closes every connection."""
        await self._client.close()

    async def _send(self, call: Call, *, stream: bool) -> httpx2.Response:
        body = build_request(lambda: to_openai(call.endpoint, call.body, call.model, self.flavor, stream=stream))
        headers = {**call.headers, **_ACCEPT} if stream else call.headers
        return await self._sender.post(call.endpoint, dumps(body), call.connect_seconds, headers, stream=stream)


_ACCEPT = {"accept": "text/event-stream", "accept-encoding": "identity"}
"""A compressed stream would arrive in the compressor's blocks instead of token by token."""
