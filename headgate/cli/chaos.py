"""`headgate chaos`: injects a fault into a running system with simulated devices. Refuses one with real accelerators.

A fault of a device is a command to the simulator, a fault of a worker or a service is a signal to its process. The
services have no endpoints for faults.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headgate.cli import addresses
from headgate.cli.command import Command, Session, UsageError, zero_or_more
from headgate.shared import ports
from headgate.shared.errors import Exit, HeadgateError
from headgate.shared.units import format_duration, parse_bytes
from inference.protocol import ModelStatus

OUT_OF_MEMORY = "CUDA error: out of memory\n  current device: 0, in function alloc at ggml-cuda.cu\n"
"""What llama.cpp's CUDA backend prints when it runs out of memory, before it aborts."""
SLOW_SECONDS, LATE_SECONDS = 0.05, 5.0
SIM = "sim"


@dataclass(frozen=True)
class Fault:
    """A fault: its target, its effect, and how it ends."""

    name: str
    on: str
    """The kind of the target: `device`, `model` or `service`."""
    summary: str
    undo: str
    """The fault that undoes this one, or a sentence about its end."""
    do: str = ""
    """The command to the simulator, or the name of the service."""
    number: int = 0
    """The signal to the worker of a model."""


def _faults(*faults: Fault) -> Mapping[str, Fault]:
    return {fault.name: fault for fault in faults}


RELOADED = "the next request loads the model again"
RESTARTED = "`headgate up` restarts it"
KILL, ABORT, STOP, CONT = signal.SIGKILL, signal.SIGABRT, signal.SIGSTOP, signal.SIGCONT
FAULTS = _faults(
    Fault("worker-kill", "model", "kill -9 of a model's worker", RELOADED, number=KILL),
    Fault("worker-abort", "model", "a model's worker aborts as after a failed assertion", RELOADED, number=ABORT),
    Fault("worker-stop", "model", "a model's worker stops as in a hanging driver", "worker-cont", number=STOP),
    Fault("worker-cont", "model", "a stopped worker continues", "nothing to undo", number=CONT),
    Fault("oom-load", "device", "the next allocation (weights) fails", "device-heal", "refuse"),
    Fault("oom-context", "device", "the allocation after the next (KV cache) fails", "device-heal", "refuse_after"),
    Fault("oom-compute", "model", "a worker aborts as CUDA does out of memory", RELOADED, number=ABORT),
    Fault("device-cut", "device", "a device falls off the bus", "device-return", "cut"),
    Fault("device-return", "device", "a device that fell off the bus returns, empty", "nothing to undo", "return"),
    Fault("device-stall", "device", "a device transfers no data", "device-heal", "stall"),
    Fault("device-slow", "device", "every request to a device takes longer", "device-heal", "slow"),
    Fault("device-shrink", "device", "a device reports less memory", "device-heal", "shrink"),
    Fault("device-foreign", "device", "another program takes memory of a device", "device-heal", "foreign"),
    Fault("device-late", "device", "freed memory becomes available later", "device-heal", "late"),
    Fault("device-heal", "device", "ends every fault of a device", "nothing to undo", "heal"),
    Fault("inference-kill", "service", "kill -9 of the inference service", RESTARTED, "inference"),
    Fault("gateway-kill", "service", "kill -9 of the gateway", RESTARTED, "gateway"),
)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "fault", metavar="FAULT", nargs="?", choices=FAULTS, help="the fault; without it the faults are listed"
    )
    parser.add_argument("--device", metavar="DEVICE", help="the device (default: all simulated devices)")
    parser.add_argument("--model", metavar="MODEL", help="the model of the worker (default: the busiest model)")
    parser.add_argument(
        "--seconds", metavar="S", type=zero_or_more, help="undo the fault after S seconds (default: it stays)"
    )
    parser.add_argument(
        "--amount",
        metavar="N",
        help="bytes (200MiB) for device-shrink and device-foreign, seconds for device-slow and device-late, "
        "allocations that fail for oom-load, or that succeed before the failing one for oom-context",
    )


def run(session: Session) -> int:
    """Injects the fault, or lists the faults."""
    if session.args.fault is None:
        return _list(session)
    fault = FAULTS[session.args.fault]
    check_options(fault, session.args)
    check_simulated(addresses.inference(session).get("/devices")["devices"])
    done, undo = {"device": _device, "model": _worker, "service": _service}[fault.on](session, fault)
    seconds = session.args.seconds
    if seconds is None or undo is None:
        _report(session, fault, done)
        return Exit.OK
    before = signal.signal(signal.SIGTERM, _end)
    began = time.monotonic()
    try:
        _report(session, fault, done)
        time.sleep(seconds)
    finally:
        signal.signal(signal.SIGTERM, before)
        undo()
        session.terminal.say(f"undone after {format_duration(round(time.monotonic() - began))}")
    return Exit.OK


