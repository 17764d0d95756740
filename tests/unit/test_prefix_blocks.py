"""The blocks of prompts: their secret, where they end, and what is part of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import BODIES
from gateway.nodes.prefix_blocks import BLOCK_BYTES, MAX_BLOCKS, PrefixBlocks, prefix_blocks, prefix_salt

SALT = prefix_salt(b"secret", "tenant", "m")
SYSTEM = {"role": "system", "content": "You are a miller."}
FIRST = {"role": "user", "content": "Hello!"}
LATER = [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Go on."}]
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def chat(*messages: dict[str, Any], salt: bytes = SALT, **more: Any) -> PrefixBlocks:
    blocks = prefix_blocks(salt, BODIES[Endpoint.CHAT][1]({"model": "m", "messages": list(messages), **more}))
    assert blocks is not None
    return blocks


def prompt(value: Any) -> PrefixBlocks | None:
    return prefix_blocks(SALT, BODIES[Endpoint.COMPLETIONS][1]({"model": "m", "prompt": value}))


def test_the_turns_of_a_conversation_share_their_beginning_and_their_key() -> None:
    first, second = chat(SYSTEM, FIRST), chat(SYSTEM, FIRST, *LATER, temperature=0)
    assert second.hashes[:2] == first.hashes
    assert second.end_bytes[:2] == first.end_bytes
    assert first.conversation == second.conversation == first.hashes[1]
    assert second.size_bytes == second.end_bytes[-1] > first.size_bytes
    parts = {"role": "user", "content": [{"type": "text", "text": "Hello!"}]}
    assert chat(SYSTEM, parts) == first
    assert chat(SYSTEM, LATER[0]).first_turn == 2


@pytest.mark.parametrize("others", [
    partial(chat, SYSTEM, FIRST, salt=prefix_salt(b"secret", "another", "m")),
    partial(chat, SYSTEM, FIRST, salt=prefix_salt(b"secret", "tenant", "n")),
    partial(chat, SYSTEM, FIRST, salt=prefix_salt(b"another", "tenant", "m")),
    partial(chat, {**SYSTEM, "role": "developer"}, FIRST),
    partial(chat, {**SYSTEM, "content": "You are a miller"}, FIRST),
    partial(chat, {**SYSTEM, "name": "x"}, FIRST),
    partial(chat, SYSTEM, FIRST, tools=[{"type": "function", "function": {"name": "f"}}]),
    partial(chat, SYSTEM, FIRST, tools=[{"type": "function", "function": {"name": "f", "description": "\ud800"}}]),
    partial(chat, SYSTEM, FIRST, chat_template_kwargs={"enable_thinking": False}),
    partial(chat, {"role": "assistant", "content": None, "tool_calls": CALLS}, FIRST),
    partial(chat, {"role": "user", "content": [IMAGE]}),
])  # fmt: skip
def test_other_prompts_have_other_blocks(others: Callable[[], PrefixBlocks]) -> None:
    assert not set(others().hashes) & set(chat(SYSTEM, FIRST).hashes)


def test_images_are_part_of_the_prompt() -> None:
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}
    ask = {"role": "user", "content": [IMAGE, {"type": "text", "text": "What is it?"}]}
    assert chat(ask) == chat(ask)
    assert chat(ask).hashes != chat({**ask, "content": [other, ask["content"][1]]}).hashes


def test_blocks_are_small_and_their_number_is_bounded() -> None:
    long = chat({"role": "user", "content": "x" * 10_000})
    ends = (0, *long.end_bytes)
    assert all(0 < end - start <= BLOCK_BYTES for start, end in itertools.pairwise(ends))
    assert len(long.hashes) == 10
    huge = chat({"role": "user", "content": "x" * (MAX_BLOCKS * BLOCK_BYTES * 2)}, FIRST, LATER[0], SYSTEM)
    assert len(huge.hashes) == len(huge.end_bytes) == MAX_BLOCKS == huge.first_turn


def test_text_prompts_have_blocks_and_other_requests_none() -> None:
    once = prompt("Once")
    assert once is not None
    assert once.first_turn == 1
    long, longer = prompt("x" * 3000), prompt("x" * 5000)
    assert long is not None
    assert longer is not None
    assert long.hashes[:2] == longer.hashes[:2]
    assert long.conversation == longer.conversation
    assert prompt("\ud800") is not None
    assert prompt(["Once", "twice"]) is None
    assert prompt("") is None
    embedding = BODIES[Endpoint.EMBEDDINGS][1]({"model": "m", "input": "Once"})
    assert prefix_blocks(SALT, embedding) is None
