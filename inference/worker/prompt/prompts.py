"""Turns validated requests into token lists that fit the context. Runs off the event loop."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headgate.shared.bodies.openai_bodies import AnswerSoFar
from inference.protocol import Code, context_overflow
from inference.worker.answers.answer_shape import Shape, Shaping
from inference.worker.backend import Vocabulary
from inference.worker.dialects.answer_parts import Tool, ToolChoice
from inference.worker.dialects.forms import Marker
from inference.worker.prompt.templates import ChatTemplate
from inference.worker.prompt.vision import Image
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import (
    NO_PREFIX,
    NO_TOOLS,
    AnswerPrefix,
    Facts,
    GenerateRequest,
    Prompt,
)

OPENED_CHARS = 256
"""Characters at the end of a rendered prompt that are searched for an open part, such as reasoning."""

TOKENIZER_STACK_BYTES = 256 * 2**20
"""Stack of threads that tokenize: llama.cpp splits text with recursive regular expressions. Only address space is
reserved; memory is allocated when it is used."""

_NAMES: Mapping[str, tuple[str, str]] = {
    "messages": ("the messages", "the messages take"),
    "prompt": ("the prompt", "the prompt takes"),
    "answer_so_far": ("the prompt", "the prompt and the answer so far take"),
}
"""For messages about length: by parameter, a name for its value and the beginning of the sentence. Messages about other
parameters use the name of the parameter.
"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request in tokens: its prompts, the maximum number of tokens of each answer, and the answers' shape.

    `images` must be kept alive while the prompts can be computed. Where `prefix` is not empty, the only prompt ends in
    it, and `max_tokens` includes it.
    """

    prompts: list[array[int]]
    max_tokens: int
    shape: Shape
    images: tuple[Image, ...] = ()
    prefix: AnswerPrefix = NO_PREFIX


class Prompts:
    """Renders and tokenizes for one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: Vocabulary,
        template: ChatTemplate | None,
        facts: Facts,
        read_image: Callable[[bytes, str], Image] | None = None,
    ) -> None:
        """`read_image` turns an image file into tokens; its second argument is the parameter that errors name."""
        self._tokenizer = tokenizer
        self._read_image = read_image
        self._template = template
        self._facts = facts
        self._shaping = Shaping(None if template is None else template.dialect, self._control_token)
        self._with_tools = self._shaping
        if template is not None and template.with_tools is not template:
            self._with_tools = Shaping(template.with_tools.dialect, self._control_token)

    def generate(self, request: GenerateRequest) -> Prepared:
        """The prompts in tokens, with the limit and the shape of the answers.

        The limit is the smaller of `max_tokens` and the room after the longest prompt. Raises
        BadRequestError: with context_length_exceeded when a prompt leaves no room for a token or for the answer so far,
        or when `max_tokens` alone is larger than the context; with other codes for what the model does not support.
        """
        limit = request.max_tokens
        if limit is not None and limit > self._facts.context_length:
            raise self._too_large(limit, request.max_tokens_param)
        opened = ""
        images: list[Image] = []
        prefix: list[int] = []
        if request.kind == "chat":
            tokens, opened, images, prefix = self._chat(
                request.messages,
                request.template_arguments,
                request.continue_final,
                request.tools,
                request.choice,
                request.images,
                request.answer_so_far,
            )
            prompts = [tokens]
        else:
            if request.answer_so_far is not None:
                prefix = self._generated(request.prompts[0], request.answer_so_far.content)
            prompts = [self.completion(prompt, request.suffix) for prompt in request.prompts]
        longest = max(len(tokens) for tokens in prompts)
        room = self._facts.context_length - longest
        if room < 1:
            raise self._too_long(longest, "messages" if request.kind == "chat" else "prompt")
        if len(prefix) > room:
            raise self._too_long(longest + len(prefix), "answer_so_far")
        shaping = self._with_tools if _may_call(request.tools, request.choice) else self._shaping
        shape = shaping.shape(request, opened)
        # Arrays take 4 bytes per token instead of 36; they are kept until the answer ends.
        packed = [array("i", [*tokens, *prefix]) for tokens in prompts]
        so_far = request.answer_so_far
        answer_prefix = NO_PREFIX if so_far is None else self._answer_prefix(so_far, len(prefix))
        return Prepared(packed, room if limit is None else min(limit, room), shape, tuple(images), answer_prefix)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        continue_final: bool = False,
        *,
        tools: Sequence[Tool] = (),
        choice: ToolChoice = NO_TOOLS,
    ) -> list[int]:
        """Tokens of rendered messages. With `continue_final` the last message, the assistant's, is left open."""
        return self._chat(messages, arguments, continue_final, tools, choice)[0]

    def _chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        continue_final: bool,
        tools: Sequence[Tool],
        choice: ToolChoice,
        files: Sequence[bytes] = (),
        so_far: AnswerSoFar | None = None,
    ) -> tuple[list[int], str, list[Image], list[int]]:
        """The prompt's tokens, the end of the text up to the answer, its images, and the tokens of `so_far`.

        The text includes `so_far`, the prompt's tokens do not.
        """
        template = self._template
        if template is None:
            raise BadRequestError(
                f"model {self._facts.model_id!r} has no chat template; send text instead of messages",
                "messages",
                code=Code.UNSUPPORTED_PARAMETER,
            )
        template = template.with_tools if _may_call(tools, choice) else template
        # Templates may drop reasoning of the assistant; they write all text of users and the system.
        self._check_size(sum(len(m["content"]) for m in messages if m["role"] in ("user", "system")), "messages")
        shown, variables = template.dialect.prepare(messages[:-1] if continue_final else messages, tools, choice)
        pieces = template.render(shown, {**arguments, **variables}, generate=True)
        opened = "".join(pieces)[-OPENED_CHARS:]
        if continue_final:
            opened, begun = _opened(template, messages[-1], opened)
            pieces = [*pieces[:-1], pieces[-1] + begun[0], *begun[1:]]
        bos = self._tokenizer.text_of(self._tokenizer.bos)
        if self._tokenizer.adds_bos and bos and pieces[0].startswith(bos):
            pieces[0] = pieces[0][len(bos) :]
        self._check_size(sum(map(len, pieces)), "messages")
        tokens = [self._tokenizer.bos] if self._tokenizer.adds_bos and self._tokenizer.bos is not None else []
        images: list[Image] = []
        for piece in pieces:
            first, *rest = piece.split(self._facts.image_marker) if files else [piece]
            tokens += self._tokenizer.tokenize(first, parse_special=True)
            for text in rest:
                images.append(image := self._image(files, len(images)))
                tokens += image.tokens
                tokens += self._tokenizer.tokenize(text, parse_special=True)
        if len(images) != len(files):
            raise BadRequestError(
                f"the model's chat template inserts {len(images)} of {len(files)} images; most templates accept "
                "images in messages of users only",
                "messages",
            )
        if not tokens:
            raise BadRequestError("the rendered prompt is empty", "messages")
        if tokens[-1] < 0:
            raise BadRequestError("the rendered prompt ends in an image; add text after it", "messages")
        if so_far is None:
            return tokens, opened, images, []
        message = {"content": so_far.content, "reasoning_content": so_far.reasoning_content}
        opened, begun = _opened(template, message, opened)
        before = pieces[-1].rpartition(self._facts.image_marker)[2] if files else pieces[-1]
        return tokens, opened, images, self._tokens_after(before, begun)

    def _image(self, files: Sequence[bytes], index: int) -> Image:
        if index >= len(files) or self._read_image is None:
            raise BadRequestError(
                "the model's chat template inserts an image twice, which is not supported", "messages"
            )
        return self._read_image(files[index], "messages")

    def embed(self, texts: Sequence[Prompt]) -> list[list[int]]:
        """Tokens of every input: a text gets the special tokens (CLS, SEP, EOS) that the model needs, tokens stay.

        Raises BadRequestError for an empty input, and for one that is longer than the context.
        """
        for item in texts:
            self._check_size(len(item) if isinstance(item, str) else 0, "input")
        inputs = [
            list(item) if isinstance(item, tuple) else self._tokenizer.tokenize(item, add_special=True)
            for item in texts
        ]
        for index, tokens in enumerate(inputs):
            param = "input" if len(inputs) == 1 else f"input[{index}]"
            if not tokens:
                raise BadRequestError(f"{param} is empty", param)
            if len(tokens) > self._facts.context_length:
                raise self._too_long(len(tokens), param)
        return inputs

    def text(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Tokens of a text."""
        return self._tokenizer.tokenize(text, add_special=add_special, parse_special=parse_special)

    def completion(self, prompt: Prompt, suffix: str | None) -> list[int]:
        """Tokens of a prompt to complete, or with `suffix` of a prompt whose answer fills the gap between the two.

        Raises BadRequestError.
        """
        return self._plain(prompt) if suffix is None else self._around(prompt, suffix)

    def _plain(self, prompt: Prompt) -> list[int]:
        """Texts of special tokens in a completion prompt mean those tokens."""
        if isinstance(prompt, tuple):
            if len(prompt) >= self._facts.context_length:
                raise self._too_long(len(prompt), "prompt")
            return list(prompt)
        self._check_size(len(prompt), "prompt")
        tokens = self._tokenizer.tokenize(prompt, parse_special=True)
        bos = self._tokenizer.bos
        if self._tokenizer.adds_bos and bos is not None and tokens[:1] != [bos]:
            tokens.insert(0, bos)
        if not tokens:
            raise BadRequestError("prompt is empty", "prompt")
        return tokens

    def _around(self, prompt: Prompt, suffix: str) -> list[int]:
        """The texts before and after the gap are documents, so control tokens in them are plain text."""
        marks = self._tokenizer.fill_tokens
        if marks is None:
            raise BadRequestError(
                f"model {self._facts.model_id!r} does not support suffix; remove it",
                "suffix",
                code=Code.UNSUPPORTED_PARAMETER,
            )
        before, after, middle = marks
        self._check_size(len(suffix), "suffix")
        if isinstance(prompt, str):
            self._check_size(len(prompt), "prompt")
            prompt = tuple(self._tokenizer.tokenize(prompt))
        bos = self._tokenizer.bos
        begin = [bos] if self._tokenizer.adds_bos and bos is not None else []
        return [*begin, before, *prompt, after, *self._tokenizer.tokenize(suffix), middle]

    def _answer_prefix(self, so_far: AnswerSoFar, tokens: int) -> AnswerPrefix:
        """The prefix of the answer from `so_far`, which has `tokens` tokens. The marker after reasoning counts as
        reasoning.
        """
        content = len(self._tokenizer.tokenize(so_far.content)) if so_far.reasoning_content else tokens
        return AnswerPrefix(tokens, max(0, tokens - content), so_far.content)

    def _generated(self, prompt: Prompt, text: str) -> list[int]:
        """Tokens of `text`, which was generated after the prompt of a completion. It contains no control tokens."""
        tokens = self._tokenizer.tokenize(text)
        is_plain = tokens == self._tokenizer.tokenize(text, parse_special=True)
        return self._tokens_after(prompt, [text]) if is_plain and isinstance(prompt, str) else tokens

    def _tokens_after(self, before: str, pieces: Sequence[str]) -> list[int]:
        """Tokens of text that was generated after the text `before`. No token crosses the border, as in generation."""
        prompt = self._tokenizer.tokenize(before, parse_special=True)
        both = self._tokenizer.tokenize(before + pieces[0], parse_special=True)
        begins = both[: len(prompt)] == prompt
        tokens = both[len(prompt) :] if begins else self._tokenizer.tokenize(pieces[0], parse_special=True)
        for piece in pieces[1:]:
            tokens += self._tokenizer.tokenize(piece, parse_special=True)
        return tokens

    def _control_token(self, text: str) -> int | None:
        tokens = self._tokenizer.tokenize(text, parse_special=True)
        return tokens[0] if len(tokens) == 1 else None

    def _check_size(self, characters: int, param: str) -> None:
        """Before tokenizing, raises BadRequestError if a text of this length has too many tokens in any case."""
        longest = self._tokenizer.longest_piece
        if longest is not None and (least := characters // longest) >= self._facts.context_length:
            raise self._too_long(least, param, "at least ")

    def _too_long(self, tokens: int, param: str, about: str = "") -> BadRequestError:
        context = self._facts.context_length
        name, subject = _NAMES.get(param, (param, f"{param} takes"))
        overflow = context_overflow(context, f"{subject} {about}{tokens} tokens")
        is_generated = "embeddings" not in self._facts.capabilities
        room = f" A prompt of up to {context - 1} tokens leaves room for an answer." if is_generated else ""
        return BadRequestError(
            f"{overflow}{room} Shorten {name}, or use a model with a longer context.",
            param,
            code=Code.CONTEXT_LENGTH_EXCEEDED,
            details={"context_length": context, "prompt_tokens": tokens, "max_tokens": None},
        )

    def _too_large(self, limit: int, param: str) -> BadRequestError:
        context = self._facts.context_length
        return BadRequestError(
            f"{context_overflow(context, f'{param} is {limit}')} The context holds the prompt and the answer together; "
            f"make {param} less than {context}, or remove it.",
            param,
            code=Code.CONTEXT_LENGTH_EXCEEDED,
            details={"context_length": context, "prompt_tokens": None, "max_tokens": limit},
        )


def _may_call(tools: Sequence[Tool], choice: ToolChoice) -> bool:
    return bool(tools) and choice.mode != "none"


def _opened(template: ChatTemplate, message: Mapping[str, Any], opened: str) -> tuple[str, list[str]]:
    """The end of the text with an open assistant's message, and the message in pieces to be tokenized separately.

    `opened` is the end of the text before the message.
    """
    begun = template.dialect.opening_of(message, opened=opened)
    pieces = [""]
    for part in begun.parts:
        first, *rest = [part.text] if isinstance(part, Marker) else template.pieces(part.text)
        pieces = [*pieces[:-1], pieces[-1] + first, *rest]
    return begun.opened[-OPENED_CHARS:], pieces
