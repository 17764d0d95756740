"""Pressure, alerts, and whether models would fit."""
