"""Compiles forms into constraints and caches the most recently used ones.

The first constraint needs llguidance and a trie of the vocabulary. Building the trie holds the GIL, so an idle
worker reads its vocabulary in advance.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from inference.protocol import Code
from inference.worker import malloc_trim
from inference.worker.backend import Constraint, Mask, Vocabulary
from inference.worker.bounded_child import OverLimitsError
from inference.worker.constraints import grammar
from inference.worker.constraints.grammar_trial import Trial
from inference.worker.constraints.masks import Guide, Scratch, guarded
from inference.worker.dialects.forms import Form
from inference.worker.worker_errors import BadRequestError, WorkerError

log = logging.getLogger("headgate.worker.constraints")

STACK_BYTES = 256 << 20
"""Stack of the thread that compiles; only used pages are allocated. llguidance follows references by recursion, at most
10,000 of them with about 8 KiB each; an overflow would end the process."""
MAX_AHEAD = 130_000
"""Largest vocabulary, in tokens, that an idle worker reads in advance. It takes 0.4 kB per token, which stays below the
growth that a reservation allows."""
_COMMON = r'[^"\\\x00-\x1F\x7F]'
_TABLES = [_COMMON + "{1,10}", _COMMON + "{1,30}", _COMMON + "+"]
"""llguidance's own tables except the one for blanks, which takes a sixth of the memory and saves 1 to 2 us per mask.
With 128,256 tokens and no tables, a mask inside a string takes 2 ms instead of 5 us, and the trie takes 34 instead of
54 MB."""
REFUSED_SECONDS = 60.0
"""For this time a refused form is refused again without another trial."""
KEPT = 24
KEPT_BYTES = 32 << 20
"""Limit of the estimated size of the cached constraints, without the growth of their automata."""
_BYTES_EACH = 256 << 10
_BYTES_PER_CHARACTER = 256
"""Measured with schemas of 100 to 1000 properties and rounded up."""
_MAX_REASON_CHARS = 300
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 5000,
    "step_max_items": 100_000,
    "step_lexer_fuel": 200_000,
    "initial_lexer_fuel": 1_000_000,
    "max_lexer_states": 10_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""Limits of one mask and one form. An automaton takes at most 5 MB (10,000 states of 0.5 kB). A mask at a limit takes
about 15 ms (20 items or 14 fuel per microsecond), or 1.1 s for a very ambiguous grammar. Measured."""


