"""The parts of `gpu-check` that need a whole inference service: growth, experts, warm, kv."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import kv, switching
from benchmarks.client import Seen, run
from benchmarks.figures import Middle, ratios
from benchmarks.gpu_table import Row
from benchmarks.gpu_target import Target
from benchmarks.models import SHAPES, path_of
from headgate.shared.units import MIB, format_bytes
from inference.authority.handlers.running.worker_memory import GROWTH_SLACK_BYTES
from inference.authority.placement.device_growth import SLACK_BYTES
from inference.devices.inventory import Inventory
from inference.devices.simgpu.control import SOCKET_NAME, Control
from inference.workers.os_api import socket_directory
from tests.rigs.stack import Stack

LOAD_SECONDS = 100.0
GROWTH_SECONDS = 30.0
CONTEXT_BYTES = 300 * MIB
"""What a process takes on a simulated device beside its buffers, so that there is growth to book."""
PROMPT_TOKENS, ANSWER_TOKENS = 600, 64
RATE_SECONDS = 1.5
"""Two heartbeats, after which the service knows the speed of an answer."""
ANSWERS = 3


@contextlib.contextmanager
def service(target: Target, models: Mapping[str, Mapping[str, Any]], devices: str | None = None) -> Iterator[Stack]:
    """An inference service with these models that reads the devices every second."""
    environment = {
        "INFERENCE_DEVICES": devices or target.devices,
        "INFERENCE_PRESSURE_CHECK_INTERVAL_SECONDS": "1",
        "INFERENCE_WARM_CHECKPOINT": "off",
    }
    common = {"context_length": 1024, "parallel": 1, "idle_timeout": "never"}
    entries = {name: {**common, **entry} for name, entry in models.items()}
    with tempfile.TemporaryDirectory(prefix="hg-gpu-") as root:
        stack = Stack(Path(root), models=json.dumps({"models": entries}), inference_env=environment)
        try:
            stack.inference.start(wait_for="/readyz")
            yield stack
        finally:
            stack.kill()


def post(stack: Stack, path: str, body: Any = None) -> Any:
    """JSON of the inference service."""
    return stack.ask(path, body or {}, direct=True, seconds=LOAD_SECONDS)


def answer(stack: Stack, model: str, prompt: str) -> Seen:
    """One streamed answer. Raises SystemExit with its error."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    (seen,) = run(kv.system_of(stack).order([body])).streams
    if seen.error:
        raise SystemExit(f"{model}: {seen.error}")
    return seen


def observed_bytes(stack: Stack, device: str) -> int:
    """The use of a device after a new reading."""
    return int(stack.ask("/memory/fragmentation", direct=True)["devices"][device]["observed_mb"] * MIB)


# --- growth ----------------------------------------------------------------------------------------------------------
def growth(target: Target) -> Iterator[Row]:
    """A model is planned without the memory of its process beside the buffers. The service has to book it."""
    shape = SHAPES[target.shape]
    with service(target, {"grows": {"path": str(path_of(shape)), "memory_overhead": 0}}) as stack:
        if target.simulated:
            with Control(socket_directory(stack.state) / SOCKET_NAME) as rig:
                rig.send("contexts", "gpu-0", bytes=CONTEXT_BYTES)
                rig.send("tell", "gpu-0")
        plan = post(stack, "/memory/plan", {"model": "grows"})
        device, planned = plan["device"], plan["need_bytes"][plan["device"]]
        post(stack, "/models/grows/load")
        answer(stack, "grows", kv.Words(shape).prompt(PROMPT_TOKENS))
        found: Mapping[str, Any] = {}
        deadline = time.monotonic() + GROWTH_SECONDS
        while not found and time.monotonic() < deadline:
            time.sleep(0.5)
            (model,) = stack.ask("/memory/models", direct=True)["models"]
            found = model["growth"].get(device, {})
        time.sleep(RATE_SECONDS)
        (model,) = stack.ask("/memory/models", direct=True)["models"]
        process = _process_bytes(target, stack, device)
        state = stack.ask("/memory/fragmentation", direct=True)["devices"][device]
    yield from growth_rows(planned, model, device, process, state["difference_mb"])


