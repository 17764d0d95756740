"""Queries of the state: devices, pressure, and the inputs of decisions."""
