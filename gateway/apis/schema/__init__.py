"""Typed request bodies of the public APIs."""
