"""The inference services: one, or several nodes, and the choice of a node for a request."""
