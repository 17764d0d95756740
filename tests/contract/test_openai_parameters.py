"""Every parameter of the official client is supported, ignored, or refused with a reason, in gateway and worker."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
from openai.resources import Completions as Texts
from openai.resources import Embeddings
from openai.resources.chat import Completions as Chats

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import BODIES as GATEWAY_BODIES
from gateway.apis.openai.generation_request import parse
from headgate.shared.bodies.body_decoder import json_schema
from inference.api.service_routes import BODIES
from inference.protocol import Code
from inference.worker.api import generation_body
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts

FACTS = Facts("tiny", 128, 300, 64, ("chat", "completions", "embeddings"))
_CLIENTS_OWN = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("create", "endpoint", "read"),
    [
        (Chats.create, Endpoint.CHAT, generation_body.chat),
        (Texts.create, Endpoint.COMPLETIONS, generation_body.completion),
        (Embeddings.create, Endpoint.EMBEDDINGS, generation_body.embedding),
    ],
)
def test_every_parameter_of_the_client_is_known(
    create: Callable[..., Any], endpoint: Endpoint, read: Callable[[Any, Facts], Any]
) -> None:
    for name in inspect.signature(create).parameters.keys() - _CLIENTS_OWN:
        assert name in json_schema(GATEWAY_BODIES[endpoint][0])[0]["properties"], "the gateway accepts it"
        assert name in BODIES[f"/v1/{endpoint}"]["properties"], "it is described"
        try:
            read({name: {"odd": True}}, FACTS)
        except BadRequestError as error:
            assert "unknown field" not in error.message, name


def test_parameters_of_cloud_caches_are_ignored() -> None:
    request = generation_body.chat({**CHAT, "prompt_cache_options": {"mode": "implicit"}}, FACTS)
    assert request == generation_body.chat(CHAT, FACTS)
    parse(Endpoint.CHAT, json.dumps({**CHAT, "model": "demo", "prompt_cache_options": {}}).encode())


def test_worker_refuses_an_unsupported_parameter_with_a_reason() -> None:
    """A null requests nothing and is accepted."""
    body = {**CHAT, "model": "demo", "moderation": {"model": "omni-moderation-latest"}}
    with pytest.raises(BadRequestError, match="moderation is not supported") as caught:
        generation_body.chat(body, FACTS)
    assert (caught.value.param, caught.value.code) == ("moderation", Code.UNSUPPORTED_PARAMETER)
    assert generation_body.chat({**CHAT, "moderation": None}, FACTS) == generation_body.chat(CHAT, FACTS)
