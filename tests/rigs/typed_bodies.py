"""Request bodies that tests write as JSON: decoded as the gateway decodes them, and the provider writers for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import orjson

from gateway.apis.messages_body import CountedRequest, Thinking
from gateway.apis.openai.frames import Endpoint, Flavor
from gateway.apis.openai.generation_request import BODIES, AnyRequest, ChatRequest
from gateway.apis.responses import responses_request
from gateway.apis.responses.responses_request import FindItem, Recall, ResponsesRequest
from gateway.providers import provider
from gateway.providers.anthropic import anthropic_models, anthropic_native, anthropic_request
from gateway.providers.openai import openai_request
from headgate.shared.bodies.body_decoder import Body, as_json
from headgate.shared.bodies.openai_bodies import ChatBody, decode_chat
from inference.worker.prompt.template_messages import messages_of

Json = Mapping[str, Any]
_NEEDED: Mapping[Endpoint, Json] = {
    Endpoint.CHAT: {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
    Endpoint.COMPLETIONS: {"model": "m", "prompt": "Hi"},
    Endpoint.EMBEDDINGS: {"model": "m", "input": "Hi"},
    Endpoint.RERANK: {"model": "m", "query": "Hi", "documents": ["Hi"]},
}


def decoded(body: Json | AnyRequest, endpoint: Endpoint = Endpoint.CHAT) -> AnyRequest:
    """`body` as the gateway decodes it, with the fields that it lacks and needs."""
    if isinstance(body, Body):
        return body
    return BODIES[endpoint][1](orjson.loads(orjson.dumps({**_NEEDED[endpoint], **body})))


def chat(body: Json | AnyRequest) -> ChatRequest:
    """A chat request."""
    found = decoded(body)
    assert isinstance(found, ChatRequest)
    return found


def json_of(body: Body) -> dict[str, Any]:
    """`body` as JSON values."""
    return as_json(body)


def call(endpoint: Endpoint, model: str, body: Json | AnyRequest, request_id: str, **more: Any) -> provider.Call:
    """A call with a body that is written as JSON."""
    return provider.Call(endpoint, model, decoded(body, endpoint), request_id, **more)


def to_openai(endpoint: Endpoint, body: Json | AnyRequest, model: str, flavor: Flavor) -> dict[str, Any]:
    """See `openai_request.to_openai`."""
    return openai_request.to_openai(endpoint, decoded(body, endpoint), model, flavor)


def unsupported_by_openai(
    body: Json | AnyRequest, flavor: Flavor, endpoint: Endpoint = Endpoint.CHAT, model: str = ""
) -> Mapping[str, str]:
    """See `openai_request.unsupported_params`."""
    return openai_request.unsupported_params(decoded(body, endpoint), flavor, endpoint, model)


def to_anthropic(body: Json | AnyRequest, model: str) -> dict[str, Any]:
    """See `anthropic_request.to_anthropic`."""
    return as_json(anthropic_request.to_anthropic(chat(body), model))


def unsupported_by_anthropic(body: Json | AnyRequest, model: str | None = None) -> Mapping[str, str]:
    """See `anthropic_request.unsupported_params`."""
    return anthropic_request.unsupported_params(chat(body), model)


def parse_responses(raw: bytes, recall: Recall, find_item: FindItem, **options: bool) -> ResponsesRequest:
    """A request of the Responses API, as the gateway decodes and translates it."""
    body = responses_request.decoded(raw, **options)
    return responses_request.translated(body, len(raw), recall, find_item)


def template_messages(messages: list[Any]) -> tuple[Json, ...]:
    """`messages` as a worker gives them to a chat template."""
    return messages_of(decode_chat({"model": "m", "messages": messages}, ChatBody, "").messages)


def to_native(origin: CountedRequest, model: str) -> dict[str, Any]:
    """See `anthropic_native.to_native`."""
    return as_json(anthropic_native.to_native(origin, model))


def needs_sampling_version(request: Json) -> bool:
    """Whether a request for Anthropic has a sampling parameter."""
    return not request.keys().isdisjoint(("temperature", "top_p", "top_k"))


def thinking_for(thinking: Json, model: str) -> Json | None:
    """See `anthropic_models.thinking_for`."""
    found = anthropic_models.thinking_for(msgspec.convert(thinking, Thinking), model)
    return None if found is None else msgspec.to_builtins(found)