def _end(number: int, _frame: object) -> None:
    """Ends the command by SIGTERM as by Ctrl-C, so that the fault is undone."""
    sys.exit(128 + number)


def check_options(fault: Fault, args: argparse.Namespace) -> None:
    """Raises UsageError for an option that does not apply to `fault`."""
    for option, given in (("device", args.device), ("model", args.model)):
        if given is not None and fault.on != option:
            raise UsageError(f"{fault.name} acts on a {fault.on}; it does not accept --{option}")
    if args.amount is not None and fault.do not in _WITH_AMOUNT:
        raise UsageError(f"{fault.name} does not accept --amount")
    if args.seconds is not None and fault.do not in _UNDO and fault.number != STOP:
        raise UsageError(f"{fault.name} does not accept --seconds; undo: {fault.undo}")


def check_simulated(devices: list[Mapping[str, Any]]) -> None:
    """Raises UsageError unless there is at least one accelerator and all accelerators are simulated."""
    real = [device for device in devices if device["kind"] not in (SIM, "cpu")]
    if not real and any(device["kind"] == SIM for device in devices):
        return
    names = ", ".join(f"{device['id']} ({device.get('name') or device['kind']})" for device in real)
    raise UsageError(
        f"chaos needs simulated devices only; this system has {names or 'none'}. "
        "Start a simulated system with INFERENCE_DEVICES=sim:2x600MiB headgate up"
    )


def _list(session: Session) -> int:
    rows = [{"fault": one.name, "on": one.on, "does": one.summary, "undo": one.undo} for one in FAULTS.values()]
    if session.prints_json({"faults": rows}):
        return Exit.OK
    table = [[one.name, one.on, one.summary, one.undo] for one in FAULTS.values()]
    session.terminal.table(["FAULT", "ON", "WHAT HAPPENS", "UNDO"], table)
    return Exit.OK


def _report(session: Session, fault: Fault, done: str) -> None:
    if not session.prints_json({"fault": fault.name, "done": done, "undo": fault.undo}):
        session.terminal.say(f"{done}; undo: {fault.undo}")


Done = tuple[str, Callable[[], object] | None]
"""A sentence about what was done, and the function that undoes it."""


# --- devices ---------------------------------------------------------------------------------------------------------
def _device(session: Session, fault: Fault) -> Done:
    from inference.devices.simgpu.control import SOCKET_NAME, Control, SimulatorError
    from inference.workers.os_api import socket_directory

    path = socket_directory(session.state) / SOCKET_NAME
    with Control(path) as control:
        before = control.send("status")
        names = list(before) if session.args.device is None else [session.args.device]
        if unknown := set(names) - set(before):
            raise UsageError(f"unknown simulated device {unknown.pop()!r}; simulated devices: {', '.join(before)}")
        for name in names:
            control.send(fault.do, name, **_amount(fault, session.args.amount, before.get(name, {})))
    commands = _UNDO.get(fault.do)

    def undo() -> None:
        try:
            with Control(path) as control:
                for name in names:
                    for do, amount in commands(before[name]) if commands else ():
                        control.send(do, name, **amount)
        except SimulatorError as error:
            raise HeadgateError(f"undoing {fault.name} on {', '.join(names)} failed: {error}") from error

    return f"{fault.name} on {', '.join(names)}: {fault.summary}", undo if commands else None


_UNDO: Mapping[str, Callable[[Mapping[str, Any]], tuple[tuple[str, dict[str, float]], ...]]] = {
    "refuse": lambda _before: (("refuse", {"count": 0}),),
    "refuse_after": lambda _before: (("refuse", {"count": 0}),),
    "cut": lambda _before: (("return", {}),),
    "stall": lambda _before: (("unstall", {}),),
    "slow": lambda before: (("slow", {"seconds": before["slow_seconds"]}),),
    "shrink": lambda before: (("shrink", {"bytes": before["total_bytes"]}),),
    "foreign": lambda before: (("foreign", {"bytes": before["foreign_bytes"]}),),
    "late": lambda _before: (("late", {"seconds": 0}), ("settle", {})),
}
"""The commands that undo a command. The functions get the status of the device before that command."""
_WITH_AMOUNT = ("refuse", "refuse_after", "slow", "late", "shrink", "foreign")


