"""A hostile chat template of a model file is refused in words or renders within bounds; it never ends a worker."""

from __future__ import annotations

import pytest

from inference.worker.prompt import rendering
from inference.worker.prompt.templates import ChatTemplate
from inference.worker.worker_errors import BadRequestError
from tests.rigs.damaged_gguf import TEMPLATES

MORE = {
    "blocks-too-deep-for-python": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "too-large-a-number": "{{ " + "9" * 5000 + " }}",
    "break-outside": "{% break %}",
    "folded-while-compiling": "{{ '%d' % 'x' }}{{ 1 // 0 }}{{ [1][5] }}{{ {}['a'] }}",
}


@pytest.mark.parametrize("name", sorted({*TEMPLATES, *MORE}))
def test_it_is_refused_or_renders(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "RENDER_SECONDS", 0.3)
    source = {**TEMPLATES, **MORE}[name]
    if isinstance(source, bytes):
        source = source.decode("utf-8", "replace")
    try:
        template = ChatTemplate(source, bos="<s>", eos="</s>", control_texts=["<s>", "</s>"])
        said = template.render([{"role": "user", "content": "hello"}], {}, generate=True)
    except ValueError as error:
        assert str(error).startswith("the chat template ")
    except BadRequestError as error:
        assert error.message.startswith("the model's chat template refused these messages: ")
    else:
        assert sum(map(len, said)) <= 2**25
        assert "uid" not in "".join(said)
