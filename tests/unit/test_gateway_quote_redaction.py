"""Error messages do not repeat text of the request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.quote_redaction import LEFT_OUT, MAX_CHARS, QUOTE_CHARS, WITHHELD, without_quotes

SECRET = "the mill by the river has a name"


def _body(text: str) -> dict[str, object]:
    return {"model": "a-model-with-a-long-name", "messages": [{"role": "user", "content": [{"text": text}]}], "n": 1}


def test_quotes_are_removed_and_the_rest_is_kept() -> None:
    message = f"invalid value: '{SECRET}' for a-model-with-a-long-name, and again {SECRET[4:]}!"
    left = f"invalid value: '{LEFT_OUT}' for a-model-with-a-long-name, and again{LEFT_OUT}!"
    assert without_quotes(message, _body(f"I say: {SECRET}.")) == left


def test_text_shorter_than_a_quote_is_kept() -> None:
    assert without_quotes("the mill by accident is closed", _body(SECRET)) == "the mill by accident is closed"
    assert without_quotes(SECRET[: QUOTE_CHARS - 1], _body(SECRET)) == SECRET[: QUOTE_CHARS - 1]


def test_error_about_a_very_long_request_is_withheld() -> None:
    assert without_quotes("invalid value somewhere", _body("x" * (MAX_CHARS + 1))) == WITHHELD


@given(before=st.text(max_size=40), quote=st.text(min_size=QUOTE_CHARS, max_size=60), after=st.text(max_size=40))
def test_no_long_quote_is_kept(before: str, quote: str, after: str) -> None:
    kept = without_quotes(before + quote + after, _body(quote))
    pieces = [piece for part in kept.split(LEFT_OUT) for piece in (part[i:] for i in range(len(part)))]
    whole = quote if LEFT_OUT not in quote else ""
    assert not any(piece[:QUOTE_CHARS] in whole for piece in pieces if len(piece) >= QUOTE_CHARS)


def test_quote_that_overlaps_another_string_of_the_request_is_removed() -> None:
    body = {"messages": ["FGHIJKLMNOPQRSTU", "EFGHIJKLMNOP"]}
    assert without_quotes("ABCDEFGHIJKLMNOPQRSTU", body) == f"ABCDE{LEFT_OUT}"
