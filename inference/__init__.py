"""The inference service: the sole GPU authority of a machine and the workers it supervises."""
