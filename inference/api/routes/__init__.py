"""Routes besides the hot path, which translate between HTTP and the authority."""
