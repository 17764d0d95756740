"""Weights of warm models: copies in host memory for a later load onto an accelerator."""
