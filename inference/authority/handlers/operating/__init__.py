"""The start, other configurations, and the commands of operators."""
