"""Real workers with an image projector: results match llama.cpp, alone, in a batch and in the next turn."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from inference import worker_link
from inference.protocol import ExitCause
from tests.rigs import tiny_gguf, tiny_projector
from tests.rigs.worker_rig import WorkerRig, grant_for

REPOSITORY = Path(__file__).resolve().parents[2]
PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class Kind:
    """A language model and its projector."""

    model: Path
    projector: Path


KINDS = {
    "causal": lambda: Kind(tiny_gguf.generative(), tiny_projector.projector()),
    "positions in two dimensions": lambda: Kind(
        tiny_gguf.generative(architecture="qwen2vl"), tiny_projector.projector(kind="qwen2vl_merger")
    ),
    "attention in both directions": lambda: Kind(tiny_gguf.generative(), tiny_projector.projector(kind="gemma3")),
}
"""By how the tokens of an image are computed."""


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


def answer(worker: WorkerRig, request: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Log probabilities of the alternatives of the first token, and the usage."""
    status, got = worker.post(PATH, request)
    assert status == 200, got
    first = got["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return [item["logprob"] for item in first], got["usage"]


def reference(root: Path, kind: Kind, content: str, *seeds: int) -> dict[str, Any]:
    """The result of llama.cpp's own helper for the same prompt."""
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


def test_answer_equals_that_of_llama_cpp(worker: WorkerRig, kind: Kind, tmp_path: Path) -> None:
    """Two images with text around them; the worker takes several steps, the helper one."""
    top, usage = answer(worker, body("look: ", image(1), " and ", image(2), " what is it?" * 5))
    response = reference(tmp_path, kind, "look: <__media__> and <__media__> what is it?" + " what is it?" * 4, 1, 2)
    assert usage["prompt_tokens"] == response["tokens"]
    assert top == pytest.approx(response["top"], abs=0.03)


def test_image_changes_the_answer_and_the_usage(worker: WorkerRig) -> None:
    plain, without = answer(worker, body("what is this"))
    one, usage = answer(worker, body("what is ", image(1), "this"))
    other, _usage = answer(worker, body("what is ", image(2), "this"))
    assert usage["prompt_tokens"] >= without["prompt_tokens"] + 4
    assert one != pytest.approx(other, abs=0.05)
    assert one != pytest.approx(plain, abs=0.05)


def test_answers_with_images_are_the_same_in_a_batch(worker: WorkerRig) -> None:
    """Texts and images of many requests at once; each gets the result it gets alone."""
    bodies = [body("number ", image(20 + n), f" of {n}") if n % 2 else body(f"number {n} of many") for n in range(12)]
    alone = [answer(worker, request)[0] for request in bodies]
    fresh = [body("number ", image(40 + n), " of it") for n in range(6)]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda request: answer(worker, request)[0], [*bodies, *fresh, *bodies]))
    for expected, found in zip([*alone, *alone], [*together[:12], *together[18:]], strict=True):
        assert found == pytest.approx(expected, abs=0.05)


def test_several_choices_and_streams_work_with_an_image(worker: WorkerRig) -> None:
    status, response = worker.post(PATH, body("what is ", image(5), " this", n=3, seed=1, temperature=1.0))
    assert (status, len(response["choices"])) == (200, 3)
    chunks = worker.chunks(PATH, body(image(5), " goes on", max_tokens=20))
    assert len(chunks) > 5


def test_next_turn_reuses_its_image(worker: WorkerRig) -> None:
    """The second turn computes only its new part."""
    first = body("see ", image(6), " there")
    response = worker.post(PATH, first)[1]["choices"][0]["message"]["content"]
    turn = [{"role": "assistant", "content": response}, {"role": "user", "content": "and then?"}]
    status, got = worker.post(PATH, {**first, "messages": [*first["messages"], *turn]})
    assert status == 200
    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] > got["usage"]["prompt_tokens"] / 2


def test_client_disconnect_frees_its_place(worker: WorkerRig) -> None:
    """More clients disconnect than places for requests with images exist."""
    raw = json.dumps(body("look ", image(9), " here", max_tokens=200)).encode()
    for _ in range(10):
        with worker.connection() as connection:
            connection.request("POST", PATH, raw, {"content-type": "application/json"})
    assert answer(worker, body("look ", image(9), " here"))


