"""Grammars and patterns were refused although valid, or read as something else."""

from __future__ import annotations

import pytest

from inference.worker.constraints import Compiler
from inference.worker.dialects.forms import Form, Grammar, Regex
from inference.worker.worker_errors import BadRequestError, ConstraintError
from tests.rigs.vocabularies import PieceVocabulary

VOCABULARY = PieceVocabulary()
COMPILER = Compiler(VOCABULARY)

READ: list[tuple[Form, list[str], list[str]]] = [
    (Regex("(?x)a b # c"), ["ab"], ["ab\n", "a b", "ab # c"]),
    (Regex("(?ix)a b"), ["aB"], ["a b"]),
    (Regex("(?i)a b"), ["A b"], ["ab", "a b\n"]),
    (Grammar('root ::= start\nstart ::= "a"'), ["a"], ["start"]),
    (Grammar('root ::= start start-rule # start\nstart ::= "a"\nstart-rule ::= "start" [start]'), ["astarts"], ["aa"]),
    (Grammar('root ::= (("a"{1,3}){1,3})'), ["a", "a" * 9], ["", "a" * 10]),
    (Grammar('root ::= (("ab"+)?)*'), ["", "abab"], ["a"]),
    (Grammar(r"root ::= [^\r\n\x0b\x0c\x85\u2028\u2029]+"), ["a", "\u3000"], ["\x85", "\u2028"]),
    (Grammar(r'root ::= "\u3000" | [\u3040-\u309F\U000E0001] root'), ["\u3000", "あ\U000e0001\u3000"], ["x"]),
    (Grammar("root ::= [a&&b]"), ["a", "&", "b"], ["x"]),
    (Grammar("root ::= [a~~b] [~-]"), ["a~", "~-"], ["x~"]),
    (Grammar("root ::= [+--/]"), ["+", ",", "-", "/"], ["."]),
    (Grammar("root ::= [^!--]"), ["a", "."], ["!", "-", "+"]),
    (Grammar("root ::= [a^-]"), ["a", "^", "-"], ["b"]),
    (Grammar(r"root ::= [\]\[-] [--a]"), ["]-", "[a", "-0"], ["b"]),
    (Grammar('\ufeffroot ::= "a"'), ["a"], ["\ufeffa"]),
    (Grammar('\ufeffstart: "a"'), ["a"], ["\ufeffa"]),
    (Grammar('start: "%json {" // %json {\n'), ["%json {"], ["{}"]),
    (Grammar('start: "a" # %json {'), ["a"], ["a{}"]),
    (Grammar('start: "@part0" /@x\\/y/ // @part0'), ["@part0@x/y"], ["@part0"]),
    (Grammar('start: %json {"type": "integer"} "@" // "\n'), ["3@"], ["3"]),
]


@pytest.mark.parametrize("row", range(len(READ)))
def test_what_is_valid_is_read_as_it_is_meant(row: int) -> None:
    """Comments, names, marks of the encoding and what only looks like a keyword."""
    form, said, unsaid = READ[row]
    constraint = COMPILER.compile(form, "f")

    def accepts(text: str) -> bool:
        mask = constraint.start()
        return VOCABULARY.follow(mask, text) and VOCABULARY.may_end(mask)

    assert all(map(accepts, said))
    assert not any(map(accepts, unsaid))


@pytest.mark.parametrize("name", ["part0", "part1", "other"])
def test_a_grammar_names_no_other(name: str) -> None:
    """Those that a form is written as are none of the caller's: the first of them is the caller's own."""
    with pytest.raises(BadRequestError, match=f"names @{name}, but there is no other grammar"):
        COMPILER.compile(Grammar(f'start: "a" @{name}?'), "grammar")


def test_a_dead_end_is_not_put_down_to_other_parameters() -> None:
    """Only a drawn token that was masked can be."""
    mask = COMPILER.compile(Grammar('start: "a" r\nr: "b" r'), "grammar").start()
    with pytest.raises(ConstraintError, match="other parameters exclude every token"):
        mask.accept(min(VOCABULARY.end_tokens))
