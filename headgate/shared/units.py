"""Pydantic field types for durations and byte sizes (`headgate.shared.amounts` parses them without pydantic)."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from headgate.shared.amounts import GIB, MIB, format_bytes, format_duration, parse_bytes, parse_duration

__all__ = ["GIB", "MIB", "Bytes", "Duration", "format_bytes", "format_duration", "parse_bytes", "parse_duration"]

# Patterns for the JSON schemas, which editors use. The parsers decide.
_DURATION_TEXT = Annotated[str, Field(pattern=r"^\s*(never|\d+(\.\d+)?\s*(ms|s|m|h|d)?)\s*$")]
_SIZE_TEXT = Annotated[str, Field(pattern=r"^\s*\d+(\.\d+)?\s*([KMGTkmgt]?[Ii]?[Bb])?\s*$")]

Duration = Annotated[float, BeforeValidator(parse_duration, json_schema_input_type=float | _DURATION_TEXT)]
"""A pydantic field type: seconds, written as `30s`, `250ms`, `5m`, `never` or a number."""

Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | _SIZE_TEXT)]
"""A pydantic field type: bytes, written as `512MiB`, `2GiB` or a number."""
