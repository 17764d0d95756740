"""Translates requests of Ollama's API into the typed requests of the gateway."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from gateway.apis.body_parser import parse_json, with_request_errors
from gateway.apis.ollama.ollama_body import (
    SAMPLING_OPTIONS,
    GeneratingRequest,
    OllamaCall,
    OllamaGenerateRequest,
    OllamaMessage,
    decode_ollama_chat,
    decode_ollama_embed,
    decode_ollama_embeddings,
    decode_ollama_generate,
)
from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import (
    ChatRequest,
    InferenceRequest,
    check_field_combinations,
    normalize_chat,
    typed,
)
from headgate.shared.bodies.body_decoder import refuse
from headgate.shared.bodies.openai_bodies import (
    AnswerSchema,
    CalledFunction,
    CompletionRequest,
    EmbeddingRequest,
    ImagePart,
    ImageUrl,
    Message,
    Part,
    ResponseFormat,
    TextPart,
    ToolCall,
)
from inference.protocol import Code

LATEST = ":latest"
"""The tag that Ollama's clients add to names without one."""

_IMAGE_TYPES: Mapping[str, str] = {
    "/9j/": "image/jpeg",
    "iVBORw": "image/png",
    "R0lGOD": "image/gif",
    "UklGR": "image/webp",
}
"""Media types by the beginning of the base64 text."""

_UNLOAD = (
    "`keep_alive: 0` without a prompt does not unload a model here, because other clients may use it: the inference "
    "service unloads idle models when their memory is needed; operators unload with `headgate unload`"
)


class ParsedRequest(NamedTuple):
    """`only_loads`: the client wants the model loaded, not an answer."""

    request: InferenceRequest
    only_loads: bool = False


def plain_name(model: str) -> str:
    """The name without the tag `:latest`."""
    return model.removesuffix(LATEST) or model


@with_request_errors
def parse_chat(raw: bytes) -> ParsedRequest:
    """The body of `/api/chat`; raises RequestError that names the parameter."""
    body = decode_ollama_chat(parse_json(raw))
    if not body.messages:
        return _loading(body, len(raw))
    chat = _chat(body, list(_messages(body.messages)))
    if body.tools:
        chat.tools, chat.has_extra = body.tools, True
    return ParsedRequest(_checked(chat, len(raw)))


@with_request_errors
def parse_generate(raw: bytes) -> ParsedRequest:
    """The body of `/api/generate`; raises RequestError that names the parameter.

    A prompt becomes a chat; with `raw` or a `suffix` it is completed as it is.
    """
    body = decode_ollama_generate(parse_json(raw))
    if not body.prompt:
        return _loading(body, len(raw))
    if body.raw or body.suffix:
        return ParsedRequest(typed(Endpoint.COMPLETIONS, _completion(body), len(raw)))
    user = OllamaMessage(role="user", content=body.prompt, images=body.images)
    system = [OllamaMessage(role="system", content=body.system)] if body.system else []
    return ParsedRequest(_checked(_chat(body, list(_messages([*system, user]))), len(raw)))


@with_request_errors
def parse_embed(raw: bytes) -> ParsedRequest:
    """The body of `/api/embed`; raises RequestError that names the parameter."""
    body = decode_ollama_embed(parse_json(raw))
    texts = body.input
    request = EmbeddingRequest(
        model=plain_name(body.model),
        input=texts if isinstance(texts, str) else [*texts],
        dimensions=body.dimensions,
        encoding_format="float",
    )
    return ParsedRequest(typed(Endpoint.EMBEDDINGS, request, len(raw)))


@with_request_errors
def parse_embeddings(raw: bytes) -> ParsedRequest:
    """The body of `/api/embeddings`; raises RequestError that names the parameter."""
    body = decode_ollama_embeddings(parse_json(raw))
    request = EmbeddingRequest(model=plain_name(body.model), input=body.prompt, encoding_format="float")
    return ParsedRequest(typed(Endpoint.EMBEDDINGS, request, len(raw)))


def _loading(body: GeneratingRequest, size_bytes: int) -> ParsedRequest:
    """A chat of one token, which loads the model as every request does."""
    if body.keep_alive is not None and str(body.keep_alive).rstrip("nuµmsh") in ("0", "0.0"):
        refuse("keep_alive", _UNLOAD, Code.UNSUPPORTED_PARAMETER)
    chat = ChatRequest(
        model=plain_name(body.model),
        messages=[Message(role="user", content="Hi")],
        max_tokens=1,
        stream=body.stream is not False,
    )
    return ParsedRequest(typed(Endpoint.CHAT, chat, size_bytes), only_loads=True)


def _checked(chat: ChatRequest, size_bytes: int) -> InferenceRequest:
    check_field_combinations(chat)
    normalize_chat(chat)
    return typed(Endpoint.CHAT, chat, size_bytes)._replace(clamps_max_tokens=True)