class Compiler:
    """Compiles for one worker, one form at a time. Thread-safe.

    The answers of a form share an automaton that grows with their texts, up to a limit. A form whose automaton reached
    the limit is compiled anew for every further request, so that other requests do not use up its limit.
    """

    def __init__(self, vocabulary: Vocabulary, *, kept: int = KEPT, kept_bytes: int = KEPT_BYTES) -> None:
        """Caches the `kept` most recently used constraints within `kept_bytes`."""
        self._vocabulary = vocabulary
        self._most = kept
        self._max_bytes = kept_bytes
        self._compiling = threading.Lock()
        self._cache_lock = threading.Lock()
        self._cache: OrderedDict[bytes, tuple[_Compiled, int]] = OrderedDict()
        self._bytes = 0
        self._trial = Trial(_LIMITS, STACK_BYTES)
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
        """The last refusals of the trial, with their times: a refusal can take seconds."""

    def compile(self, form: Form, param: str) -> Constraint:
        """The constraint of `form`. May take seconds; call it on a thread for slow work.

        Raises BadRequestError with `param`, the field of the request that requires the form, when the form cannot be
        enforced (the message names the schema keyword and its place, the pattern or the grammar), is too large or takes
        too long. Raises WorkerError when no thread or process can be started.
        """
        key = _key(form, param)
        with self._compiling:
            known = self._find(key)
            if known is not None and not known.is_spent:
                return known
            source = self._written(self._trie, form, param)
            if known is None:
                self._try(key, source, param)
            constraint = self._compiled(self._trie, source, param, shared=known is None)
            if known is None:
                self._keep(key, constraint, _BYTES_EACH + _BYTES_PER_CHARACTER * len(source))
            return constraint

    def read_vocabulary(self) -> None:
        """Does the work of the first constraint in advance, unless the vocabulary is too large."""
        if self._vocabulary.n_vocab <= MAX_AHEAD and self._vocabulary.end_tokens:
            with self._compiling:
                _ = self._trie

    @functools.cached_property
    def _trie(self) -> _Trie:
        began = time.monotonic()
        trie = _Trie(self._vocabulary)
        malloc_trim.trim()  # the trie has copied the pieces
        log.info("vocabulary read: %d tokens in %.2f s", self._vocabulary.n_vocab, time.monotonic() - began)
        return trie

    def key(self, form: Form, param: str) -> bytes:
        """A key that equal forms share; raises BadRequestError for a form that is nested too deeply."""
        return _key(form, param)

    def known(self, key: bytes) -> Constraint | None:
        """The cached constraint of a form, if there is one. Does not wait for a compilation."""
        found = self._find(key)
        return None if found is None or found.is_spent else found

    def _find(self, key: bytes) -> _Compiled | None:
        with self._cache_lock:
            if (known := self._cache.get(key)) is None:
                return None
            self._cache.move_to_end(key)
            return known[0]

    def _written(self, trie: _Trie, form: Form, param: str) -> str:
        try:
            source = grammar.written(form, trie.control_tokens, self._vocabulary.end_tokens)
        except grammar.GrammarError as error:
            raise BadRequestError(str(error), param) from None
        except RecursionError:
            raise BadRequestError(_TOO_DEEP, param) from None
        if not source.isprintable() and _has_surrogates(source):
            raise BadRequestError("the required format contains half of a surrogate pair", param)
        return source

    def _try(self, key: bytes, source: str, param: str) -> None:
        """Compiles the grammar in the child process first; raises BadRequestError or WorkerError."""
        tried, refusal = self._refused.get(key, (0.0, ""))
        if not refusal or time.monotonic() - tried > REFUSED_SECONDS:
            refusal = self._refusal(source)
            self._refused.pop(key, None)
            if refusal:
                self._refused[key] = time.monotonic(), refusal
                if len(self._refused) > KEPT:
                    self._refused.popitem(last=False)
        if refusal:
            raise BadRequestError(refusal, param)

    def _refusal(self, source: str) -> str:
        """Why the grammar cannot be compiled; empty if it can. Raises WorkerError."""
        try:
            problem = self._trial.check(source)
        except OverLimitsError:
            return (
                "the required format takes too long or too much memory to compile; use a smaller one, or fewer and "
                "shorter patterns"
            )
        except OSError:
            raise WorkerError(Code.MEMORY_LIMIT_EXCEEDED, "no process could be started", retry_after=1.0) from None
        return problem and f"the required format cannot be enforced: {reason(problem)}"

    def _compiled(self, trie: _Trie, source: str, param: str, *, shared: bool) -> _Compiled:
        matcher = _with_stack(STACK_BYTES, lambda: trie.matcher(source))
        if problem := str(matcher) if isinstance(matcher, BaseException) else matcher.get_error():
            raise BadRequestError(f"the required format cannot be enforced: {reason(problem)}", param)
        return _Compiled(matcher, trie.scratch, shared=shared)

    def _keep(self, key: bytes, constraint: _Compiled, size: int) -> None:
        with self._cache_lock:
            self._bytes += size
            self._cache[key] = constraint, size
            while len(self._cache) > self._most or (self._bytes > self._max_bytes and len(self._cache) > 1):
                _constraint, dropped = self._cache.popitem(last=False)[1]
                self._bytes -= dropped


class _Compiled:
    """A compiled form. Its matcher stays at the beginning; every answer gets a copy that shares the automaton."""

    def __init__(self, matcher: Any, scratch: Scratch, *, shared: bool) -> None:
        self._matcher = matcher
        self._scratch = scratch
        self._shared = shared
        self.is_spent = False

    def start(self) -> Mask:
        """A mask for a new answer. Raises ConstraintError."""
        return Guide(guarded(self._matcher.deep_copy), self._scratch, self._spend)

    def _spend(self) -> bool:
        self.is_spent = True
        return self._shared


