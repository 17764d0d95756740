"""A connection to a Ray cluster, and the actors of Headgate on it."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import Any

from headgate.ray_cluster.cluster_errors import ClusterError, NoClusterError, RayMissingError, reason
from headgate.ray_cluster.controller import ControllerActor
from headgate.ray_cluster.node_actors import CONTROLLER, NAMESPACE, NODE_PREFIX, actor_options
from headgate.ray_cluster.node_report import ServiceSettings

AUTO = "auto"
CONNECT_SECONDS = 5.0
"""Longest wait for a TCP connection to the head."""
HEAD_RESOURCE = "node:__internal_head__"
"""A resource that only the head has, so that the controller runs there: on another node, Ray would notice its loss only
after half a minute."""
ANSWER_SECONDS = 30.0
"""Longest wait for an actor that is starting or restarting."""


def connect(address: str) -> None:
    """Connects this process to the cluster at `address`: HOST:PORT of its head (GCS).

    With `auto` or an empty address it is that of RAY_ADDRESS, or a cluster that runs on this machine.

    Raises RayMissingError, NoClusterError, ClusterError.
    """
    try:
        import ray
    except ImportError as error:
        raise RayMissingError(f"ray is not installed ({error}); run: pip install 'headgate[ray]'") from None
    _check_answers(os.environ.get("RAY_ADDRESS") or AUTO if address in ("", AUTO) else address)
    try:
        ray.init(address=address or AUTO, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
    except ConnectionError as error:
        raise NoClusterError(
            f"no Ray cluster was found ({reason(error)}); start one with `ray start --head`, or name one with "
            f"--address HOST:6379"
        ) from error
    except Exception as error:
        raise ClusterError(f"the Ray cluster at {address or AUTO} cannot be used: {reason(error)}") from error


def _check_answers(address: str) -> None:
    """Raises NoClusterError when nothing listens at `address`: Ray itself would try for two minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # `auto` looks for running processes
    import ray

    host = host.strip("[]")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    for candidate in (host, *((ray.util.get_node_ip_address(),) if is_loopback else ())):
        try:
            socket.create_connection((candidate, int(port)), CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            failure = error
        else:
            return
    raise NoClusterError(f"no Ray cluster answers at {address} ({failure}); start one with `ray start --head`")


def start_controller(settings: ServiceSettings) -> Any:
    """The actor of the controller, started with `settings` if it does not run."""
    import ray

    return (
        ray.remote(ControllerActor)
        .options(**actor_options(CONTROLLER), resources={HEAD_RESOURCE: 0.001})
        .remote(settings)
    )


def controller() -> Any:
    """The actor of the controller. Raises NoClusterError if it does not run."""
    import ray

    try:
        return ray.get_actor(CONTROLLER, namespace=NAMESPACE)
    except ValueError:
        raise NoClusterError("Headgate does not run on this Ray cluster; start it with `headgate ray up`") from None


def answer(reference: Any, seconds: float = ANSWER_SECONDS) -> Any:
    """The result of a call to the controller. Raises ClusterError after `seconds`, or when the call fails."""
    import ray

    try:
        return ray.get(reference, timeout=seconds)
    except ray.exceptions.GetTimeoutError:
        raise ClusterError(
            f"the actor {CONTROLLER} did not answer within {seconds:g} s; `ray list actors` shows its state"
        ) from None
    except ray.exceptions.RayError as error:
        raise ClusterError(f"the actor {CONTROLLER} failed: {reason(error)}") from error


def stop_services(seconds: float) -> tuple[int, list[str], list[str]]:
    """Ends all services and actors. The services have `seconds` to end, in which running requests can finish.

    Returns the number of actors of nodes, the names of those whose service did not end in time and was killed, and the
    names of those that were lost before their service ended.
    """
    import ray

    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE]
    actors = {}
    # The controller first: it would start the others again.
    for name in sorted(names, key=lambda name: name != CONTROLLER):
        try:
            actors[name] = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:  # it has just ended
            continue
        if name == CONTROLLER:
            ray.kill(actors.pop(name), no_restart=True)
    stops = {actor.stop.remote(): name for name, actor in actors.items() if name.startswith(NODE_PREFIX)}
    done, _ = ray.wait(list(stops), num_returns=len(stops), timeout=seconds) if stops else ([], [])
    lost = []
    for reference in done:
        try:
            ray.get(reference, timeout=CONNECT_SECONDS)
        except ray.exceptions.RayError:  # the actor is lost, and its service with it
            lost.append(stops[reference])
    for actor in actors.values():
        ray.kill(actor, no_restart=True)
    return len(stops), sorted(name for reference, name in stops.items() if reference not in done), sorted(lost)
