"""Every figure that is simulated without an NVIDIA GPU, in ten minutes on one. Prints a notice without a GPU.

    python -m benchmarks.gpu_check      PARTS=bytes,decode,growth,experts,warm,kv  QUICK=1  GPU_CHECK_SHAPE=1b
                                        GPU_CHECK_MODELS=/a.gguf,/b.gguf adds your own to `bytes`

bytes: predicted bytes against the driver's, restores and checkpoints against the link. decode: tokens per second
beside a loop without a server. growth: bytes that a plan does not contain are booked to their model. experts: bytes and
speed with experts in host memory, predicted and measured. warm: the first token of cold and warm models. kv: restored
sequences against their prefill and against copies.

Each part runs in a process of its own with a time limit, and what it measured until then stays. The table is printed
and written to benchmarks/results/gpu_check.md. INFERENCE_DEVICES=sim:1x4GiB runs the same on simulated devices.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from benchmarks import gpu_bytes, gpu_decode, gpu_services, gpu_table
from benchmarks.gpu_table import Row
from benchmarks.gpu_target import Target
from headgate.shared.units import format_bytes
from inference.devices.device import Reading
from inference.devices.inventory import Inventory

TABLE = Path("benchmarks/results/gpu_check.md")
END_SECONDS = 15.0
"""Time in which a part that took too long may end its processes."""


@dataclass(frozen=True, slots=True)
class Part:
    """Its time limit and its rows."""

    seconds: float
    rows: Callable[[Target], Iterable[Row]]


PARTS: Mapping[str, Part] = {
    "bytes": Part(140, gpu_bytes.rows),
    "decode": Part(60, gpu_decode.rows),
    "growth": Part(60, gpu_services.growth),
    "experts": Part(120, gpu_services.experts),
    "warm": Part(120, gpu_services.warm),
    "kv": Part(120, gpu_services.kv_tiers),
}


def run_part(name: str, argv: Sequence[str], seconds: float, path: Path) -> list[Row]:
    """Runs the process of a part; the rows that it wrote to `path`, and one for its failure."""
    process = subprocess.Popen(argv, start_new_session=True)
    failure = ""
    try:
        if status := process.wait(seconds):
            failure = f"ended with status {status}"
    except subprocess.TimeoutExpired:
        failure = f"did not end within {seconds:g} s"
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    rows = list(gpu_table.read(path))
    return [*rows, Row(name, "not complete", failure, "", reached=False)] if failure else rows


def part_process(name: str, path: Path, target: Target) -> int:
    """The process of a part: writes each row when it is known. A failure becomes a row."""
    try:
        for row in PARTS[name].rows(target):
            gpu_table.append(path, row)
    except (Exception, SystemExit) as error:
        gpu_table.append(path, Row(name, "not complete", str(error) or type(error).__name__, "", reached=False))
    return 0


def _leave(_signal: int, _frame: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit("the time limit of the part was over")


async def first_device(target: Target) -> Reading | None:
    """The first accelerator that reports the use of all processes to the byte, or None."""
    inventory = Inventory.of(target.config().settings)
    await inventory.start()
    try:
        return next((one for one in inventory.accelerators() if one.kind in gpu_bytes.MEASURED), None)
    finally:
        await inventory.close()


def main(argv: Sequence[str] = sys.argv[1:], environ: Mapping[str, str] = os.environ) -> int:
    """Runs the parts and prints the table. Status 2 for invalid variables, else 0, also without a GPU."""
    try:
        target = Target.of(environ)
        names = gpu_table.selected(PARTS, environ.get("PARTS", ""))
    except ValueError as error:
        print(f"gpu-check: {error}")
        return 2
    if argv:
        signal.signal(signal.SIGTERM, _leave)
        return part_process(argv[0], Path(argv[1]), target)
    device = asyncio.run(first_device(target))
    if device is None:
        print("gpu-check: skipped, because llama.cpp sees no NVIDIA GPU here (is it built with -DGGML_CUDA=ON?)")
        return 0
    title = f"{device.name}, {format_bytes(device.total_bytes)}, driver {device.driver or 'none'}"
    print(f"{device.id}: {title}", flush=True)
    began = time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="hg-gpu-") as directory:
        for name in names:
            print(f"part {name}, at most {PARTS[name].seconds:g} s", flush=True)
            path = Path(directory) / name
            command = [sys.executable, "-m", "benchmarks.gpu_check", name, str(path)]
            rows += run_part(name, command, PARTS[name].seconds, path)
    head = f"`make gpu-check`, {time.strftime('%Y-%m-%d')}, {title}, {time.monotonic() - began:.0f} s:"
    text = f"{head}\n\n{gpu_table.markdown(rows)}\n"
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(text, encoding="utf-8")
    print(f"\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
