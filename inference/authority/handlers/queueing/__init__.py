"""Arrival and end of requests, their deadlines, and their quarantine."""
