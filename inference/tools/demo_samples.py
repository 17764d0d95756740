"""The vocabulary and the chat format of the demo models, and the corpus as rows of tokens for training.

All choices are drawn from one seeded generator.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from inference.tools import demo_corpus

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

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are the demo model of Headgate.",
    "Answer briefly.",
    "Be polite and precise.",
)
OPENINGS = ("Please tell me: ", "Can you tell me: ", "Hi! ", "I have a question. ", "Tell me, ", "So, ", "Question: ")
CLOSINGS = (" Please.", " Thanks!", " please", " Thank you.")
BATCH_TOKENS = 4096
IGNORED = -100
"""Label of a token that is not trained on (the default `ignore_index` of PyTorch's cross entropy)."""


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


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of packed chats, all [B, T]: input tokens, the next token of each (or IGNORED), and the number of
    its chat.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor


def corpus_texts() -> list[str]:
    """The texts for the vocabulary: questions, answers, dialogues, roles and system prompts."""
    texts = [*SYSTEM_PROMPTS, *OPENINGS, *CLOSINGS]
    for question in demo_corpus.questions():
        texts += [question.ask, *question.also, question.answer]
    for dialogue in demo_corpus.dialogues():
        for turn in dialogue.turns:
            texts += [turn.ask, turn.answer]
    return texts + ["user", "assistant", "system", "tool"] * 8 + ["\n", "\n\n"] * 8


@dataclass(slots=True)
class _Chat:
    """One chat as token ids, with the label of each (the id to predict, or IGNORED)."""

    tokenizer: Tokenizer
    ids: list[int]
    labels: list[int]

    def say(self, role: str, content: str, *, learn: bool = False) -> None:
        head, tail = encode_message(self.tokenizer, role, content)
        self.ids += [*head, *tail]
        spoken = [*tail[:-1], IGNORED] if learn else [IGNORED] * len(tail)
        self.labels += [IGNORED] * len(head) + spoken


def _pack(rows: list[list[_Chat]], length: int) -> Batch:
    """Concatenate the chats of each row, shift the labels by one, cut at `length` and fill with token 0."""
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), IGNORED, dtype=torch.long)
    documents = torch.zeros(len(rows), length, dtype=torch.long)
    for row, chats in enumerate(rows):
        start = 0
        for number, chat in enumerate(chats, start=1):
            room = min(len(chat.ids) - 1, length - start)
            tokens[row, start : start + room] = torch.tensor(chat.ids[:room])
            labels[row, start : start + room] = torch.tensor(chat.labels[1 : room + 1])
            documents[row, start : start + room] = number
            start += room
    return Batch(tokens, labels, documents)


def listed_batch(tokenizer: Tokenizer) -> Batch:
    """The listed questions for measuring, one per row, without a system message."""
    rows = []
    for question in demo_corpus.listed_questions():
        chat = _Chat(tokenizer, [], [])
        chat.say("user", question.ask)
        chat.say("assistant", question.answer, learn=True)
        rows.append([chat])
    return _pack(rows, max(len(row[0].ids) for row in rows))


class Sampler:
    """Draws batches: single questions, with system messages, after other exchanges, with typing errors."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)  # noqa: S311 - repeatable, not secret
        self._questions = demo_corpus.questions()
        self._dialogues = demo_corpus.dialogues()
        weight = {"plain": 1.0, "sum": 0.3, "unknown": 4.0}
        self._weights = [weight[question.kind] for question in self._questions]
        self._sentences = [question.answer for question in self._questions if question.kind == "plain"]

    def batch(self) -> Batch:
        """BATCH_TOKENS tokens: rows of 512 with several chats, or sometimes longer rows with one long chat."""
        length = self._random.choices((512, 2048, 4096), (0.88, 0.05, 0.07))[0]
        return _pack([self._row(length) for _ in range(BATCH_TOKENS // length)], length)

    def _row(self, length: int) -> list[_Chat]:
        chats: list[_Chat] = []
        used = 0
        while used < length:
            chat = self._chat(length - used if length > 512 else self._random.choice((1, 1, 1, 160, 400)))
            chats.append(chat)
            used += len(chat.ids) - 1
        return chats

    def _chat(self, wanted: int) -> _Chat:
        """A chat with at least `wanted` tokens (1: one exchange)."""
        chat = _Chat(self._tokenizer, [], [])
        if self._random.random() < 0.5:
            chat.say("system", self._system())
        while True:
            if self._random.random() < 0.2:
                for turn in self._random.choice(self._dialogues).turns:
                    chat.say("user", self._slip(turn.ask, 0.15))
                    chat.say("assistant", turn.answer, learn=True)
            else:
                self._exchange(chat)
            if len(chat.ids) >= wanted:
                return chat
            if self._random.random() < 0.03:
                self._interrupted(chat)

    def _exchange(self, chat: _Chat) -> None:
        question = self._random.choices(self._questions, self._weights)[0]
        asks = (question.ask, question.ask, *question.also) if question.kind != "unknown" else question.also
        chat.say("user", self._slip(self._random.choice(asks), 0.4))
        chat.say("assistant", question.answer, learn=True)

    def _interrupted(self, chat: _Chat) -> None:
        """An earlier answer that was cut; it is context and not trained."""
        question = self._random.choice(self._questions)
        words = question.answer.split(" ")
        chat.say("user", question.ask)
        chat.say("assistant", " ".join(words[: self._random.randint(1, len(words))][:40]))

    def _system(self) -> str:
        if self._random.random() < 0.8:
            return self._random.choice(SYSTEM_PROMPTS)
        return " ".join(self._random.choices(self._sentences, k=self._random.randint(1, 4)))[:1200]

    def _slip(self, text: str, chance: float) -> str:
        """The question, varied with probability `chance`: case, an omission, an addition, or swapped letters."""
        draw = self._random
        if draw.random() >= chance:
            return text
        match draw.randrange(8):
            case 0:
                return text.lower()
            case 1:
                return text.rstrip("?.!")
            case 2:
                return text.lower().rstrip("?.!")
            case 3:
                return text + " "
            case 4:
                return draw.choice(OPENINGS) + text
            case 5:
                return text + draw.choice(CLOSINGS)
            case 6 if any(character.isdigit() for character in text) or text.count(" ") < 4:
                return text.upper() if draw.random() < 0.1 else text
            case 6:
                words = text.split(" ")
                del words[draw.randrange(len(words))]
                return " ".join(words)
            case _ if any(character.isdigit() for character in text) or len(text) < 12:
                return text
            case _:
                place = draw.randrange(1, len(text) - 2)
                return text[:place] + text[place + 1] + text[place] + text[place + 2 :]
