"""HTTP routes of the gateway, one module per group of paths."""