class _Trie:
    """llguidance's view of a vocabulary, with tables that make masks inside strings fast."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        if not vocabulary.end_tokens:
            raise BadRequestError("this model has no token that ends an answer, so answers cannot be constrained")
        pieces: list[bytes] = []
        special: list[int] = []
        self.control_tokens: dict[str, int] = {}
        for token in range(vocabulary.n_vocab):
            piece = vocabulary.piece(token)
            if not piece or token in vocabulary.end_tokens:
                piece = vocabulary.piece(token, special=True)
                special.append(token)
                self.control_tokens.setdefault(piece.decode("utf-8", "replace"), token)
            pieces.append(piece)
        self.control_tokens.pop("", None)
        ends = sorted(vocabulary.end_tokens)
        wrapper: Any = _Wrapper(pieces, special, ends[0])
        self._tokenizer = llguidance.LLTokenizer(wrapper, eos_token=ends, slices=_TABLES)
        wrapper.tokens = []  # the tokenizer keeps the wrapper
        self._llguidance = llguidance
        self.scratch = Scratch(vocabulary.n_vocab)

    def matcher(self, source: str) -> Any:
        """A matcher. Its first mask is computed, so that a form that cannot begin is detected."""
        limits = self._llguidance.LLParserLimits(**_LIMITS)
        matcher = self._llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if not matcher.is_error():
            first = matcher.deep_copy()
            first.compute_bitmask()
            if first.is_error():
                return first
        return matcher


class _Wrapper:
    """A vocabulary in the form that LLTokenizer needs."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], end: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = end

    def __call__(self, text: object) -> list[int]:
        """Tokenizes forced text. No text is forced, so this is not called."""
        return []


def _key(form: Form, param: str) -> bytes:
    """A key from the form itself. Writing the form as a grammar first would slow down each use of the cache."""
    try:
        return hashlib.sha256(repr(form).encode("utf-8", "surrogatepass")).digest()
    except RecursionError:
        raise BadRequestError(_TOO_DEEP, param) from None


_TOO_DEEP = "the required format is nested too deeply"


def _with_stack(size: int, work: Callable[[], Any]) -> Any:
    """The result of `work` or its exception. Runs on a thread with a stack of `size` bytes."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    before = threading.stack_size(size)
    try:
        thread = threading.Thread(target=run, name="constraint", daemon=True)
        thread.start()
    except RuntimeError:
        raise WorkerError(Code.MEMORY_LIMIT_EXCEEDED, "no thread could be started", retry_after=1.0) from None
    finally:
        threading.stack_size(before)
    thread.join()
    return results[0]


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def reason(message: str) -> str:
    """The reason for a refusal, from llguidance's message of several lines."""
    lines = message.split("\n")
    detail = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "")
    if detail or "regex parse error" in lines[0]:
        return f"a regular expression cannot be read: {detail or 'it is malformed'}"[:_MAX_REASON_CHARS]
    first = _REFERENCE.sub("what a $ref points at", lines[0].strip())
    for pattern, written in _TRANSLATIONS:
        if found := pattern.search(first):
            return written(found)[:_MAX_REASON_CHARS]
    return (_EXPRESSION.sub("", first).strip() or "it is too complex")[:_MAX_REASON_CHARS]


_REFERENCE = re.compile(r"json-schema:/[^\s'\"]*")
_EXPRESSION = re.compile(r":?\s*\((?:And|Or|Not|SearchRegex|Regex|Concat|Repeat|JsonQuote|Literal)\b.*")
"""A regular expression in llguidance's internal notation."""
_PLAIN = {"lexer error": "this cannot be read"}
_Translation = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]
_TRANSLATIONS: tuple[_Translation, ...] = (
    (re.compile(r"^NoExtension"), lambda found: "nothing can satisfy it"),
    (
        re.compile(r"^oneOf constraints"),
        lambda found: (
            "a value could satisfy several options of oneOf; use anyOf, or a required property whose const differs"
        ),
    ),
    (
        re.compile(r"Regex is empty"),
        lambda found: "nothing can satisfy it: no text has all patterns, formats and lengths of one string",
    ),
    (
        re.compile(r"^Unable to determine if regex is empty"),
        lambda found: (
            "the patterns, formats and lengths of one string are too large together; use fewer or shorter ones"
        ),
    ),
    (re.compile(r"^Unsatisfiable schema: (.*)"), lambda found: f"nothing can satisfy it: {found[1]}"),
    (
        re.compile(r"^patternProperty regexes (.*) are not disjoint"),
        lambda found: f"a key can match two of patternProperties, {found[1]}; write them so that none does",
    ),
    (
        re.compile(r"^(?:at )?([0-9]+)\(([0-9]+)\): (.*)"),
        lambda found: f"in line {found[1]}, column {found[2]} of the grammar: {_PLAIN.get(found[3], found[3])}",
    ),
)
