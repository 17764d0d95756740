"""The request bodies of OpenAI's APIs: chat, completions, embeddings, and the usual reranking API.

The gateway decodes its clients' requests into these types and sends them to the inference service, which relays them to
a worker. The receivers decode them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType

from headgate.shared.bodies.body_decoder import (
    CHECKED,
    Body,
    Extensible,
    Object,
    Text,
    check_parameters,
    decode,
    expected,
    is_set,
    keep_extra,
    must,
    refuse,
    with_parameters,
)
from headgate.shared.parameters import PARAMETERS, json_kind

MAX_MODEL_CHARS = 256
MAX_URL_CHARS = 2048
MAX_TOOLS = 1024

ModelName = Annotated[str, Meta(min_length=1, max_length=MAX_MODEL_CHARS)]
StopStrings = Annotated[
    Text | Annotated[list[Text], Meta(max_length=16)], Meta(extra=expected("a string or an array of strings"))
]
JsonSchema = Object | bool
Effort = Text

ImageUrlText = Annotated[
    str,
    Meta(
        pattern=f"^(data:|https://.{{1,{MAX_URL_CHARS - len('https://')}}}$)",
        extra=must(f"must be a data: URL with the image, or an https: URL of at most {MAX_URL_CHARS} characters"),
    ),
]
"""A data: URL with the image, or an https: URL that the gateway may fetch. Providers get only data: URLs."""


# --- messages ---------------------------------------------------------------------------------------------------------
class TextPart(Extensible, kw_only=True, tag_field="type", tag="text"):
    """A content part with text."""

    text: str


class RefusalPart(Extensible, kw_only=True, tag_field="type", tag="refusal"):
    """A content part with the text of a refusal."""

    refusal: str


class ImageUrl(Extensible, kw_only=True):
    """The address of an image, or a data: URL with the image."""

    url: ImageUrlText
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(Extensible, kw_only=True, tag_field="type", tag="image_url"):
    """A content part with an image."""

    image_url: ImageUrl


class InputAudio(Extensible, kw_only=True):
    """Audio as base64, with its format."""

    data: Text
    format: Text


class AudioPart(Extensible, kw_only=True, tag_field="type", tag="input_audio"):
    """A content part with audio."""

    input_audio: InputAudio


class FilePart(Extensible, kw_only=True, tag_field="type", tag="file"):
    """A content part with a file."""

    file: Object


Part = TextPart | RefusalPart | ImagePart | AudioPart | FilePart
Content = str | Annotated[list[Part], Meta(min_length=1)]


class CalledFunction(Extensible, kw_only=True):
    """The function of a tool call, with its arguments as JSON text."""

    name: Text
    arguments: str


class ToolCall(Extensible, kw_only=True):
    """A call that the assistant made. Calls of custom tools have no `function`."""

    id: Text
    type: Literal["function", "custom"] | None = None
    function: CalledFunction | None = None


class Message(Extensible, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Content | UnsetType | None, Meta(extra=expected("a string or an array of parts"))] = UNSET
    name: Text | None = None
    tool_call_id: Text | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: CalledFunction | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    audio: Any = None

    @property
    def parts(self) -> list[Part]:
        """The parts of the content; empty where it is text."""
        return self.content if isinstance(self.content, list) else []


# --- tools and the shape of an answer ---------------------------------------------------------------------------------
class Function(Extensible, kw_only=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(Extensible, kw_only=True):
    """A tool. Custom tools have no `function`."""

    type: Literal["function", "custom"]
    function: Function | None = None


class ChosenFunction(Extensible, kw_only=True):
    """The function that must be called."""

    name: Text


class AllowedTools(Extensible, kw_only=True):
    """The tools that may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Meta(min_length=1)]


class ChosenTool(Extensible, kw_only=True):
    """The tool that must be called, or the tools that may be called."""

    type: str
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None


