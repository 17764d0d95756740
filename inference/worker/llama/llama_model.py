"""A loaded GGUF file: weights, vocabulary, metadata and chat templates."""

from __future__ import annotations

import ctypes
import functools
import re
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from inference.protocol import ExitCause
from inference.worker.llama import ggml_library
from inference.worker.llama.binding import lib
from inference.worker.llama.llama_process import without_gil_release
from inference.worker.worker_errors import LoadError

_ATTRIBUTE_UNKNOWN = 1 << 0
_ATTRIBUTE_CONTROL = 1 << 3
_ATTRIBUTE_USER_DEFINED = 1 << 4
_ATTRIBUTE_STRIPS_LEFT = 1 << 7
_PART_CHARS = 2**14
"""Minimum length of the parts in which a text is tokenized; it is cut before control tokens."""
MAX_PIECES = 2**13
"""Size of the cache of token bytes, at 100 bytes per token; a miss costs a microsecond."""
MAX_PROTOTYPES = 32
_EXACT_VOCABULARIES = (1, 2)
"""SentencePiece and byte-level BPE: each byte of a text belongs to exactly one token."""

_to_piece = without_gil_release("llama_token_to_piece")
_vocab_attr = without_gil_release("llama_vocab_get_attr")
_text = without_gil_release("llama_vocab_get_text")
_is_eog = without_gil_release("llama_vocab_is_eog")


