"""Writes a form for llguidance: one grammar in its Lark dialect and the grammars that it names.

Regular parts become one terminal, because llguidance matches terminals greedily and only the inside of a terminal is
divided in all possible ways. A JSON value, a control token or a grammar of the request ends a terminal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from inference.worker.constraints import instances, keywords, patterns
from inference.worker.constraints.schema_limits import Allowance, SchemaError
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

MAX_SOURCE = 65_536
"""Limit of a request's grammar in characters. llguidance follows rules by recursion."""
MAX_RULES = 500
"""Limit of rules in GBNF: the time of the translation grows with their square and is half a second for this number."""
MAX_LARK = 262_144
"""Limit of a form's own grammar in characters, without its schemas and grammars of requests."""
MAX_SCHEMA = 524_288
"""Limit of all lowered schemas of a form in characters of JSON."""
MAX_PARTS = 5000
"""Limit of the parts of a form."""
MAX_REPEATS = 10_000

WHITESPACE = r" |\n(?: {0,24}|\t{0,8})"
"""Between the tokens of a JSON text: nothing, a space, or a line break with its indentation. Bounded, so that
models cannot fill their context with blanks."""
_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""The model chooses all tokens, in its own tokenization."""
_ONE_SPELLING = 'nrbtf\\"'
"""The only escapes in a schema with objects that have named and other keys: with `\\u`, another key could be read as a
named one. So values, too, cannot contain control characters that have none of these escapes."""
_ANYTHING = "/(?s:.*)/"
_IS_LARK = re.compile(r"(?m)^\s*(%llguidance\b|[?!]?start\b[^:\n]*:(?!:))")
_LARK_PIECE = re.compile(
    r'"(?:\\.|[^"\\\n])*"|//[^\n]*|\#[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<grammar>@[A-Za-z0-9_-]+)|(?P<json>%json\b\s*)',
    re.DOTALL,
)
"""The pieces of Lark that are skipped as a whole (texts, comments, patterns), and those that are checked."""
_GBNF_PIECE = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\#[^\n]*|[\w-]+', re.DOTALL)
_CLASS_ITEM = re.compile(r"(\\x[0-9A-Fa-f]{2}|\\.|[^\\])(?:-(\\x[0-9A-Fa-f]{2}|\\.|[^\\]))?", re.DOTALL)
_CLASS_ESCAPES = {char: f"\\x{ord(char):02x}" for char in "&~-^"}
_SPACED = re.compile(r"\(\?[a-wyz]*x[a-z]*(?:-[a-z]+)?\)")
"""The flag at a pattern's beginning that ignores blanks and comments."""
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)


class GrammarError(ValueError):
    """The form cannot be written as a grammar; the message is for the client."""


def written(form: Form, control_tokens: Mapping[str, int], end_tokens: frozenset[int]) -> str:
    """The grammar of `form` as JSON text for llguidance; raises GrammarError.

    A marker of an end token ends the answer and is written as an empty text.
    """
    writer = _Writer(control_tokens, end_tokens)
    writer.start(form)
    return writer.text()


