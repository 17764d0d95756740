"""Templates pay for what they build: what may take long is never begun, and ordinary ones are as they ever were."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from inference.worker.prompt import template_metering
from inference.worker.prompt.rendering import Rendering
from inference.worker.prompt.template_sandbox import Sandbox
from tests.rigs.damaged_gguf import TEMPLATES

COSTLY = {
    **{
        name: str(source)
        for name, source in TEMPLATES.items()
        if name.startswith(("shared", "wide", "bytes", "large-"))
    },
    "namespaces": str(TEMPLATES["namespaces-as-text"]),
    "power": "{{ 10 ** 9999999 }}",
    "times": "{{ 'x' * 99999999999 }}{{ [1] * 99999999999 }}",
    "format": "{{ '%99999999999d' % 1 }}",
    "format-filter": "{{ '%99999999999d' | format(1) }}",
    "padded": "{{ 'x'.ljust(99999999999) }}",
    "centered": "{{ 'x' | center(99999999999) }}",
    "words": "{{ lipsum(n=1000000) }}",
    "rounded": "{{ 1 | round(-999999999) }}",
    "time": "{{ strftime_now('%Y' * 40) }}",
    "json-of-many": "{{ ('x' * 9999999)[:] and [text, text] | tojson }}",
    "json-parted-by-much": "{{ [1, 2] | tojson(separators=(text, ':')) }}",
    "json-parted-by-no-text": "{{ [1, 2] | tojson(separators=5) }}",
    "json-of-many-sorted": "{{ ([text] * 300) | tojson(sort_keys=true) }}",
    "many-of-one-text": "{{ (range(9000) | map(attribute='no', default=text) | list) == 1 }}",
    "joined": "{{ range(9000) | map(attribute='no', default=text) | join }}",
    "joined-by": "{{ text.join(range(9000) | list) }}",
    "split": "{% for i in range(9000) %}{% set a = text.split('x') %}{% endfor %}",
    "copied": "{% for i in range(9000) %}{% set a = text.upper() %}{% endfor %}",
    "cut": "{% for i in range(9000) %}{% set a = text[1:] %}{% endfor %}",
    "listed": "{% for i in range(9000) %}{% set a = text | list %}{% endfor %}",
    "added": "{% for i in range(9000) %}{% set a = [text] + [text] %}{% endfor %}",
    "put-in-a-dict": "{% for i in range(9000) %}{% set a = {'a': text} %}{% endfor %}",
    "put-in-a-pair": "{% for i in range(9000) %}{% set a = (text, text) %}{% endfor %}",
    "given-to-a-macro": (
        "{% macro m() %}{{ varargs | length }}{% endmacro %}{% for i in range(9000) %}{{ m([text]) }}{% endfor %}"
    ),
    "large-number": "{{ number + 1 }}",
    "is-upper": "{{ ns is upper }}",
    **{
        f"compared-{call.partition('(')[0].replace(' | ', 'filter-')}": (
            "{% set s = 'a' * 100000 %}{% set p = 'a' * 25000 + 'b' + 'a' * 25000 %}{{ (s" + call + ") | length }}"
        )
        for call in (
            ".rfind(p)",
            ".rindex(p)",
            ".rsplit(p)",
            ".rpartition(p)",
            ".strip(p)",
            ".lstrip(p)",
            ".rstrip(p)",
            " | trim(p)",
            " | trim(chars=p)",
        )
    },
    "compared-in-each-round": "{% for i in range(9000) %}{% set a = text.rfind('y' * 999) %}{% endfor %}",
    "compared-by-a-map": "{{ [text] | map('trim', text) | list }}",
}


@pytest.mark.parametrize("name", sorted(COSTLY))
def test_what_may_take_long_is_not_begun(name: str) -> None:
    """Compiling computes nothing, and the operation is refused before it is done."""
    template = template_metering.Frugal().from_string(COSTLY[name])
    template_metering.begin()
    with pytest.raises(template_metering.CostlyError):
        template.render(text="x" * 20_000, number=2**80)


ORDINARY = """\
{%- macro shown(value, names=['a', 'b'], more={}) -%}
  {%- if value is mapping %}{% for name, item in value | items %}{{ name ~ ':' ~ item }};{% endfor %}
  {%- elif value is string %}{{ value | trim }}{% else %}{{ value | tojson }}{% endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1, found=[], text='') -%}
{%- for message in messages[::-1] -%}
  {%- set index = messages | length - 1 - loop.index0 -%}
  {%- if message.get('role') == 'user' and not message['content'].startswith('<') -%}
    {%- set ns.last = index * 2 // 1 + 1 -%}
    {%- set ns.found = ns.found + [message] -%}
    {%- set ns.text = ns.text + message.content.split('</think>')[-1].strip('\\n') -%}
  {%- endif -%}
{%- endfor -%}
{%- for tool in tools or [] %}{{ shown(tool.function, more={'x': 1}) }}{{ tool | tojson(indent=2) }}{% endfor -%}
{{ ns.last }}{{ ns.found | map(attribute='role') | join(', ') }}{{ ns.text | upper }}
{{- [1, 2] | tojson }}{{ [1, 2] | tojson(separators=(',', ':')) }}
{{- {'b': 1, 'a': tools} | tojson(sort_keys=true) }}
{{- shown([1, {'a': none}]) }}{{ shown(' x ') }}{{ 'aab' | replace('a', 'b') }}{{ 'aab'.replace('a', '') }}
{{- 'a-b'.split('-') | list }}{{ '%' ~ 3 % 2 }}{{ 7 / 2 }}{{ 'ab' * 2 }}{{ missing is defined }}{{ dict(a=1).a }}
{{- messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 'x' if 'ell' in 'hello' else 'y' }}
{% set block %}{{ ns.text }}{{ 1.5 }}{% endset %}{{ block | capitalize }}{{ '.'.join(['p', 'q']) }}{{ true and 'z' }}
{{- ' \n-a-b- '.rsplit('-', 1)[0].strip().lstrip('-').rpartition('-')[2] }}{{ 'xax' | trim('x') }}{{ 5 | trim }}
{{- 'aba'.rfind('a') }}{{ 'aba'.rindex('b') }}{{ ' a b '.rsplit(none, 1)[0].rstrip() }}{{ '' | trim(chars=none) }}
"""
MESSAGES = [{"role": "user", "content": "a</think>\nHello"}, {"role": "user", "content": "<x>"}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]


def test_ordinary_templates_can_afford_themselves() -> None:
    """And write what they write without any bounds, in a thread and in the child."""
    variables: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS}
    expected = Sandbox().from_string(ORDINARY).render(variables)
    rendering = Rendering(ORDINARY)
    assert rendering.text(variables) == expected
    assert rendering._outside is None
    assert Rendering("{{ ''.join(['x']) ~ '{}'.format('y') }}" + ORDINARY).text(variables) == "xy" + expected


def test_a_long_conversation_can_be_searched_and_stripped() -> None:
    """What ordinary templates cut from answers costs little more than what it looks at."""
    source = (
        "{% for m in messages %}{% set c = m.content.rsplit('</think>', 1)[-1].strip('\\n').rstrip() | trim %}"
        "{{ c.rpartition('<tool_call>')[2] }}{{ c.rfind('<|im_start|>') }}{% endfor %}"
    )
    rendering = Rendering(source)
    content = "\n" * 500 + "a" * 20_000
    rendering.text({"messages": [{"role": "assistant", "content": content}] * 200})
    assert rendering._outside is None


def test_one_rendering_does_not_pay_for_another() -> None:
    template = template_metering.Frugal().from_string("{{ ('x' * 40000000) | length }}")
    said: list[str] = []

    def render() -> None:
        template_metering.begin()
        said.append(template.render())

    for _ in range(2):
        render()
    thread = threading.Thread(target=render)
    thread.start()
    thread.join()
    assert said == ["40000000"] * 3
