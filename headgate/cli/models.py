"""Verbs for models, from `ps` to `plan`, which call the inference service."""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headgate.cli.client import ApiError, segment
from headgate.cli.command import Session, at_least_one, no_arguments, on_nodes, zero_or_more
from headgate.cli.nodes import Answers, Nodes, label
from headgate.cli.terminal import bytes_cell, facts, seconds_cell
from headgate.shared.errors import Exit, NotRunningError
from headgate.shared.units import format_bytes, format_duration
from inference.protocol import ModelState, ModelStatus

CHANGE_SECONDS = 7200.0
"""Timeout of a load or another change. The limits of the service are shorter (a load has 1,800 s by default)."""
RETRY_SECONDS = 1.0
"""Pause before the next request that waits for the same load."""

PLAN_SECONDS = 120.0
"""Timeout of a plan: the memory of the model may have to be estimated first."""

CRASH_LINES = 5
"""How many of the last output lines of the last crash `show` prints; `--json` has all stored lines."""

WATCH_SECONDS = 2.0
CLEAR = "\x1b[H\x1b[2J"
"""Moves the cursor home and clears the screen."""

KV_TYPES = ("f16", "q8_0", "q4_0")
SPLIT_MODES = ("layer", "row", "tensor")
FITS = ("off", "context", "experts", "layers", "auto")

_STYLES = {
    ModelState.READY: "green",
    ModelState.BUSY: "green",
    ModelState.WARM: "cyan",
    ModelState.FAILED: "red",
    ModelState.COLD: "dim",
}


def _one_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model's name or alias")


def _model_and_device(parser: argparse.ArgumentParser) -> None:
    _one_model(parser)
    parser.add_argument("device", metavar="DEVICE", help="a device's name, as `headgate devices` lists it")


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    _one_model(parser)
    parser.add_argument("--ctx", metavar="TOKENS", type=at_least_one, help="context length per request to plan for")
    parser.add_argument("--parallel", metavar="N", type=at_least_one, help="concurrent sequences to plan for")
    parser.add_argument("--kv-cells", metavar="N", type=at_least_one, help="KV cells of all sequences to plan for")
    parser.add_argument("--kv-type", metavar="TYPE", choices=KV_TYPES, help="type of the KV cache: f16, q8_0 or q4_0")
    parser.add_argument("--gpu-layers", metavar="N", type=_layers, help="layers on the accelerator; -1: all")
    parser.add_argument(
        "--experts",
        metavar="WHERE",
        help="memory of the experts: device, host, auto, or N: host memory for those of N layers",
    )
    parser.add_argument("--split-mode", choices=SPLIT_MODES, help="how several devices share the model")
    parser.add_argument(
        "--fit", metavar="WHAT", choices=FITS,
        help="what may change if the model does not fit: context, experts, layers, auto (all of them), off (nothing)",
    )  # fmt: skip
    parser.add_argument(
        "--min-context", metavar="TOKENS", type=at_least_one, help="the shortest context that --fit may choose"
    )
    parser.add_argument("--ubatch", metavar="TOKENS", type=at_least_one, help="tokens in one computation of the device")


def _layers(text: str) -> int:
    """The type of an option with a number of layers; -1: all."""
    try:
        layers = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if layers < -1:
        raise argparse.ArgumentTypeError(f"{text} is too small; use -1 (all layers), 0 (none) or more")
    return layers


Models = list[tuple[str, ModelStatus]]
"""The status of models, each with the name of its node."""


def _statuses(session: Session, *, running: bool) -> tuple[Answers, Models]:
    """The answers of the nodes, and their models; with `running` only models that are not cold."""
    answers = Nodes.of(session).get("/v1/models")
    found = [(node, ModelStatus.from_json(entry)) for node, answer in answers for entry in answer["data"]]
    return answers, [(node, one) for node, one in found if not running or one.state is not ModelState.COLD]


def _json(answers: Answers, models: Models) -> list[dict[str, Any]]:
    """Each model with the name and epoch of its node. A node without a configured name has the one it reports."""
    named = {
        node: {key: answer[key] for key in ("node", "epoch") if key in answer} | ({"node": node} if node else {})
        for node, answer in answers
    }
    return [*(named[node] | status.to_json() for node, status in models), *answers.failures()]


def _watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=_interval,
        const=WATCH_SECONDS,
        help="repeat the output every SECONDS (2) until Ctrl-C; with --json one line each time",
    )


def _interval(text: str) -> float:
    seconds = zero_or_more(text)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is out of range; use 0.1 to 3600 seconds")
    return seconds


def ps(session: Session) -> int:
    """Lists models that are not cold, and each replica of a model that has several."""
    if session.args.watch is None:
        return _table(session, *_statuses(session, running=True), running=True)
    try:
        _watch(session, session.args.watch)
    except KeyboardInterrupt:
        session.terminal.say("")
    return Exit.OK


