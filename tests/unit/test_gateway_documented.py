"""The documents agree with the code: docs/api.md, docs/providers.md, links and paths."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Counter, Gauge, Metric

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import BODIES as GATEWAY_BODIES
from gateway.apis.openai.generation_request import parse
from gateway.apis.responses_body import responses_schema
from gateway.errors import RequestError, UpstreamKind
from gateway.providers import provider_fields
from gateway.providers.anthropic import anthropic_events
from gateway.providers.provider_fields import OPENAI_CHAT
from gateway.routing.chain import Drop
from gateway.routing.explain_record import AttemptRecord, BreakRecord, Record
from gateway.telemetry.gateway_metrics import Telemetry
from headgate.shared.bodies.body_decoder import json_schema
from headgate.shared.parameters import BY_NAME, MAX_BREAKER_BYTES, MAX_BREAKERS, PARAMETERS, Parameter, Sampling
from inference.api.service_routes import BODIES
from inference.protocol import CODES
from inference.worker.api import generation_body
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts, GenerateRequest
from tests.rigs.fake_provider.faults import KINDS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def _section(title: str) -> str:
    return TEXT.partition(f"### {title}\n")[2].partition("\n### ")[0].partition("\n## ")[0]


def _rows(title: str) -> list[list[str]]:
    """The cells of the tables under a heading."""
    lines = [line for line in _section(title).splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("part", [Record, AttemptRecord, BreakRecord], ids=lambda part: part.__name__)
def test_explain_record_fields_are_documented(part: type) -> None:
    documented = set(re.findall(r"`(\w+)`", _section("Explain records")))
    assert sorted({field.name for field in fields(part)} - documented) == []


def test_gateway_metrics_are_documented_with_their_labels() -> None:
    """Each metric gets a sample with the labels of the table; the sample shows their names."""
    documented = {name: _names(row[1]) for row in _rows("Metrics of the gateway") for name in _names(row[0])}
    telemetry = Telemetry()
    _, on_error = telemetry.watch_shared_state()
    on_error(*documented["gateway_shared_state_errors_total"])
    telemetry.requests(*documented["gateway_requests_total"])
    telemetry.attempts(*documented["gateway_attempts_total"])
    for metric in vars(telemetry).values():
        if isinstance(metric, (Counter, Gauge)):
            (family,) = metric.collect()
            if labels := documented[_exposed(family)]:
                metric.labels(*labels)
    found = {}
    for family in telemetry.registry.collect():
        found[_exposed(family)] = [label for label in family.samples[0].labels if label != "le"]
    assert found == documented


def _exposed(family: Metric) -> str:
    """The name of a family as a scrape shows it."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def test_error_codes_are_documented_with_their_status() -> None:
    documented: dict[str, int] = {}
    for row in _rows("Errors"):
        names, statuses = _names(row[0]), [int(status) for status in row[1].split(",")]
        documented |= dict(zip(names, statuses * (len(names) // len(statuses)), strict=True))
    assert documented == {str(code): spec.status for code, spec in CODES.items()}


def test_reasons_to_skip_or_move_back_a_candidate_are_documented() -> None:
    documented = {name for row in _rows("Which tier answers") for name in _names(row[0])}
    assert documented == {str(reason) for reason in Drop}


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "api.md"
HELLO = [{"role": "user", "content": "hello"}]
FACTS = Facts("tiny", 2**40, 300, 64, ("chat", "completions"))


def _row(parameter: Parameter) -> str:
    default = "" if parameter.default is None else f"`{_shown(parameter.default)}`"
    sent = {"renamed": "sent as `logprobs`"}.get(parameter.clouds, parameter.clouds)
    return f"| `{parameter.name}` | {_values(parameter)} | {default} | {parameter.effect} | {sent} |"


def _values(row: Parameter) -> str:
    """The accepted values."""
    match row.kind:
        case "boolean":
            return "`true`, `false`" if row.only is None else f"`{str(row.only).lower()}`"
        case "strings":
            return f"up to {MAX_BREAKERS} texts of 1 to {MAX_BREAKER_BYTES} bytes"
    if row.low <= -(2**63):
        return "whole"
    unit = "whole, " if row.kind == "integer" else ""
    is_open = math.isinf(row.high) or row.high >= 2**31 - 1
    bounds = f"from {row.low:g}" if is_open else f"{row.low:g} to {row.high:g}"
    return unit + bounds + (", or -1" if row.minus_one else "")


def _shown(value: Any) -> str:
    value = list(value) if isinstance(value, tuple) else value
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def test_documented_table_of_parameters_is_current() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    table = re.search(r"\| parameter \| values \| default \| effect \| clouds \|\n\|[-|]+\|\n((?:\|.*\n)+)", text)
    assert table is not None
    assert table[1].splitlines() == [_row(parameter) for parameter in PARAMETERS]


def test_request_without_parameters_gets_the_defaults_of_sampling() -> None:
    """Each field of `Sampling` except `logit_bias` declares a parameter with its default."""
    ours = Sampling()
    rows = {parameter.name: parameter.default for parameter in PARAMETERS if parameter.samples}
    assert rows == {field.name: getattr(ours, field.name) for field in fields(Sampling) if field.name != "logit_bias"}
    assert generation_body.chat({"messages": HELLO}, FACTS).sampling == ours


def _good(parameter: Parameter) -> list[Any]:
    match parameter.kind:
        case "boolean":
            return [True, False] if parameter.only is None else [parameter.only]
        case "strings":
            return [["a", "é"], ["x" * 40], []]
    bounds = [bound for bound in (parameter.low, parameter.high) if not math.isinf(bound)]
    return bounds + ([-1] if parameter.minus_one else [])


def _bad(parameter: Parameter) -> list[Any]:
    match parameter.kind:
        case "boolean":
            return ["true", 1, *([] if parameter.only is None else [not parameter.only])]
        case "strings":
            return ["a", [1], ["x" * 41], ["é" * 21], [""], ["\0"], ["x"] * 17, {}]
    beyond = [parameter.low - 3, parameter.high * 2 + 1]
    odd: list[Any] = ["1", True, [], {}, *([0.5] if parameter.kind == "integer" else [])]
    return odd + [bound for bound in beyond if not math.isinf(bound)]


def _gateway(name: str, value: Any) -> None:
    parse(Endpoint.CHAT, json.dumps({"model": "m", "messages": HELLO, name: value}).encode())


def _worker(name: str, value: Any) -> GenerateRequest:
    return generation_body.chat({"messages": HELLO, name: value}, FACTS)


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_both_services_accept_and_reject_the_same_values(parameter: Parameter) -> None:
    for value in [*_good(parameter), None]:
        _gateway(parameter.name, value)
        request = _worker(parameter.name, value)
        if parameter.samples and value is not None and value != [] and not (parameter.minus_one and value == -1):
            meant = min(value, FACTS.n_vocab) if parameter.name == "top_k" else value
            assert getattr(request.sampling, parameter.name) == (tuple(meant) if isinstance(meant, list) else meant)
    for value in _bad(parameter):
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            continue  # orjson reads it as a float
        with pytest.raises(RequestError) as refused:
            _gateway(parameter.name, value)
        assert refused.value.param == parameter.name
        with pytest.raises(BadRequestError) as caught:
            _worker(parameter.name, value)
        assert (caught.value.param, caught.value.code) == (parameter.name, refused.value.code)
        assert caught.value.message in refused.value.message.replace("`", "")


def test_schemas_and_profiles_contain_all_parameters() -> None:
    chats = json_schema(GATEWAY_BODIES[Endpoint.CHAT][0])[0]["properties"].keys()
    assert BY_NAME.keys() <= chats
    assert BY_NAME.keys() <= BODIES["/v1/chat/completions"]["properties"].keys()
    without = {"max_tokens", "max_completion_tokens", "n_probs"}
    assert BY_NAME.keys() - without <= responses_schema()[0]["properties"].keys()
    for parameter in PARAMETERS:
        places = (OPENAI_CHAT.takes, OPENAI_CHAT.drops, OPENAI_CHAT.refuses)
        fate = {"sent": 0, "left out": 1, "renamed": 1, "tier skipped": 2}[parameter.clouds]
        assert parameter.name in places[fate], parameter.name


@pytest.mark.parametrize(("name", "value"), [("max_tokens", 1000.0), ("n", 1.5)])
def test_float_in_place_of_an_integer_is_quoted_unchanged(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=re.escape(f"`{name}` must be a whole number; it is {value}")):
        _gateway(name, value)


@pytest.mark.parametrize("name", ["n", "max_tokens", "seed", "top_k", "top_logprobs"])
def test_integer_beyond_64_bits_is_reported_with_the_range(name: str) -> None:
    with pytest.raises(RequestError, match=rf"`{name}` must be between -?\d+ and \d+(, or -1)?; it is 10{{15}}\d+$"):
        _gateway(name, float(10**30))


def test_integer_beyond_the_range_of_floats_is_reported() -> None:
    problem = BY_NAME["temperature"].problem(10**400)
    assert problem is not None and problem.startswith("must be between 0 and 2; it is 1000")


ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
_NAMED = re.compile(r"\bdocs/[a-z-]+\.md\b")
_PATH = re.compile(r"`((?:gateway|inference|headgate|tests|benchmarks|config|docker|docs)/[\w./*-]*)`")
RESULTS = "benchmarks/results/"
"""Written by the benchmarks, not part of the repository."""


def _anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_have_a_target(document: Path) -> None:
    wrong = []
    for link, anchor in _LINK.findall(document.read_text(encoding="utf-8")):
        target = document.parent / link if link else document
        if "://" not in link and (not target.exists() or (anchor and anchor not in _anchors(target))):
            wrong.append(f"{link}#{anchor}")
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_in_documents_exist(document: Path) -> None:
    """`path/file.py`, `path/` and patterns such as `path/*.py` in backticks."""
    named = set(_PATH.findall(document.read_text(encoding="utf-8")))
    assert sorted(name for name in named if not name.startswith(RESULTS) and not [*ROOT.glob(name)]) == []


def test_documents_named_in_the_configuration_directory_exist() -> None:
    named = {
        name for path in (ROOT / "config").rglob("*") if path.is_file() for name in _NAMED.findall(path.read_text())
    }
    assert named, "the configuration refers to its documentation"
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


DOCS = (Path(__file__).resolve().parents[2] / "docs" / "providers.md").read_text(encoding="utf-8")


def parameters_of(endpoint: Endpoint) -> set[str]:
    """The names that the gateway accepts."""
    return {*json_schema(GATEWAY_BODIES[endpoint][0])[0]["properties"]}


PROFILES = (provider_fields.OPENAI_CHAT, provider_fields.GOOGLE_CHAT, provider_fields.ANTHROPIC_CHAT)
FATES = {"sent": "takes", "translated": "takes", "unsuitable": "refuses", "dropped": "drops"}


def provider_rows(columns: int) -> dict[str, tuple[str, ...]]:
    cell = r" ([^|]+) \|"
    found = re.findall(r"^\| (`[^|]+`) \|" + cell * (columns - 1) + "$", DOCS, re.MULTILINE)
    return {name: tuple(row[1:]) for row in found for name in _names(row[0])}


def test_documented_fields_agree_with_the_profiles() -> None:
    rows = provider_rows(4)
    assert len(rows) > 30
    for name, fates in rows.items():
        for profile, fate in zip(PROFILES, fates, strict=False):
            if fate in FATES:
                assert name in getattr(profile, FATES[fate]), f"{name}: {fate}"


def test_fields_with_different_treatment_are_documented() -> None:
    rows = provider_rows(4)
    same = {"model", "messages", "stream", "stream_options"}
    hosting = {name for name, why in provider_fields.GOOGLE_CHAT.drops.items() if "hosting" in why}
    samplers = set(provider_fields.EXTENSIONS_DROPPED)
    assert parameters_of(Endpoint.CHAT) - same - hosting - samplers <= set(rows)


def test_documented_stop_reasons_agree_with_the_code() -> None:
    rows = {
        name: cells[0].strip("`") for name, cells in provider_rows(2).items() if name in anthropic_events.FINISH_REASONS
    }
    assert rows == dict(anthropic_events.FINISH_REASONS)


def test_kinds_of_failures_are_documented() -> None:
    assert {str(kind) for kind in UpstreamKind} <= set(provider_rows(2))


def test_documented_faults_exist() -> None:
    named = re.findall(r"`fault-([a-z-]+)(?:=[\d.]+)?`", DOCS)
    assert named
    assert {name.replace("-", "_") for name in named} <= set(KINDS)
