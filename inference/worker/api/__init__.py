"""The worker's HTTP API: bodies in, responses out."""