def _watch(session: Session, seconds: float) -> None:
    """Repeats the table. After the first one, an error is printed and the request is tried again."""
    terminal = session.terminal
    answers, models = _statuses(session, running=True)
    while True:
        if session.json:
            terminal.data(json.dumps(_json(answers, models), ensure_ascii=False))
        else:
            terminal.data(f"{CLEAR if terminal.out_tty else ''}every {format_duration(seconds)}, {time.strftime('%X')}")
            _table(session, answers, models, running=True)
        time.sleep(seconds)
        while True:
            try:
                answers, models = _statuses(session, running=True)
                break
            except (NotRunningError, ApiError) as error:
                terminal.say(str(error))
                time.sleep(seconds)


def _rows(status: ModelStatus) -> list[ModelStatus]:
    """The replicas of a model that are not cold; without any, the model itself."""
    return [
        replace(
            status,
            id=replica.id,
            state=replica.state,
            devices=replica.devices,
            actual_bytes=replica.actual_bytes,
            in_flight=replica.in_flight,
            queued=replica.queued,
            pid=replica.pid,
            idle_seconds=replica.idle_seconds,
            parallel=replica.parallel,
        )
        for replica in status.replicas
        if replica.state is not ModelState.COLD
    ] or [status]


def list_models(session: Session) -> int:
    """Lists all models."""
    return _table(session, *_statuses(session, running=False), running=False)


def _table(session: Session, answers: Answers, models: Models, *, running: bool) -> int:
    terminal = session.terminal
    if answers.prints_json(session, _json(answers, models)):
        return Exit.OK
    if running:
        headers = ["MODEL", "STATE", "DEVICE", "PREDICTED", "ACTUAL", "CONTEXT", "IN FLIGHT", "QUEUED", "IDLE", "PID"]
        rows = [
            (
                node,
                [
                    status.id,
                    status.state.value,
                    _devices(status),
                    bytes_cell(status.predicted_bytes),
                    bytes_cell(status.actual_bytes),
                    str(status.context_length),
                    f"{status.in_flight}/{status.parallel}",
                    str(status.queued),
                    seconds_cell(status.idle_seconds),
                    str(status.pid or "-"),
                ],
            )
            for node, shown in models
            for status in _rows(shown)
        ]
        none = "no model is loaded; a request or `headgate load MODEL` loads one"
    else:
        headers = ["MODEL", "STATE", "CONTEXT", "PARALLEL", "NEEDS", "FITS", "ALIASES"]
        rows = [
            (
                node,
                [
                    status.id,
                    status.state.value,
                    str(status.context_length),
                    str(status.parallel),
                    bytes_cell(status.predicted_bytes),
                    {True: "yes", False: "no", None: "-"}[status.fits],
                    ", ".join(status.aliases) or "-",
                ],
            )
            for node, status in models
        ]
        none = "no models are configured; `headgate add FILE.gguf` adds one"
    right = ["PREDICTED", "ACTUAL", "CONTEXT", "IN FLIGHT", "QUEUED", "IDLE", "PID", "PARALLEL", "NEEDS"]
    answers.table(terminal, headers, rows, right, none)
    for node, status in models:
        for item in status.replicas or (status,):
            if item.reason:
                terminal.say(f"{label(node)}{item.id}: {item.reason}")
    return Exit.OK