def growth_rows(
    planned: int, model: Mapping[str, Any], device: str, process: int | None, difference_mb: float
) -> Iterator[Row]:
    """From an entry of `/memory/models`, the driver's bytes of its process, and `difference_mb` of the device."""
    booked = int(model["devices_mb"][device] * MIB)
    found = model["growth"].get(device, {})
    slack = format_bytes(SLACK_BYTES)
    yield Row("growth", "planned on the device", format_bytes(planned))
    yield Row(
        "growth",
        "booked after an answer",
        format_bytes(booked),
        "no figure of its process" if process is None else f"{format_bytes(process)} of its process, within {slack}",
        reached=process is None or abs(booked - process) <= SLACK_BYTES,
    )
    yield Row(
        "growth",
        "of these beyond the plan, and why",
        f"{found['mb']:.0f} MiB: {found['evidence']}" if found else "none",
        "the driver reports it for its process" if process is not None else "",
        reached=bool(found),
    )
    yield Row(
        "growth",
        "use of the device that is neither booked nor foreign",
        f"{difference_mb:+.0f} MiB",
        f"within {slack}",
        reached=abs(difference_mb) * MIB <= SLACK_BYTES,
    )


def _process_bytes(target: Target, stack: Stack, device: str) -> int | None:
    """The driver's figure for the worker of the model, None without one."""
    pid = stack.worker_pid("grows")
    if target.simulated:
        with Control(socket_directory(stack.state) / SOCKET_NAME) as rig:
            found = rig.send("status")[device]["processes"].get(str(pid))
            return None if found is None else int(found)
    return asyncio.run(_driver_bytes(target, device, pid))


async def _driver_bytes(target: Target, device: str, pid: int) -> int | None:
    inventory = Inventory.of(target.config().settings)
    await inventory.start()
    try:
        await inventory.refresh()
        reading = next((one for one in inventory.accelerators() if one.id == device), None)
        return None if reading is None else reading.process_bytes.get(pid)
    finally:
        await inventory.close()


