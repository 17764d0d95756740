"""Requests that wait for models or use them."""
