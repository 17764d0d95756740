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
        return SdkStream(lambda: self._open(call), reader, self._host, self._secrets)

    async def unary(self, call: Call) -> bytes:
        """The JSON bytes that answer a call without a stream; raises UpstreamError."""
        if call.endpoint.streams:
            raise UpstreamError(UpstreamKind.MALFORMED, f"/v1/{call.endpoint} is always streamed")
        try:
            answer = await self._whole(call)
            if not isinstance(orjson.loads(answer), dict):
                raise ValueError("a JSON object was expected")
        except UpstreamError:
            raise
        except Exception as error:
            raise upstream_error(error, self._host, self._secrets) from error
        return answer

    async def whole(self, call: Call) -> dict[str, Any]:
        """See `gateway.providers.provider.AnswersWhole`."""
        try:
            return whole_answer(await self._whole(call), self._secrets)
        except UpstreamError:
            raise
        except Exception as error:
            raise upstream_error(error, self._host, self._secrets) from error

    async def aclose(self) -> None:
        """Closes every connection."""
        await self._client.close()

    async def _open(self, call: Call) -> httpx2.Response:
        body = self._body(call, stream=True)
        return await self._sender.stream(call.endpoint, body, call.connect_seconds, {**call.headers, **_ACCEPT})

    async def _whole(self, call: Call) -> bytes:
        body = self._body(call, stream=False)
        return await self._sender.whole(call.endpoint, body, call.connect_seconds, call.headers)

    def _body(self, call: Call, *, stream: bool) -> bytes:
        return dumps(build_request(lambda: to_openai(call.endpoint, call.body, call.model, self.flavor, stream=stream)))


_ACCEPT = {"accept": "text/event-stream", "accept-encoding": "identity"}
"""A compressed stream would arrive in the compressor's blocks instead of token by token."""
