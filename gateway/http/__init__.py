"""HTTP: one exchange, connection limits, client disconnects, image downloads."""
