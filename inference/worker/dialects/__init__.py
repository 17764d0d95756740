"""Detects which family of chat templates a template belongs to.

All parsers follow the same rules. White space next to a marker of reasoning or next to a call belongs to it and is
dropped; other white space is kept. A call begins when its name is known and its arguments open with a brace (or are a
known substitute such as null); from then on the arguments are passed on as they arrive. Until then all text is held
back. Text that turns out not to be a call is content, including its markers.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from inference.worker.dialects.dialect import Dialect
from inference.worker.dialects.families import deepseek, dsml, harmony, hermes, llama3, mistral, qwenxml
from inference.worker.dialects.thinking import Thinking, thinking_of

__all__ = ["Dialect", "detect"]

_JOINED_ARGUMENTS = re.compile(r"""\+\s*[\w.\[\]'"]*arguments['"]?\]?\s*(\+|-?\}\}|-?%\})""")
"""Code of a template that joins the arguments of a call to other text without a filter. They must be text already."""
_OTHER_NOTATIONS = ("<function=", "<arg_key>", "<invoke", "<function name=", "<tool_calls>")
"""Markers that templates of Hermes and Llama 3 do not contain: a template with one of them has another notation."""


def detect(template: str, control_texts: Collection[str], *, presents: bool = True) -> Dialect:
    """The dialect of a chat template. `template`: its source. `control_texts`: the texts of the control tokens of the
    vocabulary. `presents`: whether the rendered prompt contains the tools.

    The dialect is `generic` if the notation of calls is unknown or missing, or if the prompt does not contain the
    tools. Harmony and DeepSeek are exceptions, because their models have tokens for calls: where the prompt does not
    contain the tools, their dialects explain them in a message.
    """
    thinking = thinking_of(template, control_texts)
    text_arguments = _JOINED_ARGUMENTS.search(template) is not None
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return harmony.Harmony(text_arguments=text_arguments, presents=presents)
    if deepseek.CALLS in template:
        fenced = f"{deepseek.FENCE}json" in template
        return deepseek.DeepSeek(thinking, text_arguments=text_arguments, fenced=fenced, presents=presents)
    known = _calling_family(template, thinking, text_arguments=text_arguments) if presents else None
    if known is not None:
        return known
    system = re.search(r"""['"]system['"]""", template) and "ystem role not supported" not in template
    return hermes.Generic(thinking, system=bool(system))


def _calling_family(template: str, thinking: Thinking | None, *, text_arguments: bool) -> Dialect | None:
    """The family whose notation of calls is in a template that presents tools; None where it is unknown."""
    if mistral.CALLS in template:
        lists = mistral.ARGUMENTS not in template
        return mistral.Mistral(thinking, text_arguments=text_arguments, lists=lists, ids=mistral.ID in template)
    if dsml.TOKEN in template:
        block = dsml.OLD if f"{dsml.OLD}>" in template else dsml.NEW
        return dsml.Dsml(thinking, text_arguments=text_arguments, block=block)
    if all(marker in template for marker in (qwenxml.BEGIN, qwenxml.FUNCTION, qwenxml.PARAMETER)):
        return qwenxml.QwenXml(thinking, text_arguments=text_arguments)
    if not any(marker in template for marker in _OTHER_NOTATIONS):
        if hermes.BEGIN in template and re.search(r'\\?"name\\?":', template):
            return hermes.Hermes(thinking, text_arguments=text_arguments)
        if re.search(r"<\|(start_header_id|header_start)\|>", template) and '"parameters"' in template:
            return llama3.Llama3(thinking, text_arguments=text_arguments)
    return None
