"""Requests generated from both OpenAPI documents, valid and invalid: an answer or a clear error, never a 500.

schemathesis generates the same requests in every run, with the names of the configured models. They go to a gateway and
to an inference service with real workers.
"""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings

from headgate.shared.state_directory import INFERENCE_TOKEN
from inference.protocol import Code
from tests.fuzz import EXAMPLES
from tests.fuzz.test_damaged_headers import CORPUS
from tests.rigs import tiny_gguf
from tests.rigs.processes import http_status
from tests.rigs.stack import Stack

if TYPE_CHECKING:
    from schemathesis import Case

ENDLESS = {"/events"}
"""Paths whose answers do not end; they are left out."""
BUSY = {503, 504}
"""Statuses from 500 on that are no defect: the model is not available."""
ANTHROPICS = "/v1/messages"
CODES = {*Code, "thread_unsupported_request"}
"""The codes of the gateway, and the one of Anthropic that its clients use."""
SECONDS = 60
FEW = 1
"""Requests per operation and kind in the normal run, with one model."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("fuzz")
    damaged = root / "damaged.gguf"
    damaged.write_bytes(next(item.content for item in CORPUS if item.name == "tensor-missing"))
    paths = {"tiny": tiny_gguf.generative()}
    if EXAMPLES:
        paths |= {"org/vectors": tiny_gguf.embedding(), "judge": tiny_gguf.yes_no_reranker(), "damaged": damaged}
    models = {name: {"path": str(path), "context_length": 256, "parallel": 2} for name, path in paths.items()}
    if EXAMPLES:
        models["large"] = {"path": str(paths["tiny"]), "context_length": 2**26, "parallel": 16}
    stack = Stack(root, models=json.dumps({"models": models}), inference_env={"INFERENCE_DEVICES": "cpu"}).start()
    yield stack
    stack.kill()


def narrowed(described: dict[str, Any], models: list[str]) -> dict[str, Any]:
    """The OpenAPI document with the names of configured models instead of any text."""
    found = copy.deepcopy(described)
    names = {"type": "string", "enum": models}

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            value.pop("security", None)  # otherwise the key would be generated too
            if isinstance(properties := value.get("properties"), dict) and "model" in properties:
                properties["model"] = names
            if value.get("in") == "path" and value["name"] in ("model_id", "name"):
                value["schema"] = names
            for inner in value.values():
                visit(inner)
        elif isinstance(value, list):
            for inner in value:
                visit(inner)

    visit(found)
    return found


def cases(described: dict[str, Any], models: list[str], most: int) -> Iterator[Case]:
    """`most` valid requests for every operation that ends, and with FUZZ_EXAMPLES as many invalid ones.

    The import is local because it takes over a second.
    """
    import schemathesis
    from schemathesis import GenerationMode

    made: list[Case] = []
    schema = schemathesis.openapi.from_dict(narrowed(described, models))
    for operation in (result.ok() for result in schema.get_all_operations()):
        if operation.path in ENDLESS:
            continue
        for mode in GenerationMode if EXAMPLES else (GenerationMode.POSITIVE,):

            @settings(
                max_examples=most,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def keep(case: Case) -> None:
                made.append(case)

            try:
                keep()
            except Exception as error:  # an operation without parameters has no invalid request
                if type(error).__name__ not in ("Unsatisfiable", "SkipTest", "Skipped"):
                    raise
            yield from made
            made.clear()


def complaint(case: Case | SimpleNamespace, answer: Any) -> str | None:
    """What is wrong with an answer, or None."""
    text = f"{case.method} {case.formatted_path} {case.query!r} {case.body!r}"[:600]
    shown = f"{text} -> {answer.status_code} {answer.content[:400]!r}"
    if answer.status_code < 400 or (answer.status_code == 503 and case.path in ("/health", "/memory/health")):
        return None
    if answer.status_code == 401 or (answer.status_code >= 500 and answer.status_code not in BUSY):
        return shown
    is_whole = _is_anthropics if case.path.startswith(ANTHROPICS) else _is_openais
    if case.path.startswith("/api/"):
        is_whole = _is_ollamas
    try:
        is_known = is_whole(json.loads(answer.content))
    except (ValueError, KeyError, TypeError):
        is_known = False
    return None if is_known else f"no envelope: {shown}"


def _is_openais(body: Any) -> bool:
    error = body["error"]
    return bool(error["message"]) and error["code"] in CODES and "param" in error and bool(error["type"])


def _is_ollamas(body: Any) -> bool:
    return bool(body["error"]) and isinstance(body["error"], str)


def _is_anthropics(body: Any) -> bool:
    error = body["error"]
    text = body["type"], body["request_id"], error["type"], error["message"]
    return body["type"] == "error" and all(text) and error["details"]["error_code"] in CODES


ENVELOPE = b'{"error": {"message": "no", "type": "invalid_request_error", "param": null, "code": "invalid_request"}}'
THEIRS = (
    b'{"type": "error", "error": {"type": "invalid_request_error", "message": "no", '
    b'"details": {"error_code": "invalid_request"}}, "request_id": "req_1"}'
)
NAMELESS = THEIRS.replace(b"req_1", b"")
NAKED = b'{"detail": "no"}'


JUDGED = {
    "answered": ("/v1/x", 200, b"", True),
    "refused": ("/v1/x", 400, ENVELOPE, True),
    "busy": ("/v1/x", 503, ENVELOPE, True),
    "failed": ("/v1/x", 500, ENVELOPE, False),
    "bad gateway": ("/v1/x", 502, ENVELOPE, False),
    "unauthorized": ("/v1/x", 401, ENVELOPE, False),
    "without an envelope": ("/v1/x", 400, NAKED, False),
    "unprocessable": ("/v1/x", 422, NAKED, False),
    "no JSON": ("/v1/x", 404, b"Not Found", False),
    "anthropic": ("/v1/messages", 400, THEIRS, True),
    "anthropic failed": ("/v1/messages", 500, THEIRS, False),
    "anthropic without a request id": ("/v1/messages", 400, NAMELESS, False),
    "openai's to anthropic's": ("/v1/messages", 400, ENVELOPE, False),
    "anthropic's to openai's": ("/v1/x", 400, THEIRS, False),
}


@pytest.mark.parametrize(("path", "status", "content", "is_fine"), JUDGED.values(), ids=JUDGED)
def test_answer_is_judged_by_its_status_and_its_envelope(path: str, status: int, content: bytes, is_fine: bool) -> None:
    case = SimpleNamespace(method="POST", path=path, formatted_path=path, query=None, body=None)
    answer = SimpleNamespace(status_code=status, content=content, headers={})
    assert (complaint(case, answer) is None) is is_fine


@pytest.mark.timeout(3600 if EXAMPLES else 300)
@pytest.mark.parametrize("service", ["inference", "gateway"])
def test_generated_requests_find_no_defect(stack: Stack, service: str, capsys: pytest.CaptureFixture[str]) -> None:
    def report(line: str) -> None:
        """Prints at once, for long runs that are interrupted."""
        if EXAMPLES:
            with capsys.disabled():
                sys.stdout.write(f"\n{line}")
                sys.stdout.flush()

    is_direct = service == "inference"
    base = stack.inference.url if is_direct else stack.front.url
    key = stack.state.read_secret(INFERENCE_TOKEN) if is_direct else stack.key
    described = stack.ask("/openapi.json", direct=is_direct)
    models = [entry["id"] for entry in stack.ask("/v1/models", direct=True)["data"]]
    found, statuses, operations = [], Counter[int](), set()
    with requests.Session() as session:
        session.trust_env = False
        for case in cases(described, models, EXAMPLES or FEW):
            headers = {"Authorization": f"Bearer {key}"}
            answer = case.call(base_url=base, session=session, headers=headers, timeout=SECONDS)
            operations.add((case.method, case.path))
            statuses[answer.status_code] += 1
            if (text := complaint(case, answer)) is not None:
                report(text)
                found.append(text)
    summary = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
    report(f"{service}: {len(operations)} operations, {statuses.total()} requests; replies by status: {summary}")
    assert statuses.total() >= len(described["paths"]) - len(ENDLESS)
    assert not found, "\n".join(found)
    assert http_status(stack.inference.url + "/livez") == http_status(stack.front.url + "/livez") == 200
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
    assert stack.ask("/v1/completions", body)["choices"]
    assert "Traceback" not in stack.inference.log + stack.front.log
