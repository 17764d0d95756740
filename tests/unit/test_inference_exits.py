"""Causes of worker exits: abort messages of backends, exit statuses, and the worker's own report."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.protocol import ExitCause
from inference.workers.exit_cause import ExitEvidence, cause_of_text, classify, is_silent_abort, most_telling_line
from inference.workers.os_api import LATELY_SECONDS, KernelOomKills

ABORT, KILL, SEGV, ILL = -6, -9, -11, -4
CORPUS = Path(__file__).parent / "golden" / "abort_texts.txt"


def _corpus() -> list[tuple[str, str, str, tuple[str, ...]]]:
    """(cause, backend, start of the most telling line, lines) of each block."""
    found = []
    for block in CORPUS.read_text(encoding="utf-8").split("\n== ")[1:]:
        head, *lines = block.rstrip().splitlines()
        cause, backend, _, line = head.split(" | ")
        found.append((cause, backend, line, tuple(lines)))
    return found


TEXTS = _corpus()


@pytest.mark.parametrize(("cause", "line", "lines"), [(text[0], *text[2:]) for text in TEXTS], ids=range(len(TEXTS)))
def test_each_abort_message_of_the_corpus_has_its_cause(cause: str, line: str, lines: tuple[str, ...]) -> None:
    earlier = ("llama_context: n_ctx_per_seq (4096) < n_ctx_train (40960)", "", "a warning of another library")
    output = (*earlier, *lines)
    loads = cause in ("oom_load", "startup")
    remains = ExitEvidence(1 if loads else ABORT, ready=not loads, last_text="\n".join(output))
    assert classify(remains) == cause
    assert loads or not is_silent_abort(remains)
    if cause != "startup":
        assert most_telling_line(output).startswith(line)


def test_all_backends_are_in_the_corpus() -> None:
    backends = " ".join(text[1] for text in TEXTS)
    for name in ("CUDA", "device-side assert", "cuBLAS", "Metal, initialisation", "ROCm", "RPC", "Vulkan", "host"):
        assert name in backends


def test_abort_without_a_message_is_silent() -> None:
    assert is_silent_abort(ExitEvidence(ABORT, last_text="a warning"))
    assert not is_silent_abort(ExitEvidence(ABORT, last_text="a warning\nggml.c:1: GGML_ASSERT(false) failed"))
    assert not is_silent_abort(ExitEvidence(SEGV))
    assert most_telling_line(["", "first", "last", " "]) == "last"
    assert most_telling_line([]) == ""
    assert cause_of_text("nothing to see") is None


@pytest.mark.parametrize(
    ("remains", "cause"),
    [
        (ExitEvidence(KILL, hang=True, requested=True), ExitCause.HANG),
        (ExitEvidence(1, failed_cause="oom_load", ready=False), ExitCause.OOM_LOAD),
        (ExitEvidence(1, failed_cause="something new", ready=False), ExitCause.STARTUP),
        (ExitEvidence(0, requested=True), ExitCause.REQUESTED),
        (ExitEvidence(KILL, requested=True), ExitCause.REQUESTED),
        (ExitEvidence(0), ExitCause.REQUESTED),
        (ExitEvidence(0, ready=False), ExitCause.STARTUP),
        (ExitEvidence(KILL), ExitCause.KILLED),
        (ExitEvidence(KILL, ready=False, last_text="GGML_ASSERT"), ExitCause.KILLED),
        (ExitEvidence(ABORT), ExitCause.ASSERT),
        (ExitEvidence(SEGV), ExitCause.ASSERT),
        (ExitEvidence(SEGV, has_computed=False), ExitCause.BROKEN_BUILD),
        (ExitEvidence(ILL, has_computed=False), ExitCause.BROKEN_BUILD),
        (ExitEvidence(ILL, has_computed=False, ready=False), ExitCause.BROKEN_BUILD),
        (ExitEvidence(ILL), ExitCause.ASSERT),
        (ExitEvidence(SEGV, has_computed=False, build_is_trusted=True), ExitCause.ASSERT),
        (ExitEvidence(ABORT, has_computed=False), ExitCause.ASSERT),
        (ExitEvidence(SEGV, has_computed=False, last_text="ggml.c:1: GGML_ASSERT(false) failed"), ExitCause.ASSERT),
        (ExitEvidence(SEGV, has_computed=False, requested=True), ExitCause.REQUESTED),
        (ExitEvidence(ABORT, last_text="CUDA error: out of memory"), ExitCause.OOM_COMPUTE),
        (ExitEvidence(ABORT, ready=False, last_text="CUDA error: out of memory"), ExitCause.OOM_LOAD),
        (ExitEvidence(ABORT, last_text="alloc: cudaMalloc failed: out of memory"), ExitCause.OOM_COMPUTE),
        (ExitEvidence(1, hello_received=False, ready=False), ExitCause.STARTUP),
        (ExitEvidence(-15), ExitCause.KILLED),
        (ExitEvidence(1), ExitCause.ASSERT),
    ],
)
def test_cause_follows_from_the_strongest_evidence(remains: ExitEvidence, cause: ExitCause) -> None:
    assert classify(remains) is cause


COUNTERS = {
    "v2": ("0::/service", "sys/fs/cgroup/service/memory.events", "low 0\nhigh 0\nmax 7\noom 1\noom_kill {}\n"),
    "v2 seen from within": ("0::/service", "sys/fs/cgroup/memory.events", "oom_kill {}\noom_group_kill 0\n"),
    "v1": (
        "4:memory:/service",
        "sys/fs/cgroup/memory/service/memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
    ),
    "no groups": ("", "proc/vmstat", "pgfault 5\noom_kill {}\n"),
}


@pytest.mark.parametrize("kind", COUNTERS)
def test_increase_of_a_counter_is_recent_for_a_moment(tmp_path: Path, kind: str) -> None:
    """Kills before the start of the service do not count."""
    groups, name, text = COUNTERS[kind]
    for path, content in (("proc/self/cgroup", groups + "\n" if groups else ""), (name, text.format(3))):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    kills = KernelOomKills(tmp_path)
    assert not kills.is_recent(10.0)
    (tmp_path / name).write_text(text.format(4))
    kills.update(11.0)
    assert kills.is_recent(11.0 + LATELY_SECONDS)
    assert not kills.is_recent(11.1 + LATELY_SECONDS)


def test_missing_or_unreadable_counters_are_no_kills(tmp_path: Path) -> None:
    assert not KernelOomKills(tmp_path).is_recent(0.0)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("oom_kill 1\n")
    kills = KernelOomKills(tmp_path)
    (tmp_path / "proc/vmstat").write_text("oom_kill what\n")
    assert not kills.is_recent(0.0)
    (tmp_path / "proc/vmstat").write_text("oom_kill 9\n")
    assert not kills.is_recent(1.0)
