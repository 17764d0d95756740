"""The joined pieces of an answer are the whole answer, wherever it was cut."""

from __future__ import annotations

import json

import orjson
from hypothesis import given
from hypothesis import strategies as st

from gateway.apis.openai.frames import Data, DeltaKind, Frame
from gateway.routing.resume_policy import ResumeMethod
from gateway.routing.splice import MIN_OVERLAP, SentAnswer, Splice

TEXTS = st.text("ab \n", min_size=1, max_size=60)


def frames_of(text: str, cuts: list[int], name: str) -> list[Frame]:
    """`text` in chunks that end at `cuts`, then the finish."""
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    pieces = [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    deltas = [
        ({"role": "assistant", "content": ""}, None),
        *(({"content": piece}, None) for piece in pieces),
        ({}, "stop"),
    ]
    return [
        Data(
            orjson.dumps(
                {"id": name, "created": 1, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
            ),
            DeltaKind.FINISH if finish else DeltaKind.CONTENT,
        )
        for delta, finish in deltas
    ]


def text_of(frames: list[Frame]) -> str:
    choices = [json.loads(frame.payload)["choices"][0] for frame in frames if isinstance(frame, Data)]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@given(TEXTS, st.lists(st.integers(0, 60), max_size=6), st.lists(st.integers(0, 60), max_size=6), st.integers(0, 60))
def test_two_exact_pieces_join_to_the_whole(text: str, cuts: list[int], more: list[int], at: int) -> None:
    kept = SentAnswer()
    first = [frame for frame in frames_of(text, cuts, "a") if b'"stop"' not in frame.payload][: at + 1]  # type: ignore[union-attr]
    kept.note(first)
    partial = kept.partial
    joint = Splice(kept, partial, ResumeMethod.CONTINUE, ())
    rest = joint.join(frames_of(text[len(partial.content) :], more, "b"))
    kept.note(rest)
    assert partial.content + text_of(rest) == text == kept.partial.content
    assert kept.is_finished


@given(TEXTS, TEXTS, st.integers(0, 60), st.lists(st.integers(0, 120), max_size=8))
def test_repeated_text_is_shown_once(text: str, rest: str, back: int, cuts: list[int]) -> None:
    """Known repetitions are removed; all other text of the cloud is shown."""
    kept = SentAnswer()
    kept.note([frame for frame in frames_of(text, [], "a") if b'"stop"' not in frame.payload])  # type: ignore[union-attr]
    again = text[-back:] if back else ""
    shown = text_of(Splice(kept, kept.partial, ResumeMethod.INSTRUCT, ()).join(frames_of(again + rest, cuts, "b")))
    assert (again + rest).endswith(shown)
    cut = len(again + rest) - len(shown)
    assert text.endswith((again + rest)[:cut])
    assert cut >= len(again) or len(again) < MIN_OVERLAP
