"""docs/operations.md: presets fit on their devices, log lines exist, the table of settings is complete."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference import settings
from inference.authority.handlers.queries import device_view
from inference.authority.placement.ledger import Account, Ledger
from inference.authority.placement.plan import Option, Placement, Policy, Request, Result, plan
from inference.devices.device import CPU, Reading
from inference.environment_settings import PREFIX, environment_names
from inference.estimate.header_formula import Facts, Parameters, formula_on
from inference.estimate.overheads import GPU_OVERHEAD_BYTES, host_bytes

pytestmark = pytest.mark.unmeasured

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
MIB, GIB = 2**20, 2**30
DESKTOP_BYTES = 300 * MIB


def facts(mib: int, layers: int, embedding: int, feed_forward: int, kv_heads: int, head: int, vocabulary: int) -> Facts:
    """Facts of a file of `mib` MiB; the head is assumed to be a tenth of it."""
    per_token = 2 * kv_heads * head * layers
    weights = mib * MIB
    return Facts(
        "llama", layers, embedding, feed_forward, vocabulary, 131072, per_token, weights, weights - weights // 10
    )


# From the published configurations of the models and the sizes of these files.
FILES = {
    "Llama-3.2-1B-Instruct-Q4_K_M.gguf": facts(771, 16, 2048, 8192, 8, 64, 128256),
    "Llama-3.2-3B-Instruct-Q4_K_M.gguf": facts(1926, 28, 3072, 8192, 8, 128, 128256),
    "Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf": facts(4693, 32, 4096, 14336, 8, 128, 128256),
    "Qwen2.5-7B-Instruct-Q4_K_M.gguf": facts(4467, 28, 3584, 18944, 4, 128, 152064),
    "Qwen2.5-14B-Instruct-Q4_K_M.gguf": facts(8572, 48, 5120, 13824, 8, 128, 152064),
    "nomic-embed-text-v1.5.Q8_0.gguf": facts(140, 12, 768, 3072, 12, 64, 30522),
}
GPU = "gpu-0"
CARDS = {"4 GB": 4096, "8 GB": 8188, "16 GB": 16376, "24 GB": 24564}
"""MiB that NVML reports for such cards."""


def preset(name: str) -> str:
    """The models.yaml of a preset."""
    found = re.search(rf"^### {name}\n.*?```yaml\n(.*?)```", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def readings(name: str) -> tuple[Reading, ...]:
    """The devices of a preset's machine."""
    host = 16 * GIB
    cpu = Reading(CPU, "cpu", "host", host, host - 2 * GIB, 2 * GIB)
    if name not in CARDS:
        return (cpu,)
    total = CARDS[name] * MIB
    return (Reading(GPU, "cuda", "card", total, total - DESKTOP_BYTES, DESKTOP_BYTES), cpu)


@pytest.mark.parametrize("name", [*CARDS, "CPU only"])
def test_models_of_a_preset_fit_together(name: str, tmp_path: Path) -> None:
    for file in FILES:
        (tmp_path / file).write_bytes(b"GGUF")
    (tmp_path / "models.yaml").write_text(preset(name))
    environ = {"INFERENCE_MODELS_DIR": str(tmp_path)} | ({} if name in CARDS else {"INFERENCE_DEVICES": "cpu"})
    config = settings.load(tmp_path, environ, {})
    ledger = Ledger()
    devices = readings(name)
    for reading, (capacity, budget) in device_view.allowances(devices, config.settings):
        ledger = ledger.open(Account(reading.id, capacity, budget))
        ledger = ledger.observe(reading.id, reading.used_bytes, reading.free_bytes)
    where = devices[0].id
    listed = [spec for id, spec in config.models.items() if id not in config.found]
    assert listed
    for spec in listed:
        parameters = Parameters(
            context_length=spec.context_length, parallel=spec.parallel, kv_type=spec.kv_type, batch=spec.batch,
            ubatch=spec.ubatch, gpu_layers=-1 if where == GPU else 0, flash_attention=True,
        )  # fmt: skip
        parts = formula_on(FILES[spec.path.name], parameters, {GPU: -1} if where == GPU else {})
        need = {device: part.total_bytes for device, part in parts.items()}
        need[CPU] = need.get(CPU, 0) + host_bytes([device for device in devices if device.id == where])
        if where == GPU:
            need[GPU] += GPU_OVERHEAD_BYTES
        decision = plan(Request(spec.id, (Option(where, need),)), ledger, [], Policy(0.0, None, None))
        assert isinstance(decision, Placement), (spec.id, decision)
        assert decision.result is Result.FREE
        ledger = ledger.reserve(spec.id, spec.id, need).commit(spec.id, need)


# --- log lines -------------------------------------------------------------------------------------------------------
def lines() -> list[tuple[str, str]]:
    """(logger, message) of each line under `Log lines to watch`; two spaces separate the explanation."""
    block = TEXT.partition("## Log lines to watch\n")[2].partition("\n\n")[0]
    found = []
    for line in block.splitlines():
        logger, _, message = line.strip().partition(" ")
        found.append((logger, re.split(r" {2,}", message)[0]))
    return found


SHOWN = ("info", "warning", "error", "exception", "critical")


def is_shown(call: ast.Call) -> bool:
    """Whether a call of `log.log` can have another level than debug."""
    assert isinstance(call.func, ast.Attribute)
    return call.func.attr == "log" and ast.unparse(call.args[0]) != "logging.DEBUG"


def formats(logger: str) -> Iterator[str]:
    """The formats of messages of this logger with a level above debug."""
    package = logger.partition(".")[0]
    for path in (ROOT / package).rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        named = re.search(r'^log = logging\.getLogger\((?:"([^"]+)"|__name__)\)', source, re.MULTILINE)
        if named is None or (named[1] or module) != logger:
            continue
        for node in ast.walk(ast.parse(source)):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            is_log = is_call and isinstance(node.func.value, ast.Name) and node.func.value.id == "log"
            if is_log and (node.func.attr in SHOWN or is_shown(node)):
                yield from (
                    item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)
                )


HANDLERS = ROOT / "inference" / "authority" / "handlers"


def formats_of_handlers() -> Iterator[str]:
    """The formats of messages of the handlers of the authority."""
    for path in HANDLERS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            by_draft = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "draft"
            if (by_draft and node.func.attr in SHOWN) or ast.unparse(node.func) == "write":
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield first.value


def pattern(text: str) -> str:
    """A format as a regular expression."""
    kinds = {"s": ".*", "r": ".+", "d": r"\d+", "f": r"\d+", "g": r"[\d.e+-]+"}
    parts = re.split(r"%(?:\.(\d))?([srdfg])", text)
    found = re.escape(parts[0])
    for places, kind, rest in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        decimals = rf"\.\d{{{places}}}" if kind == "f" and places != "0" else ""
        found += kinds[kind] + decimals + re.escape(rest)
    return found


@pytest.mark.parametrize(("logger", "message"), lines(), ids=lambda text: text[:40])
def test_documented_log_line_exists(logger: str, message: str) -> None:
    known = list(formats_of_handlers() if logger == "inference.authority" else formats(logger))
    assert known, f"no message has the logger {logger}"
    words = [text for text in known if text != "%s"]
    assert any(re.fullmatch(pattern(text), message) for text in words), f"{message!r} is not in {words}"


def test_table_of_settings_is_complete() -> None:
    table = TEXT.partition("## Settings of the inference service")[2].partition("\n## ")[0]
    named = {
        name for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    every = {name.removeprefix(PREFIX) for name in environment_names()}
    assert every - named == set()
    assert named <= every
