"""Placement: the decision, its inputs, and flows that move models."""
