"""Answers /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from inference.protocol import Code
from inference.worker.api import body_fields, generation_body
from inference.worker.api.generation_fields import TOOL_FIELDS, tools_of
from inference.worker.prompt.message_images import ImageParts
from inference.worker.prompt.prompts import Prompts
from inference.worker.prompt.template_messages import messages_of
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts

MAX_TOKENIZED_CHARS = 2**20
MAX_DETOKENIZED = 2**20

_KNOWN = TOOL_FIELDS | {
    "content",
    "messages",
    "prompt",
    "suffix",
    "add_special",
    "parse_special",
    "chat_template_kwargs",
    "enable_thinking",
    "reasoning_effort",
    "continue_final_message",
    "add_generation_prompt",
    "model",
}


class Counting:
    """Tokens for one model, the same as those of a request with these messages or this prompt."""

    def __init__(self, facts: Facts, prompts: Prompts, detokenize: Callable[[list[int]], str]) -> None:
        self._facts = facts
        self._prompts = prompts
        self._detokenize = detokenize

    def tokens_of(self, body: Any) -> bytes:
        """`{"tokens", "count"}` of `messages` (with `tools`), of `prompt` or of `content`; raises BadRequestError."""
        given = body_fields.known(body, _KNOWN)
        if "messages" in given:
            tokens = self._rendered(given)
        elif "prompt" in given:
            tokens = self._longest(given)
        else:
            tokens = self._text(given)
        return orjson.dumps({"tokens": tokens, "count": len(tokens)})

    def text_of(self, body: Any) -> bytes:
        """`{"content"}` of `tokens`; raises BadRequestError."""
        tokens = body.get("tokens") if isinstance(body, dict) else None
        if not isinstance(tokens, list):
            raise BadRequestError("tokens must be a list of token ids", "tokens")
        if len(tokens) > MAX_DETOKENIZED:
            raise BadRequestError(f"tokens has {len(tokens)} entries; at most {MAX_DETOKENIZED} are allowed", "tokens")
        ids = generation_body.prompts_of([tokens], "tokens", self._facts, 1)[0] if tokens else ()
        return orjson.dumps({"content": self._detokenize(list(map(int, ids)))})

    def _text(self, given: Mapping[str, Any]) -> list[int]:
        content = given.get("content")
        if not isinstance(content, str):
            raise BadRequestError("content must be a string (or send messages, or a prompt)", "content")
        if len(content) > MAX_TOKENIZED_CHARS:
            raise BadRequestError(
                f"content has {len(content)} characters; at most {MAX_TOKENIZED_CHARS} are tokenized at once",
                "content",
            )
        return self._prompts.text(
            content,
            add_special=body_fields.boolean(given, "add_special", False),
            parse_special=body_fields.boolean(given, "parse_special", True),
        )

    def _rendered(self, given: Mapping[str, Any]) -> list[int]:
        images = ImageParts(self._facts.image_marker) if self._facts.image_marker else None
        messages = messages_of(given["messages"], images)
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

    def _longest(self, given: Mapping[str, Any]) -> list[int]:
        """The tokens of the longest of several prompts."""
        prompts = generation_body.prompts_of(given["prompt"], "prompt", self._facts, generation_body.MAX_SEQUENCES)
        suffix = body_fields.text(given, "suffix") or None
        return max((self._prompts.completion(prompt, suffix) for prompt in prompts), key=len)
