"""Sizes of models before they are loaded."""
