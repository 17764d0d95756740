"""Start, reload, and commands of operators."""
