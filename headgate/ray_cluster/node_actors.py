"""Ray's calls for the actors of nodes: list the nodes, start an actor on one, find those that run."""

from __future__ import annotations

from typing import Any

from headgate.ray_cluster.node_report import ServiceSettings
from headgate.ray_cluster.node_service import NodeActor
from headgate.ray_cluster.service_placement import LABEL, RayNode

NAMESPACE = "headgate"
CONTROLLER = "headgate-controller"
NODE_PREFIX = "headgate-node-"


def alive_nodes() -> list[RayNode]:
    """The nodes of the cluster that are alive."""
    import ray

    return [
        RayNode(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            hostname=node.get("NodeManagerHostname") or "",
            name=node.get("NodeName") or "",
            is_off=(node.get("Labels") or {}).get(LABEL) == "off",
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def running_actors() -> dict[str, Any]:
    """The existing actors of nodes, by node id."""
    import ray

    found = {}
    for each in ray.util.list_named_actors(all_namespaces=True):
        if each["namespace"] == NAMESPACE and each["name"].startswith(NODE_PREFIX):
            try:
                found[each["name"].removeprefix(NODE_PREFIX)] = ray.get_actor(each["name"], namespace=NAMESPACE)
            except ValueError:  # it has just ended
                continue
    return found


def actor_options(name: str) -> dict[str, Any]:
    """Options of an actor that outlives this process, is restarted by Ray, exists once, and reserves no resources."""
    return {
        "name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "max_restarts": -1,
        "num_cpus": 0, "num_gpus": 0,
    }  # fmt: skip


def start_actor(node: RayNode, report_name: str, settings: ServiceSettings) -> Any:
    """The actor of `node`, started if there is none. It can run on this node only.

    `report_name` is the name of the node in its reports.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        ray.remote(NodeActor)
        .options(
            **actor_options(NODE_PREFIX + node.id),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        .remote(report_name, node.address, settings)
    )


def end_actor(actor: Any) -> None:
    """Ends an actor for good, with its service."""
    import ray

    ray.kill(actor, no_restart=True)
