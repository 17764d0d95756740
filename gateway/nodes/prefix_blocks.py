"""Hashes of the blocks of a prompt, each of which stands for the whole prompt up to the end of its block.

Two prompts with a common hash are alike up to the end of its block, so a node that has computed one has the KV cache
of the beginning of the other. The hashes are keyed: without the secret a hash shows nothing about its prompt, and
prompts of different tenants or models have different hashes.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import xxhash

from gateway.apis.openai.generation_request import AnyRequest, ChatRequest
from headgate.shared.bodies.openai_bodies import CompletionRequest, Message, Part, TextPart

BLOCK_BYTES = 1024
"""A block ends after this many bytes and at the end of each message."""
MAX_BLOCKS = 4096
"""Blocks of one prompt; what follows has no hashes."""
_HASH_BYTES = 8
_FIRST_TURN_BLOCKS = 2
"""Blocks of a text prompt that belong to the first turn."""

_head = attrgetter("tools", "functions", "chat_template_kwargs", "reasoning_effort")
_rest = attrgetter("name", "tool_call_id", "tool_calls", "function_call", "refusal", "reasoning_content")
_NO_HEAD = (None,) * 4
_NO_REST = (None,) * 6


class PrefixBlocks(NamedTuple):
    """The blocks of one prompt: `hashes` (16 hexadecimal digits), and the bytes of the prompt up to each block's end.

    `first_turn`: how many blocks belong to the first turn of the conversation.
    """

    hashes: tuple[str, ...]
    end_bytes: tuple[int, ...]
    first_turn: int

    @property
    def conversation(self) -> str:
        """A key that all turns of a conversation share; other conversations with the same first turn share it too."""
        return self.hashes[self.first_turn - 1]

    @property
    def size_bytes(self) -> int:
        """The bytes of all blocks."""
        return self.end_bytes[-1]


def prefix_salt(secret: bytes, tenant: str, model: str) -> bytes:
    """The key of the hashes of a tenant's prompts for a model."""
    key = blake2b(secret, digest_size=32).digest()
    return blake2b(f"{tenant}\0{model}".encode(errors="surrogatepass"), key=key, digest_size=32).digest()


def prefix_blocks(salt: bytes, body: AnyRequest) -> PrefixBlocks | None:
    """The blocks of a chat or of a text prompt; None for other requests.

    The blocks of a chat are the first ones of every chat that continues it. The same holds for the full blocks of a
    text prompt.
    """
    if isinstance(body, ChatRequest):
        head = _head(body)
        texts = chain((b"" if head == _NO_HEAD else _json(head),), map(_message, body.messages))
        roles = [message.role for message in body.messages]
        return _blocks(salt, texts, roles.index("user") + 1 if "user" in roles else len(roles))
    if isinstance(body, CompletionRequest) and isinstance(body.prompt, str) and body.prompt:
        blocks = _blocks(salt, (_utf8(body.prompt),), 0)
        return blocks._replace(first_turn=min(_FIRST_TURN_BLOCKS, len(blocks.hashes)))
    return None


def _blocks(salt: bytes, texts: Iterable[bytes], first_user: int) -> PrefixBlocks:
    """The blocks of `texts`; the text with the index `first_user` ends the first turn."""
    running = blake2b(key=salt, digest_size=_HASH_BYTES)
    hashes: list[str] = []
    ends: list[int] = []
    size = first_turn = 0
    for index, text in enumerate(texts):
        for start in range(0, min(len(text), (MAX_BLOCKS - len(hashes)) * BLOCK_BYTES), BLOCK_BYTES):
            block = text[start : start + BLOCK_BYTES]
            running.update(block)
            size += len(block)
            hashes.append(running.hexdigest())
            ends.append(size)
        if index <= first_user:
            first_turn = len(hashes)
        elif len(hashes) == MAX_BLOCKS:
            break
    return PrefixBlocks(tuple(hashes), tuple(ends), first_turn)


def _message(message: Message) -> bytes:
    """The bytes of a message. They contain their lengths, so that joined messages cannot be read as other messages."""
    content = message.content
    if isinstance(content, list):
        text = b"".join(map(_part, content))
    else:
        text = _utf8(content) if isinstance(content, str) else b""
    rest = _rest(message)
    more = b"" if rest == _NO_REST else _json(rest)
    return b"%b %d %d %b%b" % (message.role.encode(), len(more), len(text), more, text)


def _part(part: Part) -> bytes:
    """The text of a part, or a hash of an image, an audio file or a document."""
    if isinstance(part, TextPart):
        return _utf8(part.text)
    return xxhash.xxh3_128_digest(_json(part))


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can express and UTF-8 cannot
        return _utf8(repr(value))


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
