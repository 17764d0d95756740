"""The part `bytes` of `gpu-check`: predicted bytes and restores against the figures of the driver.

A real worker loads a model and answers once, so that pools and graphs are allocated. The first model shows the memory
of a process without its buffers; the error of every other model is observed - predicted - that. Then the model is
restored as by the warm pool: a process that already holds the file loads it. The restore rate is bytes of weights per
second until the model can answer. `benchmarks.link_rate` measures the rate of the link by copies of the driver.
Simulated devices have no such overhead and no link.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.figures import is_quick
from benchmarks.gpu_table import Row
from benchmarks.gpu_target import Target
from benchmarks.link_rate import COUNT_BYTES
from benchmarks.models import SHAPES, path_of
from headgate.shared.state_directory import StateDir
from headgate.shared.units import MIB, format_bytes
from inference import settings, worker_link
from inference.demo import bundled_path
from inference.devices.device import HIDDEN, Reading, grants_of
from inference.devices.inventory import Inventory
from inference.estimate.estimator import Estimator
from inference.settings import InferenceConfig, ModelSpec
from inference.workers.helper_client import HelperError, run_helper
from tests.rigs.worker_rig import WorkerRig

MEASURED = ("cuda", "sim")
"""Kinds of devices that report the use of all processes to the byte."""
SHARE, MIN_BYTES = 0.01, 16 * MIB
"""A prediction may be wrong by the larger of both."""
SETTLE_SECONDS = 10.0
LOAD_SECONDS = 300.0
CHECKPOINT_SECONDS = 60.0
LINK_SECONDS = 60.0
KIND = "cuda"
_SAME = ("gpu_layers", "context_length", "parallel", "kv_type", "batch", "ubatch", "threads", "flash_attention")


@dataclass(frozen=True, slots=True)
class Case:
    """One model and its settings; lengths in tokens."""

    name: str
    path: Path
    context_length: int
    parallel: int
    kv_type: str = "f16"


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """The reason why there are no figures."""

    why: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of the worker by the driver: seconds, and bytes that the device still showed."""

    suspend_seconds: float
    resume_seconds: float
    rest_bytes: int


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes per second of the driver's own copies to the device, and back into pinned memory."""

    pinned: float
    pageable: float
    back: float


