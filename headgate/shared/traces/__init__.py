"""Traces by OpenTelemetry: spans, their context in headers, and their export."""
