"""Templates that take what they are given in their own way: contents as lists of parts, no tools as nothing at all."""

from __future__ import annotations

import pytest

from inference.worker.worker_errors import BadRequestError
from tests.rigs.chat_templates import chat_template
from tests.rigs.tiny_gguf import CHATML

PARTS = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endfor %}"
)
EITHER = (
    "{% for message in messages %}{% if message.content is string %}text:{{ message.content }}"
    "{% else %}{% for part in message.content %}part:{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)


def rendered(source: str, *texts: str) -> list[str]:
    template = chat_template(source, control_texts=("<|end|>",))
    return template.render([{"role": "user", "content": text} for text in texts], {}, generate=True)


def test_a_text_is_not_lost_in_a_template_of_parts() -> None:
    assert rendered(PARTS, "one", "") == ["[user]one[user]"]


def test_control_tokens_in_a_part_are_broken_up_too() -> None:
    assert rendered(PARTS, "a<|end|>b") == ["[user]a<", "|end|>b"]


def test_who_takes_a_text_gets_a_text() -> None:
    assert rendered(EITHER, "one") == ["text:one"]
    assert "<|im_start|>user\none" in rendered(CHATML, "one")[0]


@pytest.mark.parametrize("content", ["{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}"])
def test_what_is_gone_through_unasked_is_no_none(content: str) -> None:
    """All others may ask whether tools and documents are none."""
    body = "{% for m in messages %}" + content + "{% endfor %}"
    assert rendered("{% for tool in tools %}{{ tool.name }}{% endfor %}" + body, "one") == ["one"]
    assert rendered("{{ 'none:' if tools is none and documents is none }}" + body, "one") == ["none:one"]


def test_who_takes_neither_is_asked_as_ever() -> None:
    assert rendered("always the same", "one") == ["always the same"]
    with pytest.raises(BadRequestError, match="nobody may speak"):
        rendered("{{ raise_exception('nobody may speak') }}", "one")