class _Writer:
    def __init__(self, control_tokens: Mapping[str, int], end_tokens: frozenset[int]) -> None:
        self._control_tokens = control_tokens
        self._end_tokens = end_tokens
        self._rules: list[str] = []
        self._grammars: list[dict[str, Any]] = []
        self._schemas: dict[str, str] = {}
        self._schema_size = 0
        self._allowance = Allowance()
        self._parts = 0

    def start(self, form: Form) -> None:
        """Writes the whole form."""
        expression = self._rule(form)
        self._rules.insert(0, f"start: {expression}")

    def text(self) -> str:
        """The JSON text of all grammars."""
        lark = _OPTIONS + "\n".join(self._rules) + "\n"
        if len(lark) > MAX_LARK:
            raise GrammarError(f"the required format takes {len(lark)} characters as a grammar; at most {MAX_LARK}")
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._grammars]}, ensure_ascii=False)

    # --- terminals ---------------------------------------------------------------------------------------------------
    def _is_regular(self, form: Form) -> bool:
        if isinstance(form, Marker):
            return form.text not in self._control_tokens
        if isinstance(form, (Sequence, OneOf)):
            return all(self._is_regular(part) for part in form.parts)
        if isinstance(form, Repeat):
            return self._is_regular(form.part) and (form.between is None or self._is_regular(form.between))
        return not isinstance(form, (Json, Grammar))

    def _terminal(self, form: Form) -> str:
        self._count()
        if isinstance(form, (Literal, Marker)):
            return _quoted(form.text)
        if isinstance(form, Regex):
            return f"/{_regex(form.pattern)}/"
        if isinstance(form, AnyText):
            without, unopened = _any_of(form.without), _any_of(form.unopened)
            never = [f"~/(?s:.*)({without})(?s:.*)/"] if without else []
            never += [f"~/\\s*({unopened})(?s:.*)/"] if unopened else []
            return f"({' & '.join([_ANYTHING, *never])})" if never else _ANYTHING
        return self._composed(form, self._terminal)

    # --- rules -------------------------------------------------------------------------------------------------------
    def _rule(self, form: Form) -> str:
        if self._is_regular(form):
            return self._named_terminal(self._terminal(form))
        self._count()
        if isinstance(form, Marker):
            token = self._control_tokens[form.text]
            return '""' if token in self._end_tokens else f"<[{token}]>"
        if isinstance(form, Json):
            return f"@{self._json(form)}"
        if isinstance(form, Grammar):
            return f"@{self._grammar(form)}"
        if isinstance(form, Sequence):
            return self._runs(form)
        return self._composed(form, self._rule)

    def _runs(self, form: Sequence) -> str:
        """Joins adjacent regular parts into one terminal."""
        pieces: list[str] = []
        run: list[Form] = []
        for part in [*_flat(form), None]:
            if part is not None and self._is_regular(part):
                run.append(part)
                continue
            if run:
                pieces.append(self._rule(Sequence(tuple(run))))
                run = []
            if part is not None:
                pieces.append(self._rule(part))
        return f"({' '.join(pieces)})"

    def _composed(self, form: Form, write: Callable[[Form], str]) -> str:
        if isinstance(form, Sequence):
            return f"({' '.join(write(part) for part in form.parts)})" if form.parts else '""'
        if isinstance(form, OneOf):
            if not form.parts:
                raise GrammarError("a choice has no alternatives")
            return f"({' | '.join(dict.fromkeys(write(part) for part in form.parts))})"
        assert isinstance(form, Repeat)
        return self._repeat(form, write)

    def _repeat(self, form: Repeat, write: Callable[[Form], str]) -> str:
        least, most = form.least, form.most
        if not 0 <= least <= (least if most is None else most) <= MAX_REPEATS:
            highest = "any number of" if most is None else most
            raise GrammarError(f"a part repeats {least} to {highest} times; the limit is {MAX_REPEATS} times")
        if most == 0:
            return '""'
        if form.between is None or most == 1:
            return f"({write(form.part)}){_times(least, most)}"
        rest = (
            f"({write(form.between)} {write(form.part)}){_times(max(least, 1) - 1, None if most is None else most - 1)}"
        )
        whole = f"({write(form.part)} {rest})"
        return f"{whole}?" if least == 0 else whole

    def _named_terminal(self, expression: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def _count(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise GrammarError(f"the required format has more than {MAX_PARTS} parts")

    # --- grammars ----------------------------------------------------------------------------------------------------
    def _json(self, form: Json) -> str:
        lowered = _lowered(form.schema, self._allowance, strict=form.strict, closed=form.closed)
        if not form.strict:
            lowered["x-guidance"]["lenient"] = True
        text = json.dumps(lowered, ensure_ascii=False)
        if (name := self._schemas.get(text)) is not None:
            return name
        self._schema_size += len(text)
        if self._schema_size > MAX_SCHEMA:
            raise GrammarError(f"the schema is too large: more than {MAX_SCHEMA} characters")
        name = self._schemas[text] = self._add("json_schema", lowered)
        return name

    def _grammar(self, form: Grammar) -> str:
        if len(form.source) > MAX_SOURCE:
            raise GrammarError(f"the grammar has {len(form.source)} characters; at most {MAX_SOURCE} are allowed")
        source = form.source.removeprefix("\ufeff")
        lark = _with_schemas(source, self._allowance) if _IS_LARK.search(source) else _of_gbnf(source)
        return self._add("lark_grammar", lark)

    def _add(self, kind: str, value: Any) -> str:
        name = f"part{len(self._grammars)}"
        self._grammars.append({"name": name, kind: value})
        return name


def _flat(form: Sequence) -> list[Form]:
    """The parts with nested sequences flattened."""
    flat: list[Form] = []
    for part in form.parts:
        flat += _flat(part) if isinstance(part, Sequence) else [part]
    return flat


def _times(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\u007f", "\\u007f")


def _escaped(text: str) -> str:
    """A text escaped for a pattern between slashes."""
    return "".join(char if char.isalnum() and char.isascii() else f"\\u{{{ord(char):x}}}" for char in text)


def _any_of(texts: tuple[str, ...]) -> str:
    return "|".join(_escaped(text) for text in texts if text)


def _regex(pattern: str) -> str:
    """A request's pattern between slashes."""
    try:
        pattern = patterns.of_whole_text(pattern)
    except patterns.PatternError as error:
        raise GrammarError(f"the regular expression {error}") from None
    pattern = re.sub(r"\\(.)|/", _slash, pattern, flags=re.DOTALL)
    pattern = pattern.replace("\n", "\\n").replace("\r", "\\r")
    end = "\n" if _SPACED.match(pattern) else ""  # ends a comment
    return f"(?:{pattern}{end})"


def _slash(found: re.Match[str]) -> str:
    return "\\/" if found[0] in ("/", "\\/") else found[0]


def _lowered(
    value: Mapping[str, Any] | bool, allowance: Allowance, *, strict: bool, closed: bool = False
) -> dict[str, Any]:
    try:
        lowered = keywords.lower(value, strict=strict, allowance=allowance, closed=closed)
    except SchemaError as error:
        raise GrammarError(f"the schema cannot be enforced: {error}") from None
    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
    if instances.has_open_names(lowered):
        options["json_allowed_escapes"] = _ONE_SPELLING
    return {**lowered, "x-guidance": options}


def _with_schemas(lark: str, allowance: Allowance) -> str:
    """A request's Lark grammar with its schemas lowered."""
    pieces: list[str] = []
    at = start = 0
    decoder = json.JSONDecoder()
    while found := _LARK_PIECE.search(lark, at):
        at = found.end()
        if found["grammar"]:
            raise GrammarError(
                f"the grammar names {found['grammar'][:80]}, but there is no other grammar; write a rule"
            )
        if found["json"] is None:
            continue
        try:
            value, end = decoder.raw_decode(lark, at)
        except (ValueError, RecursionError):
            raise GrammarError("%json in the grammar must be followed by a JSON schema") from None
        if not isinstance(value, dict):
            raise GrammarError("%json in the grammar must be followed by a JSON schema")
        pieces += [lark[start:at], json.dumps(_lowered(value, allowance, strict=True), ensure_ascii=False)]
        at = start = end
    return "".join(pieces) + lark[start:]


def _of_gbnf(source: str) -> str:
    """GBNF translated to Lark. A grammar without recursion becomes one terminal, which keeps its meaning."""
    from llguidance import gbnf_to_lark as gbnf

    if "::=" not in source:
        raise GrammarError("the grammar is neither GBNF (root ::= ...) nor Lark (start: ...)")
    if source.count("::=") > MAX_RULES:
        raise GrammarError(f"the grammar has more than {MAX_RULES} rules")
    source = _for_lark(_ESCAPE.sub(_plain, source))
    try:
        rules = gbnf.GrammarParser().parse(source)
        gbnf.resolve(rules)
        for rule in rules.values():
            _separate(rule, gbnf)
        lark = "\n".join(str(rule) for rule in rules.values())
        is_regular = rules["start"].alternatives.is_terminal()
    except RecursionError:
        raise GrammarError("the grammar is nested too deeply") from None
    except Exception as error:
        raise GrammarError(f"the grammar cannot be read: {str(error)[:300]}") from None
    name = "WHOLE"
    while name in rules:
        name += "_"
    return re.sub(r"(?m)^start:", f"start: {name}\n{name}:", lark, count=1) if is_regular else lark


def _for_lark(source: str) -> str:
    """Renames a rule `start`, because Lark uses this name for the first rule, and translates brackets to those of
    patterns.
    """
    names = set(_GBNF_PIECE.findall(source))
    name = "start"
    while name in names:
        name += "-rule"

    def piece(found: re.Match[str]) -> str:
        return name if found[0] == "start" else _class(found[0]) if found[0].startswith("[") else found[0]

    return _GBNF_PIECE.sub(piece, source)


def _class(brackets: str) -> str:
    """Characters and ranges, escaped, because `&&`, `~~` and `--` are operators between the brackets of a pattern."""
    negation, inside = ("^", brackets[2:-1]) if brackets.startswith("[^") else ("", brackets[1:-1])

    def item(found: re.Match[str]) -> str:
        return "-".join(_CLASS_ESCAPES.get(char, char) for char in found.groups() if char is not None)

    return f"[{negation}{_CLASS_ITEM.sub(item, inside)}]"


def _separate(node: Any, gbnf: Any) -> None:
    """Adds parentheses around a repetition that is directly inside another one."""
    for part in node.children():
        _separate(part, gbnf)
    if isinstance(node, gbnf.RepetitionNode) and isinstance(node.node, gbnf.RepetitionNode):
        node.node = gbnf.SequenceNode([node.node])


def _plain(escape: re.Match[str]) -> str:
    """The character of a \\u or \\U escape, or an escape if the character has a meaning in grammars."""
    digits = escape[1] or escape[2]
    if digits is None or int(digits, 16) > 0x10FFFF:
        return escape[0]
    char = chr(int(digits, 16))
    if 0xD800 <= ord(char) <= 0xDFFF:
        raise GrammarError(f"the grammar names {escape[0]}, half of a surrogate pair; write the character itself")
    is_plain = ord(char) >= 0x80 or (char.isprintable() and char not in '\\"[]^-/')
    return char if is_plain else f"\\x{ord(char):02x}"
