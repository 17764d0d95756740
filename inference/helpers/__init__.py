"""Helper processes: one short job each, with a deadline."""
