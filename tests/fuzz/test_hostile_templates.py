"""A hostile chat template of a model file is refused with a message or renders within limits."""

from __future__ import annotations

import pytest

from inference.worker.prompt.templates import ChatTemplate, TemplateProcess
from inference.worker.worker_errors import BadRequestError
from tests.rigs.damaged_gguf import TEMPLATES

MORE = {
    "blocks-too-deep-for-python": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "too-large-a-number": "{{ " + "9" * 5000 + " }}",
    "break-outside": "{% break %}",
    "folded-while-compiling": "{{ '%d' % 'x' }}{{ 1 // 0 }}{{ [1][5] }}{{ {}['a'] }}",
}


@pytest.mark.parametrize("name", sorted({*TEMPLATES, *MORE}))
def test_hostile_template_is_refused_or_renders(name: str) -> None:
    source = {**TEMPLATES, **MORE}[name]
    if isinstance(source, bytes):
        source = source.decode("utf-8", "replace")
    try:
        template = ChatTemplate(
            source, bos="<s>", eos="</s>", control_texts=["<s>", "</s>"], process=TemplateProcess(render_seconds=0.3)
        )
        pieces = template.render([{"role": "user", "content": "hello"}], {}, generate=True)
    except ValueError as error:
        assert str(error).startswith("the chat template ")
    except BadRequestError as error:
        assert error.message.startswith("the model's chat template refused these messages: ")
    else:
        assert sum(map(len, pieces)) <= 2**25
        assert "uid" not in "".join(pieces)
