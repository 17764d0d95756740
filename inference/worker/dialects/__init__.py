"""Families of chat templates: decides which one a template belongs to; never renders it.

What a parser shows is written down once, for all of them. White space next to a marker of reasoning or next to a call
belongs to it and is dropped; other white space stays as it is. A call has begun when its name is known and its
arguments open with a brace; from there on they are passed on as the model writes them. Until then everything is held,
and what turns out to be no call is content, its markers included.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from inference.worker.dialects.dialect import Dialect
from inference.worker.dialects.families import deepseek, dsml, harmony, hermes, llama3, mistral, qwenxml
from inference.worker.dialects.families.generic import Generic
from inference.worker.dialects.families.plain import Plain
from inference.worker.dialects.thinking import Thinking, thinking_of

__all__ = ["Dialect", "detect"]

_UNFILTERED = re.compile(r"""\+\s*[\w.\[\]'"]*arguments['"]?\]?\s*(\+|-?\}\}|-?%\})""")
"""Arguments that a template adds to its text as they are."""
_FOREIGN = ("<function=", "<arg_key>", "<invoke", "<function name=", "<tool_calls>")
"""Markers of notations that share a marker with a family here but are not its."""


def detect(template: str, control_texts: Collection[str], *, presents: bool = True) -> Dialect:
    """The dialect of a template's source and of the texts of the vocabulary's control tokens. `presents` says whether
    what the template makes of tools reaches the model, which only rendering it shows.

    A template whose notation of calls is none of these, or that has none, is `generic`; so is one that writes calls and
    presents no tools. No template at all is `plain`. Harmony and DeepSeek explain tools that their templates do not
    present: their models know calls by tokens of their own, whatever a template says.
    """
    if not template.strip():
        return Plain()
    thinking = thinking_of(template, control_texts)
    text = _UNFILTERED.search(template) is not None
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return harmony.Harmony(text_arguments=text, presents=presents)
    if deepseek.CALLS in template:
        fenced = f"{deepseek.FENCE}json" in template
        return deepseek.DeepSeek(thinking, text_arguments=text, fenced=fenced, presents=presents)
    known = _caller(template, thinking, text=text) if presents else None
    if known is not None:
        return known
    system = re.search(r"""['"]system['"]""", template) and "ystem role not supported" not in template
    return Generic(thinking, system=bool(system))


def _caller(template: str, thinking: Thinking | None, *, text: bool) -> Dialect | None:
    """The family whose notation of calls is in a template that presents tools; None where it is nobody's."""
    if mistral.CALLS in template:
        lists = mistral.ARGUMENTS not in template
        return mistral.Mistral(thinking, text_arguments=text, lists=lists, ids=mistral.ID in template)
    if dsml.TOKEN in template:
        block = dsml.OLD if f"{dsml.OLD}>" in template else dsml.NEW
        return dsml.Dsml(thinking, text_arguments=text, block=block)
    if all(marker in template for marker in (qwenxml.BEGIN, qwenxml.FUNCTION, qwenxml.PARAMETER)):
        return qwenxml.QwenXml(thinking, text_arguments=text)
    if not any(marker in template for marker in _FOREIGN):
        if hermes.BEGIN in template and re.search(r'\\?"name\\?":', template):
            return hermes.Hermes(thinking, text_arguments=text)
        if re.search(r"<\|(start_header_id|header_start)\|>", template) and '"parameters"' in template:
            return llama3.Llama3(thinking, text_arguments=text)
    return None
