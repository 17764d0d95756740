"""Worker processes: start, supervise, watch, end."""
