"""Answers about the state: devices, pressure, and the inputs of decisions."""
