"""Which requests are suspected of ending their worker."""
