"""`headgate chaos`: injects one named fault into a running system whose devices are simulated; refuses any other.

Faults of devices are commands of the simulator, faults of workers and services are signals to their processes. What is
done here is done from outside, as the world does it: no service has a door for it.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headgate.cli import addresses
from headgate.cli.command import Command, Session, zero_or_more
from headgate.shared import ports
from headgate.shared.amounts import format_duration, parse_bytes
from headgate.shared.errors import Exit, HeadgateError
from inference.protocol import ModelStatus

OUT_OF_MEMORY = "CUDA error: out of memory\n  current device: 0, in function alloc at ggml-cuda.cu\n"
"""What CUDA's backend of llama.cpp writes before it aborts for want of memory."""
SLOW_SECONDS, LATE_SECONDS = 0.05, 5.0
SIM = "sim"


class ChaosRefusedError(HeadgateError):
    """The fault cannot be injected here; the message says why."""

    exit_code = Exit.USAGE


@dataclass(frozen=True)
class Fault:
    """A fault by name: on what it acts, what it does, and how it ends."""

    name: str
    on: str
    """`device`, `model` or `service`."""
    summary: str
    undo: str
    do: str = ""
    """The simulator's command, or the service."""
    number: int = 0
    """The signal."""


def _faults(*faults: Fault) -> Mapping[str, Fault]:
    return {fault.name: fault for fault in faults}


RESTARTED = "the model is loaded again by its next request"
AGAIN = "`headgate up` starts it again"
KILL, ABORT, STOP, CONT = signal.SIGKILL, signal.SIGABRT, signal.SIGSTOP, signal.SIGCONT
FAULTS = _faults(
    Fault("worker-kill", "model", "kill -9 of a model's worker", RESTARTED, number=KILL),
    Fault("worker-abort", "model", "a model's worker aborts, as at a failed assertion", RESTARTED, number=ABORT),
    Fault("worker-stop", "model", "a model's worker stands still, as in a hung driver", "worker-cont", number=STOP),
    Fault("worker-cont", "model", "a worker that stands still goes on", "nothing to undo", number=CONT),
    Fault("oom-load", "device", "the next allocation fails, as for weights", "device-heal", "refuse"),
    Fault(
        "oom-context", "device", "the allocation after the next fails, as for a cache", "device-heal", "refuse_after"
    ),
    Fault("oom-compute", "model", "a worker aborts as CUDA does out of memory", RESTARTED, number=ABORT),
    Fault("device-cut", "device", "a device falls off the bus", "device-return", "cut"),
    Fault("device-return", "device", "a device that was cut is back, empty", "nothing to undo", "return"),
    Fault("device-stall", "device", "nothing passes to or from a device", "device-heal", "stall"),
    Fault("device-slow", "device", "every request to a device takes longer", "device-heal", "slow"),
    Fault("device-shrink", "device", "a device shows less memory than it had", "device-heal", "shrink"),
    Fault("device-foreign", "device", "somebody else takes memory of a device", "device-heal", "foreign"),
    Fault("device-late", "device", "memory that is freed comes back later", "device-heal", "late"),
    Fault("device-heal", "device", "ends every fault of a device", "nothing to undo", "heal"),
    Fault("inference-kill", "service", "kill -9 of the inference service", AGAIN, "inference"),
    Fault("gateway-kill", "service", "kill -9 of the gateway", AGAIN, "gateway"),
)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "fault", metavar="FAULT", nargs="?", choices=FAULTS, help="what shall happen; without it the faults are listed"
    )
    parser.add_argument("--device", metavar="DEVICE", help="the device; without it all simulated ones")
    parser.add_argument("--model", metavar="MODEL", help="whose worker; without it the busiest model's")
    parser.add_argument(
        "--seconds", metavar="S", type=zero_or_more, help="undo it after so long; without it, it stays as it is"
    )
    parser.add_argument(
        "--amount",
        metavar="N",
        help="bytes (200MiB) for device-shrink and device-foreign, seconds for device-slow and device-late, "
        "allocations for oom-load and oom-context",
    )


