"""Exact sizes of models before they are loaded."""
