"""docs/api.md names every endpoint of the inference service and exactly the fields of its answers.

Each operation has a table of fields: `a.b`, `a[].b` for lists, `a.*.b` for maps, `.c` beside `a.b` for `a.c`. A field
without documented content stands for all of its content.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from inference.app import HOT_PATHS, Service
from inference.authority.events import CrashReported
from inference.authority.quarantine import Crash
from inference.devices.device import Reading
from inference.estimate.layers import Sizes
from inference.estimate.model_estimate import Estimate
from inference.protocol import ExitCause
from inference.worker.kv.sequence_control import SequenceRow
from tests.rigs.asgi import ask, operations
from tests.rigs.authority_rig import CacheEstimator, FakeEstimator, SharedDevice, Start

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "api.md"
_SECTION = re.compile(r"^### `(GET|POST) (/[^`]+)`", re.MULTILINE)
_FIELD = re.compile(r"^\| (`[^|]+`) \| [^|]+ \|$", re.MULTILINE)


def names(cells: str) -> Iterator[str]:
    """The full names of a row."""
    parent = ""
    for name in re.findall(r"`([^`]+)`", cells):
        full = f"{parent}{name}" if name.startswith(".") else name
        parent = full.rpartition(".")[0]
        yield full


def sections() -> dict[tuple[str, str], set[str]]:
    """All documented operations with their fields."""
    text = DOCUMENT.read_text(encoding="utf-8").partition("## Inference service")[2]
    found = list(_SECTION.finditer(text))
    ends = [*(match.start() for match in found[1:]), len(text)]
    return {
        (match[1], match[2]): {name for cells in _FIELD.findall(text[match.end() : end]) for name in names(cells)}
        for match, end in zip(found, ends, strict=True)
    }


def paths(value: Any, documented: set[str], at: str = "") -> set[str]:
    """The fields of an answer as the tables write them."""
    if at in documented:
        return {at}
    if value in (None, {}, []) and any(name.startswith((f"{at}.", f"{at}[]")) for name in documented):
        return set()  # absent in this answer
    if isinstance(value, dict) and value:
        any_name = any(name.startswith(f"{at}.*" if at else "*") for name in documented)
        return _all(
            paths(inner, documented, ".".join(filter(None, (at, "*" if any_name else name))))
            for name, inner in value.items()
        )
    if isinstance(value, list) and value:
        return _all(paths(inner, documented, f"{at}[]") for inner in value)
    return {at}


def _all(sets: Iterable[set[str]]) -> set[str]:
    return set().union(*sets)


class _LayersEstimator(CacheEstimator):
    """Its models have one layer, from which the expected speed follows; `fitted` has a cache of 1 GiB."""

    async def get(self, spec: Any, device: Reading, *others: Reading, counts: Any = ()) -> Estimate:
        if spec.id == "fitted":
            return await super().get(spec, device, *others, counts=counts)
        return replace(await FakeEstimator.get(self, spec, device, *others, counts=counts), sizes=(Sizes(0, 1),))


async def _busy_service(start: Start) -> tuple[Service, SharedDevice]:
    """A service whose answers have every field: a model in use, a warm one, one too large, one that crashed."""
    estimator = _LayersEstimator(1024)
    estimator.sizes = {"large": 5000, "onto-cpu": 2000, "wide": 750}
    gpu = SharedDevice()
    models: dict[str, dict[str, Any]] = {"a": {"replicas": "1..2"}, "kept": {}, "large": {}, "broken": {}, "wide": {}}
    models["other"] = {"min_residency": 0}  # a plan evicts it
    models |= {"fitted": {"fit": "context", "min_context": 256, "parallel": 1}, "onto-cpu": {"oom_policy": "cpu"}}
    behavior = {
        "a": {"kv": [SEQUENCE], "kv_labels": ["00ff00ff00ff00ff"]},
        "broken": {"abort": "GGML_ASSERT"},
        "kept": {"saved": 1000},
    }
    behavior["other"] = {"kv": None}
    service: Service = await start(
        models, behavior, accelerator=gpu, estimator=estimator, ENABLE_MEMORY_GOVERNOR="false"
    )
    gpu.service = service
    authority = service.authority
    for name in ("a", "kept", "other", "onto-cpu"):
        await authority.load(authority.resolve(name), 10)
    await authority.offload(authority.resolve("kept"))
    await ask(service.app, "POST", "/models/broken/load")
    await ask(service.app, "POST", "/models/large/load")
    service.authority.dispatch(CrashReported("other", "0" * 16, Crash(ExitCause.ASSERT, "", alone=False)))
    lease = await authority.ask(authority.resolve("a")).wait(10)
    assert lease is not None
    await authority.reached(lambda: lease.process.beat is not None)
    await authority.reached(lambda: bool(authority.state.evictions))
    for mib in (0, 30, 730):  # growth of the model in use, then the memory of another program
        gpu.foreign_mib = mib
        await service.check_pressure()
    return service, gpu


SEQUENCE = asdict(SequenceRow("00ff", ("ram", "disk"), 10, 1000, "team", 1.5, 2, 1_800_000_000.0))
REQUESTS: dict[tuple[str, str], list[tuple[str, Any]]] = {
    ("GET", "/memory/history"): [("/memory/history?minutes=5", None)],
    ("GET", "/v1/models/{id}"): [(f"/v1/models/{name}", None) for name in ("a", "broken", "large", "onto-cpu")],
    ("GET", "/models/{id}/crashes"): [("/models/broken/crashes", None)],
    ("POST", "/memory/plan"): [
        *(("/memory/plan", {"model": name}) for name in ("other", "large", "fitted")),
        ("/memory/plan", {"model": "wide"}),
    ],
    ("POST", "/memory/preload"): [("/memory/preload", {"models": ["a", "large", "unknown"], "seconds": 10})],
    ("POST", "/memory/evict/{model}"): [("/memory/evict/other", None)],
    ("POST", "/memory/kv/pin"): [("/memory/kv/pin", {"ids": ["00ff"], "seconds": 60})],
    ("POST", "/memory/dump"): [("/memory/dump", {"large_objects": 1}), ("/memory/dump", None)],
    ("POST", "/memory/dump/compare"): [("/memory/dump/compare", {"before": "dump-1", "after": "dump-2"})],
}


async def test_documented_fields_are_those_of_the_answers(start: Start) -> None:
    service, gpu = await _busy_service(start)
    wrong = []
    for (method, path), fields in sections().items():
        found: set[str] = set()
        gpu.foreign_mib = 0 if path == "/memory/plan" else 730
        for target, body in REQUESTS.get((method, path), [(path, None)]):
            answer = await asyncio.wait_for(ask(service.app, method, target, body), 30)
            assert answer.status == 200 or path == "/memory/health", (target, answer.body)
            found |= paths(answer.body, fields)
        if found != fields:
            wrong.append(f"{method} {path}: answered {sorted(found - fields)}, documented {sorted(fields - found)}")
    assert wrong == []


async def test_every_endpoint_is_documented(start: Start) -> None:
    text = DOCUMENT.read_text(encoding="utf-8").partition("## Inference service")[2]
    service = await start({"a": {}})
    named = set(re.findall(r"(?:GET|POST) (/[^`\s]+)", text)) | set(re.findall(r"`(/[^`\s]+)`", text))
    every = {path.replace("{model_id}", "{id}") for _, path in operations(service.app)} | set(HOT_PATHS)
    assert {path.replace("/memory/evict/{id}", "/memory/evict/{model}") for path in every} - named == set()
