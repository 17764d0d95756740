"""Pressure checks, alerts, and predictions whether models fit."""
