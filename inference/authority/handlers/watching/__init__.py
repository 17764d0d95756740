"""Devices: readings, health and pressure."""
