"""Families of chat templates, one module each."""
