"""Why a worker ended, read from what it left behind: real abort texts of the backends, statuses, its own words."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.protocol import ExitCause
from inference.workers.exit_cause import Remains, cause_of_text, classify, is_wordless, telling

ABORT, KILL, SEGV, ILL = -6, -9, -11, -4
CORPUS = Path(__file__).parent / "golden" / "abort_texts.txt"


def _corpus() -> list[tuple[str, str, str, tuple[str, ...]]]:
    """(cause, backend, beginning of the telling line, lines) of every block."""
    found = []
    for block in CORPUS.read_text(encoding="utf-8").split("\n== ")[1:]:
        head, *lines = block.rstrip().splitlines()
        cause, backend, _, line = head.split(" | ")
        found.append((cause, backend, line, tuple(lines)))
    return found


TEXTS = _corpus()


@pytest.mark.parametrize(("cause", "line", "lines"), [(text[0], *text[2:]) for text in TEXTS], ids=range(len(TEXTS)))
def test_the_corpus(cause: str, line: str, lines: tuple[str, ...]) -> None:
    earlier = ("llama_context: n_ctx_per_seq (4096) < n_ctx_train (40960)", "", "a warning of another library")
    said = (*earlier, *lines)
    loads = cause in ("oom_load", "startup")
    remains = Remains(1 if loads else ABORT, ready=not loads, last_text="\n".join(said))
    assert classify(remains) == cause
    assert loads or not is_wordless(remains)
    if cause != "startup":
        assert telling(said).startswith(line)


def test_every_backend_is_in_the_corpus() -> None:
    backends = " ".join(text[1] for text in TEXTS)
    for name in ("CUDA", "device-side assert", "cuBLAS", "Metal, initialisation", "ROCm", "RPC", "Vulkan", "host"):
        assert name in backends


def test_who_says_nothing_may_have_been_sent_a_signal() -> None:
    assert is_wordless(Remains(ABORT, last_text="a warning"))
    assert not is_wordless(Remains(ABORT, last_text="a warning\nggml.c:1: GGML_ASSERT(false) failed"))
    assert not is_wordless(Remains(SEGV))
    assert telling(["", "first", "last", " "]) == "last"
    assert telling([]) == ""
    assert cause_of_text("nothing to see") is None


@pytest.mark.parametrize(
    ("remains", "cause"),
    [
        (Remains(KILL, hang=True, requested=True), ExitCause.HANG),
        (Remains(1, failed_cause="oom_load", ready=False), ExitCause.OOM_LOAD),
        (Remains(1, failed_cause="something new", ready=False), ExitCause.STARTUP),
        (Remains(0, requested=True), ExitCause.REQUESTED),
        (Remains(KILL, requested=True), ExitCause.REQUESTED),
        (Remains(0), ExitCause.REQUESTED),
        (Remains(0, ready=False), ExitCause.STARTUP),
        (Remains(KILL), ExitCause.KILLED),
        (Remains(KILL, ready=False, last_text="GGML_ASSERT"), ExitCause.KILLED),
        (Remains(ABORT), ExitCause.ASSERT),
        (Remains(SEGV), ExitCause.ASSERT),
        (Remains(SEGV, has_computed=False), ExitCause.BROKEN_BUILD),
        (Remains(ILL, has_computed=False), ExitCause.BROKEN_BUILD),
        (Remains(ILL, has_computed=False, ready=False), ExitCause.BROKEN_BUILD),
        (Remains(ILL), ExitCause.ASSERT),
        (Remains(SEGV, has_computed=False, build_is_trusted=True), ExitCause.ASSERT),
        (Remains(ABORT, has_computed=False), ExitCause.ASSERT),
        (Remains(SEGV, has_computed=False, last_text="ggml.c:1: GGML_ASSERT(false) failed"), ExitCause.ASSERT),
        (Remains(SEGV, has_computed=False, requested=True), ExitCause.REQUESTED),
        (Remains(ABORT, last_text="CUDA error: out of memory"), ExitCause.OOM_COMPUTE),
        (Remains(ABORT, ready=False, last_text="CUDA error: out of memory"), ExitCause.OOM_LOAD),
        (Remains(ABORT, last_text="alloc: cudaMalloc failed: out of memory"), ExitCause.OOM_COMPUTE),
        (Remains(1, greeted=False, ready=False), ExitCause.STARTUP),
        (Remains(-15), ExitCause.KILLED),
        (Remains(1), ExitCause.ASSERT),
    ],
)
def test_what_is_known_best_counts_first(remains: Remains, cause: ExitCause) -> None:
    assert classify(remains) is cause