def show(session: Session) -> int:
    """Shows one model."""
    api, name = Nodes.of(session).with_model(session.args.model), segment(session.args.model)
    answer = api.get(f"/v1/models/{name}")
    crashes = api.get(f"/models/{name}/crashes")["crashes"]
    if session.prints_json({**answer, "crashes": crashes}):
        return Exit.OK
    status = ModelStatus.from_json(answer)
    paint = session.terminal.paint
    fits = {True: "yes", False: "no", None: "unknown"}[status.fits]
    pool = "" if status.kv_cells is None else f" in {status.kv_cells} shared cells"
    pairs = [
        ("model", paint(status.id, "bold")),
        ("aliases", ", ".join(status.aliases) or "-"),
        ("state", paint(status.state.value, _STYLES.get(status.state, "yellow"))),
        ("worker pid", str(status.pid or "-")),
        ("device", _devices(status)),
        ("memory", f"{bytes_cell(status.actual_bytes)} (predicted {bytes_cell(status.predicted_bytes)})"),
        ("fits now", fits),
        ("context", f"{status.context_length} tokens per request, {status.parallel} parallel requests{pool}"),
        ("gpu layers", "all" if status.gpu_layers < 0 else str(status.gpu_layers)),
        ("capabilities", ", ".join(status.capabilities) or "-"),
        ("in flight", str(status.in_flight)),
        ("queued", str(status.queued)),
        ("idle", seconds_cell(status.idle_seconds)),
        ("loads", str(status.loads)),
    ]
    for replica in status.replicas:
        place = ", ".join(replica.devices) or "-"
        pairs.append(("replica", f"{replica.id}: {replica.state.value} on {place}, {replica.in_flight} in flight"))
    if status.reason:
        pairs.append(("reason", status.reason))
    if status.growth:
        pairs.append(("growth", "; ".join(status.growth)))
    if status.template_problem:
        pairs.append(("chat template", f"not used: {status.template_problem}"))
    if status.headroom_bytes:
        pairs.append(
            (
                "head-room",
                f"{bytes_cell(status.headroom_bytes)} of the predicted memory, added after out-of-memory errors",
            )
        )
    if status.reduced:
        pairs.append(("changed to fit", ", ".join(status.reduced)))
    pairs += [("step", f"{step['step']} {_settings(step['settings'])}".strip()) for step in status.steps]
    if status.retry_after_seconds is not None:
        pairs.append(("next load in", format_duration(status.retry_after_seconds)))
    if crashes:
        pairs += _last_crash(crashes)
    for line in facts(pairs):
        session.terminal.data(line)
    return Exit.OK


def _last_crash(crashes: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    last = crashes[0]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last["time"]))
    shapes = [", ".join(f"{key} {value}" for key, value in shape.items()) for shape in last["requests"]]
    pairs = [("crashes", f"{len(crashes)}, the last at {when}: {last['message']}")]
    pairs += [("requests", shape) for shape in shapes]
    return pairs + [("output", line) for line in last["last_lines"][-CRASH_LINES:]]


def _change(action: str, activity: str) -> Callable[[Session], int]:
    """The `run` of a verb that posts `action` for a model and waits until it is done."""
    return functools.partial(_run_change, action, activity)


def _run_change(action: str, activity: str, session: Session) -> int:
    """A load that outlasts the longest wait of the service is waited for again."""
    session.terminal.status(f"{activity} {session.args.model} ...")
    body = {"device": session.args.device} if action == "move" else None
    path = f"/models/{segment(session.args.model)}"
    api = Nodes.of(session).with_model(session.args.model)
    while True:
        try:
            answer = api.post(f"{path}/{action}", body, seconds=CHANGE_SECONDS)
            break
        except ApiError as error:
            if error.code != "model_loading" or action not in ("load", "restart"):
                raise
            session.terminal.status(str(error))
            action = "load"
            time.sleep(RETRY_SECONDS)
    if session.prints_json(answer):
        return Exit.OK
    status = ModelStatus.from_json(answer)
    place = f" on {_devices(status)}, {format_bytes(status.actual_bytes)}" if status.actual_bytes else ""
    session.terminal.say(f"{status.id}: {status.state.value}{place}")
    return Exit.OK


_SAME = (
    "parallel", "kv_cells", "kv_type", "gpu_layers", "experts", "split_mode", "ubatch", "fit", "min_context",
)  # fmt: skip
_PLANNED = {"ctx": "context_length"} | dict(zip(_SAME, _SAME, strict=True))
"""Options of `plan` and the settings that they replace."""


def plan(session: Session) -> int:
    """Prints a dry run. Exit code 0 when the model fits (on one of the nodes), 4 when not."""
    values = {name: getattr(session.args, option) for option, name in _PLANNED.items()}
    body = {"model": session.args.model} | {name: value for name, value in values.items() if value is not None}
    session.terminal.status(f"estimating {session.args.model} ...")
    answers = Nodes.of(session).each(lambda api: api.post("/memory/plan", body, seconds=PLAN_SECONDS), PLAN_SECONDS)
    best = best_plan(answers.values)
    if len(answers.values) + len(answers.errors) > 1:
        _print_plans(session, answers, best)
    elif not answers.prints_json(session):
        for _, answer in answers:
            for line in plan_lines(session.args.model, answer):
                session.terminal.data(line)
    return Exit.DOES_NOT_FIT if best is None else Exit.OK


