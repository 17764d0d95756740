"""Configuration fields for durations and byte sizes as people write them; parsing and printing are `amounts`'."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from headgate.shared.amounts import GIB, MIB, format_bytes, format_duration, parse_bytes, parse_duration

__all__ = ["GIB", "MIB", "Bytes", "Duration", "format_bytes", "format_duration", "parse_bytes", "parse_duration"]

# What an editor may accept, for the JSON schemas; the parsers above have the last word.
_DURATION_TEXT = Annotated[str, Field(pattern=r"^\s*(never|\d+(\.\d+)?\s*(ms|s|m|h|d)?)\s*$")]
_SIZE_TEXT = Annotated[str, Field(pattern=r"^\s*\d+(\.\d+)?\s*([KMGTkmgt]?[Ii]?[Bb])?\s*$")]

Duration = Annotated[float, BeforeValidator(parse_duration, json_schema_input_type=float | _DURATION_TEXT)]
"""A pydantic field type: seconds, written as `30s`, `250ms`, `5m`, `never` or a number."""

Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | _SIZE_TEXT)]
"""A pydantic field type: bytes, written as `512MiB`, `2GiB` or a number."""
