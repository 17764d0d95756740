"""Prometheus metrics, counters for the dashboard, and removal of prompts from error messages."""
