"""Access to the gateway: keys, rate limits, budgets, admission."""
