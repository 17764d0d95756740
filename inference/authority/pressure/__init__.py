"""Pressure levels of devices, their consequences, and alerts with recommended settings."""
