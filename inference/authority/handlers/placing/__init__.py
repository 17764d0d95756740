"""Where models go: the one decision, what it needs to know, and the flows that move models."""