def _amount(fault: Fault, given: str | None, device: Mapping[str, Any]) -> dict[str, float]:
    """The parameter of the simulator's command: `given`, or a default such as half of the memory of `device`.

    Raises UsageError for an invalid `given`.
    """
    match fault.do:
        case "refuse" | "refuse_after":
            return {"count": 1 if given is None else _number(given, int, "a number of allocations, for example 2")}
        case "slow" | "late":
            default = SLOW_SECONDS if fault.do == "slow" else LATE_SECONDS
            return {"seconds": default if given is None else _number(given, float, "seconds, for example 0.5")}
        case "shrink":
            return {"bytes": device.get("total_bytes", 0) // 2 if given is None else _bytes(given)}
        case "foreign":
            more = device.get("foreign_bytes", 0) + device.get("free_bytes", 0) // 2
            return {"bytes": more if given is None else _bytes(given)}
    return {}


def _number(given: str, kind: Callable[[str], float], example: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (number := kind(given)) < math.inf:
            return number
    raise UsageError(f"--amount {given}: write {example}")


def _bytes(given: str) -> int:
    try:
        return parse_bytes(given)
    except ValueError as error:
        raise UsageError(f"--amount {given}: {error}") from None


# --- processes -------------------------------------------------------------------------------------------------------
def _worker(session: Session, fault: Fault) -> Done:
    entries = addresses.inference(session).get("/v1/models")["data"]
    status = pick([ModelStatus.from_json(entry) for entry in entries], session.args.model)
    assert status.pid is not None
    signal_worker(status.pid, fault)
    done = f"{fault.name}: {status.id} (pid {status.pid}, on {', '.join(status.devices)})"
    return done, partial(_continue, status.pid) if fault.name == "worker-stop" else None


def _continue(pid: int) -> None:
    """Continues a stopped worker; one that was killed because it hung is gone, and its pid may be reused."""
    if _is_worker(pid):
        _signal(pid, signal.SIGCONT)


def pick(models: list[ModelStatus], name: str | None) -> ModelStatus:
    """The model `name`, by default the busiest one. Raises UsageError when it has no worker."""
    alive = [status for status in models if status.pid is not None]
    if name is None:
        if not alive:
            raise UsageError("no model is loaded; load one with `headgate load MODEL`")
        return max(alive, key=lambda status: status.in_flight)
    found = [status for status in models if name in (status.id, *status.aliases)]
    if not found:
        raise UsageError(f"unknown model {name!r}; models: {', '.join(model.id for model in models)}")
    if found[0].pid is None:
        raise UsageError(f"{name} is not loaded (it is {found[0].state}); load it with `headgate load {name}`")
    return found[0]


def signal_worker(pid: int, fault: Fault) -> None:
    """Sends the signal of `fault` to the worker `pid`. Raises HeadgateError when it is not a worker of this machine."""
    if not _is_worker(pid):
        raise HeadgateError(f"pid {pid} is not a worker on this machine; the service may run on another one")
    if fault.name == "oom-compute":
        write_to_stderr_of(pid, OUT_OF_MEMORY)
    _signal(pid, fault.number)


def _is_worker(pid: int) -> bool:
    """Whether `pid` is `python -m inference.worker`, started by an inference service.

    That its command line contains this text is not enough: so does that of an editor, a shell or a test run.
    """
    from inference.workers.orphans import FAMILY_ENV

    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        is_child = any(variable.startswith(f"{FAMILY_ENV}=".encode()) for variable in variables)
        return is_child and ports.arguments(pid)[-2:] == ["-m", "inference.worker"]
    return False


def write_to_stderr_of(pid: int, text: str) -> None:
    """Writes `text` to the stderr of the process `pid`. Raises HeadgateError when the system does not allow it."""
    try:
        with Path(f"/proc/{pid}/fd/2").open("w", encoding="utf-8") as errors:
            errors.write(text)
    except OSError as error:
        raise HeadgateError(f"cannot write to the stderr of pid {pid} ({error.strerror})") from error


def _service(session: Session, fault: Fault) -> Done:
    url = addresses.inference_url(session) if fault.do == "inference" else addresses.gateway_url(session)
    pid = service_pid(url, fault.do)
    _signal(pid, signal.SIGKILL)
    return f"{fault.name}: pid {pid} at {url}", None


def service_pid(url: str, name: str) -> int:
    """The process that listens at `url`. Raises HeadgateError unless it is the service `name` on this machine."""
    port = urlsplit(url).port
    pid = None if port is None else ports.owner_pid(port)
    if pid is None or name not in ports.arguments(pid):
        raise HeadgateError(f"cannot find the process of the {name} at {url} on this machine")
    return pid


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError as error:
        raise HeadgateError(f"cannot send {signal.Signals(number).name} to pid {pid} ({error.strerror})") from error


COMMANDS = {"chaos": Command(_arguments, run)}