@dataclass(frozen=True, slots=True)
class Restore:
    """A restored model: seconds from its grant until it could answer, bytes of weights on the device, and the bytes of
    the copy that were locked in RAM.
    """

    seconds: float
    weights_bytes: int
    locked_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes that one load used on the device, and the predicted ones.

    `grown_bytes` of them came with the first answer. `process_bytes`: the driver's figure for the process, if any.
    """

    name: str
    predicted_bytes: int
    observed_bytes: int
    checkpoint: Checkpoint | Unmeasured | None = None
    restore: Restore | None = None
    grown_bytes: int = 0
    process_bytes: int | None = None

    def error_bytes(self, context_bytes: int) -> int:
        """Error of the prediction in bytes, without the overhead of a process."""
        return self.observed_bytes - self.predicted_bytes - context_bytes

    def error(self, context_bytes: int) -> float:
        """The error relative to the allowed one."""
        allowed = max((self.predicted_bytes + context_bytes) * SHARE, MIN_BYTES)
        return abs(self.error_bytes(context_bytes)) / allowed


def cases(environ: Mapping[str, str]) -> list[Case]:
    """The cases. The first model is small: it shows the overhead of a process."""
    found = [Case("demo-mini", bundled_path("demo-mini"), 512, 1), Case("demo", bundled_path("demo"), 4096, 4)]
    names = ["135m"] if is_quick(environ) else ["135m", "1b"]
    for name in names:
        path = path_of(SHAPES[name])
        found += [Case(name, path, 4096, 4), Case(f"{name} q8_0", path, 8192, 2, "q8_0")]
    own = (Path(text.strip()) for text in environ.get("GPU_CHECK_MODELS", "").split(",") if text.strip())
    return found + [Case(path.stem, path, 4096, 1) for path in own]


async def measure(inventory: Inventory, device: Reading, wanted: Sequence[Case]) -> AsyncIterator[Sample]:
    """One sample per case, in order; the device must be idle."""
    with tempfile.TemporaryDirectory(prefix="hg-gpu-") as directory:
        root = Path(directory)
        estimator = Estimator(StateDir(root / "state"), seconds=LOAD_SECONDS)
        for number, case in enumerate(wanted):
            folder = root / str(number)
            folder.mkdir()
            spec = _spec(folder, case)
            before = await _settled(inventory, device.id)
            estimate = await estimator.get(spec, device)
            with WorkerRig(folder, _grant(spec, device), dict(device.environment)) as rig:
                rig.expect(worker_link.Ready, LOAD_SECONDS)
                loaded = await _settled(inventory, device.id)
                rig.post("/v1/completions", {"prompt": "the water of the mill", "max_tokens": 8})
                used = await _settled(inventory, device.id)
                reading = next(item for item in inventory.measured() if item.id == device.id)
                figure = reading.process_bytes.get(rig.process.pid)
                checkpoint = await _checkpointed(inventory, device, rig, before) if device.kind == KIND else None
            predicted = estimate.parts[device.id].total_bytes
            restore = _restored(folder, _grant(spec, device), device) if number else None
            yield Sample(case.name, predicted, used - before, checkpoint, restore, used - loaded, figure)
        await estimator.close()


def _restored(folder: Path, grant: worker_link.Grant, device: Reading) -> Restore:
    """Restores as the warm pool does: a process without a device holds the file, then loads it."""
    with WorkerRig(folder, env=dict(HIDDEN)) as rig:
        rig.send(worker_link.Hold(grant.path))
        held = rig.expect(worker_link.Held, LOAD_SECONDS)
        began = time.monotonic()
        rig.send(replace(grant, environment=dict(device.environment)))
        ready = rig.expect(worker_link.Ready, LOAD_SECONDS)
        seconds = time.monotonic() - began
        weights = sum(item.bytes for item in ready.buffers if item.kind == "weights" and item.device == device.id)
    return Restore(seconds, weights, held.locked_bytes)


def link_rate(environment: Mapping[str, str], count_bytes: int = COUNT_BYTES) -> Link | Unmeasured:
    """The rate of copies by the driver on the first device that `environment` makes visible."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.link_rate", str(count_bytes)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            timeout=LINK_SECONDS,
            check=False,
        )
        found = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        return Unmeasured(f"the process that copies gave no answer ({type(error).__name__})")
    return Unmeasured(found["error"]) if "error" in found else Link(**found)


async def _checkpointed(inventory: Inventory, device: Reading, rig: WorkerRig, before: int) -> Checkpoint | Unmeasured:
    """Suspends and resumes the worker, and checks that it answers afterwards."""
    seconds: dict[str, float] = {}
    rest = 0
    for operation in ("suspend", "resume"):
        job = {"operation": operation, "pid": rig.process.pid, "seconds": CHECKPOINT_SECONDS}
        try:
            answer = await run_helper("checkpoint", job, seconds=3 * CHECKPOINT_SECONDS)
        except HelperError as error:
            answer = {"error": str(error)}
        if "error" in answer:
            rig.process.kill()
            return Unmeasured(f"{operation}: {answer['error']}")
        seconds[operation] = answer["seconds"]
        if operation == "suspend":
            rest = await _settled(inventory, device.id) - before
    rig.post("/v1/completions", {"prompt": "the water of the mill", "max_tokens": 8})
    return Checkpoint(seconds["suspend"], seconds["resume"], rest)


def _spec(folder: Path, case: Case) -> ModelSpec:
    (folder / "models.yaml").write_text(json.dumps({"models": {"check": {"path": str(case.path)}}}))
    spec = settings.load(folder, {}, {}).models["check"]
    return replace(spec, context_length=case.context_length, parallel=case.parallel, kv_type=case.kv_type)


def _grant(spec: ModelSpec, device: Reading) -> worker_link.Grant:
    same = {name: getattr(spec, name) for name in _SAME}
    return worker_link.Grant(model_id=spec.id, path=str(spec.path), devices=grants_of([device]), **same)


async def _settled(inventory: Inventory, device: str) -> int:
    """Bytes in use once two readings are equal, because a driver updates its figures late."""
    last = -1
    deadline = asyncio.get_running_loop().time() + SETTLE_SECONDS
    while True:
        await inventory.refresh()
        reading = next((item for item in inventory.measured() if item.id == device), None)
        assert reading is not None
        if reading.used_bytes == last or asyncio.get_running_loop().time() > deadline:
            return reading.used_bytes
        last = reading.used_bytes
        await asyncio.sleep(0.3)


