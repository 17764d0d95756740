"""Lifecycle of a model, its queue, its backoff and Retry-After."""
