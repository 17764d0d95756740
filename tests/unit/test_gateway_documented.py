"""docs/api.md: explain records, metrics, error codes and reasons of the gateway are those of the code."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client import Counter, Gauge, Metric

from gateway.routing.chain import Drop
from gateway.routing.explain_record import AttemptRecord, BreakRecord, Record
from gateway.telemetry.gateway_metrics import Telemetry
from inference.protocol import CODES

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
    """A renamed or new field is renamed or added in the table."""
    documented = set(re.findall(r"`(\w+)`", _section("Explain records")))
    assert sorted({field.name for field in fields(part)} - documented) == []


def test_gateway_metrics_are_documented_with_their_labels() -> None:
    """Each metric gets one sample with as many labels as the table has; the sample shows their names."""
    documented = {name: _names(row[1]) for row in _rows("Metrics of the gateway") for name in _names(row[0])}
    telemetry = Telemetry()
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
