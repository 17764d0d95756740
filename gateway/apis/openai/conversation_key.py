"""A key of the conversation that a request continues.

It is the same for all turns of a chat and differs between tenants. Conversations with the same beginning share it. The
key of a prompt without messages changes until the prompt has MOST_CHARACTERS.

The inference service sends requests with the same key to the same replica of a model, which may still have the KV cache
of the last turn.
"""

from __future__ import annotations

from hashlib import blake2b

from gateway.apis.openai.generation_request import AnyRequest, ChatRequest
from headgate.shared.bodies.openai_bodies import CompletionRequest, Message, TextPart

MOST_CHARACTERS = 2048
"""Characters of a text that count. Conversations that begin alike for longer share a replica, which does no harm."""
_BYTES = 12


def conversation_key(tenant: str, body: AnyRequest) -> str | None:
    """A hash of the tenant and the beginning of a chat (up to the first user message) or of a prompt; None for others.

    Images do not count.
    """
    if isinstance(body, ChatRequest):
        texts = _beginning(body.messages)
    elif isinstance(body, CompletionRequest) and isinstance(body.prompt, str):
        texts = [body.prompt[:MOST_CHARACTERS]]
    else:
        return None
    return blake2b("\0".join((tenant, *texts)).encode(errors="surrogatepass"), digest_size=_BYTES).hexdigest()


def _beginning(messages: list[Message]) -> list[str]:
    found = []
    for message in messages:
        content = message.content if isinstance(message.content, str) else ""
        parts = [part.text for part in message.parts if isinstance(part, TextPart)]
        found.append(message.role + "".join((content, *parts))[:MOST_CHARACTERS])
        if message.role == "user":
            break
    return found
