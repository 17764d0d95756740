"""HTTP: one exchange, connection limits, client disconnects, memory for bodies, image downloads."""