def best_plan(plans: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The node with the plan of the lowest `plan_cost`, from `plans` by node; None if the model fits nowhere."""
    from gateway.nodes.plan_cost import plan_cost

    costs = {node: cost for node, plan in plans.items() if (cost := plan_cost(plan, None)) is not None}
    return min(costs, key=costs.__getitem__, default=None)


def _print_plans(session: Session, answers: Answers, best: str | None) -> None:
    """The plans of several nodes, one per line."""
    if answers.prints_json(session, {**answers.as_json(), "best": best}):
        return
    rows = []
    for node, answer in answers:
        need = ", ".join(f"{format_bytes(count)} on {device}" for device, count in answer.get("need_bytes", {}).items())
        rate = (answer.get("expected") or {}).get("tokens_per_second")
        note = answer.get("reason") or (f"with {_settings(changes)}" if (changes := answer.get("changes")) else "-")
        cells = ["*" if node == best else "", answer["result"], need or "-", ", ".join(answer.get("evict", ())) or "-"]
        rows.append((node, [*cells, "-" if rate is None else f"{rate:.3g}", note]))
    answers.table(session.terminal, ["BEST", "RESULT", "NEEDS", "EVICTS", "TOKENS/S", "NOTE"], rows, ["TOKENS/S"])
    session.terminal.say(f"`headgate plan {session.args.model} --node NODE` explains the plan of one node")


def plan_lines(model: str, answer: Mapping[str, Any]) -> list[str]:
    """The text of an answer of `/memory/plan`: the decision, changes, evictions, the estimate, and the trace."""
    need = ", ".join(f"{format_bytes(count)} on {device}" for device, count in answer.get("need_bytes", {}).items())
    if short := answer.get("short"):
        lines = [f"{model} does not fit"]
        lines += [
            f"  {entry['device']}: needs {format_bytes(entry['need_bytes'])}, {format_bytes(entry['free_bytes'])} "
            f"available, {format_bytes(entry['short_bytes'])} short ({entry['bound']})"
            for entry in short
        ]
    elif answer["result"] == "CANT_ACCOMMODATE":
        lines = [f"{model} cannot be placed now: {answer.get('reason', 'unknown reason')}"]
    else:
        results = {"DEPLOYED": "is loaded", "FREE": "fits", "FULL": "fits after evictions"}
        lines = [f"{model} {results.get(answer['result'], answer['result'])}{': ' + need if need else ''}"]
    if changes := answer.get("changes"):
        lines.append(f"  does not fit as configured; would be loaded with {_settings(changes)}")
    for step in answer.get("steps", ()):
        parts = [
            f"{'saves' if count > 0 else 'takes'} about {format_bytes(abs(count))} on {name}"
            for name, count in step["saved_bytes"].items()
            if count
        ]
        if (speed := step["tokens_per_second"]) is not None:
            parts.append(f"then {speed:.3g} tokens/s")
        lines.append(", ".join([f"  step {step['step']}: {_settings(step['settings'])}", *parts]))
    if expected := answer.get("expected"):
        lines.append(f"  expected: {_speed(expected)}")
    if evict := answer.get("evict"):
        lines.append(f"  would evict: {', '.join(evict)}")
    if waits_for := answer.get("waits_for"):
        lines.append(f"  waits for: {', '.join(waits_for)}")
    if fix := answer.get("fix"):
        lines.append(f"  would fit with {' and '.join(f'{key}: {value}' for key, value in fix.items())}")
    for device, parts in (answer.get("estimate") or {}).get("devices", {}).items():
        shown = {kind: count for kind, count in parts.items() if count or kind not in ("headroom_bytes", "draft_bytes")}
        text = ", ".join(f"{kind.removesuffix('_bytes')} {format_bytes(count)}" for kind, count in shown.items())
        lines.append(f"  estimate for {device}: {text}")
    return [*lines, *(f"  {line}" for line in answer.get("trace", ()))]


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in settings.items())


def _speed(expected: Mapping[str, Any]) -> str:
    """The expected speed and what it is computed from."""
    rates, rate = expected["bytes_per_second"], expected["tokens_per_second"]
    speed = "unknown tokens per second" if rate is None else f"{rate:.4g} tokens per second"
    reads = (
        f"{format_bytes(count)} on {device} at "
        + (f"{rates[device] / 1e9:.3g} GB/s" if device in rates else "an unknown rate")
        for device, count in expected["read_bytes"].items()
    )
    return f"{speed}; each token reads {', '.join(reads)}"


def _devices(status: ModelStatus) -> str:
    return (", ".join(status.devices) or "-") + (" (fallback)" if status.fallback else "")


COMMANDS = {
    "ps": on_nodes(_watch_arguments, ps),
    "list": on_nodes(no_arguments, list_models),
    "show": on_nodes(_one_model, show),
    "load": on_nodes(_one_model, _change("load", "loading")),
    "unload": on_nodes(_one_model, _change("unload", "unloading")),
    "offload": on_nodes(_one_model, _change("offload", "offloading")),
    "move": on_nodes(_model_and_device, _change("move", "moving")),
    "restart": on_nodes(_one_model, _change("restart", "restarting")),
    "stop": on_nodes(_one_model, _change("unload?now=true", "stopping")),
    "plan": on_nodes(_plan_arguments, plan),
}
