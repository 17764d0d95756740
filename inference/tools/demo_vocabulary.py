"""The BPE vocabulary and the chat format of the demo models, for training only."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = [
    "CHAT_TEMPLATE",
    "IM_END",
    "IM_START",
    "PAD",
    "SPECIAL_TOKENS",
    "TEXT_END",
    "encode_message",
    "train_tokenizer",
]

TEXT_END = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (TEXT_END, IM_START, IM_END, PAD)
"""Control tokens; their ids are 0 to 3, in this order."""

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is iterable -%}
        {%- for part in content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + text(message['content'] | default('')) -}}
    {%- for call in message['tool_calls'] | default([], true) -%}
        {{- '\\n' if message['content'] | default('') or not loop.first else '' -}}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
        {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt | default(false) -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""ChatML without a default system message and without tools, which the demo models cannot call. A history with tool
calls and results is written out."""


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """Train a byte-level BPE vocabulary on `texts`, with GPT-2's pre-tokenizer (`gpt-2` in llama.cpp).

    All 256 bytes are tokens, so every text can be encoded.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_message(tokenizer: Tokenizer, role: str, content: str) -> tuple[Sequence[int], Sequence[int]]:
    """Return the ids of a message in two parts: its head up to the line end after the role, and the rest.

    For an assistant message the first part is the generation prompt, and the second part up to `<|im_end|>` is the
    answer of the model. The line end after `<|im_end|>` is the last id of the second part.
    """
    head = tokenizer.encode(f"{IM_START}{role}\n", add_special_tokens=False).ids
    tail = tokenizer.encode(f"{content}{IM_END}\n", add_special_tokens=False).ids
    return head, tail
