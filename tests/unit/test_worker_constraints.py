"""Forms as masks over a small vocabulary: answers, rejections and their reasons, limits, caching."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from inference.worker.backend import Mask
from inference.worker.constraints import Compiler
from inference.worker.constraints.compiler import MAX_AHEAD, _Compiled, reason
from inference.worker.constraints.masks import Guide, Scratch
from inference.worker.dialects.forms import (
    AnyText,
    Form,
    Grammar,
    Json,
    Literal,
    Marker,
    OneOf,
    Regex,
    Repeat,
    Sequence,
)
from inference.worker.sampling import ConstrainedSampler
from inference.worker.worker_errors import BadRequestError, ConstraintError
from tests.rigs.vocabularies import PieceVocabulary

pytestmark = pytest.mark.unmeasured

VOCABULARY = PieceVocabulary()
COMPILER = Compiler(VOCABULARY)
CALL, END_CALL, THINK = (VOCABULARY.control(text) for text in ("<tool_call>", "</tool_call>", "<think>"))
END, EOM = (VOCABULARY.control(text) for text in ("</s>", "<|eom|>"))
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


def accepts(form: Form, *parts: str | bytes | int) -> bool:
    """Whether the parts are a complete answer of the form."""
    mask = COMPILER.compile(form, "f").start()
    return VOCABULARY.follow(mask, *parts) and VOCABULARY.may_end(mask)


def begins(form: Form, *parts: str | bytes | int) -> bool:
    """Whether an answer of the form can begin with the parts."""
    mask = COMPILER.compile(form, "f").start()
    return VOCABULARY.follow(mask, *parts) and bool(VOCABULARY.allowed(mask))


ROWS: list[tuple[Form, list[tuple[str | bytes | int, ...]], list[tuple[str | bytes | int, ...]]]] = [
    (Literal('ab"\\é\n'), [('ab"\\é\n',)], [("ab",), ('ab"\\é\nx',), ()]),
    (Literal(""), [()], [("a",)]),
    (Marker("<tool_call>"), [(CALL,)], [("<tool_call>",), ()]),
    (Marker("[CALL]"), [("[CALL]",)], [(CALL,)]),
    (Json(True), [("1",), ('{"a":[null,1.5e3]}',), ('"é"',)], [("01",), ("",), ('{"a":1',), ("nul",)]),
    (Json({"type": "object"}), [("{}",), ('{"a": {}}',)], [("1",), ("[]",), (" {}",), ("{} ",)]),
    (Json(POINT), [('{"x":1}',), ('{ "x": -5 }',), ('{\n  "x": 7\n}',)], [("{}",), ('{"x":1,"y":2}',), ('{"x":1.5}',)]),
    (
        Json({"properties": {"a": {"type": "object"}}, "type": "object"}, closed=True),
        [("{}",), ('{"a":{"b":1}}',)],
        [('{"b":1}',), ('{"a":{},"b":1}',)],
    ),
    (
        Json({"properties": {"a": True}, "type": "object", "additionalProperties": {"type": "null"}}, closed=True),
        [('{"a":1,"b":null}',), ('{"b":null}',)],
        [('{"b":1}',)],
    ),
    (
        Json(
            {
                "oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}],
                "$defs": {
                    "a": {"allOf": [{"$ref": "#/$defs/b"}, {"properties": {"c": True}}], "type": "object"},
                    "b": {"properties": {"b": {"type": "null"}}},
                },
            },
            closed=True,
        ),
        [('{"b":null,"c":1}',), ("null",), ('{"c":1}',)],
        [('{"b":1}',), ('{"x":1}',)],
    ),
    (Regex("[0-9]{2}-[a-z]+"), [("12-ab",)], [("1-a",), ("12-",), ("12-a1",)]),
    (Regex("^a/b$"), [("a/b",)], [("a/b/",), ("^a/b",)]),
    (Regex("^(a|ab)c\\$"), [("ac$",), ("abc$",)], [("abc",)]),
    (AnyText(), [("anything\n{é}",), ()], [(CALL,), (b"\xff",), (b"\xc3",)]),
    (AnyText(("<tool", "é")), [("<too l",), ()], [("a<tool",), ("é",), ("x<tool_call>",), (THINK,)]),
    (Sequence((Literal("a"), Sequence((Literal("b"),)), Marker("<think>"))), [("ab", THINK)], [("ab",), (THINK,)]),
    (Sequence((AnyText(("<x>",)), Literal("<x>"), Json(POINT))), [('hey <x>{"x":1}',), ('<x>{"x":1}',)], [("hey",)]),
    (Sequence((AnyText(), Marker("<tool_call>"), Json(POINT))), [("t", CALL, '{"x":1}'), (CALL, '{"x":2}')], [("t",)]),
    (Sequence((Repeat(Literal("a"), 0, None), Literal("ab"))), [("aaab",), ("ab",)], [("aaa",)]),
    (Sequence((Json(POINT), Marker("</s>"))), [('{"x":1}',)], [()]),
    (Sequence(()), [()], [("a",)]),
    (OneOf((Literal("yes"), Literal("no"))), [("yes",), ("no",)], [("ye",), ("yesno",)]),
    (OneOf((Json(POINT), Json({"type": "string"}))), [('{"x":1}',), ('"s"',)], [("1",)]),
    (
        OneOf((Sequence((Marker("<tool_call>"), Literal("a"))), Literal("b"))),
        [(CALL, "a"), ("b",)],
        [("a",), (CALL, "b")],
    ),
    (Repeat(Literal("a"), 2, 3), [("aa",), ("aaa",)], [("a",), ("aaaa",)]),
    (Repeat(Literal("a"), 0, 0), [()], [("a",)]),
    (Repeat(Literal("a"), 0, 2, Literal(",")), [(), ("a",), ("a,a",)], [("a,",), ("a,a,a",), (",a",)]),
    (
        Repeat(Sequence((Marker("<tool_call>"), Json(POINT), Marker("</tool_call>"))), 1, None, Literal("\n")),
        [(CALL, '{"x":1}', END_CALL), (CALL, '{"x":1}', END_CALL, "\n", CALL, '{"x":2}', END_CALL)],
        [(), (CALL, '{"x":1}'), (CALL, '{"x":1}', END_CALL, "\n")],
    ),
    (Grammar('root ::= "a" [b-d]+ | "x" digits\ndigits ::= [0-9]{2}'), [("abd",), ("x12",)], [("a",), ("x1",)]),
    (Grammar('root ::= whole | "-"\nwhole ::= "w"'), [("w",), ("-",)], [("",)]),
    (Grammar('root ::= [a-z]* "z"'), [("aaz",), ("zz",)], [("a",), ("",)]),
    (Grammar('root ::= "(" root ")" | "\\u0041"'), [("((A))",), ("A",)], [("((A)",)]),
    (Grammar('start: "a" num\nnum: /[0-9]+/'), [("a1",)], [("a",)]),
    (Grammar('start: "v=" %json {"type": "boolean"}'), [("v=true",)], [("v=1",)]),
    (Sequence((Literal("<"), Grammar('root ::= "a"+'), Literal(">"))), [("<aa>",)], [("<>",)]),
]


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_form_accepts_its_answers_only(row: int) -> None:
    form, whole, others = ROWS[row]
    assert [parts for parts in whole if not accepts(form, *parts)] == []
    assert [parts for parts in others if accepts(form, *parts)] == []


def test_end_is_forced_when_nothing_else_is_allowed() -> None:
    """By all tokens that end a generation."""
    mask = COMPILER.compile(Literal("ab"), "f").start()
    assert VOCABULARY.allowed(mask) == set(VOCABULARY.tokens("a") + VOCABULARY.tokens("ab"))
    assert VOCABULARY.follow(mask, "ab")
    assert VOCABULARY.allowed(mask) == {END, EOM}
    mask.accept(EOM)


def test_strings_contain_no_control_tokens_and_no_invalid_bytes() -> None:
    """The text of a control token, written with ordinary tokens, is allowed."""
    text = Json({"type": "string"})
    assert accepts(text, '"<tool_call></s>"')
    for token in (CALL, END_CALL, THINK, END, EOM):
        assert not begins(text, '"a', token)
    for raw in ("\n", "\x00", b"\xff", b"\xed\xa0\x80"):
        assert not begins(text, '"', raw)


def test_white_space_between_tokens_is_bounded() -> None:
    """One space, or a line break with an indentation: white space cannot fill the context."""
    assert accepts(Json(POINT), '{\n\t"x": 1\n}')
    for text in ("{  ", "{\n\n", "{ \n", "{\n \t", "{\r", "{\n" + " " * 25):
        assert not begins(Json(POINT), text)


def test_masked_logits_are_minus_infinity_and_others_are_unchanged() -> None:
    """In place, also in a view with an odd offset."""
    logits = np.linspace(-5, 5, VOCABULARY.n_vocab + 1).astype(np.float32)
    view, before = logits[1:], logits.copy()
    mask = COMPILER.compile(OneOf((Literal("a"), Literal("b"))), "f").start()
    mask.apply(view)
    open_tokens = VOCABULARY.tokens("a", "b") + VOCABULARY.tokens("ab") + VOCABULARY.tokens("abc")
    assert set(np.flatnonzero(np.isfinite(view)).tolist()) <= set(open_tokens)
    assert view[ord("a")] == before[1 + ord("a")]
    assert logits[0] == before[0]


def test_masks_of_one_constraint_are_independent() -> None:
    constraint = COMPILER.compile(Repeat(Literal("a"), 3, 3), "f")
    first, second = constraint.start(), constraint.start()
    assert VOCABULARY.follow(first, "aa")
    assert VOCABULARY.follow(second, "a")
    assert VOCABULARY.follow(first, "a")
    assert VOCABULARY.may_end(first)
    assert not VOCABULARY.may_end(second)


REJECTED = [
    (Json({"type": "array", "uniqueItems": True}), "uniqueItems cannot be enforced (at /uniqueItems)"),
    (Json({"properties": {"a/b": {"not": {}}}}), "not cannot be enforced (at /properties/a~1b/not)"),
    (Json({"$ref": "https://example.com/s.json"}), "points outside the schema"),
    (Json({"$ref": "#"}), "no finite value"),
    (
        Json({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        "no finite value",
    ),
    (Json(False), "which no value satisfies"),
    (Json({"oneOf": [{"type": "integer"}, {"minimum": 3}]}), "several options of oneOf"),
    (Json({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}), "multipleOf"),
    (Json({"type": "string", "pattern": "(?=a)b"}), "pattern has a group"),
    (Json({"minLength": 5, "maxLength": 3, "type": "string"}), "minLength (5) is greater"),
    (Regex("a("), "unclosed group"),
    (Regex("a(?=b)"), "look-around"),
    (Regex("(?:"), "unclosed group"),
    (Regex(""), "empty"),
    (Regex("a" * 9000), "longer than"),
    (Grammar("hello"), "neither GBNF"),
    (Grammar('root ::= "a" other'), "other"),
    (Grammar('root ::= "' + "\\ud83d" + '"'), "half of a surrogate pair"),
    (Grammar("root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "nested too deeply"),
    (Grammar("root ::= " + "\n".join(f"r{n}\nr{n} ::= [ab]" for n in range(600))), "more than 500 rules"),
    (Grammar("start: missing"), "missing"),
    (Grammar('start: %json {"type": "integer", "multipleOf": 123456789}'), "multipleOf"),
    (Grammar('start: %json ["a"]'), "%json"),
    (Grammar("start: " + "a" * 70_000), "at most 65536"),
    (OneOf(()), "has no alternatives"),
    (Repeat(Literal("a"), 3, 2), "repeats"),
    (Repeat(Literal("a"), 0, 10**9), "repeats"),
    (Sequence(tuple(Literal("a") for _ in range(6000))), "parts"),
    (Literal("\ud800"), "half of a surrogate pair"),
]


@pytest.mark.parametrize(("form", "reason"), REJECTED)
def test_form_that_cannot_be_enforced_is_rejected_with_a_reason(form: Form, reason: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        COMPILER.compile(form, "response_format.json_schema.schema")
    assert reason in caught.value.message
    assert caught.value.param == "response_format.json_schema.schema"
    assert caught.value.status == 400


def nested(depth: int) -> Form:
    form: Form = Json(True)
    for _ in range(depth):
        form = Sequence((form,))
    return form


def test_deep_schemas_and_grammars_are_compiled_or_rejected() -> None:
    """Recursion over chains of references and rules is bounded."""
    links = {f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(3000)}
    chain = {"$defs": {**links, "d3000": {"type": "integer"}}, "$ref": "#/$defs/d0"}
    assert accepts(Json(chain), '{"a":{"a":{}}}')
    too_many = {**links, **{f"d{n}": {"type": "object"} for n in range(3000, 11_000)}}
    with pytest.raises(BadRequestError, match="too large"):
        COMPILER.compile(Json({"$defs": too_many, "anyOf": [{"$ref": f"#/$defs/{name}"} for name in too_many]}), "f")
    rules = "\n".join(f"r{n}: r{n + 1}" for n in range(4000))
    assert accepts(Grammar(f'start: r0\n{rules}\nr4000: "a"'), "a")
    with pytest.raises(BadRequestError, match="nested too deeply"):
        COMPILER.compile(nested(20_000), "f")


def test_object_with_the_maximum_of_optional_properties() -> None:
    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}}
    assert begins(Json(wide), "{")


EXPLODING = Regex("(?s).*a.{18}")


def wear_out(mask: Mask) -> ConstraintError:
    """Accept random letters until the automaton of EXPLODING has its maximal size."""
    bits = random.Random(1)
    with pytest.raises(ConstraintError, match="too many states") as caught:
        for _ in range(10_000):
            VOCABULARY.allowed(mask)
            mask.accept(ord(bits.choice("ab")))
    return caught.value


def test_pattern_with_too_many_states_ends_its_answer_with_a_reason() -> None:
    """The memory of its automaton is bounded. Later requests with the same form do not share it."""
    compiler = Compiler(VOCABULARY)
    constraint = compiler.compile(EXPLODING, "f")
    assert compiler.known(compiler.key(EXPLODING, "f")) is constraint
    error = wear_out(constraint.start())
    assert error.status == 400
    assert "send the request again" in error.message
    assert compiler.known(compiler.key(EXPLODING, "f")) is None
    first, second = compiler.compile(EXPLODING, "f"), compiler.compile(EXPLODING, "f")
    assert len({id(constraint), id(first), id(second)}) == 3
    assert "send the request again" not in wear_out(first.start()).message
    mask = second.start()
    assert VOCABULARY.follow(mask, "abab" + "a" + "b" * 18)
    assert VOCABULARY.may_end(mask)


def test_mask_compiles_nothing_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers of a model are generated on one thread."""
    constraint = Compiler(VOCABULARY).compile(EXPLODING, "f")
    begun: list[str] = []
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        begun.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    wear_out(constraint.start())
    assert begun == []
    Compiler(VOCABULARY).compile(Literal("a"), "f")
    assert "constraint" in begun


