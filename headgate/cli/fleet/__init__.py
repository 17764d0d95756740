"""Verbs for several machines."""
