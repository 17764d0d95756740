"""Writes OpenAI's responses: server-sent events of streams and JSON of whole answers."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson

from inference.worker.answers.generation import Output, TokenLogprob
from inference.worker.dialects.answer_parts import CallBegin, Content, Part, Reasoning

_PREFIX = {"chat": "chatcmpl-", "completion": "cmpl-"}
_OBJECT = {"chat": "chat.completion", "completion": "text_completion"}


def new_id(kind: Literal["chat", "completion"]) -> str:
    """An id in OpenAI's style."""
    return _PREFIX[kind] + secrets.token_hex(12)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole request. `completion` includes `reasoning`."""

    prompt: int
    completion: int
    cached: int = 0
    reasoning: int = 0

    def to_json(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if self.reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return usage


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt's text at the beginning of a completion. `hidden` is the number of characters that the texts of its
    tokens have beyond `text`, such as the text of an added BOS.
    """

    text: str
    hidden: int = 0


NO_ECHO = Echo("")


class Logprobs:
    """The log probabilities of one choice, or of one chunk of it, as OpenAI's JSON.

    The bytes are appended to one buffer, which takes less memory: Python objects for a token with 20 alternatives take
    kilobytes, and so does a separate result of orjson for each token.
    """

    def __init__(self, kind: Literal["chat", "completion"]) -> None:
        self._chat = kind == "chat"
        self._columns = [bytearray() for _ in range(1 if self._chat else 4)]

    @property
    def size_bytes(self) -> int:
        """Length of the JSON so far."""
        return sum(map(len, self._columns))

    def add(self, items: Sequence[TokenLogprob], shift: int = 0) -> None:
        """Adds tokens of the same choice. Their offsets are shifted by `shift` characters."""
        for item in items:
            cells = [_chat_token(item)] if self._chat else _completion_token(item, shift)
            for column, cell in zip(self._columns, cells, strict=True):
                if column:
                    column += b","
                column += cell

    def json(self) -> bytes:
        """OpenAI's `logprobs` object."""
        names = ("content",) if self._chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        lists = [
            b'"%b":[%b]' % (name.encode(), bytes(column)) for name, column in zip(names, self._columns, strict=True)
        ]
        return b"{" + b",".join([*lists, b'"refusal":null'] if self._chat else lists) + b"}"


def _chat_token(item: TokenLogprob) -> bytes:
    return orjson.dumps(
        {
            "token": _show(item.piece),
            "logprob": _finite(item.logprob),
            "bytes": list(item.piece),
            "top_logprobs": [
                {"token": _show(piece), "logprob": _finite(value), "bytes": list(piece)} for piece, value in item.top
            ],
        }
    )


def _completion_token(item: TokenLogprob, shift: int) -> list[bytes]:
    return [
        orjson.dumps(_key(item.piece)),
        orjson.dumps(_finite(item.logprob)),
        b"null" if item.logprob is None else orjson.dumps(_by_key([*item.top, (item.piece, item.logprob)])),
        orjson.dumps(max(0, item.offset + shift)),
    ]


def _by_key(scored: Sequence[tuple[bytes, float]]) -> dict[str, float | None]:
    """Scores by the text of the token. Of tokens with the same text the likeliest is kept."""
    found: dict[str, float | None] = {}
    for piece, value in scored:
        found.setdefault(_key(piece), _finite(value))
    return found


def _key(piece: bytes) -> str:
    """The text of a token. As in OpenAI's API, tokens that are not valid UTF-8 are written as bytes."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + piece.decode("latin-1").encode("unicode_escape").decode("ascii")


def _finite(value: float | None) -> float | None:
    """As in OpenAI's API, -9999 stands for minus infinity."""
    return None if value is None else max(value, -9999.0)


