"""Helper processes: one short job each, with a deadline."""

NOTICE = b"!\n"
"""A line from a serving helper between two answers: its next answer has something new."""