class AnswerSchema(Extensible, kw_only=True):
    """A JSON schema for the answer."""

    name: Text | None = None
    schema: Object | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Extensible, kw_only=True):
    """The shape of an answer. `schema` belongs to llama.cpp's `json_object`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: AnswerSchema | None = None
    schema: JsonSchema | None = None


class StructuredOutputs(Extensible, kw_only=True):
    """The shape of an answer as vLLM names it."""

    json: JsonSchema | Text | None = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Meta(min_length=1, max_length=4096)] | None = None
    grammar: Text | None = None


class StreamOptions(Extensible, kw_only=True):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    prompt_usage: bool | None = None
    """For local models: the first chunk of a stream has the usage of the prompt, and the chunks between it and the
    last one have no `usage`."""


class AnswerSoFar(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The beginning of an answer that another attempt already sent to the client."""

    content: str = ""
    reasoning_content: str | None = None


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | ChosenTool | None, Meta(extra=expected("none, auto, required or an object"))
]


_IN_CHATS_ONLY = ("max_completion_tokens", "enable_thinking")


class GenerationFields(Body, kw_only=True):
    """Fields that chats and completions share."""

    model: ModelName
    logit_bias: Object | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: StopStrings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # the shape of an answer as llama.cpp and vLLM name it; only local models have these
    json_schema: JsonSchema | None = None
    regex: Text | None = None
    grammar: Text | None = None
    guided_json: JsonSchema | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], Meta(min_length=1, max_length=4096)] | None = None
    guided_grammar: Text | None = None
    structured_outputs: StructuredOutputs | None = None
    answer_so_far: AnswerSoFar | None = None
    """For local models: the answer continues this beginning."""

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


if TYPE_CHECKING:

    class ParameterFields(GenerationFields, kw_only=True):
        """The generation parameters, for the type checker only those that the code reads."""

        temperature: float | None = None
        top_p: float | None = None
        top_k: int | None = None
        seed: int | None = None
        frequency_penalty: float | None = None
        presence_penalty: float | None = None
        max_tokens: int | None = None
        n_probs: int | None = None
        dry_sequence_breakers: list[str] | None = None
        repetition_penalty: float | None = None
        cache_prompt: bool | None = None
        skip_special_tokens: bool | None = None

    class ChatParameterFields(ParameterFields, kw_only=True):
        """The generation parameters of a chat."""

        max_completion_tokens: int | None = None
        enable_thinking: bool | None = None

else:
    _SHARED = [row for row in PARAMETERS if row.name not in _IN_CHATS_ONLY]
    ParameterFields = with_parameters("ParameterFields", GenerationFields, _SHARED)
    ChatParameterFields = with_parameters("ChatParameterFields", GenerationFields, PARAMETERS)


class ChatBody(ChatParameterFields, kw_only=True):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    audio: Object | None = None
    function_call: Text | ChosenFunction | None = None
    functions: list[Function] | None = None
    logprobs: bool | None = None
    metadata: Object | None = None
    modalities: list[Literal["text", "audio"]] | None = None
    moderation: Object | None = None
    parallel_tool_calls: bool | None = None
    prediction: Object | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Object | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: Effort | None = None
    response_format: ResponseFormat | None = None
    safety_identifier: str | None = None
    service_tier: Text | None = None
    store: bool | None = None
    tool_choice: ToolChoice = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    web_search_options: Object | None = None
    chat_template_kwargs: Object | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Prompt = Annotated[
    str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)],
    Meta(extra=expected("a string, an array of strings or of token ids")),
]
"""A text, or an array of texts, of token ids, or of arrays of token ids."""


