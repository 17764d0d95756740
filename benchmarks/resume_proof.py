"""Shows that a resumed greedy answer equals the uninterrupted one, byte for byte, for a cut at every token.

    python -m benchmarks.resume_proof        QUESTIONS=20 EVERY=1 MODELS=demo WAYS=cut,kill TOKENS=32

A complete stack with the bundled models and a proxy between its two services. Each question is answered once without a
fault, and then once for every EVERYth frame with text: there the connection is cut (`cut`), or the worker process is
killed (`kill`), so that the model is loaded again. Text, finish reason and token counts must be equal. The route has
one model only, because another model would continue with another text.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import Bar
from tests.rigs.cutting_proxy import Break, CuttingProxy
from tests.rigs.processes import is_alive, wait_until
from tests.rigs.stack import Stack, chat_body

QUESTIONS = (
    "Why is the sky blue?",
    "Tell me about a mill.",
    "What is your name?",
    "What is a headgate?",
    "Hello!",
    "Count to ten.",
    "Tell me a story.",
    "Write a short poem about rain.",
    "What is the capital of France?",
    "What is water?",
    "Good morning!",
    "What is 12 + 7?",
    "How many days are in a week?",
    "What do bees make?",
    "What color is grass?",
    "Say hello in three ways.",
    "What is 3 + 4?",
    "Name a fruit.",
    "Why do birds sing?",
    "What is the opposite of hot?",
)

GATEWAY = """
routes:
  "*": {{chain: ["local/*"]}}
breaker: {{failures: 1000000, min_requests: 1000000}}
stream_interval: {interval}
"""
MODEL = "  {name}: {{path: 'bundled:{name}', context_length: 512, parallel: 2}}\n"
WAYS = ("cut", "kill")


@dataclass(frozen=True)
class Answered:
    """One answer as the client receives it."""

    text: str
    finish: str | None
    prompt_tokens: int
    completion_tokens: int
    frames: int = field(compare=False)
    resumed: bool = field(compare=False)


@dataclass(frozen=True)
class Cut:
    """One answer that was interrupted after `frame` frames with text."""

    model: str
    question: str
    way: str
    frame: int
    same: bool
    seconds: float
    difference: str = ""


class Proof:
    """The running stack, a context manager. With an `interval` above 0 a frame may hold several tokens."""

    def __init__(
        self, root: Path, models: tuple[str, ...] = ("demo",), tokens: int = 32, *, interval: str = "0"
    ) -> None:
        self._tokens = tokens
        text = "models:\n" + "".join(MODEL.format(name=name) for name in models)
        self._stack = Stack(root, models=text, gateway=GATEWAY.format(interval=interval))
        self._proxy = CuttingProxy(self._stack.inference.port)

    def __enter__(self) -> Proof:
        self._proxy.__enter__()
        try:
            self._stack.front.env = {**self._stack.front.env, "GATEWAY_INFERENCE__URL": self._proxy.url}
            self._stack.start()
        except BaseException:
            self._proxy.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.kill()
        self._proxy.__exit__()

    def ask(self, model: str, question: str) -> Answered:
        """Returns the streamed answer. Raises AssertionError without `[DONE]`."""
        body = chat_body(question, model, stream=True, stream_options={"include_usage": True}, max_tokens=self._tokens)
        request = urllib.request.Request(
            self._stack.base_url + "/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._stack.key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            lines = [line.strip() for line in answer.read().decode().splitlines() if line.strip()]
        assert lines[-1] == "data: [DONE]", lines[-1]
        return _read(lines)

    def cuts(self, model: str, question: str, way: str, every: int = 1, most: int | None = None) -> Iterator[Cut]:
        """Interrupts the answer after each `every`th frame, up to the `most`th."""
        whole = self.ask(model, question)
        assert not whole.resumed
        for frame in range(1, min(whole.frames, most or whole.frames) + 1, every):
            began = time.monotonic()
            pid = self._stack.worker_pid(model)
            self._proxy.plan(Break(frame, functools.partial(_kill, pid) if way == "kill" else None))
            found = self.ask(model, question)
            assert found.resumed, "the answer was not interrupted"
            assert (self._stack.worker_pid(model) != pid) == (way == "kill")
            same = found == whole
            difference = "" if same else f"{found} instead of {whole}"
            yield Cut(model, question, way, frame, same, time.monotonic() - began, difference)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until("the worker is gone", lambda: not is_alive(pid))


def _read(lines: list[str]) -> Answered:
    chunks: list[dict[str, Any]] = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts = [text for choice in choices if (text := choice["delta"].get("content"))]
    finishes = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    counts = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert len(finishes) == len(counts) == 1, lines
    resumed = any(line.startswith(": headgate resumed") for line in lines)
    return Answered(
        "".join(texts), finishes[0], counts[0]["prompt_tokens"], counts[0]["completion_tokens"], len(texts), resumed
    )


def main() -> int:
    """Prints each question, then the bars."""
    questions = QUESTIONS[: int(os.environ.get("QUESTIONS") or len(QUESTIONS))]
    every = int(os.environ.get("EVERY") or 1)
    models = tuple((os.environ.get("MODELS") or "demo").split(","))
    ways = tuple((os.environ.get("WAYS") or ",".join(WAYS)).split(","))
    tokens = int(os.environ.get("TOKENS") or 32)
    found: list[Cut] = []
    with tempfile.TemporaryDirectory(prefix="hgr") as root, Proof(Path(root), models, tokens) as proof:
        for way in ways:
            for model in models:
                for question in questions:
                    cuts = list(proof.cuts(model, question, way, every))
                    same = sum(cut.same for cut in cuts)
                    slowest = max((cut.seconds for cut in cuts), default=0.0)
                    print(f"{way} {model} {question!r}: {same} of {len(cuts)} the same, slowest {slowest:.2f} s")
                    for cut in cuts:
                        if not cut.same:
                            print(f"  after {cut.frame} frames: {cut.difference}")
                    sys.stdout.flush()
                    found += cuts
    print()
    for way in ways:
        cuts = [cut for cut in found if cut.way == way]
        share = sum(cut.same for cut in cuts) / max(1, len(cuts))
        print(f"{way}: {len(cuts)} answers broken off, {sum(cut.same for cut in cuts)} the same to the byte")
        print(Bar(f"resumed_exactly_{way}", share, "ratio", ">=", 1.0).line())
    return 0 if found and all(cut.same for cut in found) else 1


if __name__ == "__main__":
    sys.exit(main())
