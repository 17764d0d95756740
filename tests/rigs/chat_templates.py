"""Chat templates without special tokens."""

from __future__ import annotations

from collections.abc import Sequence

from inference.worker.prompt.templates import ChatTemplate


def chat_template(source: str, *, bos: str = "", eos: str = "", control_texts: Sequence[str] = ()) -> ChatTemplate:
    """A compiled template."""
    return ChatTemplate(source, bos=bos, eos=eos, control_texts=control_texts)
