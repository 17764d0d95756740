"""OpenAI and OpenAI-compatible providers. The official SDK gives the address and the headers.

Chunks are relayed byte for byte where possible, see `openai_events`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import orjson
from openai import AsyncOpenAI

from gateway.apis.lenient_json import dumps
from gateway.apis.openai.frames import Endpoint, Flavor, Frame
from gateway.apis.openai.generation_request import AnyRequest, choices_of
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.cloud_http import CloudAnswer, CloudHttp, CloudSender
from gateway.providers.cloud_stream import CloudStream, build_request
from gateway.providers.http_clients import make_unused_client
from gateway.providers.openai import openai_request
from gateway.providers.openai.openai_events import OpenAIStream, whole_answer
from gateway.providers.openai.openai_request import flavor_of, to_openai
from gateway.providers.provider import Call

BASE_URL = "https://api.openai.com/v1"


class OpenAIProvider:
    """A cloud at the address and with the headers that the `openai` SDK knows.

    `base_url` None means OpenAI; `flavor` None means the flavor of the address. `http` is closed by `aclose`.
    """

    def __init__(
        self, name: str, *, api_key: str, base_url: str | None, http: CloudHttp, flavor: Flavor | None = None
    ) -> None:
        self.name = name
        sdk = AsyncOpenAI(api_key=api_key, base_url=base_url or BASE_URL, http_client=make_unused_client())
        url = sdk.base_url
        self.flavor = flavor or flavor_of(url.host, url.path)
        if not openai_request.is_openai(url.host):
            # the SDK reads them from OPENAI_ORG_ID and OPENAI_PROJECT_ID; other providers must not get them
            sdk.organization = sdk.project = None
        self._host = url.host
        self._secrets = (api_key,)
        self._sender = CloudSender(sdk, http, self._secrets)

    def unsupported_params(self, endpoint: Endpoint, body: AnyRequest, model: str) -> Mapping[str, str]:
        """See `gateway.providers.provider.Provider`."""
        return openai_request.unsupported_params(body, self.flavor, endpoint, model)

    def stream(self, call: Call) -> AbstractAsyncContextManager[AsyncIterator[Frame]]:
        """Opens `call` as a stream; see the contract in `gateway.providers.provider`."""
        reader = OpenAIStream(choices_of(call.body), self._secrets)
        return CloudStream(lambda: self._open(call), reader, self._host, self._secrets)

    async def unary(self, call: Call) -> bytes:
        """The JSON bytes that answer a call without a stream; raises UpstreamError."""
        if call.endpoint.streams:
            raise UpstreamError(
                UpstreamKind.MALFORMED,
                f"internal error: unary() was called for /v1/{call.endpoint}; use stream() or whole()",
            )
        answer = await self._whole(call)
        try:
            is_object = isinstance(orjson.loads(answer), dict)
        except ValueError:
            is_object = False
        if not is_object:
            raise UpstreamError(UpstreamKind.MALFORMED, f"the answer from {self._host} is not a JSON object")
        return answer

    async def whole(self, call: Call) -> dict[str, Any]:
        """See `gateway.providers.provider.AnswersWhole`."""
        return whole_answer(await self._whole(call), self._secrets)

    async def aclose(self) -> None:
        """Closes every connection."""
        await self._sender.aclose()

    async def _open(self, call: Call) -> CloudAnswer:
        body = self._body(call, stream=True)
        return await self._sender.open(call.endpoint, body, call.connect_seconds, {**call.headers, **_ACCEPT})

    async def _whole(self, call: Call) -> bytes:
        body = self._body(call, stream=False)
        return await self._sender.whole(call.endpoint, body, call.connect_seconds, call.headers)

    def _body(self, call: Call, *, stream: bool) -> bytes:
        return dumps(build_request(lambda: to_openai(call.endpoint, call.body, call.model, self.flavor, stream=stream)))


_ACCEPT = {"accept": "text/event-stream", "accept-encoding": "identity"}
"""A compressed stream would arrive in the compressor's blocks instead of token by token."""
