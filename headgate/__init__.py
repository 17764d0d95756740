"""Headgate's command line and the few things both services share; decides nothing about requests or GPUs."""

__version__ = "0.1.0"