def test_slow_masks_end_the_answer_with_a_reason() -> None:
    """The time of masks is bounded; each token adds a little to the limit."""
    now = 0.0
    matcher, scratch = _Still(), Scratch(8)
    mask = Guide(matcher, scratch, never, clock=lambda: now)
    for _ in range(1000):
        mask.apply(np.zeros(8, np.float32))
        mask.accept(1)

    def slowly() -> None:
        nonlocal now
        now += 0.3

    matcher.works = slowly
    with pytest.raises(ConstraintError, match="takes too long"):
        for _ in range(4):
            mask.apply(np.zeros(8, np.float32))


class _Runs(PieceVocabulary):
    """With tokens of up to 200 equal letters, like tokens for blanks in some vocabularies."""

    def __init__(self) -> None:
        super().__init__()
        runs = [b"a" * count for count in range(2, 200)]
        self._plain = [*self._plain, *runs]
        self.n_vocab += len(runs)
        self.end_tokens = frozenset(end + len(runs) for end in self.end_tokens)


def test_mask_over_the_limit_of_work_ends_its_answer() -> None:
    vocabulary = _Runs()
    ambiguous = Grammar('start: "b" x\nx: x x x | x x | "a"')
    mask = Compiler(vocabulary).compile(ambiguous, "f").start()
    assert vocabulary.allowed(mask) == {ord("b")}
    mask.accept(ord("b"))
    with pytest.raises(ConstraintError, match=r"too complex.*Too many items"):
        vocabulary.allowed(mask)


