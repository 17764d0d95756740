"""Turns of one conversation have the same key, and other conversations and clients another one."""

from __future__ import annotations

from typing import Any

from gateway.apis.openai.conversation_key import MOST_CHARACTERS, conversation_key
from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import BODIES

SYSTEM = {"role": "system", "content": "You are a miller."}
FIRST = {"role": "user", "content": "Hello!"}
LATER = [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Go on."}]


def key(*messages: dict[str, Any], tenant: str = "t", **more: Any) -> str | None:
    _, decode = BODIES[Endpoint.CHAT]
    return conversation_key(tenant, decode({"model": "m", "messages": list(messages), **more}))


def test_turns_of_a_conversation_have_one_key() -> None:
    assert key(SYSTEM, FIRST) == key(SYSTEM, FIRST, *LATER) == key(SYSTEM, FIRST, *LATER, temperature=0)
    parts = {"role": "user", "content": [{"type": "text", "text": "Hello!"}]}
    assert key(SYSTEM, parts) == key(SYSTEM, FIRST)


def test_other_clients_and_beginnings_have_other_keys() -> None:
    others = [
        key(FIRST), key(SYSTEM, FIRST, tenant="u"), key(SYSTEM, {**FIRST, "content": "Hello"}),
        key({**SYSTEM, "role": "developer"}, FIRST), key(SYSTEM, FIRST),
    ]  # fmt: skip
    assert len(set(others)) == len(others)


def test_only_the_beginning_of_a_long_text_counts() -> None:
    long = "x" * MOST_CHARACTERS
    assert key({**FIRST, "content": long + "a"}) == key({**FIRST, "content": long + "b"})


def test_text_prompts_have_a_key_and_other_requests_none() -> None:
    _, decode = BODIES[Endpoint.COMPLETIONS]
    assert conversation_key("t", decode({"model": "m", "prompt": "Once"})) is not None
    assert conversation_key("t", decode({"model": "m", "prompt": ["Once", "twice"]})) is None
    _, decode = BODIES[Endpoint.EMBEDDINGS]
    assert conversation_key("t", decode({"model": "m", "input": "Once"})) is None
