"""Slots, and sequences saved outside the context."""
