"""`headgate ray`: starts, shows and ends inference services on the nodes of a Ray cluster."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

import headgate
from headgate.cli.command import Command, Session, UsageError, zero_or_more
from headgate.cli.terminal import seconds_cell
from headgate.shared.errors import Exit, HeadgateError
from headgate.shared.state_directory import INFERENCE_TOKEN

if TYPE_CHECKING:
    from headgate.ray_cluster.node_report import NodeReport, ServiceSettings

HERE, NODES = "here", "nodes"
READY_SECONDS = 120.0
DRAIN_SECONDS = 60.0
POLL_SECONDS = 0.25
NO_CHANGE_SECONDS = 2.0
"""How long the nodes and their states must be unchanged before `up` reports them, unless all are ready."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of the verb."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    up = actions.add_parser(
        "up",
        help="start an inference service on each node",
        description="Start an inference service on each node of a running Ray cluster, and on nodes that join later.\n"
        "Headgate must be installed in the Python of Ray on every node.",
    )
    up.add_argument("--host", metavar="HOST", help="address to listen on (default: the address of the node in Ray)")
    up.add_argument(
        "--port", metavar="PORT", type=int, default=8085, help="port of the services (8085); 0: a free one on each node"
    )
    up.add_argument(
        "--token-from",
        choices=(HERE, NODES),
        default=HERE,
        help="here: send INFERENCE_TOKEN or inference.token of this machine to the nodes (default); "
        "nodes: each node has it already",
    )
    up.add_argument(
        "--timeout", metavar="SECONDS", type=zero_or_more, default=READY_SECONDS, help="longest wait until ready (120)"
    )
    status = actions.add_parser(
        "status", help="show the services", description="Show the inference services of the cluster."
    )
    down = actions.add_parser(
        "down", help="end the services", description="End the inference services and actors on all nodes."
    )
    down.add_argument(
        "--drain", metavar="SECONDS", type=zero_or_more, default=DRAIN_SECONDS, help="time for running requests (60)"
    )
    for each in (up, status, down):
        each.add_argument("--address", metavar="HOST:PORT", default="auto", help="the Ray cluster (RAY_ADDRESS, auto)")


def run(session: Session) -> int:
    """Performs the action."""
    return {"up": _up, "status": _status, "down": _down}[session.args.action](session)


def settings_of(session: Session) -> ServiceSettings:
    """The settings of the services from the options. Raises UsageError."""
    from headgate.ray_cluster.node_report import ServiceSettings

    args = session.args
    if not 0 <= args.port < 65536:
        raise UsageError(f"--port {args.port} is not a port; use a number from 0 to 65535")
    token = ""
    if args.token_from == HERE:
        token = session.environ.get("INFERENCE_TOKEN") or session.state.secret(INFERENCE_TOKEN)
    directory = None if args.config_dir is None else str(Path(args.config_dir).expanduser().absolute())
    return ServiceSettings(headgate.__version__, token, directory, args.host or "", args.port)


def _connect(session: Session) -> None:
    from headgate.ray_cluster import cluster

    cluster.connect(session.args.address)


def _up(session: Session) -> int:
    from headgate.ray_cluster import cluster
    from headgate.ray_cluster.cluster_errors import ClusterError
    from headgate.ray_cluster.node_report import State

    settings = settings_of(session)
    _connect(session)
    controller = cluster.start_controller(settings)
    running = cluster.answer(controller.settings.remote())
    if (other := difference(running, settings)) is not None:
        raise ClusterError(f"Headgate already runs on this cluster with {other}; run `headgate ray down` first")
    deadline = time.monotonic() + session.args.timeout
    since, before = time.monotonic(), None
    while True:
        reports = cluster.answer(controller.reports.remote()) or []
        now = time.monotonic()
        if (states := [(each.name, each.state) for each in reports]) != before:
            since, before = now, states
        waiting = [each.name for each in reports if each.state is State.STARTING]
        if reports and not waiting and (now - since >= NO_CHANGE_SECONDS or all(s is State.READY for _, s in states)):
            break
        if now >= deadline:
            break
        session.terminal.status(f"waiting for {', '.join(waiting) or 'the nodes'}")
        time.sleep(POLL_SECONDS)
    _show(session, reports)
    not_ready = [each.name for each in reports if each.state is not State.READY]
    if not reports:
        raise HeadgateError(
            "no inference service was started: no node reported, or all nodes have the label headgate=off"
        )
    if not_ready:
        raise HeadgateError(
            f"not ready: {', '.join(not_ready)}; their start goes on, and `headgate ray status` shows it"
        )
    return Exit.OK


def difference(running: ServiceSettings, wanted: ServiceSettings) -> str | None:
    """The first setting that differs in the running services, or None. The controller does not reveal their token."""
    for name, option in (
        ("version", "headgate"),
        ("config_dir", "--config-dir"),
        ("host", "--host"),
        ("port", "--port"),
    ):
        found, given = getattr(running, name), getattr(wanted, name)
        if found != given:
            return f"{option} {found if found not in (None, '') else '(default)'}"
    return None


def _status(session: Session) -> int:
    from headgate.ray_cluster import cluster

    _connect(session)
    reports = cluster.answer(cluster.controller().reports.remote())
    if reports is None:
        raise HeadgateError("the controller is starting; try again in a few seconds")
    _show(session, reports)
    return Exit.OK


def _show(session: Session, reports: list[NodeReport]) -> None:
    rows = [
        {
            "name": each.name,
            "url": each.url,
            "state": str(each.state),
            "epoch": each.epoch,
            "restarts": each.restarts,
            "last_exit": each.last_exit,
            "detail": each.detail,
            "version": each.version,
            "pid": each.pid,
        }
        for each in reports
    ]
    if session.prints_json({"nodes": rows}):
        return
    session.terminal.table(
        ["NODE", "URL", "STATE", "RESTARTS", "LAST EXIT", "DETAIL"],
        [
            [each.name, each.url or "-", str(each.state), str(each.restarts), each.last_exit or "-", each.detail]
            for each in reports
        ],
        right=["RESTARTS"],
        none="no nodes",
    )


def _down(session: Session) -> int:
    from headgate.ray_cluster import cluster

    _connect(session)
    count, killed, lost = cluster.stop_services(session.args.drain)
    if session.prints_json({"ended": count, "killed": killed, "lost": lost}):
        return Exit.OK
    if not count:
        session.terminal.say("Headgate does not run on this Ray cluster")
    else:
        session.terminal.say(f"ended {count} inference services")
    if killed:
        session.terminal.say(
            f"killed, because they did not end within {seconds_cell(session.args.drain)}: {', '.join(killed)}"
        )
    if lost:
        session.terminal.say(f"lost before they were ended: {', '.join(lost)}")
    return Exit.OK


COMMANDS = {"ray": Command(arguments, run)}