class CompletionRequest(ParameterFields, kw_only=True):
    """The body of `/v1/completions`."""

    prompt: Prompt
    max_tokens: Annotated[int, Meta(ge=-1)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    suffix: str | None = None


class EmbeddingRequest(Body, kw_only=True):
    """The body of `/v1/embeddings`."""

    model: ModelName
    input: Prompt
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None


class RerankDocument(Extensible, kw_only=True):
    """A document with fields beside its text."""

    text: str


class RerankRequest(Body, kw_only=True):
    """The body of `/v1/rerank`."""

    model: ModelName
    query: Text
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
    user: str | None = None


class TokenizeBody(Body, kw_only=True):
    """The body of `/tokenize`: it has `messages` with their tools and options, a prompt, or `content`."""

    model: ModelName
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    prompt: Prompt | None = None
    suffix: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = None
    function_call: Text | ChosenFunction | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: Object | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    """The body of `/detokenize`."""

    model: ModelName
    tokens: list[TokenId]


SHAPES = (
    "json_schema", "regex", "grammar", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "structured_outputs",
)  # fmt: skip
"""Fields of `GenerationFields` that ask for a shape of the answer."""


# --- decoding ---------------------------------------------------------------------------------------------------------
Chat = TypeVar("Chat", bound=ChatBody)


def decode_chat(given: Mapping[str, Any], type_: type[Chat], path: str) -> Chat:
    """The chat request in parsed JSON; raises InvalidBodyError. For `path` see `decode`."""
    body = decode(given, type_, path)
    _check_messages_and_keep_extra(body, body.messages, given)
    check_parameters(given, CHECKED)
    return body


def decode_tokenize(given: Mapping[str, Any]) -> TokenizeBody:
    """The body of `/tokenize` in parsed JSON; raises InvalidBodyError."""
    body = decode(given, TokenizeBody, "")
    _check_messages_and_keep_extra(body, body.messages or (), given)
    if body.prompt is not None:
        _check_prompt(body.prompt, "prompt")
    return body


def _check_messages_and_keep_extra(body: Body, messages: Sequence[Message], given: Mapping[str, Any]) -> None:
    """Checks the messages of a chat, and keeps the undeclared fields of the objects in its body."""
    for index, (message, raw) in enumerate(zip(messages, given.get("messages") or (), strict=True)):
        # The usual message has a role, a text and perhaps `tool_call_id`: there is nothing to check or to keep.
        usual = 2 if message.tool_call_id is None else 3
        if len(raw) == usual and type(message.content) is str and (usual == 3 or message.role != "tool"):
            continue
        _check_message(message, f"messages[{index}]")
        if keep_extra(message, raw):
            body.has_extra = True
    if not _WITH_OBJECTS.isdisjoint(given):
        rest = {name: given[name] for name in _WITH_OBJECTS if name in given}
        body.has_extra |= keep_extra(body, rest)


_WITH_OBJECTS = frozenset(
    (
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "response_format",
        "structured_outputs",
        "stream_options",
    )
)
"""Fields of a chat whose objects may have undeclared fields."""


def _check_message(message: Message, path: str) -> None:
    has_other = message.tool_calls or is_set(message.function_call or message.refusal or message.audio)
    if not is_set(message.content) and not (message.role == "assistant" and has_other):
        refuse(f"{path}.content", f"`{path}` needs `content`")
    if message.role == "tool" and message.tool_call_id is None:
        refuse(f"{path}.tool_call_id", f"`{path}` is the result of a tool call and needs `tool_call_id`")


_CHECKED_IN_COMPLETIONS = CHECKED.difference(("max_tokens", *_IN_CHATS_ONLY))


def decode_completion(given: Mapping[str, Any], path: str) -> CompletionRequest:
    """The completion request in parsed JSON; raises InvalidBodyError. For `path` see `decode`."""
    body = decode(given, CompletionRequest, path)
    _check_prompt(body.prompt, "prompt")
    if objects := {name: given[name] for name in ("structured_outputs", "stream_options") if name in given}:
        body.has_extra = keep_extra(body, objects)
    check_parameters(given, _CHECKED_IN_COMPLETIONS)
    return body


def decode_embedding(given: Mapping[str, Any], path: str) -> EmbeddingRequest:
    """The embedding request in parsed JSON; raises InvalidBodyError. For `path` see `decode`."""
    body = decode(given, EmbeddingRequest, path)
    if body.input == "":
        refuse("input", "`input` must not be empty")
    _check_prompt(body.input, "input")
    return body


def decode_rerank(given: Mapping[str, Any], path: str) -> RerankRequest:
    """The rerank request in parsed JSON; raises InvalidBodyError. For `path` see `decode`."""
    body = decode(given, RerankRequest, path)
    body.has_extra = keep_extra(body, given)
    return body


_ITEMS: Mapping[type, str] = {str: "a string", int: "a whole number", list: "an array"}


def _check_prompt(prompt: str | Sequence[Any], path: str) -> None:
    """Raises InvalidBodyError for an array with an item of another type than the first one."""
    if isinstance(prompt, str):
        return
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if type(item) is not kind:
            refuse(f"{path}[{index}]", f"`{path}[{index}]` must be {_ITEMS[kind]}, not {json_kind(item)}")
