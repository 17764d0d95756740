"""Requests made by a machine from both descriptions, right and wrong ones: an answer or a clear error, never a 500.

The requests come from schemathesis, the same in every run. They go to a whole Headgate with real workers, and name its
models, so that they get further than a model that nobody knows.
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

from headgate.shared.state import INFERENCE_TOKEN
from inference.protocol import Code
from tests.fuzz import EXAMPLES
from tests.fuzz.test_damaged_headers import CORPUS
from tests.rigs import tiny_gguf
from tests.rigs.processes import http_status
from tests.rigs.stack import Stack

if TYPE_CHECKING:
    from schemathesis import Case

ENDLESS = {"/events"}
"""Never over, so never read to its end."""
BUSY = {503, 504}
"""What a 5xx may be: a model that cannot be had says so; anything else is a defect."""
SECONDS = 60
FEW = 1
"""Requests per operation and kind with all other tests, which ask one model."""


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
    """The description with the names of models that there are, instead of any text."""
    found = copy.deepcopy(described)
    names = {"type": "string", "enum": models}

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            value.pop("security", None)  # or the key would be made up too
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
    """`most` right requests for every operation that ends, and as many wrong ones where there is time for them.

    The import takes over a second, which nobody who only collects the tests has to wait for.
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
            except Exception as error:  # an operation without parameters cannot be asked wrongly
                if type(error).__name__ not in ("Unsatisfiable", "SkipTest", "Skipped"):
                    raise
            yield from made
            made.clear()


def complaint(case: Case | SimpleNamespace, answer: Any) -> str | None:
    """What is wrong with an answer, or None."""
    said = f"{case.method} {case.formatted_path} {case.query!r} {case.body!r}"[:600]
    shown = f"{said} -> {answer.status_code} {answer.content[:400]!r}"
    if answer.status_code < 400 or (answer.status_code == 503 and case.path in ("/health", "/memory/health")):
        return None
    if answer.status_code == 401 or (answer.status_code >= 500 and answer.status_code not in BUSY):
        return shown
    try:
        error = json.loads(answer.content)["error"]
        is_whole = bool(error["message"]) and error["code"] in set(Code) and "param" in error and bool(error["type"])
    except (ValueError, KeyError, TypeError):
        is_whole = False
    return None if is_whole else f"no envelope: {shown}"


ENVELOPE = b'{"error": {"message": "no", "type": "invalid_request_error", "param": null, "code": "invalid_request"}}'
NAKED = b'{"detail": "no"}'


JUDGED = {
    "answered": (200, b"", True),
    "refused": (400, ENVELOPE, True),
    "busy": (503, ENVELOPE, True),
    "crashed": (500, ENVELOPE, False),
    "cut off": (502, ENVELOPE, False),
    "locked out": (401, ENVELOPE, False),
    "naked": (400, NAKED, False),
    "unprocessable": (422, NAKED, False),
    "no JSON": (404, b"Not Found", False),
}


@pytest.mark.parametrize(("status", "content", "is_fine"), JUDGED.values(), ids=JUDGED)
def test_a_defect_would_be_seen(status: int, content: bytes, is_fine: bool) -> None:
    case = SimpleNamespace(method="POST", path="/v1/x", formatted_path="/v1/x", query=None, body=None)
    answer = SimpleNamespace(status_code=status, content=content, headers={})
    assert (complaint(case, answer) is None) is is_fine


@pytest.mark.timeout(3600 if EXAMPLES else 300)
@pytest.mark.parametrize("service", ["inference", "gateway"])
def test_no_request_is_answered_with_a_defect(stack: Stack, service: str, capsys: pytest.CaptureFixture[str]) -> None:
    def tell(line: str) -> None:
        """In a long run at once: who ends it knows what was found so far."""
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
            if (said := complaint(case, answer)) is not None:
                tell(said)
                found.append(said)
    told = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
    tell(f"{service}: {len(operations)} operations, {statuses.total()} requests; replies by status: {told}")
    assert statuses.total() >= len(described["paths"]) - len(ENDLESS)
    assert not found, "\n".join(found)
    assert http_status(stack.inference.url + "/livez") == http_status(stack.front.url + "/livez") == 200
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
    assert stack.ask("/v1/completions", body)["choices"]
    assert "Traceback" not in stack.inference.log + stack.front.log
