"""Metrics, explain records and usage."""