class Cutter:
    """Cuts a long text without changing its tokens.

    llama.cpp first divides a text at the texts of special tokens and tokenizes the parts separately, so a cut before
    such a text does not change the result. The time for this division grows with the square of the number of special
    tokens in the text.
    """

    def __init__(self, cuttable: Iterable[str], atoms: Iterable[str], size: int) -> None:
        """Cuts before the texts in `cuttable`, into parts of at least `size` characters.

        `atoms` are all texts at which llama.cpp divides, including `cuttable`.
        """
        longest_first = sorted((text for text in cuttable if text), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._atoms = frozenset(atoms)
        self._lengths = sorted({len(text) for text in self._atoms})
        self._size = size

    def parts(self, text: str) -> list[str]:
        """The parts of `text`, which joined are equal to it."""
        found: list[str] = []
        start, search_from = 0, self._size
        while self._pattern is not None and (match := self._pattern.search(text, search_from)) is not None:
            at = match.start()
            if self._is_inside_another(text, at, start):
                search_from = at + 1
                continue
            found.append(text[start:at])
            start, search_from = at, at + self._size
        return [*found, text[start:]]

    def _is_inside_another(self, text: str, at: int, start: int) -> bool:
        """Whether an atom starts before `at` and ends after it; llama.cpp might divide at that atom."""
        return any(
            text[begin : begin + length] in self._atoms
            for length in self._lengths
            for begin in range(max(start, at - length + 1), at)
        )


class Dry(NamedTuple):
    """Validated settings of the DRY penalty; `last_n` is at least 1."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int
    breakers: tuple[str, ...]


class _DryPrototype:
    """A DRY sampler of llama.cpp without history, freed with this object."""

    def __init__(self, vocab: Any, dry: Dry) -> None:
        breakers = [text.encode("utf-8", "replace") for text in dry.breakers]
        texts = (ctypes.c_char_p * len(breakers))(*breakers)
        self.handle = lib.llama_sampler_init_dry(vocab, *dry[:4], texts, len(breakers))
        weakref.finalize(self, lib.llama_sampler_free, self.handle).atexit = False


class DryPrototypes:
    """DRY samplers of one vocabulary: created once per setting and copied for each answer. Thread-safe.

    To create one, llama.cpp compares each sequence breaker with all tokens of the vocabulary: about 4 ms per breaker
    with 128,000 tokens. A copy takes microseconds.
    """

    def __init__(self, vocab: Any) -> None:
        self._prototype = functools.lru_cache(MAX_PROTOTYPES)(functools.partial(_DryPrototype, vocab))

    def prepare(self, dry: Dry) -> None:
        """Creates the prototype for `sampler` unless it exists. Slow: not for the event loop or the engine thread."""
        self._prototype(dry)

    def sampler(self, dry: Dry) -> Any:
        """A new DRY sampler without history, owned by the caller; slow if `prepare` was not called before."""
        prototype = self._prototype(dry)
        return lib.llama_sampler_clone(prototype.handle)

    def close(self) -> None:
        """Frees the prototypes."""
        self._prototype.cache_clear()


@dataclass(frozen=True, slots=True)
class _Special:
    ends: frozenset[int]
    control_texts: tuple[str, ...]
    longest: int
    cutter: Cutter
    messages: np.ndarray


class Model:
    """A loaded GGUF file: weights and vocabulary. Thread-safe except for `close`."""

    def __init__(self, path: str, params: Any, parts: Sequence[str] = ()) -> None:
        """Loads the file, or its `parts` if their names do not show their order; raises LoadError(OOM_LOAD) when
        llama.cpp returns NULL.
        """
        self._params = params
        self._path = path
        if len(parts) > 1:
            names = (ctypes.c_char_p * len(parts))(*(part.encode() for part in parts))
            handle = lib.llama_model_load_from_splits(names, len(parts), params)
        else:
            handle = lib.llama_model_load_from_file(path.encode(), params)
        if not handle:
            raise LoadError(ExitCause.OOM_LOAD, f"llama.cpp could not load {path}")
        self.handle = handle
        self.vocab = lib.llama_model_get_vocab(handle)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self.vocab))
        self._pieces: dict[int, bytes] = {}
        self.dry = DryPrototypes(self.vocab)

    def close(self) -> None:
        """Frees the weights. Contexts must be closed before."""
        self.dry.close()
        lib.llama_model_free(self.handle)

    @functools.cached_property
    def metadata(self) -> dict[str, str]:
        """All scalar keys of the GGUF file as text."""
        found: dict[str, str] = {}
        buffer = ctypes.create_string_buffer(1 << 20)
        for index in range(lib.llama_model_meta_count(self.handle)):
            if lib.llama_model_meta_key_by_index(self.handle, index, buffer, len(buffer)) < 0:
                continue
            key = buffer.value.decode("utf-8", "replace")
            if lib.llama_model_meta_val_str_by_index(self.handle, index, buffer, len(buffer)) >= 0:
                found[key] = buffer.value.decode("utf-8", "replace")
        return found

    @functools.cached_property
    def template(self) -> str | None:
        """The default chat template of the GGUF file."""
        return self._template(None)

    @functools.cached_property
    def tool_template(self) -> str | None:
        """The separate chat template for chats with tools, if the GGUF file has one."""
        return self._template(b"tool_use")

    @functools.cached_property
    def rerank_template(self) -> str | None:
        """The prompt template of a generative reranker, with the placeholders {query} and {document}."""
        return self._template(b"rerank")

    def _template(self, name: bytes | None) -> str | None:
        text = lib.llama_model_chat_template(self.handle, name)
        return text.decode("utf-8", "replace") if text else None

    @property
    def n_ctx_train(self) -> int:
        """Context length of the training, in tokens."""
        return int(lib.llama_model_n_ctx_train(self.handle))

    @property
    def n_embd(self) -> int:
        """Length of an output embedding."""
        return int(lib.llama_model_n_embd_out(self.handle))

    @property
    def n_scores(self) -> int:
        """Number of outputs of the classification head of a reranker."""
        return int(lib.llama_model_n_cls_out(self.handle))

    @functools.cached_property
    def has_head(self) -> bool:
        """Whether the file has a classification head; llama.cpp does not require one for ranking.

        Its last layer is `cls.output`, or `cls` in Jina's BERT.
        """
        is_jina = self.metadata.get("general.architecture") == "jina-bert-v2"
        in_parts = "split.count" in self.metadata  # a later part may hold the head
        return in_parts or self._has_tensor("cls.weight" if is_jina else "cls.output.weight")

    @functools.cached_property
    def n_positions(self) -> int | None:
        """Size of the table of position embeddings, None without one. llama.cpp aborts for later positions."""
        return self.n_ctx_train if self._has_tensor("position_embd.weight") else None

    def _has_tensor(self, name: str) -> bool:
        """Whether the file, or the first of its parts, contains the tensor."""
        return ggml_library.has_tensor(self._path, name)

    @property
    def generates(self) -> bool:
        """Whether the model is a plain decoder. A decoder may still have no KV cache, which only its context shows."""
        return bool(lib.llama_model_has_decoder(self.handle)) and not lib.llama_model_has_encoder(self.handle)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model is an encoder with a decoder."""
        return bool(lib.llama_model_has_encoder(self.handle)) and bool(lib.llama_model_has_decoder(self.handle))

    @property
    def has_recurrent_state(self) -> bool:
        """Whether the model has recurrent states (recurrent or hybrid), whose parts cannot be removed or copied."""
        return bool(lib.llama_model_is_recurrent(self.handle) or lib.llama_model_is_hybrid(self.handle))

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a generation."""
        return self._special.ends

    @property
    def message_tokens(self) -> np.ndarray:
        """Control tokens (int32) that do not end a generation; templates begin messages with them."""
        return self._special.messages

    @property
    def control_texts(self) -> tuple[str, ...]:
        """Texts that become control tokens when special tokens are parsed, longest first."""
        return self._special.control_texts

    @property
    def longest_piece(self) -> int | None:
        """Maximum bytes of text per token; None if the tokenizer drops or changes text."""
        return self._special.longest if lib.llama_vocab_type(self.vocab) in _EXACT_VOCABULARIES else None

    @functools.cached_property
    def _special(self) -> _Special:
        """Properties of special tokens, from one pass over the vocabulary."""
        ends, texts, messages, longest = set(), set(), [], 1
        atoms, cuttable = set(), set()
        for token in range(self.n_vocab):
            raw = _text(self.vocab, token) or b""
            longest = max(longest, len(raw))
            attributes = _vocab_attr(self.vocab, token)
            if attributes & (_ATTRIBUTE_CONTROL | _ATTRIBUTE_USER_DEFINED | _ATTRIBUTE_UNKNOWN):
                atoms.add(raw.decode("utf-8", "replace"))
                if attributes & _ATTRIBUTE_CONTROL and not attributes & _ATTRIBUTE_STRIPS_LEFT:
                    cuttable.add(raw.decode("utf-8", "replace"))
            is_end = bool(_is_eog(self.vocab, token))
            if is_end:
                ends.add(token)
            elif attributes & _ATTRIBUTE_CONTROL:
                messages.append(token)
            if is_end or attributes & _ATTRIBUTE_CONTROL:
                texts.add(self.text_of(token))
        texts.discard("")
        by_length = tuple(sorted(texts, key=lambda text: (-len(text), text)))
        cutter = Cutter(cuttable, atoms, _PART_CHARS)
        return _Special(frozenset(ends), by_length, longest, cutter, np.array(messages, np.int32))

    @functools.cached_property
    def bos(self) -> int | None:
        """Beginning-of-sequence token, if the vocabulary has one."""
        token = int(lib.llama_vocab_bos(self.vocab))
        return token if token >= 0 else None

    @functools.cached_property
    def eos(self) -> int | None:
        """End-of-sequence token, if the vocabulary has one."""
        token = int(lib.llama_vocab_eos(self.vocab))
        return token if token >= 0 else None

    @functools.cached_property
    def fill_tokens(self) -> tuple[int, int, int] | None:
        """The fill-in-the-middle tokens before the prefix, the suffix and the middle; None if one is missing."""
        before, after, middle = (
            int(token(self.vocab))
            for token in (lib.llama_vocab_fim_pre, lib.llama_vocab_fim_suf, lib.llama_vocab_fim_mid)
        )
        return (before, after, middle) if min(before, after, middle) >= 0 else None

    @property
    def adds_bos(self) -> bool:
        """Whether prompts of the model start with BOS."""
        return bool(lib.llama_vocab_get_add_bos(self.vocab)) and self.bos is not None

    @functools.cached_property
    def sep(self) -> int | None:
        """Separator token, if the vocabulary has one."""
        token = int(lib.llama_vocab_sep(self.vocab))
        return token if token >= 0 else None

    @property
    def adds_eos(self) -> bool:
        """Whether the tokenizer adds EOS to a text."""
        return bool(lib.llama_vocab_get_add_eos(self.vocab)) and self.eos is not None

    @property
    def adds_sep(self) -> bool:
        """Whether the tokenizer adds SEP between two texts."""
        return bool(lib.llama_vocab_get_add_sep(self.vocab)) and self.sep is not None

    def raw_text(self, token: int) -> bytes:
        """The text of a token as the file has it."""
        return _text(self.vocab, token) or b""

    def text_of(self, token: int | None) -> str:
        """The text of a special token, empty for None."""
        return "" if token is None else self.piece(token, special=True).decode("utf-8", "replace")

    @property
    def reads_text(self) -> bool:
        """Whether the model has a vocabulary; without one llama.cpp aborts when text is tokenized."""
        return bool(lib.llama_vocab_type(self.vocab) != lib.LLAMA_VOCAB_TYPE_NONE)

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of `text`; `add_special` adds the tokens that the vocabulary defines (BOS, CLS, SEP, EOS)."""
        if len(text) <= _PART_CHARS or not parse_special:
            return self._tokenize(text, add_special, parse_special)
        marks = self._tokenize("", True, parse_special) if add_special else []
        leading = marks[: 1 if self.adds_bos else 0]
        tokens = leading.copy()
        for part in self._special.cutter.parts(text):
            tokens += self._tokenize(part, False, parse_special)
        return tokens + marks[len(leading) :]

    def _tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        raw = text.encode("utf-8", "replace")
        room = len(raw) + 8
        while True:
            tokens = (ctypes.c_int32 * room)()
            count = lib.llama_tokenize(self.vocab, raw, len(raw), tokens, room, add_special, parse_special)
            if count >= 0:
                return tokens[:count]
            room = -count

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of one token, possibly a part of a character; control tokens are empty unless `special`."""
        key = token if special else ~token
        if (known := self._pieces.get(key)) is not None:
            return known
        buffer = ctypes.create_string_buffer(256)
        size = _to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = _to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        if len(self._pieces) >= MAX_PIECES:
            self._pieces.clear()
        self._pieces[key] = piece = buffer.raw[:size]
        return piece

    def detokenize(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`, including special tokens; invalid UTF-8 becomes U+FFFD."""
        return b"".join(self.piece(token, special=True) for token in tokens).decode("utf-8", "replace")
