"""The inference service's HTTP API and the relay of token streams."""
