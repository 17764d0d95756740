"""Effects that take time, and the processes and tasks that perform them."""
