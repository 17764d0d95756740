"""Prometheus' configuration, the alert rules and the dashboard use series that the services really have.

`promtool` checks the rules too where it is installed (Debian and Ubuntu: the package `prometheus`).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from gateway.settings import GatewayConfig
from inference.environment_settings import InferenceSettings
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import Start
from tests.rigs.gateway_rig import Gateway

CONFIG = Path(__file__).resolve().parents[2] / "config"
RULES = CONFIG / "prometheus" / "alerts.yml"
SCRAPES = CONFIG / "prometheus" / "prometheus.yml"
DASHBOARD = CONFIG / "grafana" / "headgate.json"
PROMTOOL = shutil.which("promtool")
OF_PROMETHEUS = {"up": {"job", "instance"}}
"""Series that Prometheus adds."""
OF_SCRAPES = {"job", "instance"}
"""Labels that Prometheus adds to every series."""
KINDS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}

Labels = dict[str, set[str]]
"""The names of the labels of each series."""


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Where each query is, and the query."""
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m")


def series_of(text: str, registry: CollectorRegistry) -> Labels:
    """The series in a scrape. Metrics without a sample yet get the labels with which the service declared them."""
    declared = {
        name: set(collector._labelnames)
        for collector, names in registry._collector_to_names.items()
        if isinstance(collector, MetricWrapperBase)
        for name in names
    }
    found: Labels = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for suffix in KINDS[family.type]:
            labels = {label for sample in family.samples for label in sample.labels if sample.name == name + suffix}
            le = {"le"} if suffix == "_bucket" else set()
            found[name + suffix] = labels | declared.get(family.name, set()) | le
    return found


@pytest.fixture
async def series(start: Start, tmp_path: Path) -> Labels:
    """All series of `/metrics` of both services, while a model is loaded."""
    service = await start({"a": {}})
    await service.authority.load(service.authority.resolve("a"), 10)
    await ask(service.app, "POST", "/v1/completions", {"model": "a", "prompt": "x"})
    own = service.metrics.render().decode()
    assert (await ask(service.app, "GET", "/metrics", key=None)).status == 200
    gateway = Gateway(tmp_path, "http://127.0.0.1:9")
    async with gateway:
        gateway.runtime.telemetry.watch_shared_state()
        page = await gateway.client.get("/metrics")
        assert page.status_code == 200
        metrics = gateway.runtime.telemetry.registry
        return {**series_of(own, service.metrics.registry), **series_of(page.text, metrics), **OF_PROMETHEUS}


def selectors(query: str) -> list[Any]:
    """Every selector of a series in a query."""
    found: list[Any] = []

    def note(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(query), note)
    return found


async def test_queries_of_rules_and_dashboard_name_series_and_labels_that_exist(series: Labels) -> None:
    """At least nine of ten metrics are in a query."""
    used = set()
    for place, query in expressions():
        known = OF_SCRAPES | ({"le"} if "histogram_quantile" in query else set())
        for selector in selectors(query):
            assert selector.name in series, f"{place}: no service has the series {selector.name}"
            names = {matcher.name for matcher in selector.matchers.matchers}
            assert names <= series[selector.name], f"{place}: {selector.name} has no labels {names}"
            known |= series[selector.name]
            used.add(re.sub("_(bucket|sum|count)$", "", selector.name))
        for grouped in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
            assert {name.strip() for name in grouped.split(",")} <= known, (
                f"{place}: {grouped} are no labels of {query}"
            )
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in series}
    assert len(used & families) > 0.9 * len(families), sorted(families - used)


async def test_texts_of_alerts_name_labels_of_their_series(series: Labels) -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        labels = set().union(*(series[selector.name] for selector in selectors(rule["expr"])))
        named = re.findall(r"\$labels\.(\w+)", "".join(rule["annotations"].values()))
        assert set(named) <= labels | OF_SCRAPES, rule["alert"]
        assert set(rule["annotations"]) == {"summary", "description"}