def test_panic_of_rust_ends_the_answer_only() -> None:
    """It is a BaseException."""

    class Panic(BaseException):
        pass

    def panic() -> None:
        raise Panic("index out of bounds")

    matcher = _Still()
    matcher.works = panic
    with pytest.raises(ConstraintError, match="index out of bounds"):
        Guide(matcher, Scratch(8), never).accept(1)
    with pytest.raises(ConstraintError, match="index out of bounds"):
        _Compiled(matcher, Scratch(8), shared=False).start()


def never() -> bool:
    raise AssertionError


class _Still:
    """A matcher that allows every token and does not change."""

    def __init__(self) -> None:
        self.works: Callable[[], None] = lambda: None

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        ctypes.memset(address, 0xFF, size)
        self.works()

    def consume_token(self, token: int) -> bool:
        self.works()
        return True

    def deep_copy(self) -> _Still:
        self.works()
        return self

    def is_error(self) -> bool:
        return False


def test_compiled_forms_are_cached_within_limits() -> None:
    """Least recently used forms are dropped over a number or a size."""
    compiler = Compiler(VOCABULARY, kept=2)
    first = compiler.compile(Literal("a"), "f")
    second = compiler.compile(Literal("b"), "f")
    assert compiler.compile(Literal("a"), "g") is first
    third = compiler.compile(Literal("c"), "f")
    assert compiler.compile(Literal("a"), "f") is first
    assert compiler.compile(Literal("c"), "f") is third
    assert compiler.compile(Literal("b"), "f") is not second
    small = Compiler(VOCABULARY, kept_bytes=1)
    assert small.compile(Literal("a"), "f") is small.compile(Literal("a"), "f")


