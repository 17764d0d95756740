"""Worker and helper processes: start, supervise, watch, end."""