# --- experts ---------------------------------------------------------------------------------------------------------
def experts(target: Target) -> Iterator[Row]:
    """The same model with its experts on the device, half of them in host memory, and all."""
    shape = SHAPES[target.moe]
    path = str(path_of(shape))
    places: Mapping[str, str | int] = {"device": "device", "half": shape.layers // 2, "host": "host"}
    words = kv.Words(shape)
    used: dict[str, tuple[int, int]] = {}
    with service(target, {name: {"path": path, "experts": value} for name, value in places.items()}) as stack:
        for name in places:
            plan = post(stack, "/memory/plan", {"model": name})
            if "need_bytes" not in plan:
                yield Row("experts", name, str(plan.get("reason")), "a plan", reached=False)
                continue
            device = plan["device"]
            before = observed_bytes(stack, device)
            post(stack, f"/models/{name}/load")
            speeds = []
            for _ in range(ANSWERS):
                times = answer(stack, name, words.prompt(16)).times
                speeds.append((len(times) - 1) / (times[-1] - times[0]))
                time.sleep(RATE_SECONDS)
            used[name] = observed_bytes(stack, device) - before, _buffer_bytes(plan, device)
            (host,) = stack.ask("/memory/fragmentation", direct=True)["models"]
            post(stack, f"/models/{name}/unload")
            yield from experts_rows(name, plan, Middle.of(speeds), host["process_mb"], used)
            _wait_for_free(stack, device, before)


def _buffer_bytes(plan: Mapping[str, Any], device: str) -> int:
    """The planned bytes without those of the context, which the service learns from the first load."""
    parts = plan["estimate"]["devices"][device]
    return int(parts["weights_bytes"] + parts["kv_bytes"] + parts["compute_bytes"])


def experts_rows(
    name: str, plan: Mapping[str, Any], speed: Middle, process_mb: float | None, used: Mapping[str, tuple[int, int]]
) -> Iterator[Row]:
    """`used`: observed and planned bytes on the device by place. Differences to the first are free of the context."""
    observed, planned = used[name]
    part, title = "experts", f"experts {name}"
    first = next(iter(used))
    if name == first:
        yield Row(part, f"{title}, on the device", format_bytes(observed), f"{format_bytes(planned)} and its context")
    else:
        freed, expected = used[first][0] - observed, used[first][1] - planned
        allowed = max(16 * MIB, expected // 100)
        yield Row(
            part,
            f"{title}, freed on the device",
            format_bytes(freed),
            f"{format_bytes(expected)} within 1 % or 16 MiB",
            reached=abs(freed - expected) <= allowed,
        )
    host, host_planned = int((process_mb or 0) * MIB), plan["need_bytes"].get("cpu", 0)
    yield Row(
        part,
        f"{title}, private host memory",
        "unknown" if process_mb is None else format_bytes(host),
        f"at most {format_bytes(host_planned)} and {format_bytes(GROWTH_SLACK_BYTES)}",
        reached=process_mb is not None and host <= host_planned + GROWTH_SLACK_BYTES,
    )
    rate = (plan.get("expected") or {}).get("tokens_per_second")
    expectation = "not known before the first run" if rate is None else f"{rate:.1f}"
    yield Row(part, f"{title}, tokens/s of one answer", speed.text(1), expectation)


def _wait_for_free(stack: Stack, device: str, before: int) -> None:
    deadline = time.monotonic() + switching.GONE_SECONDS
    while observed_bytes(stack, device) > before + MIB and time.monotonic() < deadline:
        time.sleep(0.3)


# --- warm ------------------------------------------------------------------------------------------------------------
def warm(target: Target) -> Iterator[Row]:
    """Cold and warm first tokens with both mechanisms; checkpoints of the driver where they are supported."""
    places = ("sim-resident", "sim") if target.simulated else ("gpu", "gpu-checkpoint")
    rounds = 2
    for place in places:
        found = switching.Samples(target.shape, place)
        try:
            switching.measure(found, path_of(SHAPES[target.shape]), rounds)
        except SystemExit as error:
            yield Row("warm", switching.MECHANISMS[place], str(error), "", reached=False)
            continue
        yield from warm_rows(found)


def warm_rows(found: switching.Samples) -> Iterator[Row]:
    """Medians and their ratios."""
    title = f"{found.model}, {switching.MECHANISMS[found.place]}"
    for name, values in (
        ("cold", found.cold),
        ("cold, file in the page cache", found.cached),
        ("warm", found.warm),
        (f"{switching.CONVERSATION_TOKENS} tokens computed", found.prefill),
        (f"{switching.CONVERSATION_TOKENS} tokens kept", found.kept),
    ):
        yield Row("warm", f"{title}: {name}, s", Middle.of(values).text(3))
    for name, above, below, target in (
        ("warm over cold", found.warm, found.cold, switching.WARM_RATIO),
        ("kept over computed", found.kept, found.prefill, switching.KEPT_RATIO),
    ):
        ratio = median(ratios(above, below))
        yield Row("warm", f"{title}: {name}", f"{ratio:.2f}", f"at most {target}", reached=ratio <= target)
    rest = max(found.device_bytes)
    yield Row("warm", f"{title}: device memory while warm", format_bytes(rest), "0 B", reached=rest == 0)
    yield Row("warm", f"{title}: copy locked in RAM", format_bytes(found.locked_bytes))


# --- stored sequences ------------------------------------------------------------------------------------------------
def kv_tiers(target: Target) -> Iterator[Row]:
    """One conversation that loses its slot in every way."""
    found = kv.Paths(target.shape, "sim" if target.simulated else "gpu", "f16")
    kv.measure_paths(found, 1)
    yield from kv_rows(found)


def kv_rows(found: kv.Paths) -> Iterator[Row]:
    """First tokens against the prefill, differing answers, and rates against copies."""
    cold = found.seconds["cold"]
    yield Row("kv", f"{kv.TOKENS} tokens of {found.model} computed, s", Middle.of(cold).text(3))
    for path, target in kv.PATHS.items():
        if path not in found.seconds:
            continue
        ratio = found.share_of_prefill(path)
        yield Row(
            "kv",
            f"first token, {path}, s",
            f"{Middle.of(found.seconds[path]).value:.3f}, {ratio:.3f} of the prefill",
            f"at most {target}" if not found.missed[path] else "a restore; it was computed",
            reached=not found.missed[path] and ratio <= target,
        )
    differing = sum(found.texts.values()), sum(found.numbers.values())
    yield Row(
        "kv", "answers, log probabilities that differ", "{}, {}".format(*differing), "0, 0", reached=not any(differing)
    )
    # From RAM to a device the link is the limit, so a copy in memory is no bar.
    for name, other, what, least in (
        ("ram", "memory", "by a copy in memory", 0.0),
        ("disk", "file", f"by a read of the file, at least {kv.DISK_RATIO} of it", kv.DISK_RATIO),
    ):
        if name in found.rates and other in found.rates:
            ours, theirs = (Middle.of(found.rates[key]).value / 1e9 for key in (name, other))
            reached = bool(ours >= least * theirs)  # the rates are of numpy
            yield Row("kv", f"restore from {name}, GB/s", f"{ours:.2f}", f"{theirs:.2f} {what}", reached=reached)