def test_known_form_is_identified_by_its_content() -> None:
    """Equal values of other types, and another order of keys, are other forms."""
    compiler = Compiler(VOCABULARY)
    schema = {"properties": {"a": {"const": 1}, "b": {"const": True}}}
    first = compiler.compile(Json(schema), "f")
    assert compiler.compile(Json({"properties": {"a": {"const": 1}, "b": {"const": True}}}), "g") is first
    others: list[Form] = [
        Json(schema, strict=False),
        Json({"properties": {"b": {"const": True}, "a": {"const": 1}}}),
        Json({"properties": {"a": {"const": True}, "b": {"const": 1}}}),
    ]
    assert [compiler.known(compiler.key(form, "f")) for form in others] == [None, None, None]
    with pytest.raises(BadRequestError, match="nested too deeply"):
        compiler.known(compiler.key(nested(20_000), "f"))


def test_form_compiled_by_many_threads_is_compiled_once() -> None:
    vocabulary = PieceVocabulary()
    compiler = Compiler(vocabulary)
    assert vocabulary.asked == 0
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(compiler.compile(Json(POINT), "f"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    assert vocabulary.asked < 2 * vocabulary.n_vocab


def test_stack_size_of_other_threads_is_not_changed() -> None:
    before = threading.stack_size()
    Compiler(PieceVocabulary()).compile(Literal("a"), "f")
    assert threading.stack_size() == before


def test_llguidance_is_imported_with_the_first_constraint() -> None:
    code = (
        "import sys, inference.worker.constraints, inference.worker.sampling as c\n"
        "inference.worker.constraints.Compiler(None)\n"
        "assert not any(name.startswith('llguidance') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Counted(PieceVocabulary):
    """Counts how often it is read."""

    reads = 0

    def piece(self, token: int, *, special: bool = False) -> bytes:
        self.reads += token == 0
        return super().piece(token, special=special)


def test_vocabulary_is_read_once() -> None:
    vocabulary = Counted()
    compiler = Compiler(vocabulary)
    compiler.read_vocabulary()
    compiler.read_vocabulary()
    assert vocabulary.reads == 1
    compiler.compile(Literal("a"), "f")
    assert vocabulary.reads == 1


def test_very_large_vocabulary_is_read_with_the_first_constraint() -> None:
    vocabulary = Counted()
    vocabulary.n_vocab = MAX_AHEAD + 1
    compiler = Compiler(vocabulary)
    compiler.read_vocabulary()
    assert vocabulary.reads == 0
    vocabulary.n_vocab = PieceVocabulary().n_vocab
    vocabulary.end_tokens = frozenset()
    compiler.read_vocabulary()
    assert vocabulary.reads == 0


def test_vocabulary_without_an_end_token_is_rejected() -> None:

    class Endless(PieceVocabulary):
        def __init__(self) -> None:
            super().__init__()
            self.end_tokens = frozenset()

    with pytest.raises(BadRequestError, match="no token that ends"):
        Compiler(Endless()).compile(Literal("a"), "f")


class Backend:
    """Logits of one row."""

    def __init__(self) -> None:
        self.row = np.zeros(VOCABULARY.n_vocab, np.float32)

    def logits(self, index: int) -> np.ndarray:
        assert index == 3
        return self.row


class Greedy:
    """Draws the largest logit, with a bias."""

    def __init__(self, backend: Backend, bias: dict[int, float] | None = None) -> None:
        self._backend = backend
        self._bias = bias or {}
        self.closed = 0

    def sample(self, index: int) -> int:
        row = self._backend.logits(index).copy()
        for token, value in self._bias.items():
            row[token] += value
        return int(row.argmax())

    def accept(self, tokens: Iterable[int]) -> None:
        self.accepted = [*tokens]

    def close(self) -> None:
        self.closed += 1


def test_constrained_sampler_draws_allowed_tokens() -> None:
    backend = Backend()
    inner = Greedy(backend)
    sampler = ConstrainedSampler(inner, backend, COMPILER.compile(Literal("é!"), "f").start())  # type: ignore[arg-type]
    drawn = []
    for _ in range(10):
        backend.row[:] = np.arange(VOCABULARY.n_vocab)
        drawn.append(sampler.sample(3))
        if drawn[-1] in VOCABULARY.end_tokens:
            break
    assert b"".join(VOCABULARY.piece(token) for token in drawn) == "é!".encode()
    sampler.close()
    assert inner.closed == 1


def test_parameters_that_exclude_all_allowed_tokens_end_the_request_with_a_reason() -> None:
    """For example `ignore_eos` where only the end is allowed."""
    backend = Backend()
    inner = Greedy(backend, dict.fromkeys(VOCABULARY.end_tokens, -np.inf))
    sampler = ConstrainedSampler(inner, backend, COMPILER.compile(Literal("a"), "f").start())  # type: ignore[arg-type]
    backend.row[:] = 0
    assert sampler.sample(3) == ord("a")
    backend.row[:] = 0
    with pytest.raises(ConstraintError, match="ignore_eos"):
        sampler.sample(3)


def test_schema_that_needs_too_much_memory_is_rejected() -> None:
    """It is prepared in a child process once; the next form is compiled."""
    compiler = Compiler(VOCABULARY)
    patterns = Json({"type": "string", "allOf": [{"pattern": f"a.{{{size}}}b"} for size in range(1, 30)]})
    with pytest.raises(BadRequestError, match="too long or too much memory"):
        compiler.compile(patterns, "f")
    compiler.compile(Json({"type": "object"}), "f")
    compiler._trial.close()
    with pytest.raises(BadRequestError, match="too long or too much memory") as caught:
        compiler.compile(patterns, "g")
    assert (caught.value.param, compiler._trial._process) == ("g", None)


MESSAGES = [
    ("NoExtensionBias\n<non-verbose/>", "nothing can satisfy it"),
    ("oneOf constraints are not supported. Enable 'coerce_one_of'", "a value could satisfy several options of oneOf"),
    (
        'at 3(5): invalid regex "(?:a()" (in regex): regex parse error:\n    (?:a()\n    ^\nerror: unclosed group',
        "a regular expression cannot be read: unclosed group",
    ),
    ("regex parse error:", "a regular expression cannot be read: it is malformed"),
    (
        "Unsatisfiable schema: Regex is empty:  (And (SearchRegex /^a$/))",
        "no text has all patterns, formats and lengths",
    ),
    ("Unable to determine if regex is empty: (And (SearchRegex", "too large together"),
    ("Unsatisfiable schema: minLength (4) is greater", "nothing can satisfy it: minLength (4) is greater"),
    (
        "patternProperty regexes /^a/ and /a$/ are not disjoint",
        "a key can match two of patternProperties, /^a/ and /a$/",
    ),
    ('at 1(8): unknown name: "x"', 'in line 1, column 8 of the grammar: unknown name: "x"'),
    ("1(10): lexer error", "in line 1, column 10 of the grammar: this cannot be read"),
    ("circular reference json-schema:///#/$defs/d0", "circular reference what a $ref points at"),
    ("something else: (And (Or a b))", "something else"),
    ("(And (Or a b))", "it is too complex"),
]


@pytest.mark.parametrize(("message", "written"), MESSAGES)
def test_message_has_no_internal_details(message: str, written: str) -> None:
    """No positions in generated grammars, no expressions, no internal addresses."""
    assert written in reason(message)
    assert all(inside not in reason(message) for inside in ("(?:", "(And", "json-schema:", "Unsatisfiable", "at 3("))
    assert len(reason(message * 50)) <= 300