def test_prometheus_scrapes_both_services_and_loads_the_rules() -> None:
    config = yaml.safe_load(SCRAPES.read_text(encoding="utf-8"))
    targets = {
        target for job in config["scrape_configs"] for block in job["static_configs"] for target in block["targets"]
    }
    assert targets == {f"127.0.0.1:{GatewayConfig().port}", f"127.0.0.1:{InferenceSettings().port}"}
    assert [SCRAPES.parent / name for name in config["rule_files"]] == [RULES]


def test_panels_of_the_dashboard_have_their_own_ids_and_places() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    for key in (lambda panel: panel["id"], lambda panel: (panel["gridPos"]["x"], panel["gridPos"]["y"])):
        assert len({key(panel) for panel in panels}) == len(panels)


# --- with Prometheus' own tool ---------------------------------------------------------------------------------------
MINUTES = 30
CASES: dict[str, tuple[dict[str, str], dict[str, str], dict[str, str]]] = {
    "HeadgateServiceDown": (
        {'up{job="headgate-gateway",instance="x:1"}': "0"},
        {"job": "headgate-gateway", "instance": "x:1"},
        {'up{job="headgate-gateway",instance="x:1"}': "1"},
    ),
    "HeadgateRequestsFail": (
        {
            'gateway_requests_total{route="demo",tier="none",outcome="no_tier_available"}': "0+2",
            'gateway_requests_total{route="demo",tier="local",outcome="success"}': "0+20",
        },
        {},
        {'gateway_requests_total{route="demo",tier="local",outcome="success"}': "0+20"},
    ),
    "HeadgateBreakerOpen": (
        {'gateway_breaker_state{provider="local",node="a",model="demo"}': "2"},
        {"provider": "local", "node": "a", "model": "demo"},
        {'gateway_breaker_state{provider="local",node="a",model="demo"}': "1"},
    ),
    "HeadgateManyFallbacks": (
        {
            'gateway_fallback_total{from="local/a",to="local/b",reason="cannot_fit"}': "0+5",
            'gateway_requests_total{route="*",tier="local-fallback",outcome="success"}': "0+20",
        },
        {},
        {
            'gateway_fallback_total{from="local/a",to="local/b",reason="cannot_fit"}': "0+3",
            'gateway_requests_total{route="*",tier="local-fallback",outcome="success"}': "0+20",
        },
    ),
    "HeadgateSlowFirstToken": (
        {
            f'gateway_ttft_seconds_bucket{{le="{le}"}}': f"0+{count}"
            for le, count in (("20", 8), ("40", 10), ("+Inf", 10))
        },
        {},
        {
            f'gateway_ttft_seconds_bucket{{le="{le}"}}': f"0+{count}"
            for le, count in (("20", 99), ("40", 100), ("+Inf", 100))
        },
    ),
    "HeadgateAdmissionQueue": ({"gateway_queue_depth": "101"}, {}, {"gateway_queue_depth": "100"}),
    "HeadgateNodeDown": (
        {'gateway_node_up{node="a",instance="x:1"}': "0", 'gateway_node_up{node="a",instance="y:1"}': "0"},
        {"node": "a"},
        {'gateway_node_up{node="a",instance="x:1"}': "0", 'gateway_node_up{node="a",instance="y:1"}': "1"},
    ),
    "HeadgateNodePartitioned": (
        {'gateway_node_up{node="a",instance="x:1"}': "0", 'gateway_node_up{node="a",instance="y:1"}': "1"},
        {"node": "a"},
        {'gateway_node_up{node="a",instance="x:1"}': "0", 'gateway_node_up{node="b",instance="x:1"}': "1"},
    ),
    "HeadgateSharedStateLost": (
        {'gateway_shared_state_up{instance="x:1"}': "0"},
        {"instance": "x:1"},
        {'gateway_shared_state_up{instance="x:1"}': "1"},
    ),
    "HeadgateDeviceUnusable": (
        {'inference_device_state{device="gpu-0"}': "5"},
        {"device": "gpu-0"},
        {'inference_device_state{device="gpu-0"}': "1"},
    ),
    "HeadgateMemoryPressure": (
        {'inference_pressure_level{device="gpu-0"}': "3"},
        {"device": "gpu-0"},
        {'inference_pressure_level{device="gpu-0"}': "2"},
    ),
    "HeadgateForeignUse": (
        {
            'inference_device_bytes{device="gpu-0",account="foreign"}': "5000",
            'inference_device_memory_bytes{device="gpu-0",kind="total"}': "10000",
            'inference_pressure_level{device="gpu-0"}': "2",
        },
        {"device": "gpu-0"},
        {
            'inference_device_bytes{device="gpu-0",account="foreign"}': "2000",
            'inference_device_memory_bytes{device="gpu-0",kind="total"}': "10000",
            'inference_pressure_level{device="gpu-0"}': "2",
        },
    ),
    "HeadgateModelFailed": (
        {'inference_model_state{model="a"}': "9"},
        {"model": "a"},
        {'inference_model_state{model="a"}': "2"},
    ),
    "HeadgateWorkersCrash": (
        {'inference_worker_exits_total{model="a",cause="hang"}': "0+1"},
        {"model": "a", "cause": "hang"},
        {'inference_worker_exits_total{model="a",cause="requested"}': "0+1"},
    ),
    "HeadgateModelDoesNotFit": (
        {'inference_placement_total{result="cant_accommodate",reason="memory"}': "0+1"},
        {},
        {'inference_placement_total{result="free",reason="fits"}': "0+9"},
    ),
    "HeadgateModelsEvictEachOther": (
        {'inference_evictions_total{action="unload",reason="memory wanted"}': "0+2"},
        {},
        {'inference_evictions_total{action="unload",reason="idle"}': "0+9"},
    ),
    "HeadgateStoredSequencesDamaged": (
        {'inference_kv_invalid_total{model="a"}': "0+1"},
        {"model": "a"},
        {'inference_kv_invalid_total{model="a"}': "5"},
    ),
    "HeadgateModelQueue": (
        {
            'inference_queue_depth{model="a",priority="normal"}': "15",
            'inference_queue_depth{model="a",priority="low"}': "5",
            'inference_sequences{model="a",state="queued"}': "4",
        },
        {"model": "a"},
        {
            'inference_queue_depth{model="a",priority="normal"}': "15",
            'inference_sequences{model="a",state="queued"}': "4",
        },
    ),
}
"""By alert: series that raise it, the labels that it then has, and series that do not. `0+2` grows by 2 a minute."""


