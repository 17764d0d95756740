"""config/kubernetes: valid by the schemas of Kubernetes, and in agreement with the product and with each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from gateway import settings_loading
from gateway.endpoints.operator_routes import KEYLESS_PATHS as GATEWAY_PATHS
from gateway.settings import KEY_VARIABLES, TOKEN_VARIABLE, GatewayConfig, node_source
from inference import settings as inference_settings
from inference.api.service_routes import KEYLESS_PATHS as INFERENCE_PATHS
from inference.environment_settings import InferenceSettings, environment_names
from tests.unit.test_container_files import COMPOSE

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "config" / "kubernetes"
SCHEMAS = json.loads((ROOT / "tests" / "rigs" / "kubernetes" / "schemas.json").read_text(encoding="utf-8"))
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
SECRETS = {TOKEN_VARIABLE, *KEY_VARIABLES, "REDIS_PASSWORD"}
GATEWAY, INFERENCE, REDIS = "gateway", "inference", "redis"
DRAIN_MARGIN_SECONDS = 5


def _documents() -> list[dict[str, Any]]:
    """The objects of all files, and those that kustomize generates."""
    found = []
    for name in KUSTOMIZATION["resources"]:
        found += list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))
    for entry in KUSTOMIZATION["configMapGenerator"]:
        data = {Path(file).name: (FOLDER / file).read_text(encoding="utf-8") for file in entry["files"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": entry["name"]}, "data": data})
    for entry in KUSTOMIZATION["secretGenerator"]:
        data = dict.fromkeys(SECRETS, "eA==")
        found.append({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": entry["name"]}, "data": data})
    return found


DOCUMENTS = _documents()
NAMES = {(document["kind"], document["metadata"]["name"]): document for document in DOCUMENTS}
WORKLOADS = {
    document["metadata"]["labels"]["app.kubernetes.io/component"]: document
    for document in DOCUMENTS
    if document["kind"] in ("Deployment", "DaemonSet", "StatefulSet")
}
CONTAINERS = {name: workload["spec"]["template"]["spec"]["containers"][0] for name, workload in WORKLOADS.items()}


def _problems(document: dict[str, Any]) -> list[str]:
    """What the strict schema of the kind does not allow."""
    name = SCHEMAS["kinds"].get(f"{document.get('apiVersion')} {document.get('kind')}")
    if name is None:
        return [f"no schema of {document.get('apiVersion')} {document.get('kind')}"]
    schema = {"$ref": f"#/$defs/{name}", "$defs": SCHEMAS["$defs"]}
    validator = jsonschema_rs.Draft7Validator(schema)
    return [f"{'/'.join(map(str, error.instance_path))}: {error.message}" for error in validator.iter_errors(document)]


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda document: f"{document['kind']}-{document['metadata']['name']}"
)
def test_object_is_valid_by_the_schema_of_its_kind(document: dict[str, Any]) -> None:
    assert _problems(document) == []


def test_schema_finds_misspelled_missing_and_wrong_fields() -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"ports": [{"port": 1}]}}
    assert _problems(service) == []
    wrong = [{"ports": [{"port": "1"}]}, {"ports": [{}]}, {"ports": [{"port": 1, "target": 2}]}, {"selectors": {}}]
    for spec in wrong:
        assert _problems({**service, "spec": spec}) != [], spec
    assert _problems({**service, "kind": "Services"}) != []


def test_every_file_of_the_folder_is_part_of_the_kustomization() -> None:
    used = {*KUSTOMIZATION["resources"], "kustomization.yaml"}
    used |= {file for entry in KUSTOMIZATION["configMapGenerator"] for file in entry["files"]}
    assert {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.*")} - {"secrets.env"} == used


def test_secrets_are_not_in_the_repository() -> None:
    (entry,) = KUSTOMIZATION["secretGenerator"]
    assert entry["envs"] == ["secrets.env"]
    assert "config/kubernetes/secrets.env" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    instructions = (FOLDER / "kustomization.yaml").read_text(encoding="utf-8")
    assert all(name in instructions for name in SECRETS)


# --- settings --------------------------------------------------------------------------------------------------------
def test_gateways_use_all_pods_of_the_inference_service_and_the_shared_state() -> None:
    config = settings_loading.load(FOLDER / "settings", {"REDIS_PASSWORD": "0" * 64})
    (entry,) = config.inference.nodes
    source = node_source(entry)
    service = NAMES["Service", "headgate-inference"]
    namespace = KUSTOMIZATION["namespace"]
    assert source.kind == "dns"
    assert source.address == f"headgate-inference.{namespace}.svc.cluster.local:{service['spec']['ports'][0]['port']}"
    assert service["spec"]["clusterIP"] == "None"
    redis = NAMES["Service", "headgate-redis"]
    assert config.state == f"redis://:{'0' * 64}@headgate-redis:{redis['spec']['ports'][0]['port']}/0"
    assert ("Namespace", namespace) in NAMES


def test_models_of_the_nodes_load() -> None:
    assert {"demo", "demo-mini"} <= set(inference_settings.load(FOLDER / "settings", {}, {}).models)


def test_pods_have_more_time_to_end_than_the_services_need_to_drain() -> None:
    config = settings_loading.load(FOLDER / "settings", {"REDIS_PASSWORD": "x"})
    for name, seconds in ((GATEWAY, config.drain_seconds), (INFERENCE, InferenceSettings().drain_seconds)):
        pod = WORKLOADS[name]["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > seconds + DRAIN_MARGIN_SECONDS


# --- agreement with the product --------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "paths"), [(GATEWAY, GATEWAY_PATHS), (INFERENCE, INFERENCE_PATHS)])
def test_probes_use_paths_that_need_no_key_and_restart_only_a_dead_process(name: str, paths: Any) -> None:
    container = CONTAINERS[name]
    port = {GATEWAY: GatewayConfig().port, INFERENCE: InferenceSettings().port}[name]
    assert container["ports"] == [{"name": "http", "containerPort": port}]
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {"http"}
    assert {probe["path"] for probe in probes.values()} <= set(paths)
    assert (probes["liveness"]["path"], probes["startup"]["path"]) == ("/livez", "/livez")
    assert probes["readiness"]["path"] == "/readyz"
    annotations = WORKLOADS[name]["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {"prometheus.io/scrape": "true", "prometheus.io/port": str(port)}


def test_variables_exist_and_secrets_have_the_keys_that_are_used() -> None:
    known = {*environment_names(), "HEADGATE_CONFIG_DIR", "HEADGATE_STATE_DIR", "HEADGATE_LOG_FORMAT", "REDIS_PASSWORD"}
    known |= {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}
    for container in CONTAINERS.values():
        for variable in container["env"]:
            assert variable["name"] in known
            if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
                assert secret["key"] in SECRETS
    assert CONTAINERS[GATEWAY]["envFrom"] == [{"secretRef": {"name": "headgate"}}]


def test_images_users_and_paths_are_those_of_the_containers() -> None:
    images = {service["image"] for service in COMPOSE["services"].values()}
    listed = {entry["name"] for entry in KUSTOMIZATION["images"]}
    for name in (GATEWAY, INFERENCE):
        pod = WORKLOADS[name]["spec"]["template"]["spec"]
        container = CONTAINERS[name]
        assert container["image"] in images & listed
        security = {**pod["securityContext"], **container["securityContext"]}
        assert (security["runAsUser"], security["runAsGroup"]) == (10001, 10001)
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        paths = {volume.split(":")[1] for volume in COMPOSE["services"][name]["volumes"]}
        assert mounts == {*paths, "/tmp"}


# --- agreement among the objects -------------------------------------------------------------------------------------
def _references(pod: dict[str, Any], claims: list[str]) -> Iterator[tuple[str, str]]:
    yield "ServiceAccount", pod["serviceAccountName"]
    for volume in pod.get("volumes", ()):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"]
    volumes = {volume["name"] for volume in pod.get("volumes", ())} | set(claims)
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        for source in container.get("envFrom", ()):
            yield "Secret", source["secretRef"]["name"]
        for variable in container.get("env", ()):
            if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
                yield "Secret", secret["name"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_pods_refer_to_objects_that_exist_and_are_locked_down(name: str) -> None:
    spec = WORKLOADS[name]["spec"]
    pod = spec["template"]["spec"]
    claims = [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())]
    for reference in _references(pod, claims):
        assert reference in NAMES
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert pod["automountServiceAccountToken"] is False
    assert NAMES["ServiceAccount", pod["serviceAccountName"]]["automountServiceAccountToken"] is False
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"]["drop"] == ["ALL"]
        assert {"cpu", "memory"} == set(container["resources"]["requests"])
    main = {**pod["securityContext"], **pod["containers"][0]["securityContext"]}
    assert main["runAsNonRoot"] is True


def test_selectors_choose_the_pods_of_one_workload() -> None:
    labels = [workload["spec"]["template"]["metadata"]["labels"] for workload in WORKLOADS.values()]
    chosen = [document["spec"]["selector"] for document in DOCUMENTS if document["kind"] == "Service"]
    chosen += [document["spec"]["podSelector"] for document in DOCUMENTS if document["kind"] == "NetworkPolicy"]
    chosen.append(NAMES["PodDisruptionBudget", "headgate-gateway"]["spec"]["selector"])
    assert len(chosen) == 6
    for selector in chosen:
        assert labels.count(selector.get("matchLabels", selector)) == 1


def test_an_eviction_leaves_two_gateways() -> None:
    budget = NAMES["PodDisruptionBudget", "headgate-gateway"]["spec"]["minAvailable"]
    assert budget == WORKLOADS[GATEWAY]["spec"]["replicas"] - 1 == 2


@pytest.mark.parametrize("name", [INFERENCE, REDIS])
def test_only_gateways_reach_the_inference_service_and_the_shared_state(name: str) -> None:
    policy = NAMES["NetworkPolicy", f"headgate-{name}"]["spec"]
    assert policy["podSelector"]["matchLabels"] == WORKLOADS[name]["spec"]["template"]["metadata"]["labels"]
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    gateways = WORKLOADS[GATEWAY]["spec"]["template"]["metadata"]["labels"]
    assert rule["from"] == [{"podSelector": {"matchLabels": gateways}}]
    assert [port["port"] for port in rule["ports"]] == [CONTAINERS[name]["ports"][0]["containerPort"]]


def test_the_inference_service_sees_all_gpus_of_its_node_and_one_service_runs_per_node() -> None:
    pod = WORKLOADS[INFERENCE]["spec"]["template"]["spec"]
    values = {variable["name"]: variable.get("value") for variable in CONTAINERS[INFERENCE]["env"]}
    assert pod["runtimeClassName"] == "nvidia"
    assert values["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert "nvidia.com/gpu" not in str(CONTAINERS[INFERENCE]["resources"])
    (state,) = (volume for volume in pod["volumes"] if volume["name"] == "state")
    assert state["hostPath"]["path"]  # the lock of the machine is in it: HEADGATE_LOCK_DIR of the image


def test_state_directories_belong_to_the_user_of_the_container() -> None:
    """The root of an emptyDir or of a folder of the node belongs to root, so that its mode cannot be set to 0700."""
    values = {variable["name"]: variable.get("value") for variable in CONTAINERS[GATEWAY]["env"]}
    assert values["HEADGATE_STATE_DIR"].startswith("/state/")
    (owner,) = WORKLOADS[INFERENCE]["spec"]["template"]["spec"]["initContainers"]
    assert "chmod 0700 /state && chown 10001:10001 /state" in owner["command"][-1]
    assert {"CHOWN", "FOWNER"} == set(owner["securityContext"]["capabilities"]["add"])
