"""Text that grows token by token equals the text of all tokens at once."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.shared.parameters import Sampling
from inference import demo
from inference.worker import llama
from inference.worker.answers.generation import Detokenizer
from inference.worker.api.response_writer import Logprobs
from inference.worker.llama.binding import lib
from tests.rigs import tiny_spm
from tests.rigs.engine_rig import EngineRig, engine_rig, start
from tests.rigs.worker_rig import grant_for

PATHS = {"byte-level BPE": lambda: demo.bundled_path("demo"), "SentencePiece with bytes": tiny_spm.vocabulary}
TEXT = st.text("abe hello, water the 漢字 é😀\n\x00ü€") | st.text()


@pytest.fixture(scope="module", params=list(PATHS))
def model(request: pytest.FixtureRequest) -> Iterator[llama.Model]:
    start()
    path = PATHS[request.param]()
    opened = llama.Model(str(path), llama.model_params(grant_for(path), vocab_only=True))
    yield opened
    opened.close()


def at_once(model: llama.Model, tokens: list[int]) -> bytes:
    """The text that llama.cpp gives for `tokens`; after a letter, because it removes a leading space."""
    (letter,) = model.tokenize("a")
    array = (ctypes.c_int32 * (len(tokens) + 1))(letter, *tokens)
    buffer = ctypes.create_string_buffer(64 * len(array) + 64)
    size = lib.llama_detokenize(model.vocab, array, len(array), buffer, len(buffer), False, False)
    assert size > 0
    return buffer.raw[1:size]


def piece_by_piece(model: llama.Model, tokens: list[int]) -> str:
    detokenizer = Detokenizer()
    return "".join([detokenizer.push(model.piece(token)) for token in tokens] + [detokenizer.flush()])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_give_the_same_text_incrementally(model: llama.Model, data: st.DataObject) -> None:
    """Including control tokens, parts of characters and bytes that are not UTF-8."""
    tokens = data.draw(st.lists(st.integers(0, model.n_vocab - 1), max_size=40))
    assert piece_by_piece(model, tokens) == at_once(model, tokens).decode("utf-8", "replace")


@settings(max_examples=150, deadline=None)
@given(text=TEXT)
def test_tokens_of_a_text_give_the_text_incrementally(model: llama.Model, text: str) -> None:
    """No text is shown early that would change later."""
    tokens = model.tokenize(text)
    assert piece_by_piece(model, tokens) == text
    detokenizer = Detokenizer()
    shown = ""
    for token in tokens:
        shown += detokenizer.push(model.piece(token))
        assert text.startswith(shown)


@pytest.fixture(scope="module")
def rig() -> Iterator[EngineRig]:
    with engine_rig(demo.bundled_path("demo"), context_length=256) as opened:
        yield opened


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_bytes_in_log_probabilities_are_those_of_the_text(rig: EngineRig, seed: int) -> None:
    """The temperature is so high that characters are broken. The offset of each token is where its text begins.

    Control tokens have bytes and no text, so the bias excludes them.
    """
    hot = Sampling(temperature=2.0, top_k=0, min_p=0.0, seed=seed, logit_bias=tuple((t, 30.0) for t in range(4, 260)))
    outputs = rig.answer([5, 6, 7], sampling=hot, logprobs=1, max_tokens=20)
    items = [item for output in outputs for item in output.logprobs]
    written = Logprobs("chat")
    written.add(items)
    raw_bytes = bytes(byte for entry in json.loads(written.json())["content"] for byte in entry["bytes"])
    text = "".join(output.text for output in outputs)
    assert raw_bytes.decode("utf-8", "replace") == text
    detokenizer = Detokenizer()
    at = 0
    for item in items:
        assert item.offset == at
        at += len(detokenizer.push(item.piece))