def _show(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


class Stream:
    """One stream's chunks, all with the same id and created. `frames` returns those of one output of the engine."""

    def __init__(
        self,
        kind: Literal["chat", "completion"],
        model: str,
        created: int,
        *,
        with_usage: bool,
        prompt_tokens: int | None = None,
        choices: int = 1,
        echo: Sequence[Echo] = (),
        has_parts: bool = False,
    ) -> None:
        """`with_usage` puts `usage: null` into every chunk but the last, as OpenAI does. With `prompt_tokens` the first
        chunk of a chat has the usage of the prompt instead, and the others have no `usage`.

        `echo` is the beginning of each choice of a completion, in order of choices. `has_parts`: the answer may have no
        content at all, so the content of its first chunk is null. If the answer has neither content nor calls, the last
        chunk has empty content, like a whole answer.
        """
        self._choices = choices
        self._chat = kind == "chat"
        self._has_parts = has_parts
        self._role = b'"delta":{"role":"assistant","content":%b}' % (b"null" if has_parts else b'""')
        head = {
            "id": new_id(kind),
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": created,
            "model": model,
        }
        self._head = b"data: " + orjson.dumps(head)[:-1]
        self._tail = b',"usage":null}\n\n' if with_usage and prompt_tokens is None else b"}\n\n"
        self._prompt_tokens = prompt_tokens
        self._begun: set[int] = set()
        """The choices that have begun; those of a chat begin together."""
        self._silent = set(range(choices)) if has_parts else set()
        """The choices that have only reasoning so far, or nothing."""
        self._echo = echo

    def frames(self, output: Output) -> bytes:
        """The chunks for one output; the finish reason follows the last text. The roles of all choices come first, in
        order, because clients append choices to a list.
        """
        parts = []
        text = output.text
        if self._chat and not self._begun:
            self._begun.update(range(self._choices))
            parts += [self._chunk(choice, self._role, None, b"null") for choice in range(self._choices)]
            if self._prompt_tokens is not None:
                usage = Usage(self._prompt_tokens, 0, min(self._prompt_tokens, output.cached))
                parts[0] = parts[0][:-3] + b',"usage":' + orjson.dumps(usage.to_json()) + b"}\n\n"
        elif output.choice not in self._begun:
            self._begun.add(output.choice)
            if self._echo:
                text = self._echo[output.choice].text + text
        is_scored = bool(output.logprobs or output.prompt_logprobs)
        if self._has_parts:
            parts += self._parts(output)
            if output.choice in self._silent and any(not isinstance(part, Reasoning) for part in output.parts):
                self._silent.discard(output.choice)
        elif text or is_scored:
            body = b'"delta":{"content":' if self._chat else b'"text":'
            body += orjson.dumps(text) + (b"}" if self._chat else b"")
            parts.append(self._chunk(output.choice, body, None, self._logprobs(output)))
        if output.finish is not None:
            delta = b'{"content":""}' if output.choice in self._silent else b"{}"
            body = b'"delta":%b' % delta if self._chat else b'"text":""'
            parts.append(self._chunk(output.choice, body, output.finish, b"null", output.stop))
        return b"".join(parts)

    def _parts(self, output: Output) -> list[bytes]:
        """Log probabilities are sent with the content, or in a chunk of their own without content."""
        scores = self._logprobs(output)
        where = [index for index, part in enumerate(output.parts) if isinstance(part, Content)][-1:]
        chunks = [
            self._chunk(output.choice, _delta(part), None, scores if index in where else b"null")
            for index, part in enumerate(output.parts)
        ]
        if output.logprobs and not where:
            chunks.append(self._chunk(output.choice, b'"delta":{}', None, scores))
        return chunks

    def usage(self, usage: Usage) -> bytes:
        """The last chunk, with usage and no choices."""
        return self._head + b',"choices":[],"usage":' + orjson.dumps(usage.to_json()) + b"}\n\n"

    def _chunk(self, choice: int, body: bytes, finish: str | None, logprobs: bytes, stop: str | None = None) -> bytes:
        """`stop` is the stop string that ended the choice; as in vLLM it is sent as `stop_reason`."""
        return b'%b,"choices":[{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b}]%b' % (
            self._head,
            choice,
            body,
            logprobs,
            orjson.dumps(finish),
            b"" if stop is None else b',"stop_reason":' + orjson.dumps(stop),
            self._tail,
        )

    def _logprobs(self, output: Output) -> bytes:
        if not (output.logprobs or output.prompt_logprobs):
            return b"null"
        logprobs = Logprobs("chat" if self._chat else "completion")
        _score(logprobs, output, self._echo[output.choice] if self._echo else NO_ECHO)
        return logprobs.json()


def _score(logprobs: Logprobs, output: Output, echo: Echo) -> None:
    """Adds the log probabilities of the prompt and the answer in `output`."""
    logprobs.add(output.prompt_logprobs, -echo.hidden)
    logprobs.add(output.logprobs, len(echo.text))


def _delta(part: Part) -> bytes:
    """The delta of a part."""
    if isinstance(part, Content):
        return b'"delta":{"content":%b}' % orjson.dumps(part.text)
    if isinstance(part, Reasoning):
        return b'"delta":{"reasoning_content":%b}' % orjson.dumps(part.text)
    if isinstance(part, CallBegin):
        function = {"name": part.name, "arguments": ""}
        call: dict[str, Any] = {"index": part.index, "id": part.id, "type": "function", "function": function}
    else:
        call = {"index": part.index, "function": {"arguments": part.text}}
    return b'"delta":{"tool_calls":[%b]}' % orjson.dumps(call)


class Answer:
    """One choice of a whole answer, collected from outputs."""

    def __init__(self, kind: Literal["chat", "completion"], echo: Echo = NO_ECHO) -> None:
        self.finish: str | None = None
        self.stop: str | None = None
        self.tokens = 0
        self.cached = 0
        self.reasoning_tokens = 0
        self.logprobs = Logprobs(kind)
        self._echo = echo
        self._texts = [echo.text]
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallBegin, list[str]]] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message."""
        text = self.text
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if not text and self._calls else text,
            "refusal": None,
        }
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(arguments)},
                }
                for call, arguments in self._calls
            ]
        return message

    def add(self, output: Output) -> None:
        """Adds an output of this choice."""
        self._texts.append(output.text)
        for part in output.parts:
            if isinstance(part, Content):
                self._texts.append(part.text)
            elif isinstance(part, Reasoning):
                self._reasoning.append(part.text)
            elif isinstance(part, CallBegin):
                self._calls.append((part, []))
            else:
                self._calls[part.index][1].append(part.text)
        _score(self.logprobs, output, self._echo)
        self.tokens = output.tokens
        self.cached = output.cached
        self.reasoning_tokens = output.reasoning_tokens
        self.finish = output.finish
        self.stop = output.stop


def whole(
    kind: Literal["chat", "completion"],
    model: str,
    created: int,
    answers: Sequence[Answer],
    usage: Usage,
    *,
    with_logprobs: bool,
) -> bytes:
    """A complete response that is not streamed."""
    choices: list[dict[str, Any]] = []
    for index, answer in enumerate(answers):
        choice: dict[str, Any] = {"index": index, "finish_reason": answer.finish, "logprobs": None}
        if kind == "chat":
            choice["message"] = answer.message
        else:
            choice["text"] = answer.text
        if answer.stop is not None:
            choice["stop_reason"] = answer.stop
        if with_logprobs:
            choice["logprobs"] = orjson.Fragment(answer.logprobs.json())
        choices.append(choice)
    return orjson.dumps(
        {
            "id": new_id(kind),
            "object": _OBJECT[kind],
            "created": created,
            "model": model,
            "choices": choices,
            "usage": usage.to_json(),
        }
    )


def embeddings(model: str, vectors: Sequence[np.ndarray], tokens: int, *, as_base64: bool) -> bytes:
    """An embeddings response; base64 holds little-endian float32, as OpenAI's client expects."""
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector,
        }
        for index, vector in enumerate(vectors)
    ]
    body = {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
