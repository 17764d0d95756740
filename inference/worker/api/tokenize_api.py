"""Answers /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import orjson

from headgate.shared.bodies.body_decoder import decode
from headgate.shared.bodies.openai_bodies import DetokenizeBody, Message, Prompt, TokenizeBody, decode_tokenize
from inference.protocol import Code
from inference.worker.api import generation_body
from inference.worker.api.body_intake import typed
from inference.worker.api.generation_fields import tools_of
from inference.worker.prompt.prompts import Prompts
from inference.worker.prompt.template_messages import ImageParts, messages_of
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts

MAX_TOKENIZED_CHARS = 2**20
MAX_DETOKENIZED = 2**20

_read_detokenize = partial(decode, type_=DetokenizeBody, path="")


class TokenizeApi:
    """Tokenizes for one model, exactly as a request with the same messages or prompt is tokenized."""

    def __init__(self, facts: Facts, prompts: Prompts, detokenize: Callable[[list[int]], str]) -> None:
        self._facts = facts
        self._prompts = prompts
        self._detokenize = detokenize

    def tokens_of(self, body: Any) -> bytes:
        """`{"tokens", "count"}` of `messages` (with `tools`), of `prompt` or of `content`; raises BadRequestError."""
        given = typed(body, decode_tokenize, self._facts)
        if given.messages is not None:
            tokens = self._rendered(given, given.messages)
        elif given.prompt is not None:
            tokens = self._longest(given.prompt, given.suffix)
        else:
            tokens = self._text(given)
        return orjson.dumps({"tokens": tokens, "count": len(tokens)})

    def text_of(self, body: Any) -> bytes:
        """`{"content"}` of `tokens`; raises BadRequestError."""
        tokens = typed(body, _read_detokenize, self._facts).tokens
        if len(tokens) > MAX_DETOKENIZED:
            raise BadRequestError(f"tokens has {len(tokens)} entries; at most {MAX_DETOKENIZED} are allowed", "tokens")
        ids = generation_body.prompts_of(tokens, "tokens", self._facts, 1)[0] if tokens else ()
        return orjson.dumps({"content": self._detokenize(list(map(int, ids)))})

    def _text(self, given: TokenizeBody) -> list[int]:
        content = given.content
        if content is None:
            raise BadRequestError("content must be a string (or send messages, or a prompt)", "content")
        if len(content) > MAX_TOKENIZED_CHARS:
            raise BadRequestError(
                f"content has {len(content)} characters; at most {MAX_TOKENIZED_CHARS} are tokenized at once",
                "content",
            )
        return self._prompts.text(
            content, add_special=bool(given.add_special), parse_special=given.parse_special is not False
        )

    def _rendered(self, given: TokenizeBody, decoded: Sequence[Message]) -> list[int]:
        images = ImageParts(self._facts.image_marker) if self._facts.image_marker else None
        messages = messages_of(decoded, images)
        if images is not None and images.found:
            raise BadRequestError(
                "images cannot be counted here; the usage of an answer includes them",
                "messages",
                code=Code.UNSUPPORTED_PARAMETER,
            )
        tools, choice = tools_of(given, self._facts)
        continues = generation_body.continues(given, messages)
        return self._prompts.chat(
            messages, generation_body.variables(given, self._facts), continues, tools=tools, choice=choice
        )

    def _longest(self, prompt: Prompt, suffix: str | None) -> list[int]:
        """The tokens of the longest of several prompts."""
        prompts = generation_body.prompts_of(prompt, "prompt", self._facts, generation_body.MAX_SEQUENCES)
        return max((self._prompts.completion(one, suffix or None) for one in prompts), key=len)