def run(session: Session) -> int:
    """Injects the fault, or lists what there is."""
    if session.args.fault is None:
        return _list(session)
    fault = FAULTS[session.args.fault]
    check_sense(fault, session.args)
    check_simulated(addresses.inference(session).get("/devices")["devices"])
    said, undo = {"device": _device, "model": _worker, "service": _service}[fault.on](session, fault)
    seconds = session.args.seconds
    try:
        _tell(session, fault, said)
        if seconds is not None:
            time.sleep(seconds)
    finally:
        if seconds is not None and undo is not None:
            undo()
            session.terminal.say(f"undone after {format_duration(seconds)}")
    return Exit.OK


def check_sense(fault: Fault, args: argparse.Namespace) -> None:
    """Raises ChaosRefusedError where an option cannot apply to `fault`: what is not meant must not be struck."""
    for option, given in (("device", args.device), ("model", args.model)):
        if given is not None and fault.on != option:
            raise ChaosRefusedError(f"{fault.name} strikes a {fault.on}; it takes no --{option}")
    if args.amount is not None and fault.do not in _WITH_AMOUNT:
        raise ChaosRefusedError(f"{fault.name} takes no --amount")
    if args.seconds is not None and fault.do not in _ENDS and fault.number != STOP:
        raise ChaosRefusedError(f"{fault.name} has nothing that --seconds could end; {fault.undo}")


def check_simulated(devices: list[Mapping[str, Any]]) -> None:
    """Raises ChaosRefusedError unless there are accelerators and all of them are simulated."""
    real = [device for device in devices if device["kind"] not in (SIM, "cpu")]
    if real or not any(device["kind"] == SIM for device in devices):
        there = ", ".join(f"{device['id']} ({device.get('name') or device['kind']})" for device in real) or "none"
        raise ChaosRefusedError(
            f"faults are injected into systems on simulated devices only; accelerators here: {there}. "
            f"Start one with INFERENCE_DEVICES=sim:2x600MiB headgate up"
        )


def _list(session: Session) -> int:
    if session.json:
        rows = [{"fault": one.name, "on": one.on, "does": one.summary, "undo": one.undo} for one in FAULTS.values()]
        session.terminal.json({"faults": rows})
        return Exit.OK
    table = [[one.name, one.on, one.summary, one.undo] for one in FAULTS.values()]
    session.terminal.table(["FAULT", "ON", "WHAT HAPPENS", "UNDO"], table)
    return Exit.OK


def _tell(session: Session, fault: Fault, said: str) -> None:
    if session.json:
        session.terminal.json({"fault": fault.name, "done": said, "undo": fault.undo})
    else:
        session.terminal.say(f"{said}; undo: {fault.undo}")


Done = tuple[str, Callable[[], object] | None]
"""What was done, in a sentence, and what undoes it."""


# --- devices ---------------------------------------------------------------------------------------------------------
def _device(session: Session, fault: Fault) -> Done:
    from inference.devices.simgpu.control import SOCKET_NAME, Control, SimulatorError
    from inference.workers.os_api import socket_directory

    path = socket_directory(session.state) / SOCKET_NAME
    try:
        with Control(path) as control:
            before = control.tell("status")
            names = list(before) if session.args.device is None else [session.args.device]
            if unknown := set(names) - set(before):
                there = ", ".join(before)
                raise ChaosRefusedError(f"there is no simulated device {unknown.pop()!r}; there are {there}")
            for name in names:
                control.tell(fault.do, name, **_amount(fault, session.args.amount, before.get(name, {})))
    except SimulatorError as error:
        raise HeadgateError(str(error)) from error
    ends = _ENDS.get(fault.do)

    def undo() -> None:
        try:
            with Control(path) as control:
                for name in names:
                    for do, amount in ends(before[name]) if ends else ():
                        control.tell(do, name, **amount)
        except SimulatorError as error:
            raise HeadgateError(f"{fault.name} on {', '.join(names)} cannot be undone: {error}") from error

    return f"{fault.name} on {', '.join(names)}: {fault.summary}", undo if ends else None


_ENDS: Mapping[str, Callable[[Mapping[str, Any]], tuple[tuple[str, dict[str, float]], ...]]] = {
    "refuse": lambda _before: (("refuse", {"count": 0}),),
    "refuse_after": lambda _before: (("refuse", {"count": 0}),),
    "cut": lambda _before: (("return", {}),),
    "stall": lambda _before: (("unstall", {}),),
    "slow": lambda before: (("slow", {"seconds": before["slow_seconds"]}),),
    "shrink": lambda before: (("shrink", {"bytes": before["total_bytes"]}),),
    "foreign": lambda before: (("foreign", {"bytes": before["foreign_bytes"]}),),
    "late": lambda _before: (("late", {"seconds": 0}), ("settle", {})),
}
"""The commands that end a command's effect on a device, of which the status before it is given."""
_WITH_AMOUNT = ("refuse", "refuse_after", "slow", "late", "shrink", "foreign")


