"""The inference service as a provider, and its last known state."""