def link_rows(rate: Link | Unmeasured | None) -> Iterator[Row]:
    """The rates of copies by the driver; nothing for a simulated device."""
    if isinstance(rate, Unmeasured):
        yield Row("bytes", "copies by the driver", rate.why, "", reached=False)
    elif rate is not None:
        pageable, back = f"{rate.pageable / 1e9:.2f}", f"{rate.back / 1e9:.2f}"
        yield Row(
            "bytes",
            "copies by the driver to the device: page-locked, pageable; back",
            f"{rate.pinned / 1e9:.2f}, {pageable}; {back} GB/s",
        )


def sample_rows(sample: Sample, first: Sample, rate: Link | Unmeasured | None) -> Iterator[Row]:
    """The rows of a load. It is compared without the memory of a process, which the first load shows."""
    context = first.observed_bytes - first.predicted_bytes
    if sample is first:
        yield Row("bytes", f"a process beside its buffers ({first.name})", format_bytes(context))
    else:
        yield Row(
            "bytes",
            f"{sample.name}: on the device",
            f"{format_bytes(sample.observed_bytes)}, error {sample.error_bytes(context) / MIB:+.2f} MiB",
            f"{format_bytes(sample.predicted_bytes + context)} within 1 % or 16 MiB",
            reached=sample.error(context) <= 1,
        )
    figure = "no figure" if sample.process_bytes is None else format_bytes(sample.process_bytes)
    grown = format_bytes(sample.grown_bytes)
    yield Row(
        "bytes", f"{sample.name}: the driver's figure for its process; more with the first answer", f"{figure}; {grown}"
    )
    if sample.restore is not None:
        yield _of_restore(sample.name, sample.restore, rate if isinstance(rate, Link) else None)
    if sample.checkpoint is not None:
        yield _of_checkpoint(sample, sample.checkpoint)


def _of_restore(name: str, done: Restore, rate: Link | None) -> Row:
    reached = done.weights_bytes / done.seconds
    share = f", {reached / rate.pinned:.2f} of the page-locked copy" if rate is not None else ""
    locked = f"{format_bytes(done.locked_bytes)} locked in RAM"
    text = f"{format_bytes(done.weights_bytes)} in {done.seconds:.2f} s, {reached / 1e9:.2f} GB/s{share}; {locked}"
    return Row("bytes", f"{name}: warm restore", text)


def _of_checkpoint(sample: Sample, done: Checkpoint | Unmeasured) -> Row:
    name = f"{sample.name}: checkpoint by the driver"
    if isinstance(done, Unmeasured):
        return Row("bytes", name, done.why, "", reached=False)
    away, back = (sample.observed_bytes / seconds / 1e9 for seconds in (done.suspend_seconds, done.resume_seconds))
    rest = f"{done.rest_bytes / MIB:.2f} MiB stayed"
    return Row("bytes", name, f"suspended at {away:.2f} GB/s, resumed at {back:.2f} GB/s, {rest}")


def check(
    config: InferenceConfig, wanted: Callable[[], Sequence[Case]]
) -> Iterator[tuple[Sample, Link | Unmeasured | None]]:
    """Each sample of the first measurable device when it is known, with the rate of its link (None if simulated)."""
    inventory = Inventory.of(config.settings)
    with asyncio.Runner() as runner:
        runner.run(inventory.start())
        try:
            device = next(reading for reading in inventory.accelerators() if reading.kind in MEASURED)
            rate = link_rate(device.environment) if device.kind == KIND else None
            samples = measure(inventory, device, wanted())
            while (sample := runner.run(_next(samples))) is not None:
                yield sample, rate
        finally:
            runner.run(inventory.close())


async def _next(samples: AsyncIterator[Sample]) -> Sample | None:
    return await anext(samples, None)


def rows(target: Target) -> Iterator[Row]:
    """The part `bytes` of `gpu-check`."""
    first: Sample | None = None
    for sample, rate in check(target.config(), lambda: cases(target.environ)):
        if first is None:
            first = sample
            yield from link_rows(rate)
        yield from sample_rows(sample, first, rate)
