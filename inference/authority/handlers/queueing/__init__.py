"""Arrival, deadline, end and quarantine of requests."""
