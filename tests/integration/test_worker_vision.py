"""Real workers with an image projector: what they see is in the answer, alone, in company and in the next turn."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.rigs import tiny_gguf, tiny_projector
from tests.rigs.worker_rig import WorkerRig, grant_for

REPOSITORY = Path(__file__).resolve().parents[2]
PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class Kind:
    """A language model, its projector, and how many tokens an image of 24 x 24 pixels takes, marks included."""

    model: Path
    projector: Path


KINDS = {
    "one after the other": lambda: Kind(tiny_gguf.generative(), tiny_projector.projector()),
    "places in the image": lambda: Kind(
        tiny_gguf.generative(architecture="qwen2vl"), tiny_projector.projector(kind="qwen2vl_merger")
    ),
    "in both directions": lambda: Kind(tiny_gguf.generative(), tiny_projector.projector(kind="gemma3")),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]()


@pytest.fixture(scope="module")
def worker(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerRig]:
    """`batch` is small, so that prompts take several steps."""
    grant = grant_for(kind.model, mmproj=str(kind.projector), batch=48, ubatch=32)
    with WorkerRig(tmp_path_factory.mktemp("worker"), grant) as rig:
        assert "vision" in rig.ready().capabilities
        yield rig


def url(seed: int = 1, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(tiny_projector.png(seed=seed)).decode()}"


def image(seed: int = 1) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(seed)}}


def body(*content: Any, **more: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 5, **more,
    }  # fmt: skip


def answer(worker: WorkerRig, said: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Log probabilities of the first token's alternatives, and the usage."""
    status, got = worker.post(PATH, said)
    assert status == 200, got
    first = got["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return [item["logprob"] for item in first], got["usage"]


def reference(root: Path, kind: Kind, content: str, *seeds: int) -> dict[str, Any]:
    """What llama.cpp's own helper makes of the same prompt."""
    files = []
    for seed in seeds:
        files.append(root / f"{seed}.png")
        files[-1].write_bytes(tiny_projector.png(seed=seed))
    prompt = f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    command = [sys.executable, "-m", "tests.rigs.mtmd_reference", str(kind.model), str(kind.projector), prompt]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_answer_is_what_llama_cpp_itself_computes(worker: WorkerRig, kind: Kind, tmp_path: Path) -> None:
    """Two images and text around them, in several steps here, in one there."""
    top, usage = answer(worker, body("look: ", image(1), " and ", image(2), " what is it?" * 5))
    said = reference(tmp_path, kind, "look: <__media__> and <__media__> what is it?" + " what is it?" * 4, 1, 2)
    assert usage["prompt_tokens"] == said["tokens"]
    assert top == pytest.approx(said["top"], abs=0.03)


def test_an_image_changes_the_answer_and_counts(worker: WorkerRig) -> None:
    plain, without = answer(worker, body("what is this"))
    one, usage = answer(worker, body("what is ", image(1), "this"))
    other, _usage = answer(worker, body("what is ", image(2), "this"))
    assert usage["prompt_tokens"] >= without["prompt_tokens"] + 4
    assert one != pytest.approx(other, abs=0.05)
    assert one != pytest.approx(plain, abs=0.05)


def test_the_next_turn_finds_the_image_again(worker: WorkerRig) -> None:
    """The same bytes are the same prefix; other bytes are not."""
    said = body("look at ", image(3), " and at the mill")
    first, fresh = answer(worker, said)
    again, usage = answer(worker, said)
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    _other, usage = answer(worker, body("look at ", image(4), " and at the mill"))
    assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"] - 8
    assert first == pytest.approx(again, abs=0.02)
    assert fresh["prompt_tokens"] == usage["prompt_tokens"]
