"""Which models are kept in host memory."""
