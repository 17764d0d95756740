"""Typed request bodies that the gateway and the worker share."""
