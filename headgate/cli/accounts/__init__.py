"""The verbs `key` and `usage`: keys of the gateway, and what was used with them."""