def _amount(fault: Fault, said: str | None, device: Mapping[str, Any]) -> dict[str, float]:
    """The parameter of the simulator's command; what nobody said is half of what there is, or little."""
    try:
        match fault.do:
            case "refuse" | "refuse_after":
                return {"count": 1 if said is None else int(said)}
            case "slow" | "late":
                usual = SLOW_SECONDS if fault.do == "slow" else LATE_SECONDS
                return {"seconds": usual if said is None else float(said)}
            case "shrink":
                return {"bytes": device.get("total_bytes", 0) // 2 if said is None else parse_bytes(said)}
            case "foreign":
                half = device.get("foreign_bytes", 0) + device.get("free_bytes", 0) // 2
                return {"bytes": half if said is None else parse_bytes(said)}
    except ValueError as error:
        raise ChaosRefusedError(f"--amount {said}: {error}") from None
    return {}


# --- processes -------------------------------------------------------------------------------------------------------
def _worker(session: Session, fault: Fault) -> Done:
    entries = addresses.inference(session).get("/v1/models")["data"]
    status = pick([ModelStatus.from_json(entry) for entry in entries], session.args.model)
    assert status.pid is not None
    strike(status.pid, fault)
    said = f"{fault.name}: {status.id} (pid {status.pid}, on {', '.join(status.devices)})"
    undo = (lambda: _signal(status.pid or 0, signal.SIGCONT)) if fault.name == "worker-stop" else None
    return said, undo


def pick(models: list[ModelStatus], name: str | None) -> ModelStatus:
    """The model called `name`, or the busiest; raises ChaosRefusedError where it has no worker."""
    alive = [status for status in models if status.pid is not None]
    if name is None:
        if not alive:
            raise ChaosRefusedError("no model has a worker now; `headgate load MODEL` gives it one")
        return max(alive, key=lambda status: status.in_flight)
    found = [status for status in models if name in (status.id, *status.aliases)]
    if not found:
        raise ChaosRefusedError(f"there is no model {name!r}; there are {', '.join(one.id for one in models)}")
    if found[0].pid is None:
        raise ChaosRefusedError(
            f"{name} has no worker now (it is {found[0].state}); `headgate load {name}` gives it one"
        )
    return found[0]


def strike(pid: int, fault: Fault) -> None:
    """Sends the worker `pid` the signal of `fault`; raises HeadgateError unless it is a worker of this machine."""
    if "inference.worker" not in ports.command(pid):
        raise HeadgateError(f"pid {pid} is no worker on this machine; the service may run elsewhere")
    if fault.name == "oom-compute":
        say_last_words(pid, OUT_OF_MEMORY)
    _signal(pid, fault.number)


def say_last_words(pid: int, text: str) -> None:
    """Writes `text` where the process `pid` writes its errors; raises HeadgateError where the system has no way."""
    try:
        with Path(f"/proc/{pid}/fd/2").open("w", encoding="utf-8") as errors:
            errors.write(text)
    except OSError as error:
        raise HeadgateError(f"the errors of pid {pid} cannot be written to ({error.strerror})") from error


def _service(session: Session, fault: Fault) -> Done:
    url = addresses.inference_url(session) if fault.do == "inference" else addresses.gateway_url(session)
    pid = service_pid(url, fault.do)
    _signal(pid, signal.SIGKILL)
    return f"{fault.name}: pid {pid} at {url}", None


def service_pid(url: str, name: str) -> int:
    """The process that listens at `url` on this machine; raises HeadgateError unless it is our service `name`."""
    port = urlsplit(url).port
    pid = None if port is None else ports.owner_pid(port)
    if pid is None or name not in ports.command(pid):
        raise HeadgateError(f"the process of the {name} at {url} cannot be found on this machine")
    return pid


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError as error:
        raise HeadgateError(f"pid {pid} cannot be sent {signal.Signals(number).name} ({error.strerror})") from error


COMMANDS = {"chaos": Command(_arguments, run)}
