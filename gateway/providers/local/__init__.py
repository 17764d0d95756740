"""The inference service as a provider, and what the gateway knows about it."""
