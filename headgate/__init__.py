"""The command line, the set-up, and the code that the gateway and the inference service share."""

__version__ = "0.1.0"