def run_promtool(*arguments: str) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_loads_rules_and_configuration() -> None:
    run_promtool("check", "rules", str(RULES))
    run_promtool("check", "config", str(SCRAPES))


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_alerts_are_raised_by_their_series_only(tmp_path: Path) -> None:
    assert set(CASES) == {rule["alert"] for rule in rules()}
    tests = []
    for alert, (raising, labels, calm) in CASES.items():
        (rule,) = [rule for rule in rules() if rule["alert"] == alert]
        for values, is_raised in ((raising, True), (calm, False)):
            expected = [{"exp_labels": {**labels, "severity": rule["labels"]["severity"]}}] if is_raised else []
            tests.append(
                {
                    "interval": "1m",
                    "input_series": [
                        {"series": name, "values": f"{value if '+' in value else value + '+0'}x{MINUTES}"}
                        for name, value in values.items()
                    ],
                    "alert_rule_test": [{"eval_time": f"{MINUTES}m", "alertname": alert, "exp_alerts": expected}],
                }
            )
    path, plain = tmp_path / "tests.yml", tmp_path / "rules.yml"
    without_texts = [{name: value for name, value in rule.items() if name != "annotations"} for rule in rules()]
    plain.write_text(yaml.safe_dump({"groups": [{"name": "headgate", "rules": without_texts}]}))
    path.write_text(yaml.safe_dump({"rule_files": [plain.name], "tests": tests}))
    run_promtool("test", "rules", str(path))
