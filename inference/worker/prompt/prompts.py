"""Makes token lists out of validated requests and checks that they fit the context; runs off the event loop."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from inference.protocol import Code, context_overflow
from inference.worker.answers.answer_shape import Shape, Shaping
from inference.worker.dialects.answer_parts import Tool, ToolChoice
from inference.worker.dialects.forms import Marker
from inference.worker.prompt.templates import ChatTemplate
from inference.worker.prompt.vision import Image
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import (
    NO_TOOLS,
    NOTHING,
    Begun,
    EmbeddingRequest,
    Facts,
    GenerateRequest,
    Prompt,
    Said,
)

OPENED_CHARS = 256
"""How much of a rendered prompt's end shows what it has opened for the answer, such as a thought."""

TOKENIZER_STACK_BYTES = 256 * 2**20
"""Of threads that tokenize: llama.cpp splits text with recursive regular expressions. Address space only, used as far
as a text needs."""

_NAMES: Mapping[str, tuple[str, str]] = {
    "messages": ("the messages", "the messages take"),
    "prompt": ("the prompt", "the prompt takes"),
    "answer_so_far": ("the prompt", "the prompt and the answer so far take"),
}
"""What sentences about the length of a parameter call it, and how they begin; others go by their own names."""


class Tokenizer(Protocol):
    """What prompts need of a model."""

    @property
    def bos(self) -> int | None:
        """Beginning-of-sequence token."""
        ...

    @property
    def adds_bos(self) -> bool:
        """Whether prompts begin with BOS."""
        ...

    @property
    def longest_piece(self) -> int | None:
        """Most bytes one token can stand for, None when unknown."""
        ...

    @property
    def fill_tokens(self) -> tuple[int, int, int] | None:
        """Tokens before the text that precedes a gap, before the text that follows it, and before what fills it."""
        ...

    def text_of(self, token: int | None) -> str:
        """Text of a special token."""
        ...

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request in tokens: its prompts, how many tokens each answer may have, and the answers' shape.

    `images` are to be held as long as anybody may compute the prompts. The only prompt ends in what was `said` of the
    answer, which `most` counts too.
    """

    prompts: list[array[int]]
    most: int
    shape: Shape
    images: tuple[Image, ...] = ()
    said: Begun = NOTHING


class Prompts:
    """Renders and tokenizes for one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        facts: Facts,
        read_image: Callable[[bytes, str], Image] | None = None,
    ) -> None:
        """`read_image` makes tokens of an image file (and of the parameter to blame), where the model reads images."""
        self._tokenizer = tokenizer
        self._read_image = read_image
        self._template = template
        self._facts = facts
        self._shaping = Shaping(None if template is None else template.dialect, self._control_token)
        self._with_tools = self._shaping
        if template is not None and template.with_tools is not template:
            self._with_tools = Shaping(template.with_tools.dialect, self._control_token)

    def generate(self, request: GenerateRequest) -> Prepared:
        """The prompts' tokens, how many tokens each answer may have, and its shape.

        `max_tokens` is an upper bound, and clients often send a large one: the room beside the longest prompt bounds
        it further, and an answer that reaches the end of the context says `length`. Raises
        BadRequestError(context_length_exceeded) when a prompt leaves no room for a token, or when `max_tokens` alone
        is more than the context, which no prompt could make true.
        """
        most = request.max_tokens
        if most is not None and most > self._facts.context_length:
            raise self._too_large(most, request.max_tokens_param)
        opened = ""
        images: list[Image] = []
        said: list[int] = []
        if request.kind == "chat":
            tokens, opened, images, said = self._chat(
                request.messages,
                request.template_arguments,
                request.continue_final,
                request.tools,
                request.choice,
                request.images,
                request.said,
            )
            prompts = [tokens]
        else:
            if request.said is not None:
                said = self._written(request.prompts[0], request.said.content)
            prompts = [self.completion(prompt, request.suffix) for prompt in request.prompts]
        longest = max(len(tokens) for tokens in prompts)
        room = self._facts.context_length - longest
        if room < 1:
            raise self._too_long(longest, "messages" if request.kind == "chat" else "prompt")
        if len(said) > room:
            raise self._too_long(longest + len(said), "answer_so_far")
        shaping = self._with_tools if _may_call(request.tools, request.choice) else self._shaping
        shape = shaping.shape(request, opened)
        # Held for as long as the answer takes: as a list a token takes 36 bytes, so four.
        packed = [array("i", [*tokens, *said]) for tokens in prompts]
        begun = NOTHING if request.said is None else self._begun(request.said, len(said))
        return Prepared(packed, room if most is None else min(most, room), shape, tuple(images), begun)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        continue_final: bool = False,
        *,
        tools: Sequence[Tool] = (),
        choice: ToolChoice = NO_TOOLS,
    ) -> list[int]:
        """Tokens of rendered messages. With `continue_final` the last one, the assistant's, is left open to go on."""
        return self._chat(messages, arguments, continue_final, tools, choice)[0]

    def _chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        continue_final: bool,
        tools: Sequence[Tool],
        choice: ToolChoice,
        files: Sequence[bytes] = (),
        said: Said | None = None,
    ) -> tuple[list[int], str, list[Image], list[int]]:
        """The prompt's tokens, the end of its text, the images in it, and the tokens of what was `said` behind it."""
        template = self._template
        if template is None:
            raise BadRequestError(
                f"model {self._facts.model_id!r} has no chat template; send text instead of messages",
                "messages",
                code=Code.UNSUPPORTED_PARAMETER,
            )
        template = template.with_tools if _may_call(tools, choice) else template
        # Templates drop what an assistant thought; what a user or the system said they write out.
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
                f"the model's chat template shows {len(images)} of {len(files)} images; only messages of users can "
                "hold them in most templates",
                "messages",
            )
        if not tokens:
            raise BadRequestError("the rendered prompt is empty", "messages")
        if tokens[-1] < 0:
            raise BadRequestError("the rendered prompt ends in an image; let text follow it", "messages")
        if said is None:
            return tokens, opened, images, []
        opened, begun = _opened(template, said.message(), opened)
        before = pieces[-1].rpartition(self._facts.image_marker)[2] if files else pieces[-1]
        return tokens, opened, images, self._behind(before, begun)

    def _image(self, files: Sequence[bytes], index: int) -> Image:
        if index >= len(files) or self._read_image is None:
            raise BadRequestError("the model's chat template shows an image twice, which is not supported", "messages")
        return self._read_image(files[index], "messages")

    def embed(self, request: EmbeddingRequest) -> list[list[int]]:
        """Tokens of every input, with the marks (CLS, SEP, EOS) that the model wants around a text."""
        for item in request.inputs:
            self._check_size(len(item) if isinstance(item, str) else 0, "input")
        inputs = [
            list(item) if isinstance(item, tuple) else self._tokenizer.tokenize(item, add_special=True)
            for item in request.inputs
        ]
        for index, tokens in enumerate(inputs):
            param = "input" if len(inputs) == 1 else f"input[{index}]"
            if not tokens:
                raise BadRequestError(f"{param} is empty", param)
            if len(tokens) > self._facts.context_length:
                raise self._too_long(len(tokens), param)
        return inputs

    def text(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Tokens of a text as they are."""
        return self._tokenizer.tokenize(text, add_special=add_special, parse_special=parse_special)

    def completion(self, prompt: Prompt, suffix: str | None) -> list[int]:
        """Tokens of a prompt to complete, or of the gap between it and `suffix`."""
        return self._plain(prompt) if suffix is None else self._around(prompt, suffix)

    def _plain(self, prompt: Prompt) -> list[int]:
        """A completion prompt is the caller's alone: the texts of special tokens in it mean those tokens."""
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
        """A prompt and what follows the gap, which are text of the caller's own documents: no control tokens in it."""
        marks = self._tokenizer.fill_tokens
        if marks is None:
            raise BadRequestError(
                f"model {self._facts.model_id!r} does not fill gaps; leave suffix out",
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

    def _begun(self, said: Said, tokens: int) -> Begun:
        """`said`, which takes so many tokens; the mark that ends a thought belongs to it."""
        content = len(self._tokenizer.tokenize(said.content)) if said.reasoning else tokens
        return Begun(tokens, max(0, tokens - content), said.content)

    def _written(self, prompt: Prompt, said: str) -> list[int]:
        """Tokens of what was generated behind a completion's prompt, in which no text stands for a control token."""
        tokens = self._tokenizer.tokenize(said)
        is_plain = tokens == self._tokenizer.tokenize(said, parse_special=True)
        return self._behind(prompt, [said]) if is_plain and isinstance(prompt, str) else tokens

    def _behind(self, before: str, pieces: Sequence[str]) -> list[int]:
        """Tokens of what was generated behind the text `before`, as it was then: no token reaches across."""
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
        """Refuses a text that cannot fit whatever its tokens are, before minutes are spent on tokenizing it."""
        longest = self._tokenizer.longest_piece
        if longest is not None and (least := characters // longest) >= self._facts.context_length:
            raise self._too_long(least, param, "at least ")

    def _too_long(self, prompt: int, param: str, about: str = "") -> BadRequestError:
        context = self._facts.context_length
        name, subject = _NAMES.get(param, (param, f"{param} takes"))
        overflow = context_overflow(context, f"{subject} {about}{prompt} tokens")
        is_generated = "embeddings" not in self._facts.capabilities
        room = f" A prompt of up to {context - 1} tokens leaves room for an answer." if is_generated else ""
        return BadRequestError(
            f"{overflow}{room} Shorten {name}, or use a model with a longer context.",
            param,
            code=Code.CONTEXT_LENGTH_EXCEEDED,
            details={"context_length": context, "prompt_tokens": prompt, "max_tokens": None},
        )

    def _too_large(self, most: int, param: str) -> BadRequestError:
        context = self._facts.context_length
        return BadRequestError(
            f"{context_overflow(context, f'{param} is {most}')} The context holds the prompt and the answer together; "
            f"make {param} less than {context}, or leave it out.",
            param,
            code=Code.CONTEXT_LENGTH_EXCEEDED,
            details={"context_length": context, "prompt_tokens": None, "max_tokens": most},
        )


def _may_call(tools: Sequence[Tool], choice: ToolChoice) -> bool:
    return bool(tools) and choice.mode != "none"


def _opened(template: ChatTemplate, message: Mapping[str, Any], opened: str) -> tuple[str, list[str]]:
    """What the assistant's message has opened by its end, and its text, in pieces to be tokenized apart."""
    begun = template.dialect.begun(message, opened=opened)
    pieces = [""]
    for part in begun.parts:
        first, *rest = [part.text] if isinstance(part, Marker) else template.defused(part.text)
        pieces = [*pieces[:-1], pieces[-1] + first, *rest]
    return begun.opened[-OPENED_CHARS:], pieces