def _chat(body: GeneratingRequest, messages: list[Message]) -> ChatRequest:
    chat = ChatRequest(
        model=plain_name(body.model),
        messages=messages,
        max_tokens=_max_tokens(body),
        stream=body.stream is not False,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs if body.logprobs else None,
        **_sampling(body),
    )
    if isinstance(body.format, dict):
        schema = AnswerSchema(name="answer", schema=body.format, strict=True)
        chat.response_format = ResponseFormat(type="json_schema", json_schema=schema)
    elif body.format:
        chat.response_format = ResponseFormat(type="json_object")
    if isinstance(body.think, str):
        chat.reasoning_effort = body.think
    elif body.think is not None:
        chat.chat_template_kwargs = {"enable_thinking": body.think, "thinking": body.think}
    return chat


def _completion(body: OllamaGenerateRequest) -> CompletionRequest:
    """Raises InvalidBodyError for fields that a completion does not have."""
    mode = "raw" if body.raw else "suffix"
    for name in ("images", "system", "think", "logprobs"):
        if getattr(body, name):
            refuse(name, f"`{name}` cannot be combined with `{mode}`", Code.UNSUPPORTED_PARAMETER)
    completion = CompletionRequest(
        model=plain_name(body.model),
        prompt=body.prompt or "",
        suffix=body.suffix or None,
        max_tokens=_max_tokens(body) or -1,
        stream=body.stream is not False,
        **_sampling(body),
    )
    if body.format:
        completion.json_schema = body.format if isinstance(body.format, dict) else {"type": "object"}
    return completion


def _max_tokens(body: GeneratingRequest) -> int | None:
    """None for an answer that is as long as the context allows."""
    number = body.options.num_predict if body.options is not None else None
    if number == 0:
        refuse("options.num_predict", "`options.num_predict` must be at least 1, or -1 for no limit; it is 0")
    return None if number is None or number < 0 else number


def _sampling(body: GeneratingRequest) -> dict[str, Any]:
    """The generation parameters among the options."""
    if body.options is None:
        return {}
    found = {row.name: getattr(body.options, row.name) for row in SAMPLING_OPTIONS}
    if found["seed"] == -1:
        found["seed"] = None
    return {**found, "stop": body.options.stop or None}


# --- the conversation -------------------------------------------------------------------------------------------------
def _messages(messages: Sequence[OllamaMessage]) -> Iterator[Message]:
    """The messages of a chat. Calls without an id get one; `calls` are those without a result yet: id to name."""
    calls: dict[str, str] = {}
    for index, message in enumerate(messages):
        if message.role == "assistant":
            made = [_call(call, f"call_{index}_{place}") for place, call in enumerate(message.tool_calls or ())]
            calls = {call.id: call.function.name for call in made if call.function is not None}
            yield Message(
                role="assistant",
                content=None if made and not message.content else message.content or "",
                reasoning_content=message.thinking or None,
                tool_calls=made or None,
            )
        elif message.role == "tool":
            id = _answered(message, calls, index)
            del calls[id]
            yield Message(role="tool", tool_call_id=id, content=message.content or "")
        else:
            yield Message(role=message.role, content=_content(message, index))


def _call(call: OllamaCall, id: str) -> ToolCall:
    arguments = orjson.dumps(call.function.arguments).decode()
    function = CalledFunction(name=call.function.name, arguments=arguments)
    return ToolCall(id=call.id or id, type="function", function=function)


def _answered(message: OllamaMessage, calls: Mapping[str, str], index: int) -> str:
    """The id of the call that a result belongs to: by id, by name, or the first one; raises InvalidBodyError."""
    if message.tool_call_id in calls:
        return str(message.tool_call_id)
    named = [id for id, name in calls.items() if message.tool_name in (None, "", name)]
    if message.tool_call_id or not named:
        param = f"messages[{index}]"
        refuse(param, f"`{param}` is the result of a tool that the assistant's message before it did not call")
    return named[0]


def _content(message: OllamaMessage, index: int) -> str | list[Part]:
    """The text, or text and images as parts."""
    text = message.content or ""
    if not message.images:
        return text
    parts: list[Part] = [TextPart(text=text)] if text else []
    for place, data in enumerate(message.images):
        parts.append(ImagePart(image_url=ImageUrl(url=_image(data, f"messages[{index}].images[{place}]"))))
    return parts


def _image(data: str, param: str) -> str:
    if data.startswith("data:image/"):
        return data
    kind = next((kind for start, kind in _IMAGE_TYPES.items() if data.startswith(start)), None)
    if kind is None:
        refuse(param, f"`{param}` must be a JPEG, PNG, GIF or WebP image as base64")
    return f"data:{kind};base64,{data}"