def test_invalid_image_is_refused_without_affecting_other_requests(worker: WorkerRig) -> None:
    broken = bytearray(tiny_projector.png())
    broken[45:60] = bytes(15)
    for part, says in (
        ({"type": "image_url", "image_url": {"url": "https://127.0.0.1:1/x.png"}}, "do not fetch images"),
        ({"type": "image_url", "image_url": {"url": url(kind="image/webp")}}, "PNG or JPEG"),
        (
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(broken).decode()}"}},
            "an image cannot be read",
        ),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "text and images only"),
    ):
        status, response = worker.post(PATH, body("look", part))
        assert status == 400, response
        assert says in response["error"]["message"]
    answer(worker, body("look ", image(1), " again"))


def test_token_count_of_images_is_refused(worker: WorkerRig) -> None:
    status, response = worker.post("/tokenize", {"messages": body("look ", image())["messages"]})
    assert (status, response["error"]["code"]) == (400, "unsupported_parameter")
    assert "the usage of an answer includes them" in response["error"]["message"]
    assert worker.post("/tokenize", {"messages": body("look")["messages"]})[0] == 200


def test_images_beyond_the_context_are_refused(worker: WorkerRig) -> None:
    status, response = worker.post(PATH, body(*[image(n) for n in range(16)], "x" * 1200))
    assert (status, response["error"]["code"]) == (400, "context_length_exceeded")


def test_same_image_bytes_reuse_the_prefix(worker: WorkerRig) -> None:
    """Another image of the same size has another prefix."""
    request = body("look at ", image(3), " and at the mill")
    first, fresh = answer(worker, request)
    again, usage = answer(worker, request)
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    _other, usage = answer(worker, body("look at ", image(4), " and at the mill"))
    assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"] - 8
    assert first == pytest.approx(again, abs=0.02)
    assert fresh["prompt_tokens"] == usage["prompt_tokens"]


WIDE = lambda: tiny_projector.projector(into=128)  # noqa: E731 - created when a test needs it


@pytest.mark.parametrize(
    ("model", "projector", "changes", "says"),
    [
        (tiny_gguf.generative, WIDE, {}, "mismatch"),
        (tiny_gguf.generative, tiny_gguf.generative, {}, "could not load the projector"),
        (tiny_gguf.generative, lambda: Path("/nowhere/eye.gguf"), {}, "file not found: /nowhere/eye.gguf (mmproj)"),
        (tiny_gguf.embedding, tiny_projector.projector, {}, "images need chat"),
        (lambda: tiny_gguf.generative(template=None), tiny_projector.projector, {}, "images need chat"),
        (tiny_gguf.generative, None, {"capabilities": ("chat", "vision")}, "mmproj is not set"),
    ],
    ids=["another width", "no projector", "no file", "an embedding model", "no template", "no image encoder"],
)
def test_invalid_projector_is_rejected_at_load(
    tmp_path: Path,
    model: Callable[[], Path],
    projector: Callable[[], Path] | None,
    changes: dict[str, Any],
    says: str,
) -> None:
    grant = grant_for(model(), mmproj=None if projector is None else str(projector()), **changes)
    with WorkerRig(tmp_path, grant) as worker:
        failed = worker.expect(worker_link.Failed)
        assert says in failed.message
        assert failed.cause == ExitCause.STARTUP
        assert worker.wait() == 1


def test_image_larger_than_a_batch_is_refused_with_both_sizes(tmp_path: Path) -> None:
    grant = grant_for(tiny_gguf.generative(), mmproj=str(tiny_projector.projector()), batch=16, ubatch=8)
    with WorkerRig(tmp_path, grant) as worker:
        worker.ready()
        status, response = worker.post(PATH, body("look ", image(), " here"))
        assert (status, response["error"]["param"]) == (400, "messages")
        assert "has 16 tokens" in response["error"]["message"]
        assert "at most 12" in response["error"]["message"]


def test_model_without_a_projector_refuses_images(tmp_path: Path) -> None:
    with WorkerRig(tmp_path, grant_for(tiny_gguf.generative())) as worker:
        assert "vision" not in worker.ready().capabilities
        status, response = worker.post(PATH, body("look ", image()))
        assert (status, response["error"]["code"]) == (400, "unsupported_parameter")
        assert "reads text only" in response["error"]["message"]


def test_buffers_of_a_model_do_not_include_its_projector(tmp_path: Path) -> None:
    found = []
    for name, mmproj in (("without", None), ("with", str(tiny_projector.projector()))):
        (tmp_path / name).mkdir()
        with WorkerRig(tmp_path / name, grant_for(tiny_gguf.generative(), mmproj=mmproj)) as worker:
            found.append(worker.ready().buffers)
    assert found[0] == found[1]
