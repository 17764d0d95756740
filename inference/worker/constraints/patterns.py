"""Translates regular expressions: ECMA 262 patterns and formats of JSON schemas into the dialect of llguidance.

The dialects differ in few places: in the characters of a dot and of \\s, and in the operators inside a character class.
Constructs without a counterpart are refused.
"""

from __future__ import annotations

import re

MAX_LENGTH = 8192
"""Limit in characters."""

_ANY = r"[^\n\r\u{2028}\u{2029}]"
_SPACES = r"\t\n\v\f\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
_SAME = frozenset("dDwWtnrfv")
_PUNCTUATION = frozenset("^$\\.*+?()[]{}|/-\"'#&~,:;<=>@!%_` ")
_GROUPS = ("(?:", "(?<")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(=[A-Za-z_]+)?\}")


_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"

FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
"""Values of `format` that are written as patterns (RFC 3339). Dates are those of the calendar from year 1 on, as
most parsers require; times have no leap second."""

BUILT_IN_FORMATS = frozenset(["duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
"""Values of `format` that llguidance enforces as the JSON-Schema-Test-Suite requires."""


class PatternError(ValueError):
    """The pattern cannot be enforced; the message follows the pattern's name in a sentence."""


def of_ecma(pattern: str) -> str:
    """`pattern` of a JSON schema in the dialect of llguidance; raises PatternError."""
    if len(pattern) > MAX_LENGTH:
        raise PatternError(f"is longer than {MAX_LENGTH} characters")
    return _Ecma(pattern).translated()


def of_whole_text(pattern: str) -> str:
    """A pattern of Rust's dialect that must match a whole text. Anchors at its ends are redundant and dropped.

    Raises PatternError.
    """
    if len(pattern) > MAX_LENGTH:
        raise PatternError(f"is longer than {MAX_LENGTH} characters")
    if not pattern:
        raise PatternError("is empty")
    if re.search(r"\(\?[a-zA-Z]*x", pattern) and "\n" in pattern:
        raise PatternError("spans several lines, which is not supported; write it in one line")
    if pattern.startswith("^"):
        pattern = pattern[1:]
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 1:
        pattern = pattern[:-1]
    return pattern


class _Ecma:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._out: list[str] = []

    def translated(self) -> str:
        while self._at < len(self._text):
            self._one()
        return "".join(self._out)

    def _one(self) -> None:
        text, at = self._text, self._at
        char = text[at]
        if char == "\\":
            self._out.append(self._escape(in_class=False))
        elif char == "[":
            self._class()
        elif char == ".":
            self._out.append(_ANY)
            self._at += 1
        elif char == "(" and text.startswith("(?", at):
            if not text.startswith(_GROUPS, at) or text.startswith(("(?<=", "(?<!"), at):
                raise PatternError(f"has a group {text[at : at + 3]!r}, which cannot be enforced")
            self._out.append("(?:")
            self._at = text.find(">", at) + 1 if text.startswith("(?<", at) else at + 3
            if self._at == 0:
                raise PatternError("has an unterminated group name")
        else:
            self._out.append(f"\\x{ord(char):02x}" if char in "\n\r" else char)
            self._at += 1

    def _escape(self, *, in_class: bool) -> str:
        """The escape at the cursor, which moves past it."""
        rest = self._text[self._at + 1 :]
        if not rest:
            raise PatternError("ends in a backslash")
        self._at += 2
        char = rest[0]
        if char == "s":
            return _SPACES if in_class else f"[{_SPACES}]"
        if char == "S":
            return f"[^{_SPACES}]"
        if char in _SAME:
            return "\\" + char
        if found := _HEX.match(rest):
            self._at += len(found[0]) - 1
            return f"\\u{{{next(group for group in found.groups() if group)}}}"
        if found := _PROPERTY.match(rest):
            self._at += len(found[0]) - 1
            return "\\" + found[0]
        if char in _PUNCTUATION:
            return re.escape(char) if char in "\\^$.|?*+()[]{}-&~#" else ("\\/" if char == "/" else char)
        if char == "c" and len(rest) > 1 and rest[1].isascii() and rest[1].isalpha():
            self._at += 1
            return f"\\x{ord(rest[1].upper()) - 64:02x}"
        if char == "0" and not rest[1:2].isdigit():
            return "\\x00"
        raise PatternError(f"has \\{char}, which cannot be enforced")

    def _class(self) -> None:
        text = self._text
        self._at += 1
        negated = text.startswith("^", self._at)
        self._at += negated
        parts: list[str] = []
        while self._at < len(text) and text[self._at] != "]":
            char = text[self._at]
            if char == "\\":
                if text.startswith("\\b", self._at):
                    self._at += 2
                    parts.append("\\x08")
                else:
                    parts.append(self._escape(in_class=True))
            elif char == "-" and text.startswith("--", self._at):
                raise PatternError("has -- inside brackets, which is ambiguous; write \\-")
            else:
                escape = char in "[&~^" or (char == "-" and (not parts or text.startswith("-]", self._at)))
                parts.append("\\" + char if escape else char)
                self._at += 1
        if self._at >= len(text):
            raise PatternError("has an unterminated bracket")
        self._at += 1
        if not parts:
            self._out.append("(?s:.)" if negated else r"[^\x00-\u{10ffff}]")
            return
        self._out.append(f"[{'^' if negated else ''}{''.join(parts)}]")
